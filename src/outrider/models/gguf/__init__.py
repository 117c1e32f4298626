"""Conversion of GGUF files into model folders as mlx-lm writes them."""
