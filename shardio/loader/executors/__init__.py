"""Executors, which make the batches of an epoch. ``executor`` holds their interface, ``choice`` selects one."""
