"""A plug-in for Lookonce with the device `fixed`."""
