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
from pagoda.checkpoint.export import ChangedModelError, export
from pagoda.checkpoint.pretrained import INDEX, SINGLE, listed
from pagoda.errors import CheckpointError
from pagoda.integrations import seals
from pagoda.integrations.staging import Staged, delete_if_possible, name_complete
from pagoda.memory.identity import partial

_NAME = "pagoda"
"""The directory of a save, in the one that a framework names."""


@contextmanager
def saved(directory: Path, places: Sequence[str | Path], is_main: bool, wait: Callable[[], Any]) -> Iterator[Path]:
    """Yield a directory to fill with a framework's own files and Pagoda's checkpoints. After the block, it is sealed
    and takes the place of the save that `directory` had. So a crash at any instant leaves a complete save.

    Every rank must call it. `places`: the SSD directories of the checkpoints. `wait` waits for all ranks. If the block
    fails, what was written is deleted. Raises StorageError.
    """
    staged = Staged(directory / _NAME, places)
    if is_main:
        staged.create()
    wait()
    try:
        yield staged.path
        wait()
        if is_main:
            staged.complete()
            delete_if_possible(staged.replaced, places)
    except BaseException:
        if is_main:
            delete_if_possible(partial(staged.directory), places)
        raise
    finally:
        staged.close()
    wait()


def newest(directories: Sequence[Path], is_main: bool, wait: Callable[[], Any]) -> Path:
    """The save in the last of these directories that has a complete one. Warns of each that is skipped. Every rank must
    call it.

    Raises CheckpointError if none has one.
    """
    for directory in directories if is_main else ():
        name_complete(directory, _NAME)
    wait()
    for directory in reversed(directories):
        try:
            seals.check(directory / _NAME)
            return directory / _NAME
        except CheckpointError as error:
            warnings.warn(f"{str(error).rstrip('.')}. It is skipped.", stacklevel=3)
    raise CheckpointError(
        f"There is no complete save in {', '.join(map(str, directories)) or 'the project directory'}."
    )


def has_save(directory: Path) -> bool:
    """Whether there is a save in a directory."""
    return (directory / _NAME).exists()


def delete_save(directory: Path, places: Sequence[str | Path]) -> None:
    """Delete the save in a directory, and the directory if nothing else is in it."""
    delete_if_possible(directory / _NAME, places)
    with suppress(OSError):  # a file of the user has this name
        directory.rmdir()


def numbered(directory: Path, prefix: str) -> list[Path]:
    """The paths in a directory whose name is a prefix and a number, in the order of these numbers."""
    paths = directory.glob(f"{prefix}*") if directory.is_dir() else ()
    found = {path: int(path.name[len(prefix) :]) for path in paths if path.name[len(prefix) :].isdecimal()}
    return sorted(found, key=lambda path: found[path])


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
