"""Recurrent layers with per-row commit: the delta rule, state spaces, short convolutions."""
