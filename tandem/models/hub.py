"""Fetching a model from a Hugging Face hub (HF_ENDPOINT, HF_HOME, HF_HUB_OFFLINE and HF_TOKEN are the library's)."""

from __future__ import annotations

import errno
import re
from pathlib import Path

from tandem.models.errors import ModelError

# owner/name, and for GGUF repositories owner/name:file.gguf or owner/name:QUANT
HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(:[\w./-]+)?$")
# Never pickles (*.bin, *.pt): they are code.
_PATTERNS = ("*.safetensors", "*.json", "*.jinja", "additional_chat_templates/*")


def is_hub_id(model: str) -> bool:
    return HUB_ID.fullmatch(model) is not None


def fetch(model: str) -> Path:
    """Local folder (or .gguf file) of a hub model; what is cached is not fetched again, a cut-off file is resumed.

    Raises:
        ModelError: unknown, not permitted, unreachable, or without a weight format that is read here.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    repo, _, part = model.partition(":")
    patterns = [part if part.endswith(".gguf") else f"*{part}*.gguf"] if part else list(_PATTERNS)
    try:
        folder = Path(snapshot_download(repo, allow_patterns=patterns))
    except RepositoryNotFoundError as error:
        raise ModelError(f"{repo} is not on the hub, or is private and HF_TOKEN does not open it") from error
    except LocalEntryNotFoundError as error:
        raise ModelError(f"{repo} is not in the local cache and the hub cannot be reached (HF_HUB_OFFLINE?)") from error
    except HfHubHTTPError as error:
        raise ModelError(f"{repo} could not be fetched from the hub: {error}") from error
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise ModelError(f"the disk is full while fetching {repo}: {error.filename or 'cache folder'}") from error
        raise ModelError(f"{repo} could not be fetched from the hub: {error}") from error
    return _gguf_of(folder, model) if part else _checked_folder(folder, repo)


def _gguf_of(folder: Path, model: str) -> Path:
    files = sorted(folder.rglob("*.gguf"))
    if not files:
        raise ModelError(f"{model} names no GGUF file in that repository")
    if len(files) > 1:
        raise ModelError(f"{model} names {len(files)} GGUF files ({', '.join(f.name for f in files)}); name one")
    return files[0]


def _checked_folder(folder: Path, repo: str) -> Path:
    if not any(folder.glob("*.safetensors")):
        raise ModelError(f"{repo} has no safetensors weights; pickled weights are never read")
    if not (folder / "config.json").exists():
        raise ModelError(f"{repo} has no config.json")
    return folder
