"""Where shards are packed: in this process, in worker processes, or on a Ray cluster."""
