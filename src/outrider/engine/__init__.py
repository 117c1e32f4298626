"""The loop: scheduler, sequences, the engine thread. Everything but the thread is free of MLX."""
