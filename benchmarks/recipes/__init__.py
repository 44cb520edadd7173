"""The benchmark of recipes: shardio and other loaders with the same augmentations."""
