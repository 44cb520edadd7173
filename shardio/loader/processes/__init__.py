"""Worker processes: background processes that run decode threads, and never import torch or the user's script."""
