"""The benchmark: the same questions to our engine or any server, with and without drafts, in turns.

Owns the questions, the timing and the figures. Must not know how a step works.
"""
