"""JPEG files: their segments, their tiles, and decoding parts of their pictures."""
