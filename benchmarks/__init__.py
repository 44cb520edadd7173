"""Benchmarks. Each benchmark answers one question. README.md has the commands, the environment and the results."""
