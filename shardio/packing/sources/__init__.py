"""Scan and read the sources of a pack: directories and other tools' datasets."""
