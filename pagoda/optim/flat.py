"""The kernels' checked front: the same code for flat CPU tensors.

For code off the hot path (setup, load, export, tests). Lane threads call `kernels` by address instead.
"""

from collections.abc import Mapping, Sequence
from typing import get_args

import torch

from pagoda.config.training import Precision
from pagoda.errors import ConfigError
from pagoda.optim import codec_kernels, formats
from pagoda.optim.codecs import BLOCK, Key, Moments
from pagoda.optim.gradient_kernels import GradientKernels
from pagoda.optim.rule import ElementwiseRule, gradient_dtype


def _precision(dtype: torch.dtype, what: str) -> Precision:
    for precision in get_args(Precision):
        if dtype is gradient_dtype(precision):
            found: Precision = precision
            return found
    raise ConfigError(f"{what} is {dtype}; it must be torch.bfloat16, torch.float16 or torch.float32")


def _check(what: str, tensor: torch.Tensor, dtype: torch.dtype, numel: int) -> int:
    """Address of ``tensor``; raises ConfigError unless it is what a kernel may be given."""
    if tensor.dtype is not dtype:
        raise ConfigError(f"{what} is {tensor.dtype}; it must be {dtype}")
    if tensor.device.type != "cpu":
        raise ConfigError(f"{what} is on {tensor.device}; these kernels need it on the CPU")
    if not tensor.is_contiguous():
        raise ConfigError(f"{what} has strides {tensor.stride()}; it must be contiguous")
    if tensor.numel() != numel:
        raise ConfigError(f"{what} has {tensor.numel()} elements; it must have {numel}")
    return tensor.data_ptr()


def update(
    rule: ElementwiseRule,
    states: Mapping[str, torch.Tensor],
    gradient: torch.Tensor,
    scalars: tuple[float, ...],
    noise: Key | None = None,
) -> None:
    """One update in place, on a whole parameter of N elements.

    states: a contiguous CPU tensor for each of ``rule.states(precision)``, by name; the dtype of "weight" tells the
    precision.
    gradient: N elements, bf16, fp16 or fp32; only read.
    scalars, noise: the rule's, of one step.
    Raises ConfigError naming the first tensor that is missing or unfit.
    """
    if "weight" not in states:
        raise ConfigError(f"{rule.name} states are {sorted(states)}; weight is missing")
    weight = states["weight"]
    precision = _precision(weight.dtype, "weight")
    addresses = []
    for spec in rule.states(precision):
        if spec.name not in states:
            raise ConfigError(f"{rule.name} states are {sorted(states)}; {spec.name} is missing for {precision}")
        addresses.append(_check(spec.name, states[spec.name], spec.dtype, spec.elements(weight.numel())))
    _precision(gradient.dtype, "gradient")
    addresses.append(_check("gradient", gradient, gradient.dtype, weight.numel()))
    rounding = () if noise is None else (0, *noise)
    formats.update_kernel(rule, precision, gradient.dtype)(*addresses, weight.numel(), *rounding, *scalars)


def store_gradient(dst: torch.Tensor, src: torch.Tensor) -> float:
    """Copies ``src`` to ``dst`` (N elements each, of one dtype, or fp32 for ``dst``); returns the sum of squares.

    The sum is in float64, in an order fixed by N, and non-finite if and only if an element is.
    Raises ConfigError for unfit tensors.
    """
    return _take_gradient(dst, src).store_gradient(dst.data_ptr(), src.data_ptr(), dst.numel())


def add_gradient(dst: torch.Tensor, src: torch.Tensor) -> float:
    """``dst += src`` with the bits of torch's; returns the sum of squares of the new ``dst``.

    As `store_gradient` in all else.
    """
    return _take_gradient(dst, src).add_gradient(dst.data_ptr(), src.data_ptr(), dst.numel())


def _take_gradient(dst: torch.Tensor, src: torch.Tensor) -> GradientKernels:
    _precision(dst.dtype, "dst")
    _check("dst", dst, dst.dtype, dst.numel())
    _check("src", src, src.dtype if dst.dtype is torch.float32 else dst.dtype, dst.numel())
    _precision(src.dtype, "src")
    return formats.gradient_kernels(dst.dtype, src.dtype)


def split(master: torch.Tensor, weight: torch.Tensor, weight_low: torch.Tensor) -> None:
    """Splits fp32 ``master`` into bf16 or fp16 ``weight`` and int16 ``weight_low`` (N elements each).

    With bf16, nothing is lost. Raises ConfigError for unfit tensors.
    """
    n = master.numel()
    split_halves, _ = formats.halves(_half(weight))
    split_halves(
        _check("master", master, torch.float32, n),
        _check("weight", weight, weight.dtype, n),
        _check("weight_low", weight_low, torch.int16, n),
        n,
    )


def join(weight: torch.Tensor, weight_low: torch.Tensor, master: torch.Tensor) -> None:
    """Writes to ``master`` the fp32 values that `split` took apart. Raises ConfigError for unfit tensors."""
    n = master.numel()
    _, join_halves = formats.halves(_half(weight))
    join_halves(
        _check("weight", weight, weight.dtype, n),
        _check("weight_low", weight_low, torch.int16, n),
        _check("master", master, torch.float32, n),
        n,
    )


def _half(weight: torch.Tensor) -> torch.dtype:
    if weight.dtype not in (torch.bfloat16, torch.float16):
        raise ConfigError(f"weight is {weight.dtype}; it must be torch.bfloat16 or torch.float16")
    return weight.dtype


def decode_moment(moment: str, kept: Sequence[torch.Tensor]) -> torch.Tensor:
    """A parameter's moment in fp32, shape [N].

    kept: the tensors of ``AdamW(moments=...).states_of(moment)``, whose dtype tells the codec.
    Raises ConfigError for unfit tensors.
    """
    codes = kept[0]
    if codes.dtype is not torch.uint8:
        return codes.float()
    n = codes.numel()
    values = torch.empty(n, device=codes.device)
    if codes.is_meta:
        return values
    decode = codec_kernels.decode_signed if moment == "exp_avg" else codec_kernels.decode_unsigned
    decode(
        _check(moment, codes, torch.uint8, n),
        _check(f"{moment} scale", kept[1], torch.float32, -(-n // BLOCK)),
        values.data_ptr(),
        n,
    )
    return values


def encode_moment(moment: str, values: torch.Tensor, moments: Moments) -> tuple[torch.Tensor, ...]:
    """What keeps ``values`` (shape [N], fp32) as a parameter's moment: the tensors that `decode_moment` takes.

    Nothing is rounded at random: bf16 rounds to nearest. Encoding what was decoded gives the same bits.
    Raises ConfigError for unfit tensors.
    """
    if moments == "fp32":
        return (values,)
    if moments == "bf16":
        return (values.to(torch.bfloat16),)
    n = values.numel()
    codes, scales = torch.empty(n, dtype=torch.uint8), torch.empty(-(-n // BLOCK))
    encode = codec_kernels.encode_signed if moment == "exp_avg" else codec_kernels.encode_unsigned
    encode(_check(moment, values, torch.float32, n), codes.data_ptr(), scales.data_ptr(), n)
    return codes, scales
