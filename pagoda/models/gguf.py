"""GGUF files, the models of llama.cpp: which one a path names, and its configuration as transformers reads it."""

import re
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

from pagoda.errors import ConfigError, needed

SUFFIX = ".gguf"
_PART = re.compile(r"-\d{5}-of-\d{5}\.gguf$")


def gguf_in(path: Path) -> Path | None:
    """The GGUF file that a path is, or that a directory without a config.json has. None if there is none.

    Raises ConfigError if a directory has several, and for a part of a model that is divided into files.
    """
    if path.suffix == SUFFIX and path.is_file():
        files = [path]
    elif path.is_dir() and not (path / "config.json").exists():
        files = sorted(path.glob(f"*{SUFFIX}"))
    else:
        return None
    if any(_PART.search(file.name) for file in files):
        raise ConfigError(
            f"{files[0]} is a part of a GGUF model that is divided into files: join them with llama.cpp's "
            "`llama-gguf-split --merge`, and name the result"
        )
    if len(files) > 1:
        raise ConfigError(f"{path} has {len(files)} GGUF files, {files[0].name} and others: name one of them")
    return files[0] if files else None


def settings_of(file: Path) -> dict[str, Any]:
    """The settings of a file's configuration, by transformers' names.

    Raises ConfigError for a file that cannot be read or has an architecture that transformers does not read, and if the
    package gguf is not installed.
    """
    about = file.stat()
    return deepcopy(_settings(file, about.st_mtime_ns, about.st_size))


@cache
def _settings(file: Path, _changed: int, _nbytes: int) -> dict[str, Any]:
    gguf_package()
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    try:
        found: dict[str, Any] = load_gguf_checkpoint(str(file), return_tensors=False)["config"]
    except Exception as error:  # gguf and transformers have many for a bad file
        raise ConfigError(f"{file} cannot be read as a GGUF file: {type(error).__name__}: {error}") from error
    return found


def gguf_package() -> Any:
    """The package that reads GGUF files. Raises ConfigError if it is not installed."""
    return needed("gguf", "a GGUF file needs the package gguf: pip install 'pagoda-train[gguf]'")
