"""The models of one server: loaded on first use, unloaded to make room. No MLX, no HTTP."""
