"""The tensors of a GGUF file, under the names of transformers. Each is dequantized when it is read.

The values are those of `from_pretrained(..., gguf_file=...)`: the package gguf dequantizes, and transformers names and
rearranges.
"""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from pagoda.checkpoint.lazy import Deferred, LazyTensor
from pagoda.errors import CheckpointError, ConfigError
from pagoda.models.gguf import gguf_package, settings_of


def gguf_tensors(model: nn.Module, file: Path) -> dict[str, LazyTensor]:
    """Name in the model's `state_dict()` -> values in fp32. Tensors that the model does not use have their own names.

    Raises ConfigError if the file cannot be read.
    """
    from transformers import modeling_gguf_pytorch_utils as reading

    settings = settings_of(file)
    try:
        reader = gguf_package().GGUFReader(file)
        architecture = reading.read_field(reader, "general.architecture")[0]
        processor = reading.TENSOR_PROCESSORS.get(architecture, reading.TensorProcessor)(config=settings)
        names: dict[str, str] = reading.get_gguf_hf_weights_map(model, processor)
    except Exception as error:  # gguf and transformers have many for a bad file
        raise ConfigError(f"{file} cannot be read as a GGUF file: {type(error).__name__}: {error}") from error
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    stored: dict[str, list[Any]] = {}
    for tensor in reader.tensors:  # several may make one parameter, as those of experts do
        target = names.get(tensor.name) or names.get(tensor.name.removesuffix(".weight")) or tensor.name
        stored.setdefault(target, []).append(tensor)
    found = {}
    for name, tensors in stored.items():
        shape = shapes.get(name, torch.Size(reversed(tensors[0].shape.tolist())))
        compute = Deferred(partial(_values, file, name, shape, tensors, partial(_processed, processor, names)), (), {})
        found[name] = LazyTensor(torch.float32, shape, partial(compute.read, 0))
    return found


def _values(file: Path, name: str, shape: torch.Size, tensors: list[Any], process: Any) -> torch.Tensor:
    dequantize = gguf_package().dequantize
    made: dict[str, torch.Tensor] = {}
    for tensor in tensors:
        process(dequantize(tensor.data, tensor.tensor_type), tensor.name, name, made)
    if name not in made or made[name].shape != shape:
        held = list(made[name].shape) if name in made else "absent"
        raise CheckpointError(
            f"{file} does not fit its configuration: {name!r} is {held}, and {list(shape)} in the model"
        )
    return made[name]


def _processed(
    processor: Any, names: dict[str, str], weights: Any, stored: str, name: str, made: dict[str, torch.Tensor]
) -> None:
    """Give `made` what a tensor of the file is in transformers. Some processors write it there themselves."""
    found = processor.process(weights, stored, tensor_key_mapping=names, parsed_parameters={"tensors": made})
    if found.name is not None:
        made[name] = torch.from_numpy(np.array(found.weights, dtype=np.float32))
