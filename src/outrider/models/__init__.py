"""Checkpoints, families and heads: everything that knows what a model is made of."""
