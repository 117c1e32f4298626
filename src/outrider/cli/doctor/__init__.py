"""`outrider doctor`: checks on this machine what tests elsewhere cannot check, and writes a report of it.

random_model   small models with random weights
decoding       decodes rows with them, as the engine does
invariance     compares answers with drafts and without, alone and in a batch
step_times     the time of a step, by rows and width
examination    runs all checks in their order
report         the result as text and as JSON
command        the options of the command, and its progress
"""
