"""The prefix cache of the scheduler: which cells are matched, loaded, saved and fetched from disk."""
