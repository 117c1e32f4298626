"""Grammars: which tokens may come next in a row whose answer must have a form. Pure host code, no MLX."""
