"""Routes for operators: health, metrics, prefix cache, version."""
