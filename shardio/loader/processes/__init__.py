"""Worker processes, which decode and transform without running the user's script, and their fork server."""
