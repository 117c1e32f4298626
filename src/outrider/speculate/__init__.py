"""Drafting decisions: the sources of drafts, their acceptance rates, their costs, and how many are fed."""
