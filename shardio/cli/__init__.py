"""The command line: one thin file per command. Slow modules are imported only when a command runs."""
