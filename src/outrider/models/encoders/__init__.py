"""Pooling models: encoders of the BERT kind, and causal models that are made for embeddings."""
