"""From a checkpoint to the files that transformers' `from_pretrained` reads, in pieces; or to those of peft."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pagoda.checkpoint.adapter import AdaptedModel
from pagoda.checkpoint.directory import committed, write_json
from pagoda.checkpoint.hf_layout import stored_names, to_files
from pagoda.checkpoint.lazy import LazyTensor, Read
from pagoda.checkpoint.model_config import ADAPTER, skeleton
from pagoda.checkpoint.pretrained import INDEX, SINGLE
from pagoda.checkpoint.rank_files import Files
from pagoda.checkpoint.reader import BUFFERS, Checkpoint
from pagoda.checkpoint.tensors import chunks
from pagoda.config.training import Precision
from pagoda.errors import CheckpointError
from pagoda.memory.arena import tensor_bytes
from pagoda.memory.files import write_durably
from pagoda.memory.identity import new_checkpoint_id
from pagoda.optim.flat import join

_WEIGHT, _LOW = "weight", "weight_low"
_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True)
class Exported:
    """What `export` wrote."""

    files: list[str]
    """Names of the safetensors files, or of all that an adapter has."""
    tensors: int
    nbytes: int
    dtype: torch.dtype
    """Of the weights."""


def export(
    directory: Path,
    out: Path,
    *,
    dtype: Precision | None = None,
    max_shard_bytes: int = 5 << 30,
    merge: bool = False,
    beside: Sequence[Path] = (),
) -> Exported:
    """Write the model of a checkpoint as a Hugging Face directory, which appears complete or not at all.

    Of a model with an adapter of peft, that is the adapter alone, for `peft.PeftModel.from_pretrained`; with `merge` it
    is the model without one, whose weights have what the adapter adds. Files `beside` are copied into it: a tokenizer.

    The weights are those that the model computed with, unless `dtype` asks for others: "fp32" is the master, exact;
    "bf16" of a model trained in fp32 is rounded to even. A file has at most `max_shard_bytes` of tensors, or one
    tensor. Buffers keep their dtype. RAM used depends on the number of tensors, not on their size; the exception are
    layouts that transformers makes by more than joining and cutting, where each such tensor is in RAM at once.

    Raises CheckpointError for what is no checkpoint, is damaged, or is not of a model of transformers, and where `out`
    exists; StorageError where the disk is full or fails; ConfigError where transformers is not installed.
    """
    with Checkpoint(directory) as checkpoint:
        record = checkpoint.manifest.get("model")
        if not isinstance(record, dict):
            raise CheckpointError(
                f"{directory} has no Hugging Face layout, because its model is not of transformers. Its "
                f"{_WEIGHT}.safetensors has the weights, under the model's own names."
            )
        as_dtype = checkpoint.states[_WEIGHT] if dtype is None else _DTYPES[dtype]
        adapted = None
        if ADAPTER in record:
            adapted = AdaptedModel(record, lambda name: _whole(checkpoint, name, as_dtype))
            if not merge:
                with committed(out) as folder:
                    _copy(beside, folder)
                    return Exported(*adapted.write(folder), as_dtype)
        elif merge:
            raise CheckpointError(f"{directory} has no adapter to merge: export it without --merge.")
        model = skeleton(record)
        tensors = to_files(model, _tensors(checkpoint, model, as_dtype, adapted))
        shards = _shards(tensors, max_shard_bytes)
        nbytes = sum(tensor.nbytes for tensor in tensors.values())
        specs = {file: [tensors[name].spec(name) for name in names] for file, names in shards.items()}
        files = Files(out, new_checkpoint_id(), specs, None)
        with files.open():
            _copy(beside, files.folder)
            for file, names in shards.items():
                for name in names:
                    for start, count in chunks(tensors[name].numel()):
                        files.write(file, name, start, tensor_bytes(tensors[name].read(start, count)))
            files.finish()
            if len(shards) > 1:
                index = {
                    "metadata": {"total_size": nbytes},
                    "weight_map": {name: f"{file}.safetensors" for file, names in shards.items() for name in names},
                }
                write_json(files.folder / INDEX, index, indent=2)
            write_json(files.folder / "config.json", _config(record, as_dtype), indent=2)
            if record.get("generation_config"):
                write_json(files.folder / "generation_config.json", record["generation_config"], indent=2)
    return Exported([f"{file}.safetensors" for file in shards], len(tensors), nbytes, as_dtype)


def _copy(files: Sequence[Path], folder: Path) -> None:
    for file in files:
        write_durably(folder / file.name, file.read_bytes())


def _tensors(
    checkpoint: Checkpoint, model: Any, dtype: torch.dtype, adapted: AdaptedModel | None
) -> dict[str, LazyTensor]:
    """What the checkpoint has for each name under which transformers saves a tensor of the model, merged with what an
    adapter adds."""
    expected = model.state_dict()
    weights, buffers = checkpoint.specs(_WEIGHT), checkpoint.specs(BUFFERS)
    found = {}
    for name, plain in stored_names(model).items():
        held_as = plain if adapted is None else adapted.stored_name(plain)
        if held_as in weights:
            spec = weights[held_as]
            read = _weights(checkpoint, held_as, dtype if adapted is None else torch.float32)
            if adapted is not None:
                read = adapted.merged(held_as, read, dtype)
            found[name] = LazyTensor(dtype, spec.shape, read)
        elif held_as in buffers:
            spec = buffers[held_as]
            found[name] = checkpoint.tensor(BUFFERS, held_as)
        else:
            raise CheckpointError(
                f"{checkpoint.directory} is damaged: it lacks {held_as!r} of its {type(model).__name__}"
            )
        if spec.shape != tuple(expected[name].shape):
            raise CheckpointError(
                f"{checkpoint.directory} has {held_as!r} as {spec}; its {type(model).__name__} has the shape "
                f"{list(expected[name].shape)}. A model changed after it was built from its config cannot be exported."
            )
    return found


def _weights(checkpoint: Checkpoint, name: str, dtype: torch.dtype) -> Read:
    """Reads a parameter's weights: the halves of the master joined where fp32 is asked of bf16."""
    weight = checkpoint.tensor(_WEIGHT, name)
    if dtype is torch.float32 and _LOW in checkpoint.states and name in checkpoint.specs(_LOW):
        low = checkpoint.tensor(_LOW, name)

        def master(start: int, count: int) -> torch.Tensor:
            joined = torch.empty(count)
            join(weight.read(start, count), low.read(start, count), joined)
            return joined

        return master
    return lambda start, count: weight.read(start, count).to(dtype)


def _whole(checkpoint: Checkpoint, name: str, dtype: torch.dtype) -> torch.Tensor:
    """A parameter's weights, in its shape."""
    shape = checkpoint.tensor(_WEIGHT, name).shape
    return _weights(checkpoint, name, dtype)(0, shape.numel()).view(shape)


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
    """The model's config.json. The key-value cache, which training turns off, is as transformers has it by default."""

    def settings(given: dict[str, Any]) -> dict[str, Any]:
        kept = {key: settings(value) if isinstance(value, dict) else value for key, value in given.items()}
        if "dtype" in kept:
            kept["dtype"] = name
        return {key: value for key, value in kept.items() if (key, value) != ("use_cache", False)}

    name = str(dtype).removeprefix("torch.")
    return {**settings(record["config"]), "architectures": [record["class"]], "dtype": name}
