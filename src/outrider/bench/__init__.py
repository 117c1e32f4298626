"""The benchmark: the same questions asked of our engine or of any server, with and without drafts, in turns.

Owns what is asked, how it is timed and how the figures are told. Must not know how a step works.
"""
