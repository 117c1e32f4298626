"""The step at real sizes on a GPU: models of published shapes with random weights, acceptance by a script.

shapes      what the models look like
weights     builds them in memory, in their dtype, on the device
scripted    which drafts count as right
driver      the engine's loop
loop        what it brings, timed
bare        the device's own time for a step, its bandwidth, the floor
mlx_lm_loop mlx-lm's generators on the same model
checks      what must hold on this device before any time means anything
*_cells     what can be measured, by name
"""
