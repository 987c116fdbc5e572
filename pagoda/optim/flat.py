"""The kernels' checked front: the same code for flat CPU tensors.

For code off the hot path (setup, load, export, tests). Lane threads call `kernels` by address instead.
"""

from collections.abc import Mapping

import torch

from pagoda.errors import ConfigError
from pagoda.optim import kernels
from pagoda.optim.adamw import AdamW, Precision, Scalars


def _precision(dtype: torch.dtype, what: str) -> Precision:
    if dtype is torch.bfloat16:
        return "bf16"
    if dtype is torch.float32:
        return "fp32"
    raise ConfigError(f"{what} is {dtype}; it must be torch.bfloat16 or torch.float32")


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


def adamw_step(states: Mapping[str, torch.Tensor], gradient: torch.Tensor, scalars: Scalars) -> None:
    """One AdamW step in place.

    states: a contiguous CPU tensor of N elements for each of ``AdamW().states(precision)``, by name; the
    dtype of "weight" tells the precision.
    gradient: N elements of the weight's dtype; only read.
    Raises ConfigError naming the first tensor that is missing or unfit.
    """
    if "weight" not in states:
        raise ConfigError(f"AdamW states are {sorted(states)}; weight is missing")
    weight = states["weight"]
    precision = _precision(weight.dtype, "weight")
    addresses = []
    for spec in AdamW().states(precision):
        if spec.name not in states:
            raise ConfigError(f"AdamW states are {sorted(states)}; {spec.name} is missing for {precision}")
        addresses.append(_check(spec.name, states[spec.name], spec.dtype, weight.numel()))
    addresses.append(_check("gradient", gradient, weight.dtype, weight.numel()))
    kernels.kernels_for(precision).adamw(*addresses, weight.numel(), *scalars)


def store_gradient(dst: torch.Tensor, src: torch.Tensor) -> float:
    """Copies ``src`` to ``dst`` (N elements, both bf16 or both fp32); returns the sum of squares.

    The sum is in float64, in an order fixed by N, and non-finite if and only if an element is.
    Raises ConfigError for unfit tensors.
    """
    kernel = kernels.kernels_for(_precision(dst.dtype, "dst")).store_gradient
    n = dst.numel()
    return kernel(_check("dst", dst, dst.dtype, n), _check("src", src, dst.dtype, n), n)


def add_gradient(dst: torch.Tensor, src: torch.Tensor) -> float:
    """``dst += src`` with the bits of torch's; returns the sum of squares of the new ``dst``.

    As `store_gradient` in all else.
    """
    kernel = kernels.kernels_for(_precision(dst.dtype, "dst")).add_gradient
    n = dst.numel()
    return kernel(_check("dst", dst, dst.dtype, n), _check("src", src, dst.dtype, n), n)


def split(master: torch.Tensor, weight: torch.Tensor, weight_low: torch.Tensor) -> None:
    """Splits fp32 ``master`` into bf16 ``weight`` and int16 ``weight_low`` (N elements each), without loss.

    Raises ConfigError for unfit tensors.
    """
    n = master.numel()
    kernels.split(
        _check("master", master, torch.float32, n),
        _check("weight", weight, torch.bfloat16, n),
        _check("weight_low", weight_low, torch.int16, n),
        n,
    )


def join(weight: torch.Tensor, weight_low: torch.Tensor, master: torch.Tensor) -> None:
    """Writes to ``master`` the fp32 values that `split` took apart. Raises ConfigError for unfit tensors."""
    n = master.numel()
    kernels.join(
        _check("weight", weight, torch.bfloat16, n),
        _check("weight_low", weight_low, torch.int16, n),
        _check("master", master, torch.float32, n),
        n,
    )
