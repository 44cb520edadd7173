"""The loader benchmark: shardio and other loaders, each in its own process. See ``python -m benchmarks --help``."""
