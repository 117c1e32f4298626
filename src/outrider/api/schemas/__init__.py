"""What clients may send, one file an API. Shapes only: what they mean is the routes'."""
