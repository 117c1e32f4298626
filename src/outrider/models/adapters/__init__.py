"""LoRA and DoRA adapters as mlx-lm writes them: fused into the weights, or chosen by each row of a pass.

files.py    reads and checks an adapter's folder; no MLX
fit.py      an adapter's arrays as the terms of this model's layers
fuse.py     adds the terms to weights that are not quantised
terms.py    computes the terms of a pass's rows; the class of adapted layers
store.py    the adapters that are loaded now
"""
