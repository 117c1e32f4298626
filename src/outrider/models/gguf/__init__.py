"""GGUF files: converted once into a folder as mlx-lm writes it."""
