"""Saves state, models and adapters in directories to which a framework saves again and again."""

import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn

from pagoda.checkpoint.adapter import saved_by_peft
from pagoda.checkpoint.directory import empty, remove
from pagoda.checkpoint.export import ChangedModelError, export
from pagoda.checkpoint.pretrained import INDEX, SINGLE, listed
from pagoda.errors import CheckpointError, StorageError
from pagoda.integrations import seals
from pagoda.memory.files import inside, storage_errors
from pagoda.memory.identity import MANIFEST

_NAME = "pagoda-"


class Saves:
    """Numbered saves in a directory that a framework saves to: `pagoda-1` and so on.

    Each has the framework's own files and Pagoda's checkpoints, under one seal. The new one is sealed before the old
    one is deleted, so a crash at any instant leaves a complete save.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    @contextmanager
    def new(self, is_main: bool, agree: Callable[[str], str], wait: Callable[[], Any]) -> Iterator[Path]:
        """Yield the directory of a new save, which the block fills. After the block, seal it and delete older saves.

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
        if is_main:
            _delete_all(older)
        wait()

    def delete(self) -> None:
        """Delete all saves, and the directory if nothing else is in it."""
        _delete_all(self._all())
        with suppress(OSError):  # a file of the user has this name
            self._directory.rmdir()

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
    """The last complete save in the last of these directories that has one. Warns of each that is skipped.

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
        warnings.warn(f"{str(error).rstrip('.')}. It is skipped.", stacklevel=4)


def _delete_all(saves: Sequence[Path]) -> None:
    for save in saves:
        with _warned():
            _delete(save)


def _delete(save: Path) -> None:
    """Delete a save, and free the pages of its checkpoints. Raises CheckpointError if files in it are not part of the
    save, and StorageError if it cannot be deleted."""
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
    """Write a model's files in pieces. The block may write other files to the directory. After it, the model's files
    replace older ones there. Every rank must call it. The settings and errors are those of `export`. But a model that
    differs from what its config builds is written under its own names, with a warning."""
    directory.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=".pagoda-", dir=directory) as folder:
        try:
            export(model, Path(folder, "model"), **settings)
        except ChangedModelError as error:
            warnings.warn(
                f"{directory} has the names of the changed model, and can be loaded only into such a model: {error}",
                stacklevel=3,
            )
            export(model, Path(folder, "model"), **settings, own_names=True)
        yield
        for file in Path(folder, "model").glob("*"):
            os.replace(file, directory / file.name)
            if file.name == INDEX:  # a single file of an earlier save would be loaded instead of the shards
                (directory / SINGLE).unlink(missing_ok=True)


class LazyStateDict(Mapping[str, torch.Tensor]):
    """The state dict of a paged model, for hooks on saving. It takes no memory until one looks at it; `dict` copies
    it."""

    def __init__(self, model: nn.Module) -> None:
        self._read = cache(model.state_dict)

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._read()[name]
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._read())

    def __len__(self) -> int:
        return len(self._read())


def adapter_state(model: Any) -> dict[str, torch.Tensor]:
    """A state dict of a wrapped model with adapters, for its `save_pretrained`. The tensors that it saves are in RAM;
    all others are on meta. Every rank must call it. Warns of parameters that were trained and are not saved."""
    held = {
        f"{prefix}{'.' if prefix else ''}{name}": (module, name)
        for prefix, module in model.named_modules(remove_duplicate=False)
        for name in (*module._parameters, *(module._buffers.keys() - module._non_persistent_buffers_set))
        if getattr(module, name) is not None
    }
    blank = {key: torch.empty_like(getattr(module, name), device="meta") for key, (module, name) in held.items()}
    saved = saved_by_peft(model, "auto") & blank.keys()
    values = {key: held[key][0].state_dict()[held[key][1]] for key in sorted(saved)}
    kept = {id(getattr(*held[key])) for key in saved}
    left_out = [name for name, param in model.named_parameters() if param.requires_grad and id(param) not in kept]
    if left_out and not any(config.is_prompt_learning for config in model.peft_config.values()):
        warnings.warn(
            f"peft does not save {listed(left_out)}, which the model trains: list its module in modules_to_save. "
            "Pagoda's checkpoints have it.",
            stacklevel=2,
        )
    return {**blank, **values}
