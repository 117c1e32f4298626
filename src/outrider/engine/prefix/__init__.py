"""The prefix cache as the scheduler sees it: which cells are matched, loaded, saved and fetched from disk."""
