"""The benchmark of transfers to a GPU: see ``python -m benchmarks.bench_device --help``."""
