"""Experiments: what was asked, the command, the environment, and the figures."""
