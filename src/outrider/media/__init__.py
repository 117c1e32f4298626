"""Pictures from clients: fetched, checked and decoded off the event loop. No MLX, no HTTP server."""
