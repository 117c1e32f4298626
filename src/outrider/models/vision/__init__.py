"""Vision models: families, image processors, encoders, positions."""
