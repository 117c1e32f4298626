"""Images and videos from clients: fetched, checked and decoded off the event loop. No MLX, no HTTP server."""
