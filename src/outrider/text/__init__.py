"""Turns committed token ids into the client's text: whole characters, cut at stop strings.

Must not know models, caches, scheduling or APIs.
"""
