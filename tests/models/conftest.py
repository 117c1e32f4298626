"""The real default model for the tests that need it: from the user's cache, fetched once if need be."""

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
    """The GGUF file that the default model is made from, kept between test runs."""
    kept = pytestconfig.cache.mkdir("default-model") / SMOLLM2.file_name
    if kept.exists() and kept.stat().st_size == SMOLLM2.num_bytes:
        return kept
    try:
        fetched = download(SMOLLM2, tmp_path_factory.mktemp("gguf"), ignore)
    except ModelUnavailable as error:
        pytest.skip(f"the default model cannot be fetched here: {error}")
    return Path(shutil.move(fetched.path, kept))
