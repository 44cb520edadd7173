"""Shards from programs that make samples."""
