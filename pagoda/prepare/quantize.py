"""Frozen linear layers in 4 or 8 bits, under adapters.

Source: Dettmers et al., "QLoRA: Efficient Finetuning of Quantized LLMs" (NeurIPS 2023), for 4 bits.
"""

from collections import Counter
from typing import Any

import torch
from torch import nn

from pagoda.checkpoint.waiting import source_of
from pagoda.errors import ConfigError, needed

PACKAGES = {"4bit": "bitsandbytes", "8bit": "torchao"}
"""Format -> the package that has its layers."""


def package_of(bits: str) -> Any:
    """The package that has the layers of a format. Raises ConfigError if it is not installed."""
    return needed(PACKAGES[bits], f"--quantize {bits} needs {PACKAGES[bits]}: pip install 'pagoda-train[quantized]'")


def quantize(model: nn.Module, bits: str, dtype: torch.dtype) -> int:
    """Replace the linear layers of a transformers model by frozen ones that compute in `dtype`. Their weights are in 4
    bits (NF4 of bitsandbytes, with quantized scales) or in 8 bits (integers of torchao). The output layer, and layers
    whose weights are tied, stay as they are, as in transformers. Weights that wait are read layer by layer.

    Returns the number of weights that were quantized. Raises ConfigError if there are none.
    """
    package, make = package_of(bits), {"4bit": _in_4_bits, "8bit": _in_8_bits}[bits]
    uses = Counter(id(param) for module in model.modules() for param in module._parameters.values())
    output: Any = model.get_output_embeddings()  # type: ignore[operator]
    total = 0
    for name, module in [*model.named_modules()]:
        if module is output or not _is_linear(module) or uses[id(module.weight)] > 1:
            continue
        made = make(package, _values(module, dtype))
        made.bias = None if module.bias is None else module.bias.requires_grad_(False)
        model.set_submodule(name, made)
        total += module.weight.numel()
    if not total:
        raise ConfigError(f"--quantize is for linear layers, and a {type(model).__name__} has none: leave it out")
    return total


def _is_linear(module: nn.Module) -> bool:
    from transformers.pytorch_utils import Conv1D

    return type(module) in (nn.Linear, Conv1D)


def _values(module: Any, dtype: torch.dtype) -> torch.Tensor:
    """The weights of a linear layer, [outputs, inputs]. They are not in memory afterwards if they were not before."""
    source = source_of(module.weight)
    values = module.weight.detach() if source is None else source.values.whole()
    return (values if type(module) is nn.Linear else values.T.contiguous()).to(dtype)


def _in_4_bits(bitsandbytes: Any, values: torch.Tensor) -> Any:
    outputs, inputs = values.shape
    form = {"quant_type": "nf4", "compress_statistics": True}
    made = bitsandbytes.nn.Linear4bit(inputs, outputs, bias=False, compute_dtype=values.dtype, device="meta", **form)
    weight = bitsandbytes.nn.Params4bit(values, requires_grad=False, module=made, **form)
    made.weight = weight.to(values.device)  # packs it
    return made


def _in_8_bits(torchao: Any, values: torch.Tensor) -> Any:
    outputs, inputs = values.shape
    made = nn.Sequential(nn.Linear(inputs, outputs, bias=False, device="meta"))
    made[0].weight = nn.Parameter(values, requires_grad=False)
    torchao.quantization.quantize_(made, torchao.quantization.Int8WeightOnlyConfig())
    return made[0]
