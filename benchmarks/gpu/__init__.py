"""The step at real sizes on a GPU: models of published shapes with random weights and scripted acceptance.

shapes      the configs of the models
weights     builds the models in the device's memory, in their dtype
scripted    decides which drafts are accepted
driver      the engine's loop
loop        times the engine's loop
interleaved compares loops, a few steps of each in turn
bare        the device's own time for a step, its memory bandwidth, and the lower bound of a step's time
wide_passes the memory of wide passes over prompts, as it is and as it is predicted
mlx_lm_loop mlx-lm's generators on the same model
checks      kernels and tokens must be right on this device, or times mean nothing
exactness, shared_prefixes   two of these checks, in processes of their own
*_cells     the measurements by name: a cell is one measurement
"""
