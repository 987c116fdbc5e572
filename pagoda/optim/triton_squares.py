"""Square sums of gradients on a GPU, in the order of the CPU's gradient kernels."""

import triton.language as tl

from pagoda.optim.gradient_kernels import LANES as CPU_LANES, ROW
from pagoda.optim.triton_parts import as_fp32, jit

LANES = tl.constexpr(CPU_LANES)
_ROW = tl.constexpr(ROW)
_AHEAD = tl.constexpr(16)


@jit()
def _squares(value: tl.tensor, form: tl.constexpr) -> tl.tensor:
    x = as_fp32(value, form).to(tl.float64)
    return x * x


@jit()
def _row(gradient: tl.tensor, at: tl.tensor, form: tl.constexpr) -> tl.tensor:
    """What the elements of a row add to each lane."""
    one = _squares(tl.load(gradient + at), form)
    two = _squares(tl.load(gradient + at + LANES), form)
    three = _squares(tl.load(gradient + at + 2 * LANES), form)
    four = _squares(tl.load(gradient + at + 3 * LANES), form)
    return one + two + three + four


@jit(do_not_specialize=("n",), do_not_specialize_on_alignment=("gradient",))
def square_sums(gradient: tl.tensor, sums: tl.tensor, n: tl.tensor, piece: tl.constexpr, form: tl.constexpr) -> None:
    """The partial sums of squares of each `piece` of ``n`` elements, shape [pieces, LANES] in fp64.

    gradient: bf16 or fp16, as int16, or fp32, as `form` says. A program has one piece, and each of its threads has one
    lane. The order of additions is that of `gradient_kernels`: adding the lanes of a piece from first to last gives the
    bits of `store_gradient`.

    Rows are added one after another, but _AHEAD rows are loaded together. Otherwise each row would wait for memory.
    """
    first = tl.program_id(0) * piece
    count = tl.minimum(n - first, piece)
    lane = tl.arange(0, LANES)
    start = gradient + first
    lanes = tl.zeros([LANES], tl.float64)
    ahead = count // (_AHEAD * _ROW) * (_AHEAD * _ROW)
    for at in range(0, ahead, _AHEAD * _ROW):
        for row in tl.static_range(_AHEAD):
            lanes += _row(start, at + row * _ROW + lane, form)
    whole = count // _ROW * _ROW
    for at in range(ahead, whole, _ROW):
        lanes += _row(start, at + lane, form)
    for part in tl.static_range(4):
        at = whole + part * LANES + lane
        lanes += _squares(tl.load(start + at, at < count, 0), form)
    tl.store(sums + tl.program_id(0) * LANES + lane, lanes)
