"""Runs native code that reads clients' input in child processes: a crash there costs one request. No MLX."""
