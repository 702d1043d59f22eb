"""The commands of `lookonce`, a module for each command or small group. lookonce/cli.py puts them together."""
