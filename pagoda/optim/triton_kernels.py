"""GPU kernels as the runtime calls them: on tensors, behind the stream that is current.

`kernels` is the same for the CPU. Import this only where a GPU is, as `triton_parts` says.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from triton import cdiv, next_power_of_2

from pagoda.config.training import Precision
from pagoda.optim import triton_squares, triton_updates
from pagoda.optim.arithmetic import FORMS, PLAIN
from pagoda.optim.codecs import BLOCK
from pagoda.optim.gradient_kernels import arriving_dtype
from pagoda.optim.rule import ElementwiseRule, Rule, TensorRule, gradient_dtype

DeviceKernel = Callable[[Sequence[torch.Tensor], torch.Tensor, Sequence[float]], None]
"""An update in place: states in StateSpec order and the gradient, flat and contiguous, and what a CPU kernel takes
after its number of elements. Each state has the elements that `StateSpec.elements` says for the gradient's.

A kernel may be given at most 2**31 - 2**20 elements."""

_STRICT = {"enable_fp_fusion": False}
"""How every kernel is launched: each operation rounds by itself."""
_SIZE = 1024
"""Elements of a program."""
_BITS = {torch.bfloat16: torch.int16, torch.float16: torch.int16}


def update_kernel(rule: ElementwiseRule, precision: Precision, gradient: torch.dtype | None = None) -> DeviceKernel:
    """The kernel of a rule for weights in `precision` and gradients in that too, or in another dtype.

    Raises ConfigError for a precision that is not known.
    """
    plain = PLAIN.get(rule.kernel_name)
    function: Any = triton_updates.adamw_8bit if plain is None else triton_updates.update
    constants = {} if plain is None else {"rule": plain[0], "noisy": plain[1]}
    weight = gradient_dtype(precision)
    forms = {"form": FORMS[weight], "arriving": FORMS[gradient or weight]}
    count = len(rule.scalars(1))

    def update(states: Sequence[torch.Tensor], grad: torch.Tensor, arguments: Sequence[float]) -> None:
        n = grad.numel()
        random = len(arguments) - count
        noise = (*map(_as_int32, arguments[:random]), 0, 0, 0)[:3] if plain else ()
        scalars = tuple(arguments[random:])
        tensors = [_bits(state) for state in states]
        if precision == "fp32":
            tensors.insert(0, tensors[0])  # there is no low half: its pointer is not used
        if plain:
            tensors = [*tensors, tensors[0], tensors[0]][:4]  # nor are those of moments that the rule has not
        grid = (cdiv(n, _SIZE),)
        function[grid](*tensors, _bits(grad), n, *noise, scalars, **constants, **forms, size=_SIZE, **_STRICT)

    return update


def split(master: torch.Tensor, weight: torch.Tensor, weight_low: torch.Tensor) -> None:
    """Split fp32 masters into weights of 16 bits and what is kept beside them; all are flat."""
    _halves(triton_updates.split, master, weight, weight_low)


def join(weight: torch.Tensor, weight_low: torch.Tensor, master: torch.Tensor) -> None:
    """The reverse of `split`."""
    _halves(triton_updates.join, master, weight, weight_low)


def _halves(function: Any, master: torch.Tensor, weight: torch.Tensor, weight_low: torch.Tensor) -> None:
    n, form = weight.numel(), FORMS[weight.dtype]
    function[(cdiv(n, _SIZE),)](_bits(weight), weight_low, master, n, form=form, size=_SIZE, **_STRICT)


def square_sums(gradient: torch.Tensor, into: torch.Tensor, piece: int) -> None:
    """The partial sums of squares of each `piece` elements of a flat gradient; `piece` is a power of two.

    into: fp64, at least [pieces, LANES]. A piece's sum is that of its lanes, added from the first to the last.
    """
    assert piece == next_power_of_2(piece)
    n = gradient.numel()
    form = FORMS[gradient.dtype]
    # One warp, so that a lane is a thread.
    triton_squares.square_sums[(cdiv(n, piece),)](
        _bits(gradient), into, n, piece=piece, form=form, num_warps=1, **_STRICT
    )


def warm_up(rule: Rule, precision: Precision, gradient: torch.dtype, device: torch.device, piece: int) -> None:
    """Compile, or load from Triton's cache, all that is used with these, so that no step waits for it."""
    weight = gradient_dtype(precision)
    if isinstance(rule, ElementwiseRule):
        _warm_up_update(rule, precision, gradient, device)
    elif isinstance(rule, TensorRule):
        for beside in rule.beside():
            _warm_up_update(beside, "fp32", torch.float32, device)
        if precision != "fp32":
            kinds = weight, torch.int16, torch.float32
            halves = [torch.zeros(BLOCK, dtype=kind, device=device) for kind in kinds]
            join(*halves)
            split(halves[2], *halves[:2])
    sums = torch.zeros(triton_squares.LANES.value, dtype=torch.float64, device=device)
    for dtype in {gradient, arriving_dtype(gradient, weight)}:
        square_sums(torch.zeros(BLOCK, dtype=dtype, device=device), sums, piece)
    torch.cuda.synchronize(device)


def _warm_up_update(rule: ElementwiseRule, precision: Precision, gradient: torch.dtype, device: torch.device) -> None:
    # Aligned, as every block of a unit is.
    states = rule.states(precision)
    tensors = [torch.zeros(state.elements(BLOCK), dtype=state.dtype, device=device) for state in states]
    noise = () if rule.noise("", 1) is None else (0, 0, 0)
    grad = torch.zeros(BLOCK, dtype=gradient, device=device)
    update_kernel(rule, precision, gradient)(tensors, grad, (*noise, *rule.scalars(1)))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(_BITS.get(tensor.dtype, tensor.dtype))


def _as_int32(value: float) -> int:
    """The signed number with the same 32 low bits."""
    return ((int(value) + (1 << 31)) & 0xFFFFFFFF) - (1 << 31)
