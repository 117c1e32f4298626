"""Runs pooling models: embeddings and rerank scores, batched over requests. Must not know MLX or HTTP."""
