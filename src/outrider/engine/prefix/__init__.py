"""The prefix cache as the scheduler sees it: what is kept, matched, loaded and fetched."""
