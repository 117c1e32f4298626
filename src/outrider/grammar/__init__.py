"""Owns grammars: which tokens may come next in a row with a constrained answer. Pure host code, no MLX."""
