"""What can be packed: directories, and the datasets of other tools."""
