"""The sources of packing: directories, and the datasets of other tools."""
