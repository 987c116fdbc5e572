"""peft adapters in a checkpoint: written as a directory that peft can load, or merged into the weights they adapt."""

import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pagoda.checkpoint.lazy import LazyTensor
from pagoda.checkpoint.model_config import ADAPTER, skeleton
from pagoda.checkpoint.pretrained import listed
from pagoda.checkpoint.state import named_tensors
from pagoda.errors import CheckpointError, PagodaError
from pagoda.models.lora import MERGED, adapted_as, adapter_name

_BASE = "base_model.model."
_UNMERGED = (
    ". Export it without --merge, or call merge_and_unload() of the wrapped model inside "
    "pagoda.gathered(model, modify=True)."
)


def saved_by_peft(model: Any, embeddings: bool | str = False) -> set[str]:
    """The names of tensors of a peft model that its `save_pretrained` writes, for all adapters. Prompts that peft
    computes from parameters are not among them. `embeddings` is peft's `save_embedding_layers`."""
    from peft import get_peft_model_state_dict

    blank = {name: torch.empty_like(tensor, device="meta") for name, tensor in named_tensors(model, every_name=True)}
    names = {id(tensor): name for name, tensor in blank.items()}
    saved = set()
    for adapter, config in model.peft_config.items():
        if not config.is_prompt_learning:
            of_adapter = get_peft_model_state_dict(
                model, state_dict=dict(blank), adapter_name=adapter, save_embedding_layers=embeddings
            )
            saved |= {names[id(tensor)] for tensor in of_adapter.values() if id(tensor) in names}
    return saved


class AdaptedModel:
    """The model that a checkpoint's record describes, with its adapter, on the meta device.

    peft's own code merges: layer by layer, with the values of one layer in RAM, in fp32.
    """

    def __init__(self, record: dict[str, Any], read: Callable[[str], torch.Tensor]) -> None:
        """`read`: returns a whole parameter or buffer in its shape, given its name in the checkpoint.

        Raises CheckpointError if transformers cannot build the model, and ConfigError if peft is not installed.
        """
        base = skeleton(record)
        self._read = read
        self._settings: dict[str, Any] = record[ADAPTER]
        self._base = dict(base.state_dict(keep_vars=True))
        try:
            self._name = adapter_name(self._settings)
            with torch.random.fork_rng(devices=[]):  # peft initializes the adapter on the CPU, then moves it to meta
                self._model = adapted_as(base, self._settings)
        except PagodaError:
            raise
        except Exception as error:  # peft validates with many exception types, and the settings may be damaged
            raise CheckpointError(
                f"peft cannot build this checkpoint's adapter on the meta device: {error}. Call save_pretrained of the "
                "wrapped model."
            ) from error
        self._stored = {id(tensor): name for name, tensor in reversed([*named_tensors(self._model)])}
        """Id of a tensor of this model -> its name in the checkpoint, which is its first one."""
        self._layers = dict(self._adapted_layers())
        """Name in the model without adapter -> the layer or wrapper that peft has put there."""
        self._merged: tuple[str, Mapping[str, torch.Tensor]] = ("", {})
        """Name of the last merged layer, and its tensors."""

    def write(self, folder: Path, values: Mapping[str, torch.Tensor]) -> list[str]:
        """Write and sync the adapter, given its `values`. Returns the names of its files."""
        others = {*folder.iterdir()}  # a tokenizer, and the mark of a directory that is not complete
        try:
            _fill(self._model, values, self._stored)
            self._model.save_pretrained(folder, save_embedding_layers=False)
        except Exception as error:  # peft computes prompts from the model, which is on meta
            raise CheckpointError(
                f"peft cannot write this adapter without its model ({error}): call save_pretrained of a wrapped model."
            ) from error
        for nested in filter(Path.is_dir, [folder / self._name]):  # peft's place for an adapter with another name
            for path in nested.iterdir():
                path.rename(folder / path.name)
            nested.rmdir()
        files = sorted(path for path in {*folder.iterdir()} - others if path.is_file())
        for path in files:
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)
        return [path.name for path in files]

    def values(self, trained: Iterable[str]) -> dict[str, torch.Tensor]:
        """The tensors that peft saves, by name in the checkpoint.

        Raises CheckpointError if it would leave out one of the `trained` parameters.
        """
        state = dict(named_tensors(self._model, every_name=True))
        own = {id(tensor) for tensor in self._base.values()}
        names = {self._stored[id(state[key])] for key in saved_by_peft(self._model)}
        names |= {name for name, tensor in named_tensors(self._model) if id(tensor) not in own}
        if left_out := sorted(set(trained) - names):
            raise CheckpointError(
                f"{listed(left_out)} was trained, but peft does not save it with the adapter: export with --merge "
                "(merge=True), or list its module in modules_to_save before training."
            )
        return {name: self._read(name) for name in sorted(names)}

    def source(self, name: str) -> str | LazyTensor:
        """A tensor of the model without adapter, as it is after merging: its name in the checkpoint if merging does not
        compute it, otherwise the merged tensor, in fp32."""
        for prefix, layer in self._layers.items():
            if not name.startswith(f"{prefix}."):
                continue
            if hasattr(layer, "original_module") and not any(map(_is_tuned, layer.modules())):
                trained = dict(named_tensors(_unloaded(layer, merge=False)))
                return self._stored[id(trained[name.removeprefix(f"{prefix}.")])]
            tensor = self._base[name]
            return LazyTensor(tensor.dtype, tensor.shape, partial(self._read_merged, prefix, name))
        if (stored := self._stored.get(id(self._base[name]))) is None:
            raise CheckpointError(
                f"peft replaces {name!r}, so the adapter cannot be merged. Export it without --merge."
            )
        return stored

    def stored_name(self, name: str) -> str | None:
        """The name in the checkpoint of a tensor of the model without adapter, as it is before merging."""
        return self._stored.get(id(self._base[name]))

    def merged_names(self) -> set[str]:
        """Names in the checkpoint of everything that merging reads or replaces. Raises CheckpointError if this adapter
        cannot be merged."""
        for setting, why in _UNMERGEABLE.items():
            if self._settings.get(setting):
                raise CheckpointError(f"An adapter with {setting!r} cannot be merged, because {why}.")
        with _peft_errors():
            if hasattr(self._model.base_model, "_check_merge_allowed"):
                self._model.base_model._check_merge_allowed()
        return {self._stored[id(tensor)] for layer in self._layers.values() for _, tensor in named_tensors(layer)}

    def _adapted_layers(self) -> Iterable[tuple[str, nn.Module]]:
        outer: tuple[str, ...] = ()
        for prefix, module in self._model.named_modules():
            changed = prefix.startswith(_BASE) and (_is_tuned(module) or hasattr(module, "original_module"))
            if changed and not prefix.startswith(outer):
                outer = (*outer, f"{prefix}.")
                yield prefix.removeprefix(_BASE), module

    def _read_merged(self, prefix: str, name: str, start: int, count: int) -> torch.Tensor:
        if self._merged[0] != prefix:
            self._merged = "", {}
            with _peft_errors(), torch.no_grad():
                layer = deepcopy(self._layers[prefix])
                pairs = zip(named_tensors(layer), named_tensors(self._layers[prefix]), strict=True)
                names = {id(copied): self._stored[id(tensor)] for (_, copied), (_, tensor) in pairs}
                _fill(layer, {held: self._read_in_fp32(held) for held in dict.fromkeys(names.values())}, names)
                with _RefusingMeta():  # type: ignore[no-untyped-call]
                    self._merged = prefix, dict(named_tensors(_unloaded(layer, merge=True)))
        return self._merged[1][name.removeprefix(f"{prefix}.")].detach().reshape(-1)[start : start + count]

    def _read_in_fp32(self, name: str) -> torch.Tensor:
        value = self._read(name)
        return value.float() if value.is_floating_point() else value


_UNMERGEABLE = {
    "layer_replication": "its layers share weights: export it without --merge",
    "alora_invocation_tokens": "it acts after certain tokens only: export it without --merge",
    MERGED: "its weights are in the base weights already: unmerge it first, inside pagoda.gathered(model, modify=True)",
}
"""Setting of peft -> why an adapter with it cannot be merged."""


def _is_tuned(module: nn.Module) -> bool:
    from peft.tuners.tuners_utils import BaseTunerLayer

    return isinstance(module, BaseTunerLayer)


def _fill(module: nn.Module, values: Mapping[str, torch.Tensor], names: Mapping[int, str]) -> None:
    """Replace the tensors of a module that have values. `names`: id of a tensor -> name of its value. Tied ones stay
    tied."""
    filled: dict[int, torch.Tensor] = {}
    for child in module.modules():
        for held in (child._parameters, child._buffers):
            for name, tensor in held.items():
                if tensor is None or (value := values.get(names.get(id(tensor), ""))) is None:
                    continue
                if id(tensor) not in filled:
                    filled[id(tensor)] = nn.Parameter(value, False) if held is child._parameters else value
                held[name] = filled[id(tensor)]  # type: ignore[assignment]


def _unloaded(layer: Any, merge: bool) -> nn.Module:
    """The module that peft leaves in place of a layer or wrapper of its own when it removes the adapter."""
    if hasattr(layer, "unload_and_optionally_merge_module"):
        module: nn.Module = layer.unload_and_optionally_merge_module(merge=merge, safe_merge=False, adapter_names=None)
        return module
    layer.merge(safe_merge=False, adapter_names=None)
    base: nn.Module = layer.get_base_layer()
    return base


class _RefusingMeta(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside, operations on meta tensors raise CheckpointError. Otherwise torch adds a meta tensor to another one in
    place without any effect or error."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(isinstance(each, torch.Tensor) and each.is_meta for each in tree_leaves((args, kwargs))):
            raise CheckpointError(
                "peft computes a part of this adapter when it builds it, so it is in no checkpoint" + _UNMERGED
            )
        return func(*args, **(kwargs or {}))


@contextmanager
def _peft_errors() -> Any:
    try:
        yield
    except PagodaError:
        raise
    except Exception as error:  # of many types
        raise CheckpointError(f"peft cannot merge this adapter: {error}{_UNMERGED}") from error
