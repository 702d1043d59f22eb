"""Kinds of devices that models run on: one data file each, and a registry to which plug-ins add."""
