"""Owns the way from committed token ids to the client's text: whole characters, cut at stop strings.

Must not know models, caches, scheduling or APIs.
"""
