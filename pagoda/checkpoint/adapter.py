"""peft adapters in a checkpoint: written as a directory that peft can load, or merged into the weights they adapt."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pagoda.checkpoint.lazy import Read
from pagoda.checkpoint.model_config import ADAPTER, skeleton
from pagoda.errors import CheckpointError, PagodaError
from pagoda.models.lora import ADAPTER as NAME, adapted_as


class AdaptedModel:
    """The model that a checkpoint's record describes, with its adapter. It is on the meta device, except for what
    `merged` has read."""

    def __init__(self, record: dict[str, Any], read: Callable[[str], torch.Tensor]) -> None:
        """`read`: returns a whole parameter in its shape, given its name in the checkpoint.

        Raises CheckpointError if transformers cannot build the model, and ConfigError if peft is not installed.
        """
        base = skeleton(record)
        own = {id(param): name for name, param in base.named_parameters()}
        self._read = read
        self._record = record
        try:
            with torch.random.fork_rng(devices=[]):  # peft initializes the adapter on the CPU, then moves it to meta
                self._model = adapted_as(base, record[ADAPTER])
        except PagodaError:
            raise
        except Exception as error:  # peft validates with many exception types
            raise CheckpointError(f"peft cannot build this checkpoint's adapter: {error}") from error
        named = dict(self._model.named_parameters())
        self._names: dict[str, str] = {own[id(param)]: name for name, param in named.items() if id(param) in own}
        self._adapter = [name for name, param in named.items() if id(param) not in own]
        self._layers = {
            f"{prefix}.base_layer.weight": (prefix, module)
            for prefix, module in self._model.named_modules()
            if callable(getattr(module, "get_delta_weight", None))
        }
        self._change: tuple[str, torch.Tensor] = ("", torch.empty(0))
        """Name of the last merged parameter, and what the adapter adds to it, flat."""

    def stored_name(self, name: str) -> str:
        """Name in the checkpoint of a parameter or buffer, given its name in the model without adapter."""
        return self._names.get(name, f"base_model.model.{name}")

    def values(self) -> dict[str, torch.Tensor]:
        """The adapter's parameters, by name."""
        return {name: self._read(name) for name in self._adapter}

    def write(self, folder: Path, values: dict[str, torch.Tensor]) -> list[str]:
        """Write and sync the adapter. Returns the names of its files."""
        others = {*folder.iterdir()}  # a tokenizer, and the mark of a directory that is not complete
        try:
            self._model.save_pretrained(folder, state_dict=values, save_embedding_layers=False)
        except Exception as error:  # peft computes prompts from the model, which is on meta
            raise CheckpointError(
                f"peft cannot write this adapter without its model ({error}): call save_pretrained of a wrapped model."
            ) from error
        files = sorted(path for path in {*folder.iterdir()} - others if path.is_file())
        for path in files:
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)
        return [path.name for path in files]

    def merged(self, name: str, read: Read, dtype: torch.dtype) -> Read:
        """A function that reads a weight, including what the adapter adds to it. `name` is its name in the checkpoint.

        `read`: reads the weight without the adapter, in fp32. Raises CheckpointError if the adapter does more than add
        (DoRA).
        """
        if self._record[ADAPTER].get("use_dora"):
            raise CheckpointError("An adapter with use_dora cannot be merged: export it without --merge.")
        if name not in self._layers:
            return lambda start, count: read(start, count).to(dtype)
        return lambda start, count: (read(start, count) + self._added(name)[start : start + count]).to(dtype)

    def _added(self, name: str) -> torch.Tensor:
        """What the adapter adds to a weight, flat, in fp32. It stays in RAM until another weight's is requested."""
        if self._change[0] != name:
            prefix, layer = self._layers[name]
            for own in self._adapter:
                if own.startswith(f"{prefix}."):
                    owner, _, leaf = own.removeprefix(f"{prefix}.").rpartition(".")
                    value = nn.Parameter(self._read(own).float(), requires_grad=False)
                    layer.get_submodule(owner)._parameters[leaf] = value
            self._change = name, layer.get_delta_weight(NAME).reshape(-1)
        return self._change[1]
