"""Folders that datasets are written to, in the local file system and in object stores."""
