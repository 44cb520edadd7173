"""Image loaders side by side: shardio and others, each in a process of its own. See ``python -m benchmarks --help``."""
