"""What holds for every test: nothing is fetched from the network, and comparisons are made on the CPU."""

import os
import signal

signal.signal(
    signal.SIGINT, signal.default_int_handler
)  # a shell's background job ignores it, and tests send it
os.environ["HF_HUB_OFFLINE"] = "1"  # read when huggingface_hub is first imported

import outrider  # noqa: E402, F401, I001  (first: it loads the fast BLAS, which must come before mlx)
import mlx.core as mx  # noqa: E402

mx.set_default_device(mx.cpu)
