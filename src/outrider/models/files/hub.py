"""Downloads of models from the Hugging Face hub. An interrupted download goes on where it ended.

Owns which files are fetched, and the messages about downloads that fail.
"""

from __future__ import annotations

from pathlib import Path

from outrider.models.errors import ModelUnavailable

PATTERNS = ["*.json", "*.safetensors", "tokenizer.model", "*.tiktoken", "*.txt", "*.jinja"]


class DownloadFailed(ModelUnavailable):
    """The message says why, and what to do."""


def download(repo_id: str, revision: str | None = None) -> Path:
    """The local folder of a model. `revision`: commit, tag or branch; None: the main branch.

    Files that are here already are not fetched again. Bars on the terminal show the progress.
    """
    from huggingface_hub import constants, errors, snapshot_download

    at = "" if revision is None else f" at revision {revision}"
    start = f"{repo_id}: there is no such local folder, and it could not be downloaded{at}: "
    try:
        return Path(snapshot_download(repo_id, revision=revision, allow_patterns=PATTERNS))
    except errors.GatedRepoError as error:
        raise DownloadFailed(
            f"{start}its owner has to give you access on {constants.ENDPOINT}/{repo_id}; then set HF_TOKEN."
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise DownloadFailed(
            f"{start}{constants.ENDPOINT} has no such model, or it is private. Check the name, or set "
            "HF_TOKEN."
        ) from error
    except errors.RevisionNotFoundError as error:
        raise DownloadFailed(f"{start}the model has no such commit, tag or branch.") from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled, ConnectionError) as error:
        raise DownloadFailed(
            f"{start}no hub can be reached at {constants.ENDPOINT} ({_reason(error)}). Check the network, "
            "set HF_ENDPOINT to a mirror, or give the path of a model folder."
        ) from error
    except Exception as error:
        raise DownloadFailed(
            f"{start}{_reason(error)}. Run the command again: files that are complete are not fetched twice."
        ) from error


def downloaded(repo_id: str, revision: str | None = None) -> Path | None:
    """The local folder of a model that was downloaded completely; None if it was not. No network is used."""
    from huggingface_hub import snapshot_download

    try:
        found = snapshot_download(repo_id, revision=revision, allow_patterns=PATTERNS, local_files_only=True)
    except (OSError, ValueError):  # LocalEntryNotFoundError is an OSError
        return None
    return Path(found)


def _reason(error: BaseException) -> str:
    """The first line of an exception, or of the one that caused it."""
    cause = error.__cause__ or error
    return f"{type(cause).__name__}: {str(cause).partition(chr(10))[0]}"
