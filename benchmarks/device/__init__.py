"""The way to a GPU, measured: see ``python -m benchmarks.bench_device --help``."""
