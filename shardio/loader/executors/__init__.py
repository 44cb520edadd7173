"""Executors: what makes the batches of an epoch. Each file holds one; ``executor`` holds their interface."""
