"""Writes state, models and adapters into directories that a framework overwrites."""

import os
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn

from pagoda.checkpoint.adapter import saved_by_peft
from pagoda.checkpoint.directory import remove
from pagoda.checkpoint.export import ChangedModelError, export
from pagoda.checkpoint.pretrained import INDEX, SINGLE, listed
from pagoda.errors import CheckpointError
from pagoda.optimizer import PagedOptimizer


class States:
    """Numbered checkpoints in a directory: `NAME-1` and so on. The new one is complete before the old one is
    deleted."""

    def __init__(self, directory: Path, name: str = "pagoda") -> None:
        self._directory = directory
        self._name = re.compile(rf"{name}-(\d+)")
        self._new = f"{name}-{{}}"

    def save(self, optimizer: PagedOptimizer, agree: Callable[[str], str] = lambda name: name) -> str:
        """Save all state of an optimizer, and return the checkpoint's name. Every rank must call it. `agree` gives all
        ranks the first rank's name. Raises the errors of `save_checkpoint`."""
        self._directory.mkdir(parents=True, exist_ok=True)
        name = agree(self._new.format(max(self._numbers(), default=0) + 1))
        optimizer.save_checkpoint(self._directory / name)
        return name

    def newest(self) -> Path:
        """The last checkpoint. Raises CheckpointError if there is none."""
        numbers = self._numbers()
        if not numbers:
            raise CheckpointError(f"{self._directory} has no Pagoda checkpoint: it was saved without paging.")
        return self._directory / self._new.format(max(numbers))

    def keep_newest(self) -> None:
        """Delete all checkpoints except the last one."""
        for number in self._numbers()[:-1]:
            remove(self._directory / self._new.format(number))

    def _numbers(self) -> list[int]:
        names = [path.name for path in self._directory.iterdir()] if self._directory.is_dir() else []
        return sorted(int(found[1]) for name in names if (found := self._name.fullmatch(name)))


@contextmanager
def exported_into(directory: Path, model: nn.Module, **settings: Any) -> Iterator[None]:
    """Write a model's files in pieces. After the block, which may write other files in the directory, they replace
    older ones there. Every rank must call it. The settings and errors are those of `export`, but a model that is not as
    its config builds it is written under its own names, with a warning."""
    directory.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=".pagoda-", dir=directory) as folder:
        try:
            export(model, Path(folder, "model"), **settings)
        except ChangedModelError as error:
            warnings.warn(
                f"{directory} has the names of the changed model, to load into such a model: {error}", stacklevel=3
            )
            export(model, Path(folder, "model"), **settings, own_names=True)
        yield
        for file in Path(folder, "model").glob("*"):
            os.replace(file, directory / file.name)
            if file.name == INDEX:  # a single file of an earlier save would be loaded instead of the shards
                (directory / SINGLE).unlink(missing_ok=True)


def has_adapters(model: nn.Module) -> bool:
    """Whether peft has put adapters into a model, by `get_peft_model` or by the model's `add_adapter`."""
    return bool(getattr(model, "peft_config", None))


def adapter_state(model: Any) -> dict[str, torch.Tensor]:
    """A state dict of a wrapped model with adapters, for its `save_pretrained`. What that saves has values, in RAM; all
    other tensors are on meta. Every rank must call it. Warns of parameters that were trained and are not saved."""
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
            f"peft does not save {listed(left_out)}, though the model trains: list its module in modules_to_save. "
            "Checkpoints of Pagoda have it.",
            stacklevel=2,
        )
    return {**blank, **values}
