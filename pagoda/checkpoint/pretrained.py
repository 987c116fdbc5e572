"""Weights of a Hugging Face directory: matched to a model by transformers' own rules, and read when they are placed."""

import json
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pagoda.checkpoint.dequantize import dequantized, quantization_of
from pagoda.checkpoint.gguf import gguf_tensors
from pagoda.checkpoint.lazy import LazyTensor, tensors_of
from pagoda.checkpoint.tensors import TensorFile, chunks
from pagoda.checkpoint.waiting import WaitingTensor, set_source
from pagoda.errors import CheckpointError, ConfigError
from pagoda.memory.files import read_regular
from pagoda.models.gguf import SUFFIX, gguf_in

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_OTHER_FORMATS = ("pytorch_model.bin", "pytorch_model.bin.index.json", "tf_model.h5", "flax_model.msgpack")
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Pretrained:
    """The result of `attach_weights`."""

    files: int
    nbytes: int
    missing: list[str]
    """Parameters and buffers that the files lack. They keep their initialisation."""
    unexpected: list[str]
    """Tensors of the files that the model does not use."""

    def warnings(self) -> list[str]:
        """Warnings for the user, one sentence each."""
        found = []
        if self.missing:
            found.append(f"The files lack {listed(self.missing)}, which will be initialised as in a new model.")
        if self.unexpected:
            found.append(f"The model does not use {listed(self.unexpected)} from the files.")
        return found


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files of a Hugging Face directory, or its GGUF file. Empty if it has no weights.

    Raises ConfigError if the index cannot be read, or if the weights are in a format that cannot be read in pieces.
    """
    index = directory / INDEX
    if (file := gguf_in(directory)) is not None:
        return [file]
    if (directory / SINGLE).is_file():
        return [directory / SINGLE]
    if index.is_file():
        try:
            names = set(json.loads(read_regular(index))["weight_map"].values())
            files = [directory / name for name in sorted(names)]
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise ConfigError(f"{index} cannot be read: {error!r}. Download or copy it again") from error
        outside = [file for file in files if file.parent != directory or "\0" in file.name]
        if outside or not files:
            raise ConfigError(f"{index} names {outside[0] if outside else 'no file'}; files must be in its directory")
        return files
    if found := sorted(path.name for path in directory.glob(f"*{SUFFIX}")):
        raise ConfigError(f"{directory} has a config.json, and its weights in {found[0]}: name that file itself")
    others = [name for name in _OTHER_FORMATS if (directory / name).exists()]
    if others:
        raise ConfigError(
            f"{directory} has its weights in {others[0]}, but only safetensors files can be read in pieces: load it "
            "with transformers' from_pretrained and save it again with save_pretrained"
        )
    return []


def dtype_of_files(directory: Path) -> torch.dtype | None:
    """The dtype of the first floating-point tensor in the files of a directory. None if there is none, and for a GGUF
    file, whose values are mostly quantized."""
    if gguf_in(directory) is not None:
        return None
    specs = (spec for path in weight_files(directory) for spec in TensorFile(path).specs.values())
    return next((spec.dtype for spec in specs if spec.dtype in _FLOATS), None)


def attach_weights(model: nn.Module, directory: Path) -> Pretrained:
    """Give a transformers model, built in `pagoda.deferred_init()`, the weights of a directory or GGUF file.

    Real parameters and buffers get their values now. Parameters that wait get a reference to their values, which `wrap`
    reads piece by piece, directly into their tier. Values are exact, because fp32, fp16 and bf16 all fit
    the fp32 master. Quantized weights are dequantized.

    Raises ConfigError if the directory has no weights, weights in a format that cannot be dequantized or the files of
    another model, if shapes differ from the model's, or if the files have different values for tied parameters. Raises
    CheckpointError if a file is damaged.
    """
    if (gguf := gguf_in(directory)) is not None:
        missing, unexpected = attach_tensors(model, gguf, gguf_tensors(model, gguf))
        return Pretrained(1, gguf.stat().st_size, missing, unexpected)
    quantization = quantization_of(directory)
    files = [TensorFile(path) for path in weight_files(directory)]
    if not files:
        raise ConfigError(f"{directory} has no weights: neither {SINGLE} nor {INDEX}")
    stored = {name: tensor for file in files for name, tensor in tensors_of(file).items()}
    plain = stored if quantization is None else dequantized(quantization, stored)
    missing, unexpected = attach_tensors(model, directory, plain)
    return Pretrained(len(files), sum(tensor.nbytes for tensor in stored.values()), missing, unexpected)


def attach_tensors(
    model: nn.Module, directory: Path, stored: dict[str, LazyTensor], their_dtypes: bool = False
) -> tuple[list[str], list[str]]:
    """Like `attach_weights`, for tensors as the directory's files have them. Returns missing and unexpected names.
    `their_dtypes`: parameters take the dtypes of the tensors."""
    tensors, missing, unexpected = _from_files(model, stored)
    names: dict[int, list[str]] = {}
    held: dict[str, torch.Tensor] = dict(model.state_dict(keep_vars=True))
    for name, tensor in held.items():
        names.setdefault(id(tensor), []).append(name)
    _check_fit(directory, tensors, held)
    given: set[str] = set()
    for same in names.values():
        present = [name for name in same if name in tensors]
        if not present:
            continue
        _check_tied(directory, present, tensors)
        tensor, values = held[same[0]], tensors[present[0]]
        if their_dtypes and tensor.is_floating_point() and tensor.dtype is not values.dtype:
            tensor.data = tensor.data.to(values.dtype)
        give(tensor, values)
        given.update(same)
    if not given:
        raise ConfigError(
            f"{directory} has no weights for a {type(model).__name__}: its files have {listed(sorted(stored))}"
        )
    return [name for name in missing if name not in given], unexpected


def _from_files(model: Any, tensors: Mapping[str, LazyTensor]) -> tuple[dict[str, LazyTensor], list[str], list[str]]:
    """Convert tensors of files to tensors named as in `state_dict()`, like `from_pretrained`.

    Also returns the names in the model that the files lack, and the names in the files that the model lacks, without
    those that transformers ignores.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key
    from transformers.utils.loading_report import LoadStateDictInfo

    expected = model.state_dict()
    transforms = get_model_conversion_mapping(model)
    renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
    converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
    of_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    groups: dict[str, Any] = {}
    unexpected = set()
    for name in sorted(tensors, key=dot_natural_key):
        renamed, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, expected)
        if renamed not in expected and name in expected:
            renamed, pattern = name, None
        if renamed not in expected:
            unexpected.add(name)
        elif pattern is not None:
            group = groups.setdefault(renamed, deepcopy(of_pattern[pattern]))
            group.add_tensor(renamed, name, pattern, tensors[name])
        else:
            groups.setdefault(renamed, WeightRenaming(name, renamed)).add_tensor(renamed, name, name, tensors[name])
    found: dict[str, LazyTensor] = {}
    for name, group in groups.items():
        try:
            converted = group.convert(name, model=model, config=model.config)
        except (RuntimeError, ValueError, LookupError) as error:
            raise CheckpointError(f"the files' tensors for {name!r} cannot be converted: {error}") from error
        for target, value in converted.items():
            found[target] = value[0] if isinstance(value, list) else value
    report = LoadStateDictInfo(
        missing_keys=expected.keys() - found.keys(),
        unexpected_keys=unexpected | (found.keys() - expected.keys()),
        mismatched_keys=set(),
        error_msgs=[],
        conversion_errors={},
        skipped_pp_keys=set(),
    )
    model._adjust_missing_and_unexpected_keys(report)
    found = {name: _oriented(model, name, tensor) for name, tensor in found.items() if name in expected}
    return found, sorted(report.missing_keys), sorted(report.unexpected_keys)


def _oriented(model: nn.Module, name: str, values: LazyTensor) -> LazyTensor:
    """The values of a parameter in its own orientation. bitsandbytes stores a Conv1D as the linear layer that it makes
    of it, so it is transposed."""
    from transformers.pytorch_utils import Conv1D

    holder, _, short = name.rpartition(".")
    if values.packed is None or short != "weight" or not isinstance(model.get_submodule(holder), Conv1D):
        return values
    turned: LazyTensor = values.t()
    turned.packed = values.packed
    return turned


def give(tensor: torch.Tensor, values: LazyTensor) -> None:
    """Let a parameter or buffer have these values. A parameter that waits reads them later."""
    tensor.__dict__.update(
        _is_hf_initialized=True
    )  # as from_pretrained does, so that transformers does not initialise it
    if isinstance(tensor, WaitingTensor):
        set_source(tensor, values)
        return
    with torch.no_grad():
        flat = tensor.view(-1)
        for start, count in chunks(values.numel()):
            flat[start : start + count] = values.read(start, count)


def _check_fit(directory: Path, tensors: dict[str, LazyTensor], held: dict[str, torch.Tensor]) -> None:
    """Raises ConfigError unless all tensors have the model's shapes, and all weights are fp32, fp16 or bf16."""
    for name, tensor in tensors.items():
        if held[name].is_floating_point() and tensor.dtype not in _FLOATS:
            raise ConfigError(f"{directory} has {name!r} as {tensor.dtype}; weights must be fp32, fp16 or bf16")
    wrong = [
        f"{name!r} is {list(tensor.shape)} in the files and {list(held[name].shape)} in the model"
        for name, tensor in tensors.items()
        if tensor.shape != held[name].shape
    ]
    if wrong:
        more = f", and {len(wrong) - 3} more differ" if len(wrong) > 3 else ""
        raise ConfigError(f"{directory} does not fit its config.json: {'; '.join(wrong[:3])}{more}")


def _check_tied(directory: Path, names: list[str], tensors: dict[str, LazyTensor]) -> None:
    """Raises ConfigError unless all names of one parameter have the same value."""
    for name in names[1:]:
        if not equal(tensors[names[0]], tensors[name]):
            raise ConfigError(
                f"{directory} has different values for {names[0]!r} and {name!r}, which its config.json ties to "
                "one parameter: set tie_word_embeddings to false there if they are not tied"
            )


def equal(one: LazyTensor, other: LazyTensor) -> bool:
    """Whether two tensors have equal elements, which are read piece by piece."""
    return one.shape == other.shape and all(
        torch.equal(one.read(*part), other.read(*part)) for part in chunks(one.numel())
    )


def listed(names: list[str]) -> str:
    """The first names of a list, for a message."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(repr(name) for name in names[:3]) + more
