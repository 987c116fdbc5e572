"""GPU kernels with the interface that the runtime calls: on tensors, on the current stream.

`kernels` is the counterpart for the CPU. Import this only if there is a GPU (see `triton_parts`).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from triton import cdiv, next_power_of_2

from pagoda.config.training import Precision
from pagoda.optim import triton_adafactor, triton_updates
from pagoda.optim.arithmetic import FORMS, PLAIN
from pagoda.optim.factors import COLUMNS, ROWS, folded, update_factors
from pagoda.optim.rule import DTYPES, ElementwiseRule

DeviceKernel = Callable[[Sequence[torch.Tensor], torch.Tensor, Sequence[float]], None]
"""An update in place. The arguments are the states in StateSpec order, the gradient, and the arguments that a CPU
kernel takes after its number of elements. Tensors are flat and contiguous. Each state has `StateSpec.elements` of the
gradient's elements.

A kernel takes at most 2**31 - 2**20 elements.
"""

_STRICT = {"enable_fp_fusion": False}
"""Launch options of every kernel: each operation rounds by itself, as it is written."""
_SIZE = 1024
"""Number of elements of a program."""
_TILE = 16
"""Number of rows that a program sums."""
_BITS = {torch.bfloat16: torch.int16, torch.float16: torch.int16}


def update_kernel(rule: ElementwiseRule, precision: Precision, gradient: torch.dtype | None = None) -> DeviceKernel:
    """The kernel of a rule for weights in `precision`, and gradients in that precision or in another dtype."""
    plain = PLAIN.get(rule.kernel_name)
    function: Any = triton_updates.adamw_8bit if plain is None else triton_updates.update
    constants = {} if plain is None else {"rule": plain[0], "noisy": plain[1]}
    weight = DTYPES[precision]
    predicts = rule.ahead is not None
    forms = {"form": FORMS[weight], "arriving": FORMS[gradient or weight], "predicts": predicts}
    count = len(rule.scalars(1))

    def update(states: Sequence[torch.Tensor], grad: torch.Tensor, arguments: Sequence[float]) -> None:
        n = grad.numel()
        scalars = tuple(arguments[-count:])
        random = len(arguments) - count - predicts
        noise, ahead = (*map(_as_int32, arguments[:random]), 0, 0, 0)[:3], float(arguments[random])
        tensors = [_bits(state) for state in states]
        if predicts:
            tensors.insert(1, tensors[1])  # both halves of the master are the whole
        elif precision == "fp32":
            tensors = [tensors[0]] * 2 + tensors  # stand for what the kernel does not use
        else:
            tensors.insert(0, tensors[0])
        if plain:
            tensors = [*tensors, tensors[0], tensors[0]][:5]  # stand for moments that the rule does not have
        grid = (cdiv(n, _SIZE),)
        function[grid](*tensors, _bits(grad), n, *noise, ahead, scalars, **constants, **forms, size=_SIZE, **_STRICT)

    return update


def convert_halves(weight: torch.Tensor, weight_low: torch.Tensor, master: torch.Tensor, joining: bool) -> None:
    """Split fp32 masters into 16-bit weights and their low halves, or join them. All tensors are flat."""
    n, form, function = weight.numel(), FORMS[weight.dtype], triton_updates.join if joining else triton_updates.split
    function[(cdiv(n, _SIZE),)](_bits(weight), weight_low, master, n, form=form, size=_SIZE, **_STRICT)


def square_sums(gradient: torch.Tensor, into: torch.Tensor, piece: int) -> None:
    """The partial sums of squares of each `piece` elements of a flat gradient; `piece` is a power of two.

    into: fp64, at least [pieces, LANES]. A piece's sum is that of its lanes, added from the first to the last.
    """
    assert piece == next_power_of_2(piece)
    n = gradient.numel()
    form = FORMS[gradient.dtype]
    # With one warp, each lane is a thread.
    triton_updates.square_sums[(cdiv(n, piece),)](
        _bits(gradient), into, n, piece=piece, form=form, num_warps=1, **_STRICT
    )


def update_adafactor(
    weight: torch.Tensor,
    weight_low: torch.Tensor | None,
    gradient: torch.Tensor,
    states: Mapping[str, torch.Tensor],
    shape: tuple[int, int, int],
    scalars: Sequence[float],
    scaled: bool,
) -> None:
    """The counterpart of `adafactor_kernels.update`."""
    grad_scale, share, eps, floor, *others = scalars
    (matrices, rows, columns), n, device = shape, weight.numel(), weight.device
    every, groups, blocks = matrices * rows, cdiv(rows, ROWS), cdiv(columns, COLUMNS)
    low, grad, moment = weight if weight_low is None else weight_low, _bits(gradient), states.get("exp_avg")
    column_var = states["col_var" if "col_var" in states else "variance"]
    forms = {"form": FORMS[weight.dtype], "arriving": FORMS[gradient.dtype]}
    grid = (matrices * groups * blocks,)

    def sum_blocks(of: Any, shares: torch.Tensor, *sizes: int) -> torch.Tensor:
        sums = torch.empty(sizes, dtype=torch.float64, device=device)
        triton_adafactor.sum_block[grid](
            _bits(weight), low, grad, column_var, shares, sums, *shape, grad_scale, floor, of=of, **forms, **_STRICT
        )
        return sums

    by_column = sum_blocks(triton_adafactor.OF_GRADIENT, column_var, groups, matrices, columns)
    by_row = torch.empty(blocks, every, dtype=torch.float64, device=device)
    triton_adafactor.sum_rows[(cdiv(every, _TILE), blocks)](
        grad, by_row, every, columns, grad_scale, arriving=forms["arriving"], tile=_TILE, **_STRICT
    )
    shares = update_factors(states, by_column, by_row, shape, share, eps)
    weight_sum = torch.zeros(1, dtype=torch.float64, device=device)
    if scaled:
        weight_sum = folded(sum_blocks(triton_adafactor.OF_WEIGHT, shares, *grid))
    update_sum = folded(sum_blocks(triton_adafactor.OF_UPDATE, shares, *grid))
    tensors = _bits(weight), low, grad, weight if moment is None else moment, column_var, shares, weight_sum, update_sum
    numbers = rows, columns, n, float(n), (grad_scale, floor, *others)
    constants = {"has_moment": moment is not None, "size": _SIZE}
    triton_adafactor.step[(cdiv(n, _SIZE),)](*tensors, *numbers, **constants, **forms, **_STRICT)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(_BITS.get(tensor.dtype, tensor.dtype))


def _as_int32(value: float) -> int:
    """The signed number with the same 32 low bits."""
    return ((int(value) + (1 << 31)) & 0xFFFFFFFF) - (1 << 31)
