"""Export from a checkpoint or from pages to the files that transformers' `from_pretrained` or peft reads, in pieces."""

import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from pagoda.checkpoint.adapter import AdaptedModel
from pagoda.checkpoint.directory import check_absent, committed
from pagoda.checkpoint.lazy import LazyTensor
from pagoda.checkpoint.live import ModelTensors, live_weights
from pagoda.checkpoint.model_config import ADAPTER, QUANTIZED, TIES, skeleton, untied, with_everywhere
from pagoda.checkpoint.pretrained import INDEX, SINGLE, equal, give, listed
from pagoda.checkpoint.rank_files import Files
from pagoda.checkpoint.reader import BUFFERS, SavedCheckpoint
from pagoda.checkpoint.state import OF_WEIGHTS, named_tensors
from pagoda.checkpoint.tensors import chunks
from pagoda.config.training import require_choice
from pagoda.errors import CheckpointError
from pagoda.memory.arena import tensor_bytes
from pagoda.memory.files import copy_durably, inside, write_durably
from pagoda.memory.identity import new_checkpoint_id
from pagoda.optim.flat import join, weights_of
from pagoda.optim.rule import DTYPES
from pagoda.parameters.quantized import is_quantized
from pagoda.plan.layout import WEIGHT

_OWN_NAMES = (
    " A changed model cannot be exported for its class. In Python, export(source, out, own_names=True) writes all "
    "tensors under their names in the model."
)


class ChangedModelError(CheckpointError):
    """The model is not as its config builds it, so nothing can load its files by the config."""


@dataclass(frozen=True)
class Exported:
    """The result of `export`."""

    files: list[str]
    """Names of the safetensors files. For an adapter, names of all its files."""
    tensors: int
    nbytes: int
    dtype: torch.dtype
    """Dtype of the weights."""


def export(
    source: Path | nn.Module,
    out: Path,
    *,
    dtype: Literal["bf16", "fp32"] | None = None,
    max_shard_bytes: int = 5 << 30,
    merge: bool = False,
    own_names: bool = False,
    beside: Sequence[Path] = (),
) -> Exported:
    """Write a wrapped model, or the model of a checkpoint, as a Hugging Face directory. The directory appears only once
    it is complete.

    For a model with a peft adapter, this writes the adapter alone, for `peft.PeftModel.from_pretrained`. With `merge`,
    it writes the model without adapter, after adding the adapter's contribution to the weights. Files and folders in
    `beside`, such as a tokenizer's, are copied into it. With `own_names`, or if the model is not from transformers, the
    whole model is written under the names that its parameters and buffers have in Python, without a configuration.

    By default, the weights have the values that the model computed with. `dtype` "fp32" writes the exact master; "bf16"
    rounds a model trained in fp32 to nearest even. A file has at most `max_shard_bytes` of tensors, or a single tensor.
    Buffers keep their dtype. The RAM used depends on the number of tensors, not on their size. Two kinds of tensors are
    exceptions, because each is read as a whole: layouts that transformers builds by more than joining and cutting, and
    parameters that tensor-parallel ranks divide.

    For a wrapped model, every rank calls it at the same point of the program, and the first rank writes.

    Raises CheckpointError if the source is not a checkpoint or is damaged, or if `out` exists; StorageError if the disk
    is full or fails; ConfigError for another `dtype`, or if transformers is not installed; UsageError if the model is
    not wrapped, or between backward and `step()` if updates run during backward.
    """
    if dtype is not None:
        require_choice("dtype", dtype, Literal["bf16", "fp32"])
    with ExitStack() as opened:
        if isinstance(source, nn.Module):
            weights = opened.enter_context(live_weights(source))
        else:
            weights = _weights_in(opened.enter_context(SavedCheckpoint(source)))
        record = None if own_names else weights.record
        as_dtype = None if dtype is None else DTYPES[dtype]
        adapted = None
        if record is not None and ADAPTER in record:
            adapted = AdaptedModel(record, lambda name: _stored(weights, name, as_dtype).whole())
            if not merge:
                values, files = adapted.values(weights.trained), []
                if weights.is_first:
                    with committed(out) as folder:
                        _copy(beside, folder)
                        files = adapted.write(folder, values)
                return Exported(
                    files, len(values), sum(value.nbytes for value in values.values()), as_dtype or weights.dtype
                )
        elif merge:
            raise CheckpointError(f"{weights.name} has no adapter to merge: export it without --merge.")
        _check_not_quantized(weights)
        tensors, record = _tensors(weights, record, as_dtype, adapted)
        shards = _shards(tensors, max_shard_bytes)
        if weights.is_first:
            _write(out, tensors, shards, beside, record, as_dtype or weights.dtype)
        else:
            for tensor in tensors.values():
                for start, count in chunks(tensor.numel()):
                    tensor.read(start, count)
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    return Exported([f"{file}.safetensors" for file in shards], len(tensors), nbytes, as_dtype or weights.dtype)


def exported_by_reference(checkpoint: SavedCheckpoint) -> tuple[dict[str, LazyTensor], dict[str, Any]]:
    """What `export` would write for the model of a checkpoint, with adapters merged: its tensors, and a record with its
    config.json. The tensors can be read as long as the checkpoint is open.

    Raises CheckpointError if the model is not from transformers, and in the cases of `export`.
    """
    weights = _weights_in(checkpoint)
    record = weights.record
    if record is None:
        raise CheckpointError(f"{weights.name} is not of a transformers model, so it does not say how to build one")
    _check_not_quantized(weights)
    adapted = AdaptedModel(record, lambda name: _stored(weights, name, None).whole()) if ADAPTER in record else None
    tensors, described = _tensors(weights, record, None, adapted)
    assert described is not None, "as `record`"
    return tensors, {**described, "config": _config(described, weights.dtype)}


def give_values(model: nn.Module, checkpoint: SavedCheckpoint) -> None:
    """Give a model that is built like that of a checkpoint the values that it computed with. Quantized parameters keep
    their own, because no checkpoint has them. The checkpoint must stay open until parameters that wait have been read.

    Raises CheckpointError if the checkpoint lacks a parameter or buffer.
    """
    weights = _weights_in(checkpoint)
    for name, tensor in named_tensors(model):
        if is_quantized(tensor):
            continue
        if name not in weights.tensors[WEIGHT] and name not in weights.tensors[BUFFERS]:
            raise CheckpointError(f"{weights.name} lacks {name!r} of its {type(model).__name__}: it is damaged")
        give(tensor, _stored(weights, name, weights.dtype))


def _check_not_quantized(weights: ModelTensors) -> None:
    """Raises CheckpointError if there are quantized weights, which no other model has."""
    if weights.record is not None and weights.record.get(QUANTIZED):
        raise CheckpointError(
            f"{weights.name} has quantized weights, which cannot be exported, and into which no adapter can be merged. "
            "Export the adapter alone (without --merge), and merge it into the original model: "
            'peft.PeftModel.from_pretrained(model, "ADAPTER").merge_and_unload()'
        )


def _weights_in(checkpoint: SavedCheckpoint) -> ModelTensors:
    """The weights of a checkpoint. Raises CheckpointError if its description of the model is damaged."""
    record = checkpoint.manifest.get("model")
    if not (record is None or isinstance(record, dict)):
        raise CheckpointError(f"{checkpoint.directory} is damaged: the model in its manifest is not an object")
    trained = {name for name, steps in checkpoint.steps.items() if any(steps.values())}
    return ModelTensors(str(checkpoint.directory), record, checkpoint.tensors, trained)


def _write(
    out: Path,
    tensors: dict[str, LazyTensor],
    shards: dict[str, list[str]],
    beside: Sequence[Path],
    record: dict[str, Any] | None,
    dtype: torch.dtype,
) -> None:
    """Write all files of a model in order, each tensor piece by piece."""
    check_absent(out)
    specs = {file: [tensors[name].spec(name) for name in names] for file, names in shards.items()}
    files = Files(out, new_checkpoint_id(), specs, None)
    with files.open():
        _copy(beside, files.folder)
        for file, names in shards.items():
            for name in names:
                for start, count in chunks(tensors[name].numel()):
                    files.write(file, name, start, tensor_bytes(tensors[name].read(start, count)))
        files.finish()
        described: dict[str, Any] = {}
        if len(shards) > 1:
            index = {
                "metadata": {"total_size": sum(tensor.nbytes for tensor in tensors.values())},
                "weight_map": {name: f"{file}.safetensors" for file, names in shards.items() for name in names},
            }
            described[INDEX] = index
        if record is not None:
            described["config.json"] = _config(record, dtype)
            if record.get("generation_config"):
                described["generation_config.json"] = record["generation_config"]
        for name, content in described.items():
            write_durably(files.folder / name, (json.dumps(content, indent=2, sort_keys=True) + "\n").encode())


def _copy(files: Sequence[Path], folder: Path) -> None:
    with inside(folder) as descriptor:
        for file in files:
            copy_durably(file, descriptor)


def _tensors(
    weights: ModelTensors, record: dict[str, Any] | None, dtype: torch.dtype | None, adapted: AdaptedModel | None
) -> tuple[dict[str, LazyTensor], dict[str, Any] | None]:
    """Name in the files -> tensor, and the record of the model that they are for: `record`, or its `untied` variant if
    tied weights differ. The weights include the adapter's contribution, if there is an adapter.

    Raises ChangedModelError if a model that is built from the record would lack a tensor, or have another one.
    """
    held, buffers = weights.tensors[WEIGHT], weights.tensors[BUFFERS]
    if record is None:
        return {name: _stored(weights, name, dtype) for name in held} | dict(buffers), None
    from transformers.core_model_loading import revert_weight_conversion

    for variant in (dict, untied):
        described = variant(record)
        model = skeleton(described)  # raises if the record is damaged, before `untied` reads it
        found, conflict, used = _of_model(weights, record, model, dtype, adapted)
        if not conflict:
            break
    else:
        raise ChangedModelError(
            f"{weights.name} has different values for {' and '.join(conflict)}, which are one tensor in each "
            f"{type(model).__name__} that is built from its config.{_OWN_NAMES}"
        )
    left = sorted({*held, *buffers} - used)
    if left and adapted is not None:
        raise CheckpointError(f"{listed(left)} of the adapter cannot be merged into weights: export without --merge.")
    if left:
        raise ChangedModelError(
            f"{weights.name} has {listed(left)}, but a {type(model).__name__} that is built from its config does not, "
            f"so it would compute something else.{_OWN_NAMES}"
        )
    laid_out: dict[str, LazyTensor] = revert_weight_conversion(model, found)
    return laid_out, described


def _of_model(
    weights: ModelTensors, record: dict[str, Any], model: Any, dtype: torch.dtype | None, adapted: AdaptedModel | None
) -> tuple[dict[str, LazyTensor], list[str], set[str]]:
    """Name in the `state_dict()` of a transformers model -> tensor, for those that `save_pretrained` saves; the names
    of one tensor for which there are different values, if any; and the names of all weights that were used."""
    held, buffers, ties = weights.tensors[WEIGHT], weights.tensors[BUFFERS], record.get(TIES, {})
    ignored, tied = set(model._keys_to_ignore_on_save or ()), set(model.all_tied_weights_keys)
    groups: dict[int, list[str]] = {}
    expected = model.state_dict(keep_vars=True)
    for name, tensor in expected.items():
        groups.setdefault(id(tensor), []).append(name)
    found: dict[str, LazyTensor] = {}
    used = set() if adapted is None else adapted.merged_names()
    for names in groups.values():
        sources: dict[str | int, LazyTensor] = {}
        for name in names:
            source = name if adapted is None else adapted.source(name)
            if isinstance(source, LazyTensor):
                sources[id(source)] = source
            elif (stored := ties.get(source, source)) in held or stored in buffers:
                used.add(stored)
                sources[stored] = _stored(weights, stored, dtype if adapted is None else torch.float32)
        kept = next((name for name in names if name not in tied), names[0])
        if not sources and kept not in ignored:
            raise ChangedModelError(
                f"{weights.name} lacks {kept!r} of its {type(model).__name__}: it is damaged, or the model was "
                f"changed after it was built from its config, as by add_adapter.{_OWN_NAMES}"
            )
        if not sources:
            continue
        first, *others = sources.values()
        if any(not equal(first, other) for other in others):
            return {}, [repr(name) for name in names], set()
        if first.shape != expected[kept].shape:
            raise ChangedModelError(
                f"{weights.name} has {kept!r} as {list(first.shape)}; a {type(model).__name__} that is built from its "
                f"config has the shape {list(expected[kept].shape)}.{_OWN_NAMES}"
            )
        if kept not in ignored:
            is_weight = isinstance(expected[kept], nn.Parameter) and expected[kept].is_floating_point()
            if is_weight and adapted is not None:
                own = held.get(adapted.stored_name(kept) or "")
                first = first.cast(dtype or (weights.dtype if own is None else own.dtype))
            found[kept] = first
    return {name: found[name] for name in expected if name in found}, [], used


def _stored(weights: ModelTensors, name: str, dtype: torch.dtype | None) -> LazyTensor:
    """A parameter's weights in `dtype`, by default their own, or a buffer. For fp32 from bf16, the two halves of the
    master are joined. Where a checkpoint has predicted weights, the master is rounded."""
    weight, low, whole = (weights.tensors.get(state, {}).get(name) for state in OF_WEIGHTS)
    if weight is None:
        return weights.tensors[BUFFERS][name]
    dtype = dtype or weight.dtype
    if whole is not None:
        convert = weights_of if dtype is weight.dtype else torch.Tensor.to
        return LazyTensor(dtype, weight.shape, lambda start, count: convert(whole.read(start, count), dtype))
    if dtype is not torch.float32 or low is None:
        return weight.cast(dtype)

    def master(start: int, count: int) -> torch.Tensor:
        joined = torch.empty(count)
        join(weight.read(start, count), low.read(start, count), joined)
        return joined

    return LazyTensor(dtype, weight.shape, master)


def _shards(tensors: dict[str, LazyTensor], max_bytes: int) -> dict[str, list[str]]:
    """File -> names of its tensors, in order."""
    groups: list[list[str]] = [[]]
    size = 0
    for name, tensor in tensors.items():
        if groups[-1] and size + tensor.nbytes > max_bytes:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += tensor.nbytes
    if len(groups) == 1:
        return {SINGLE.removesuffix(".safetensors"): groups[0]}
    return {f"model-{n:05d}-of-{len(groups):05d}": group for n, group in enumerate(groups, 1)}


def _config(record: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """The model's config.json."""
    name = str(dtype).removeprefix("torch.")
    return {**with_everywhere(record["config"], "dtype", name), "architectures": [record["class"]], "dtype": name}
