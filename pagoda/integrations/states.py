"""Writes state, models and adapters into directories that a framework overwrites."""

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn

from pagoda.checkpoint.directory import empty, remove
from pagoda.checkpoint.export import export
from pagoda.checkpoint.pretrained import INDEX, SINGLE
from pagoda.errors import CheckpointError, StorageError
from pagoda.integrations import seals
from pagoda.memory.files import inside, storage_errors
from pagoda.memory.identity import MANIFEST

_NAME = "pagoda-"


class Saves:
    """Numbered saves in a directory that a framework saves to: `pagoda-1` and so on.

    Each has the framework's own files and Pagoda's checkpoints, under one seal. The new one is sealed before the old
    one is deleted, so a process that ends at any instant leaves a complete save.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    @contextmanager
    def new(self, is_main: bool, agree: Callable[[str], str], wait: Callable[[], Any]) -> Iterator[Path]:
        """The directory of a new save, to fill in the block. After it, the save is sealed and older ones are deleted.

        Every rank must call it. `agree` gives all ranks the main rank's text, and `wait` waits for all ranks. If the
        block fails, the new save is deleted. Raises StorageError.
        """
        older = self._all()
        number = int(older[-1].name[len(_NAME) :]) if older else 0
        name = f"{_NAME}{number + 1}"
        if is_main:
            seals.begin(self._directory / name)
        save = self._directory / agree(name)
        try:
            yield save
            wait()
            if is_main:
                seals.seal(save)
        except BaseException:
            if is_main:
                with suppress(CheckpointError, StorageError):
                    _delete(save)
            raise
        for path in older if is_main else ():
            with _warned():
                _delete(path)
        wait()

    def newest(self) -> Path:
        """The last complete save. Warns of later ones that are not complete or are damaged.

        Raises CheckpointError if there is none.
        """
        for save in reversed(self._all()):
            with _warned():
                seals.check(save)
                return save
        raise CheckpointError(f"{self._directory} has no complete save of Pagoda's")

    def _all(self) -> list[Path]:
        return numbered(self._directory, _NAME)

    def complete(self) -> bool:
        """Whether there is a complete save."""
        with warnings.catch_warnings(action="ignore"), suppress(CheckpointError):
            self.newest()
            return True
        return False


def numbered(directory: Path, prefix: str) -> list[Path]:
    """The paths in a directory whose name is a prefix and a number, in the order of these numbers."""
    paths = directory.glob(f"{prefix}*") if directory.is_dir() else ()
    found = {path: int(path.name[len(prefix) :]) for path in paths if path.name[len(prefix) :].isdecimal()}
    return sorted(found, key=lambda path: found[path])


def newest(directories: Sequence[Path]) -> Path:
    """The last complete save in the last of these directories that has one. Warns of each that is passed over.

    Raises CheckpointError if none has one.
    """
    for directory in reversed(directories):
        with _warned():
            return Saves(directory).newest()
    raise CheckpointError(
        f"There is no complete save in {', '.join(map(str, directories)) or 'the project directory'}."
    )


@contextmanager
def _warned() -> Iterator[None]:
    """Turn a CheckpointError into a warning."""
    try:
        yield
    except CheckpointError as error:
        warnings.warn(f"{str(error).rstrip('.')}. It is passed over.", stacklevel=4)


def _delete(save: Path) -> None:
    """Delete a save, and free the pages of its checkpoints. Raises CheckpointError if it has to be kept, because
    something in it is not Pagoda's, and StorageError."""
    seals.check_removable(save)
    seals.begin(save)
    for manifest in save.glob(f"*/{MANIFEST}"):
        remove(manifest.parent)
    with storage_errors(f"{save} could not be deleted"):
        with inside(save.parent, save.name) as descriptor:
            empty(descriptor, last=seals.SEAL)
        save.rmdir()


@contextmanager
def exported_into(directory: Path, model: nn.Module, **settings: Any) -> Iterator[None]:
    """Write a model's files in pieces. After the block, which may write other files in the directory, they replace
    older ones there. Every rank must call it. The settings and errors are those of `export`."""
    directory.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=".pagoda-", dir=directory) as folder:
        export(model, Path(folder, "model"), **settings)
        yield
        for file in Path(folder, "model").glob("*"):
            os.replace(file, directory / file.name)
            if file.name == INDEX:  # a single file of an earlier save would be loaded instead of the shards
                (directory / SINGLE).unlink(missing_ok=True)


def has_adapters(model: nn.Module) -> bool:
    """Whether peft has put adapters into a model, by `get_peft_model` or by the model's `add_adapter`."""
    return bool(getattr(model, "peft_config", None))


def adapter_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """A state dict of a wrapped model with adapters, for its `save_pretrained`. What that saves has values, in RAM; all
    other tensors are on meta. Every rank must call it."""
    from peft import get_peft_model_state_dict

    held = {
        f"{prefix}{'.' if prefix else ''}{name}": (module, name)
        for prefix, module in model.named_modules(remove_duplicate=False)
        for name in (*module._parameters, *(module._buffers.keys() - module._non_persistent_buffers_set))
        if getattr(module, name) is not None
    }
    blank = {key: torch.empty_like(getattr(module, name), device="meta") for key, (module, name) in held.items()}
    keys = {id(tensor): key for key, tensor in blank.items()}
    saved = [
        keys[id(tensor)]
        for adapter in model.peft_config  # type: ignore[union-attr]
        for tensor in get_peft_model_state_dict(model, state_dict=dict(blank), adapter_name=adapter).values()
        if id(tensor) in keys  # prompts are computed
    ]
    return {**blank, **{key: held[key][0].state_dict()[held[key][1]] for key in saved}}
