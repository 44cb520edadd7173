"""Conformance tests of the interfaces that programs can implement for shardio.

Each module holds one class of pytest tests. Subclass it in your own tests and override its fixtures:

- :class:`shardio.testing.executor.ExecutorTests`: an executor of a loader
- ``remainder_policy``: the treatment of an epoch's last samples.
"""
