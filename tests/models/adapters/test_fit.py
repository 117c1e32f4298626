"""The arrays of an adapter's file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest

from adapter_files import write_adapter
from outrider.models.adapters.files import read_adapter
from outrider.models.adapters.fit import _read_arrays
from patience import PATIENCE_S
from tiny_models import tiny_model

# A deadlock would hold Python's lock: only another process can notice it.
LOADS_AND_UNLOADS = """
import sys, threading
import mlx.core as mx
from outrider.models.adapters.files import read_adapter
from outrider.models.adapters.fit import _read_arrays

files, is_done = read_adapter(sys.argv[1]), threading.Event()

def clear():
    while not is_done.is_set():
        mx.eval(mx.ones(4096) + 1)
        mx.clear_cache()

clearing = threading.Thread(target=clear)
clearing.start()
for _ in range(200):
    _read_arrays(files)
is_done.set()
clearing.join()
print("done")
"""


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_arrays_are_those_of_the_file(tmp_path: Path, dtype: mx.Dtype) -> None:
    folder = write_adapter(tmp_path, tiny_model("llama"))
    file = str(folder / "adapters.safetensors")
    written = {name: array.astype(dtype) for name, array in mx.load(file).items()}  # type: ignore[union-attr]
    mx.eval(written)
    mx.save_safetensors(file, written)
    found = _read_arrays(read_adapter(folder))
    assert found.keys() == written.keys()
    for name, array in found.items():
        assert array.dtype == mx.float32
        assert mx.array_equal(array, written[name].astype(mx.float32))


def test_an_adapter_is_read_while_another_model_is_unloaded(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path, tiny_model("llama"))
    command = [sys.executable, "-c", LOADS_AND_UNLOADS, str(folder)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert found.stdout.strip() == "done", found.stderr
