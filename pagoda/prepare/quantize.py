"""Frozen linear layers and experts in 4 or 8 bits, under adapters.

Source: Dettmers et al., "QLoRA: Efficient Finetuning of Quantized LLMs" (NeurIPS 2023), for 4 bits.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

import torch
from torch import nn

from pagoda.checkpoint.dequantize import ABSMAX, params_in_4_bits
from pagoda.checkpoint.sources import ValueSource
from pagoda.checkpoint.waiting import source_of
from pagoda.config.run import PACKAGES, needs_package
from pagoda.errors import ConfigError, needed
from pagoda.models.lora import ALL_LINEAR
from pagoda.parameters.quantized import ALIGN_BYTES, waiting_to_be_packed, without_memory
from pagoda.prepare.experts import (
    ExpertStack,
    QuantizedExperts,
    adapting_pieces,
    experts_of_stack,
    is_expert_stack,
)

Form = tuple[torch.dtype, torch.device]
"""The dtype and the device of layers that compute with quantized weights."""
_NF4 = {"quant_type": "nf4", "compress_statistics": True}
_BIAS_DIM = 2
"""Dimensions of the biases of a stack of experts, one row for each expert."""


def package_of(bits: str) -> Any:
    """The package that has the layers of a format. Raises ConfigError if it is not installed."""
    return needed(PACKAGES[bits], needs_package(bits))


def quantize_layers(model: nn.Module, bits: str, dtype: torch.dtype, device: torch.device) -> int:
    """Replace the linear layers of a transformers model by frozen ones that compute in `dtype` on `device`. Their
    weights are in 4 bits (NF4 of bitsandbytes, with quantized scales) or in 8 bits (integers of torchao). Weights that
    wait go on waiting: `wrap` reads and packs one layer at a time, straight into its tier. Layers that bitsandbytes has
    in 4 bits in their files stay as they are.

    Call it before peft adds adapters, whose classes depend on the layers'. Returns the number of weights that were
    quantized. Raises ConfigError if there are none.
    """
    layers, form = linear_layers(model), (dtype, device)
    for name, module in layers.items():
        outputs, inputs = module.weight.shape if type(module) is nn.Linear else reversed(module.weight.shape)
        made: Any = nn.Linear(inputs, outputs, bias=False, device="meta")
        made.weight = _packed(bits, source_of(module.weight), partial(_values, module), (outputs, inputs), form)
        if bits == "4bit":
            settings = {"bias": False, "compute_dtype": dtype, "device": "meta"}
            weight, made = made.weight, package_of(bits).nn.Linear4bit(inputs, outputs, **settings)
            made.weight, made.quant_state = weight, weight.quant_state
        made.bias = None if module.bias is None else module.bias.requires_grad_(False)
        model.set_submodule(name, made)
    return sum(module.weight.numel() for module in layers.values())


def quantize_experts(model: nn.Module, bits: str, dtype: torch.dtype, device: torch.device) -> int:
    """Replace the stacks of experts of a transformers model in the same way, expert by expert.

    peft's adapters of experts read the shapes of stacks, so this comes after them. Returns the number of weights that
    were quantized.
    """
    count, made = 0, set()
    for name, stack in [(name, module) for name, module in model.named_modules() if is_expert_stack(module)]:
        count += sum(param.numel() for param in stack.parameters() if param.dim() > _BIAS_DIM)
        parts = [_expert(stack, number, bits, (dtype, device)) for number in range(experts_of_stack(stack))]
        experts = QuantizedExperts(stack, parts, dtype).train(stack.training)
        model.set_submodule(name, experts)
        made.add(experts)
    for name, adapter in [*model.named_modules()]:
        if hasattr(adapter, "get_base_layer") and adapter.get_base_layer() in made:
            model.set_submodule(name, adapting_pieces(adapter))
    return count


def _expert(stack: nn.Module, number: int, bits: str, form: Form) -> dict[str, Any]:
    """The parameters of one expert of a stack: its matrices quantized, each by itself, and its biases as they are."""
    made: dict[str, Any] = {}
    for name, param in stack.named_parameters():
        source = source_of(param)
        part = None if source is None else replace(source, values=source.values.narrow(0, number, 1))
        read = partial(_part, param.detach(), number) if part is None else part.values.whole
        if param.dim() <= _BIAS_DIM:
            made[name] = nn.Parameter(read().clone(), requires_grad=False)
        elif bits == "4bit":
            made[name] = _packed(bits, part, read, (1, *param.shape[1:]), form)
        else:
            made[name] = _packed(bits, part, partial(_first_of, read), param.shape[1:], form)
    return made


def _part(stack: torch.Tensor, number: int) -> torch.Tensor:
    return stack[number : number + 1]


def _first_of(read: Callable[[], torch.Tensor]) -> torch.Tensor:
    return read()[0]


def linear_layers(model: nn.Module) -> dict[str, Any]:
    """The layers of a transformers model that are quantized, by name: as in transformers, all linear ones except the
    output layer and those whose weights are tied. Raises ConfigError if there are none."""
    uses = Counter(id(param) for module in model.modules() for param in module._parameters.values())
    output: Any = model.get_output_embeddings()  # type: ignore[operator]
    linear = {name: module for name, module in model.named_modules() if _is_linear(module) and module is not output}
    found: dict[str, Any] = {name: module for name, module in linear.items() if uses[id(module.weight)] == 1}
    if not found:
        raise ConfigError(
            "--load-in-4bit and --load-in-8bit are for linear layers, and a "
            f"{type(model).__name__} has none: leave them out"
        )
    return found


def targets_of(model: nn.Module, targets: tuple[str, ...]) -> tuple[str, ...]:
    """The targets of adapters in a model that will be quantized: "all-linear" without experts, whose adapters may take
    more than the experts in 4 bits."""
    has_stacks = any(map(is_expert_stack, model.modules()))
    return tuple(linear_layers(model)) if has_stacks and targets == (ALL_LINEAR,) else targets


def pack_without_values(model: nn.Module, layers: Iterable[Any], bits: str) -> None:
    """Give linear layers and experts weights of as many bytes as they have in pages once they are quantized. For plans:
    they can no longer compute. `layers`: the linear ones."""
    for layer in layers:
        layer.weight = _packed_without_values(layer.weight, bits)
    for stack in [module for module in model.modules() if isinstance(module, ExpertStack)]:
        for tile, _ in stack.pieces():
            for name, param in [*tile.named_parameters()]:
                if param.dim() > _BIAS_DIM:
                    tile.register_parameter(name, _packed_without_values(param[0], bits))


def _packed_without_values(weight: torch.Tensor, bits: str) -> nn.Parameter:
    count, rows = weight.numel(), weight.shape[0]
    # In 8 bits, each row has a scale of 4 bytes and a zero point of 1.
    inner, last = ((), -(-count // 2)) if bits == "4bit" else ((count, 4 * rows), rows)
    nbytes = sum(-(-size // ALIGN_BYTES) * ALIGN_BYTES for size in inner) + last
    return nn.Parameter(torch.empty(nbytes, dtype=torch.uint8, device="meta"), requires_grad=False)


def _is_linear(module: nn.Module) -> bool:
    from transformers.pytorch_utils import Conv1D

    return type(module) in (nn.Linear, Conv1D)


def _values(module: Any) -> torch.Tensor:
    """The weights of a linear layer, [outputs, inputs]. They are not in memory afterwards if they were not before."""
    source = source_of(module.weight)
    values = module.weight.detach() if source is None else source.values.whole()
    return values if type(module) is nn.Linear else values.T.contiguous()


def _packed(
    bits: str, source: ValueSource | None, read: Callable[[], torch.Tensor], shape: Sequence[int], form: Form
) -> Any:
    """A parameter with packed weights of a shape, whose values `read` returns. If they wait, it waits too, without
    memory, until `wrap` packs them."""
    dtype, device = form
    pack = _in_4_bits if bits == "4bit" else _in_8_bits
    stored = None if source is None or bits != "4bit" else source.values.packed

    def make() -> Any:
        if stored is None or ABSMAX not in stored:
            made = pack(read().to(dtype))
        else:
            made = params_in_4_bits({end: tensor.whole() for end, tensor in stored.items()})
        if bits == "4bit":  # the scales are in no page, so nothing else moves them
            made.quant_state.to(device)
        return made

    if source is None:
        return make()
    return waiting_to_be_packed(
        _blank_in_4_bits(shape) if bits == "4bit" else pack(torch.empty(*shape, dtype=dtype, device="meta")), make
    )


def _in_4_bits(values: torch.Tensor) -> Any:
    weight = package_of("4bit").nn.Params4bit(values, requires_grad=False, **_NF4)
    return weight.to(values.device)  # packs it


def _blank_in_4_bits(shape: Sequence[int]) -> Any:
    """Packed weights without values. Their state is empty, and is filled when they are packed."""
    bitsandbytes = package_of("4bit")
    state = object.__new__(bitsandbytes.functional.QuantState)
    data = without_memory((-(-prod(shape) // 2), 1), torch.uint8)
    return bitsandbytes.nn.Params4bit(data, requires_grad=False, quant_state=state, bnb_quantized=True, **_NF4)


def _in_8_bits(values: torch.Tensor) -> Any:
    torchao = package_of("8bit")
    outputs, inputs = values.shape
    made = nn.Sequential(nn.Linear(inputs, outputs, bias=False, device="meta"))
    made[0].weight = nn.Parameter(values, requires_grad=False)
    torchao.quantization.quantize_(made, torchao.quantization.Int8WeightOnlyConfig())
    return made[0]._parameters.pop("weight")  # torchao's layer refers to itself, so it is freed late
