"""The real default model: from the user's cache, downloaded once if needed."""

import shutil
from pathlib import Path

import pytest

from outrider.models.errors import ModelUnavailable
from outrider.models.files import default_model
from outrider.models.files.default_download import SMOLLM2, download
from outrider.progress import ignore


@pytest.fixture(scope="session")
def default_model_folder() -> Path:
    try:
        return default_model.ensure()
    except ModelUnavailable as error:
        pytest.skip(f"the default model cannot be fetched here: {error}")


@pytest.fixture(scope="session")
def default_gguf(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The GGUF file of the default model, cached between test runs."""
    cached = pytestconfig.cache.mkdir("default-model") / SMOLLM2.file_name
    if cached.exists() and cached.stat().st_size == SMOLLM2.num_bytes:
        return cached
    try:
        fetched = download(SMOLLM2, tmp_path_factory.mktemp("gguf"), ignore)
    except ModelUnavailable as error:
        pytest.skip(f"the default model cannot be fetched here: {error}")
    return Path(shutil.move(fetched.path, cached))
