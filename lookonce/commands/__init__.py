"""The commands of `lookonce`, a module for each command or small group. application.py puts them together."""
