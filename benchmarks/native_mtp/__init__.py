"""Outrider beside other servers that draft with the MTP head of one checkpoint: speed and equal answers."""
