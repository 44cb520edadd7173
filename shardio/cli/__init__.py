"""The command line: one thin file per command. Slow imports wait until the command runs."""
