"""Square sums of gradients on a GPU, in the order of the CPU's gradient kernels."""

import triton.language as tl

from pagoda.optim.jit import LANES as CPU_LANES
from pagoda.optim.triton_parts import FP16, bf16_to_fp32, fp16_to_fp32, jit

LANES = tl.constexpr(CPU_LANES)
_ROW = tl.constexpr(4 * CPU_LANES)
_AHEAD = tl.constexpr(16)
_FP16 = tl.constexpr(FP16)


@jit()
def _squares(gradient: tl.tensor, at: tl.tensor, half: tl.constexpr) -> tl.tensor:
    return _squared(tl.load(gradient + at), half)


@jit()
def _squares_inside(gradient: tl.tensor, at: tl.tensor, count: tl.tensor, half: tl.constexpr) -> tl.tensor:
    return _squared(tl.load(gradient + at, at < count, 0), half)


@jit()
def _squared(x: tl.tensor, half: tl.constexpr) -> tl.tensor:
    if half == _FP16:
        x = fp16_to_fp32(x)
    elif half:
        x = bf16_to_fp32(x)
    x = x.to(tl.float64)
    return x * x


@jit()
def _row(gradient: tl.tensor, at: tl.tensor, half: tl.constexpr) -> tl.tensor:
    """What the elements of a row add to each lane."""
    one = _squares(gradient, at, half)
    two = _squares(gradient, at + LANES, half)
    three = _squares(gradient, at + 2 * LANES, half)
    four = _squares(gradient, at + 3 * LANES, half)
    return one + two + three + four


@jit(do_not_specialize=("n",), do_not_specialize_on_alignment=("gradient",))
def square_sums(gradient: tl.tensor, sums: tl.tensor, n: tl.tensor, piece: tl.constexpr, half: tl.constexpr) -> None:
    """The partial sums of squares of each `piece` of ``n`` elements, shape [pieces, LANES] in fp64.

    gradient: bf16 or fp16, as `half` says, as int16; else fp32. A program has one piece and a thread one lane of it: a
    lane adds up every LANES-th element, four at a time, as `kernels` says. Whoever adds the lanes of a piece, first to
    last, has the bits of `store_gradient`.

    Sums are one after another, but loads need not be: those of _AHEAD rows are on their way at once, without which a
    piece would wait for memory once a row.
    """
    first = tl.program_id(0) * piece
    count = tl.minimum(n - first, piece)
    lane = tl.arange(0, LANES)
    start = gradient + first
    lanes = tl.zeros([LANES], tl.float64)
    ahead = count // (_AHEAD * _ROW) * (_AHEAD * _ROW)
    for at in range(0, ahead, _AHEAD * _ROW):
        for row in tl.static_range(_AHEAD):
            lanes += _row(start, at + row * _ROW + lane, half)
    whole = count // _ROW * _ROW
    for at in range(ahead, whole, _ROW):
        lanes += _row(start, at + lane, half)
    for part in tl.static_range(4):
        lanes += _squares_inside(start, whole + part * LANES + lane, count, half)
    tl.store(sums + tl.program_id(0) * LANES + lane, lanes)
