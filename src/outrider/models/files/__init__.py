"""Model files: where they are cached, fetched, converted and recognised."""
