"""Provide the command line. Slow modules are imported only when a command runs."""
