"""Models by their name on the Hugging Face Hub, ORG/NAME, in the local cache of huggingface_hub."""

import re
from pathlib import Path
from typing import Any

from pagoda.errors import ConfigError, needed

_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_PATTERNS = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
"""Files of configuration, weights and tokenizer. Other files are copies in other formats."""
_ELSEWHERE = ["*/*"]
"""Folders have copies of the weights in the formats of other programs."""


def is_hub_name(name: str) -> bool:
    """Whether a name has the form ORG/NAME, and nothing here has this path."""
    path = Path(name)
    return _REPOSITORY.fullmatch(name) is not None and not path.exists() and not path.parent.is_dir()


def cached(name: str) -> Path | None:
    """The directory of a repository's newest snapshot in the cache, or None. Nothing is downloaded.

    Raises ConfigError if huggingface_hub is not installed.
    """
    directory = _snapshot(name, local_files_only=True)
    return directory if directory is not None and (directory / "config.json").is_file() else None


def download(name: str) -> None:
    """Download what is missing of a repository into the cache, with the progress of huggingface_hub.

    Raises ConfigError if it cannot be downloaded, or if huggingface_hub is not installed.
    """
    _snapshot(name, allow_patterns=_PATTERNS, ignore_patterns=_ELSEWHERE)


def how_to_download(name: str) -> str:
    """The end of a message that asks the user for a download."""
    return f"run `hf download {name}`, or `pagoda train` with --download (of a gated model, first `hf auth login`)"


def _snapshot(name: str, *, local_files_only: bool = False, **patterns: Any) -> Path | None:
    hub = needed("huggingface_hub", f"model {name!r} needs huggingface_hub: pip install 'pagoda-train[transformers]'")
    try:
        return Path(hub.snapshot_download(name, local_files_only=local_files_only, **patterns))
    except Exception as error:  # the network, the disk and the Hub have many exception types
        if local_files_only and isinstance(error, FileNotFoundError):  # LocalEntryNotFoundError is one
            return None
        raise _refusal(name, error) from error


def _refusal(name: str, error: Exception) -> ConfigError:
    why = next(iter(str(error).strip().splitlines()), type(error).__name__)
    return ConfigError(f"{name} cannot be downloaded: {why} Check its name, the network and `hf auth whoami`")
