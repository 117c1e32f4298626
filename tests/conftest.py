"""What holds for every test: nothing is fetched from the network, and comparisons are made on the CPU."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # read when huggingface_hub is first imported

import outrider  # noqa: F401, I001  (first: it loads the fast BLAS, which must come before mlx)
import mlx.core as mx

mx.set_default_device(mx.cpu)
