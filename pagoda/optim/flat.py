"""The kernels on flat tensors, for code that is not performance-critical. The runtime's threads call kernels by address
instead."""

from collections.abc import Mapping, Sequence

import torch

from pagoda.config.run import Moments
from pagoda.errors import ConfigError
from pagoda.optim import kernels
from pagoda.optim.moments import BLOCK, MOMENT_FORMATS
from pagoda.optim.rule import PRECISIONS, ElementwiseRule, Key


def _address(what: str, tensor: torch.Tensor, dtype: torch.dtype, numel: int) -> int:
    """The address of a tensor. Raises ConfigError unless a kernel can take the tensor."""
    fits = tensor.dtype is dtype and tensor.device.type == "cpu" and tensor.is_contiguous() and tensor.numel() == numel
    if not fits:
        raise ConfigError(
            f"{what} has {tensor.numel()} elements of {tensor.dtype} on {tensor.device}, with strides "
            f"{tensor.stride()}; it must have {numel} of {dtype} on the CPU, one after another"
        )
    return tensor.data_ptr()


def update(
    rule: ElementwiseRule,
    states: Mapping[str, torch.Tensor],
    gradient: torch.Tensor,
    scalars: tuple[float, ...],
    noise: Key | None = None,
) -> None:
    """Update a whole parameter of N elements in place.

    states: name -> a contiguous tensor for each of ``rule.states(precision)``, all on the CPU or all on a GPU. The
    dtype of "weight" determines the precision. gradient: N elements, bf16, fp16 or fp32. Only read. scalars, noise: the
    rule's, for one step. Raises ConfigError naming the first unsuitable tensor.
    """
    n = gradient.numel()
    precision = PRECISIONS[states["weight"].dtype]
    specs = rule.states(precision)
    rounding = (*(() if noise is None else (0, *noise)), *rule.arguments)
    if gradient.device.type == "cuda":
        from pagoda.optim import triton_kernels

        tensors = [states[spec.name].view(-1) for spec in specs]
        triton_kernels.update_kernel(rule, precision, gradient.dtype)(tensors, gradient.view(-1), (*rounding, *scalars))
        return
    addresses = [_address(spec.name, states[spec.name], spec.dtype, spec.elements(n)) for spec in specs]
    addresses.append(_address("gradient", gradient, gradient.dtype, n))
    kernels.update_kernel(rule, precision, gradient.dtype)(*addresses, n, *rounding, *scalars)


def weights_of(master: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The fp32 ``master`` in the dtype of weights, rounded as `split` does."""
    if dtype is torch.float32:
        return master
    weight, low = (torch.empty(master.shape, dtype=each) for each in (dtype, torch.int16))
    split(master, weight, low)
    return weight


def split(master: torch.Tensor, weight: torch.Tensor, weight_low: torch.Tensor) -> None:
    """Split fp32 ``master`` into bf16 or fp16 ``weight`` and int16 ``weight_low`` (N elements each), all on the CPU or
    all on a GPU.

    With bf16, nothing is lost. Raises ConfigError for unsuitable tensors.
    """
    _convert(weight, weight_low, master, joining=False)


def join(weight: torch.Tensor, weight_low: torch.Tensor, master: torch.Tensor) -> None:
    """Write to ``master`` the fp32 values that `split` has split. Raises ConfigError for unsuitable tensors."""
    _convert(weight, weight_low, master, joining=True)


def _convert(weight: torch.Tensor, weight_low: torch.Tensor, master: torch.Tensor, joining: bool) -> None:
    if weight.device.type == "cuda":
        from pagoda.optim import triton_kernels

        triton_kernels.convert_halves(weight, weight_low, master, joining)
        return
    n = weight.numel()
    tensors = {"weight": (weight, weight.dtype), "weight_low": (weight_low, torch.int16)}
    tensors["master"] = master, torch.float32
    addresses = (_address(name, tensor, dtype, n) for name, (tensor, dtype) in tensors.items())
    kernels.halves(weight.dtype, joining)(*addresses, n)


def decode_moment(moment: str, kept: Sequence[torch.Tensor]) -> torch.Tensor:
    """A parameter's moment in fp32, shape [N].

    kept: the tensors of ``AdamW(moments=...).states_of(moment)``. Their dtype determines the format. Raises ConfigError
    for unsuitable tensors.
    """
    codes = kept[0]
    if codes.dtype is not torch.uint8:
        return codes.float()
    n = codes.numel()
    values = torch.empty(n, device=codes.device)
    if not codes.is_meta:
        at = _address(moment, codes, torch.uint8, n)
        floors = _address(f"{moment} floor", kept[1], torch.float32, -(-n // BLOCK))
        kernels.convert_moment(values.data_ptr(), at, floors, n, moment == "exp_avg", False)
    return values


def encode_moment(moment: str, values: torch.Tensor, moments: Moments) -> tuple[torch.Tensor, ...]:
    """The tensors that store ``values`` (shape [N], fp32) as a parameter's moment, as `decode_moment` takes them.

    Nothing is rounded stochastically, but to nearest. Encoding decoded values gives the same bits. Raises
    ConfigError for unsuitable tensors.
    """
    dtype = MOMENT_FORMATS[moments].states[0].dtype
    if dtype is not torch.uint8:
        return (values.to(dtype),)
    n = values.numel()
    codes, floors = torch.empty(n, dtype=torch.uint8), torch.empty(-(-n // BLOCK))
    at = _address(moment, values, torch.float32, n)
    kernels.convert_moment(at, codes.data_ptr(), floors.data_ptr(), n, moment == "exp_avg", True)
    return codes, floors
