"""Worker processes, which decode and never import torch or the user's script, and their fork server."""
