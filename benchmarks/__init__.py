"""Benchmarks. Each one answers a question. README.md has the commands, the environment and the results."""
