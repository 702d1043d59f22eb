"""Kernels for CPUs, in C++ and through oneDNN, and the threads that run them."""
