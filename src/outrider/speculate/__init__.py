"""Drafting decisions: who proposes drafts, how often they are accepted, what they cost, how many are fed."""
