"""Square sums of gradients on a GPU, in the order of the CPU's gradient kernels."""

import triton.language as tl

from pagoda.optim.jit import LANES as CPU_LANES
from pagoda.optim.triton_parts import FP16, bf16_to_fp32, fp16_to_fp32, jit

LANES = tl.constexpr(CPU_LANES)
_ROW = tl.constexpr(4 * CPU_LANES)
_FP16 = tl.constexpr(FP16)


@jit()
def _squares(gradient: tl.tensor, at: tl.tensor, inside: tl.tensor, half: tl.constexpr) -> tl.tensor:
    x = tl.load(gradient + at, inside, 0)
    if half == _FP16:
        x = fp16_to_fp32(x)
    elif half:
        x = bf16_to_fp32(x)
    x = x.to(tl.float64)
    return x * x


@jit(do_not_specialize=("n",))
def square_sums(gradient: tl.tensor, sums: tl.tensor, n: tl.tensor, piece: tl.constexpr, half: tl.constexpr) -> None:
    """The partial sums of squares of each `piece` of ``n`` elements, shape [pieces, LANES] in fp64.

    gradient: bf16 or fp16, as `half` says, as int16; else fp32. A program has one piece and a thread one lane of it: a
    lane adds up every LANES-th element, four at a time, as `kernels` says. Whoever adds the lanes of a piece, first to
    last, has the bits of `store_gradient`.
    """
    first = tl.program_id(0) * piece
    count = tl.minimum(n - first, piece)
    lane = tl.arange(0, LANES)
    start = gradient + first
    whole = count // _ROW * _ROW
    lanes = tl.zeros([LANES], tl.float64)
    for row in range(0, whole, _ROW):
        at = row + lane
        one = _squares(start, at, at < count, half)
        two = _squares(start, at + LANES, at < count, half)
        three = _squares(start, at + 2 * LANES, at < count, half)
        four = _squares(start, at + 3 * LANES, at < count, half)
        lanes += one + two + three + four
    for part in tl.static_range(4):
        at = whole + part * LANES + lane
        lanes += _squares(start, at, at < count, half)
    tl.store(sums + tl.program_id(0) * LANES + lane, lanes)
