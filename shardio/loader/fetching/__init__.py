"""Batches of any dataset, with the meaning that torch's DataLoader gives to its arguments."""
