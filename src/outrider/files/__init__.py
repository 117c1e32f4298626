"""Files on disk: the cache folder, atomic writes, the safetensors format. No MLX."""
