"""New datasets from packed ones: append, merge, split, reshard."""
