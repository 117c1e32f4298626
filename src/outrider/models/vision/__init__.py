"""Vision models: families, image processing, the vision encoder, and the language model's part in it."""
