"""Quantized files: which of their tensors make one parameter, and how its values are computed from them.

The values are those that transformers, or the library that wrote the files, computes in fp32. They are computed when
they are read: some rows, one expert or one matrix at a time.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from pagoda.checkpoint.lazy import Deferred, LazyTensor, cat, stack
from pagoda.errors import CheckpointError, ConfigError, needed
from pagoda.memory.files import read_regular

Parts = dict[str, LazyTensor]
"""End of a tensor's name -> tensor, of one parameter."""
_PIECE_ELEMENTS = 1 << 24
"""Most elements that are computed at once, if a piece of that size can be computed by itself."""
_QUANT_STATE = (".weight.quant_state.bitsandbytes__nf4", ".weight.quant_state.bitsandbytes__fp4")


@dataclass(frozen=True)
class Format:
    """How files store a quantized parameter."""

    parameter: str
    """The end of the parameter's name."""
    packed: str
    """What the name of the tensor with the packed values has in place of that end."""
    mark: str
    """The same for a tensor that only quantized parameters have."""
    others: tuple[str, ...]
    """The same for all other tensors of the parameter. Some may be absent."""
    values: Callable[[Parts, Mapping[str, Any]], LazyTensor]
    """The parameter's values, from its tensors and the settings in config.json. Raises ValueError if they do not fit
    each other."""


def quantization_of(directory: Path) -> dict[str, Any] | None:
    """The settings in config.json with which the weights of a directory were quantized, or None if they were not.

    Raises ConfigError for a method whose files cannot be read.
    """
    config: dict[str, Any] = json.loads(read_regular(directory / "config.json"))
    text = config.get("text_config")
    settings: Any = config.get("quantization_config") or (isinstance(text, dict) and text.get("quantization_config"))
    if not settings:
        return None
    method = _method(settings) if isinstance(settings, dict) else settings
    if method not in FORMATS:
        raise ConfigError(
            f"{directory} has weights quantized with {method!r}, which cannot be read. Those of {', '.join(FORMATS)} "
            "can: name the directory of the original model, or of a copy in one of these formats"
        )
    return dict(settings)


def _method(settings: Mapping[str, Any]) -> str:
    return str(settings.get("quant_method", "bitsandbytes"))  # whose early files do not name it


def dequantized(settings: Mapping[str, Any], stored: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
    """The tensors of quantized files, with each quantized parameter in place of the tensors that make it.

    Raises CheckpointError if a parameter's tensors do not fit each other.
    """
    plain = dict(stored)
    for form in FORMATS[_method(settings)]:
        ends = (form.packed, form.mark, *form.others)
        for name in stored:
            base = name.removesuffix(form.mark)
            if base == name or base + form.packed not in stored:
                continue
            parts = {end: plain.pop(base + end) for end in ends if base + end in stored}
            try:
                plain[base + form.parameter] = values = form.values(parts, settings)
                values.packed = parts
            except (ValueError, LookupError) as error:
                raise CheckpointError(
                    f"the files' tensors for {base + form.parameter!r} do not fit each other: {error}"
                ) from error
    return plain


def _computed(function: Callable[..., torch.Tensor], parts: tuple[Any, ...], like: torch.Tensor) -> LazyTensor:
    """The result of a function of whole tensors, with the shape and dtype of `like`."""
    return LazyTensor(like.dtype, like.shape, partial(Deferred(function, parts, {}).read, 0))


def _fp32(*shape: int) -> torch.Tensor:
    return torch.empty(shape, device="meta")


def _mxfp4(parts: Parts, _: Mapping[str, Any]) -> LazyTensor:
    """4-bit floats in groups of 32 with an exponent each. Stored as [experts, outputs, groups, bytes]; the parameter is
    [experts, inputs, outputs]."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    blocks, scales = parts["_blocks"], parts["_scales"]
    if blocks.shape[:-1] != scales.shape or blocks.ndim != 4:
        raise ValueError(f"blocks {list(blocks.shape)} and scales {list(scales.shape)}")
    experts, outputs, groups, nbytes = blocks.shape
    unpack = partial(convert_moe_packed_tensors, dtype=torch.float32)
    like = _fp32(1, 2 * groups * nbytes, outputs)
    return cat([_computed(unpack, (blocks.narrow(0, e, 1), scales.narrow(0, e, 1)), like) for e in range(experts)])


def _float8(parts: Parts, settings: Mapping[str, Any]) -> LazyTensor:
    """8-bit floats with a scale for each block of rows and columns, or one for the whole matrix."""
    return _scaled(parts[".weight"], parts[".weight_scale_inv"], settings.get("weight_block_size"))


def _scaled(weight: LazyTensor, scale: LazyTensor, block: list[int] | None) -> LazyTensor:
    if weight.ndim == 3:  # a matrix for each expert
        weights, scales = ([one.narrow(0, e, 1).squeeze(0) for e in range(one.shape[0])] for one in (weight, scale))
        return stack([_scaled(one, its, block) for one, its in zip(weights, scales, strict=True)])
    rows, columns = weight.shape
    if scale.numel() == 1:
        scale, block = scale.with_shape((1, 1)), [rows, columns]
    height, width = block or [-(-size // count) for size, count in zip(weight.shape, scale.shape, strict=True)]
    if tuple(scale.shape) != (-(-rows // height), -(-columns // width)) or not weight.dtype.is_floating_point:
        raise ValueError(f"{weight.dtype} {list(weight.shape)} with scales {list(scale.shape)} of blocks {block}")
    step = height * max(1, _PIECE_ELEMENTS // (height * columns))
    pieces = []
    for first in range(0, rows, step):
        some = weight.narrow(0, first, min(step, rows - first))
        theirs = scale.narrow(0, first // height, -(-some.shape[0] // height))
        pieces.append(_computed(_times_scale, (some, theirs, height, width), _fp32(*some.shape)))
    return cat(pieces)


def _times_scale(weight: torch.Tensor, scale: torch.Tensor, height: int, width: int) -> torch.Tensor:
    rows, columns = weight.shape
    factors = (scale.float() - 127).exp2() if scale.dtype is torch.uint8 else scale.float()  # uint8: exponents
    return weight.float() * factors.repeat_interleave(height, 0)[:rows].repeat_interleave(width, 1)[:, :columns]


def _four_bits(parts: Parts, _: Mapping[str, Any]) -> LazyTensor:
    """4 bits of bitsandbytes, in the dtype that was quantized."""
    unpack = _bitsandbytes().utils.unpack_tensor_to_dict
    state = unpack(next(parts[end] for end in _QUANT_STATE if end in parts).whole())
    like = torch.empty(state["shape"], dtype=getattr(torch, state["dtype"]), device="meta")
    return _computed(_of_four_bits, (parts,), like)


def _of_four_bits(parts: dict[str, torch.Tensor]) -> torch.Tensor:
    packed = params_in_4_bits(parts)
    values: torch.Tensor = _bitsandbytes().functional.dequantize_4bit(packed.data, packed.quant_state)
    return values


def params_in_4_bits(parts: Mapping[str, torch.Tensor]) -> Any:
    """The parameter of bitsandbytes that a layer's tensors in files make."""
    stats = dict(parts)
    return _bitsandbytes().nn.Params4bit.from_prequantized(stats.pop(".weight"), stats, device="cpu")


def _eight_bits(parts: Parts, _: Mapping[str, Any]) -> LazyTensor:
    """8-bit integers of bitsandbytes with a scale for each row."""
    weight, scale = parts[".weight"], parts[".SCB"]
    if ".weight_format" in parts and parts[".weight_format"].whole().item() != 0:
        raise ValueError("weights are not stored by rows")
    rows, columns = weight.shape
    unpack, step = _bitsandbytes().functional.int8_vectorwise_dequant, max(1, _PIECE_ELEMENTS // columns)
    pieces = []
    for first in range(0, rows, step):
        count = min(step, rows - first)
        some = weight.narrow(0, first, count), scale.narrow(0, first, count)
        pieces.append(_computed(unpack, some, _fp32(count, columns)))
    return cat(pieces)


def _bitsandbytes() -> Any:
    return needed("bitsandbytes", "weights of bitsandbytes need bitsandbytes: pip install 'pagoda-train[quantized]'")


ABSMAX = ".weight.absmax"
"""The mark of weights in 4 bits of bitsandbytes."""
_OF_4_BITS = (".weight.quant_map", ".weight.nested_absmax", ".weight.nested_quant_map", *_QUANT_STATE)
FORMATS: dict[str, tuple[Format, ...]] = {
    "mxfp4": (Format("", "_blocks", "_scales", (), _mxfp4),),
    "fp8": (Format(".weight", ".weight", ".weight_scale_inv", (".activation_scale",), _float8),),
    "bitsandbytes": (
        Format(".weight", ".weight", ABSMAX, _OF_4_BITS, _four_bits),
        Format(".weight", ".weight", ".SCB", (".weight_format",), _eight_bits),
    ),
}
"""`quant_method` of a config.json -> the formats in its files."""
