"""Owns the way from committed token ids to the text a client may see: whole characters, cut at stop strings.

Knows nothing of models, caches, scheduling or APIs: it is given a decode function and strings.
"""
