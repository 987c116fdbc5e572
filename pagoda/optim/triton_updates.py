"""Element-wise kernels on a GPU: updates with every format of moments, and sums of squares of gradients.

A kernel takes pointers to the first of `n` elements: bf16 values and int16 halves as int16, codes as uint8, fp32 as
fp32. It does not use pointers to states that its rule does not have. `scalars` are the rule's, as a tuple.
"""

import triton.language as tl

from pagoda.optim import arithmetic, gradient_kernels, moments, triton_parts as parts
from pagoda.optim.triton_parts import jit

_ADAMW, _SGD = tl.constexpr(arithmetic.ADAMW), tl.constexpr(arithmetic.SGD)
_SIGN_SGD = tl.constexpr(arithmetic.SIGN_SGD)
_SGD_MOMENTUM, _LION = tl.constexpr(arithmetic.SGD_MOMENTUM), tl.constexpr(arithmetic.LION)
_FP32 = tl.constexpr(arithmetic.FP32)
_BLOCK, _CUT = tl.constexpr(moments.BLOCK), tl.constexpr(moments.CUT)
LANES, _ROW = tl.constexpr(gradient_kernels.LANES), tl.constexpr(gradient_kernels.ROW)
_AHEAD = tl.constexpr(16)


@jit()
def _noises(index, at, key_low, key_high, cut: tl.constexpr):
    """The noise of both moments of the elements `at`."""
    return parts.noises(parts.noise_bits(parts.add(index, at), parts.word(key_low), parts.word(key_high)), cut)


@jit(do_not_specialize=("n", "index", "key_low", "key_high"))
def update(
    shown,
    weight,
    weight_low,
    first,
    second,
    gradient,
    n,
    index,
    key_low,
    key_high,
    ahead,
    scalars,
    rule: tl.constexpr,
    noisy: tl.constexpr,
    form: tl.constexpr,
    arriving: tl.constexpr,
    predicts: tl.constexpr,
    size: tl.constexpr,
):
    """Update ``n`` elements, `size` per program. Weights have the form `form` (`arithmetic`), gradients the form
    `arriving`. Moments are fp32, or bf16 if `noisy`. If it `predicts`, weights go to `shown`, and `weight` and
    `weight_low` are both the whole masters.

    `index` is the index of the first element in its parameter. The keys are those of `Key`, each as an int32 with the
    same bits. No kernel is compiled for a particular value of these.
    """
    at = tl.program_id(0) * size + tl.arange(0, size)
    mask = at < n
    before = parts.load_master(weight, weight_low, at, mask, _FP32 if predicts else form)
    w = before
    grad = parts.as_fp32(tl.load(gradient + at, mask, 0), arriving)
    if rule == _SGD:
        w, _ = parts.sgd_element(w, w, grad, scalars, False)
    elif rule == _SGD_MOMENTUM:
        w, m = parts.sgd_element(w, tl.load(first + at, mask, 0.0), grad, scalars, True)
        tl.store(first + at, m, mask)
    elif rule == _SIGN_SGD:
        w = parts.sign_sgd_element(w, grad, scalars)
    elif rule == _LION:
        w, m = parts.lion_element(w, tl.load(first + at, mask, 0.0), grad, scalars)
        tl.store(first + at, m, mask)
    else:
        m, v = tl.load(first + at, mask, 0), tl.load(second + at, mask, 0)
        if noisy:
            m, v = parts.bf16_to_fp32(m), parts.bf16_to_fp32(v)
        w, m, v = parts.adam_element(w, m, v, grad, scalars, rule == _ADAMW)
        if noisy:
            noise, noise_sq = _noises(index, at, key_low, key_high, 16)
            m, v = parts.encode_bf16(m, noise).to(tl.int16), parts.encode_bf16(v, noise_sq).to(tl.int16)
        tl.store(first + at, m, mask)
        tl.store(second + at, v, mask)
    parts.store_master(weight, weight_low, at, w, mask, _FP32 if predicts else form)
    if predicts:
        parts.store(shown, at, parts.predicted(w, before, ahead), mask, form)


@jit()
def _encode_blocks(value, noise, codes, floors, at, mask, row, there, signed: tl.constexpr):
    floor = parts.floor_of(tl.max(tl.where(mask, parts.magnitude(value), 0), axis=1), signed)
    tl.store(floors + row, floor, there)
    tl.store(codes + at, parts.encode_8bit(value, floor[:, None], noise, signed).to(tl.uint8), mask)


@jit(
    do_not_specialize=("n", "index", "key_low", "key_high"),
    do_not_specialize_on_alignment=("exp_avg_floor", "exp_avg_sq_floor"),
)
def adamw_8bit(
    shown,
    weight,
    weight_low,
    exp_avg,
    exp_avg_sq,
    exp_avg_floor,
    exp_avg_sq_floor,
    gradient,
    n,
    index,
    key_low,
    key_high,
    ahead,
    scalars,
    form: tl.constexpr,
    arriving: tl.constexpr,
    predicts: tl.constexpr,
    size: tl.constexpr,
):
    """AdamW with 8-bit moments, otherwise like `update`. A program has whole blocks, and the first element is the first
    of a block."""
    rows: tl.constexpr = size // _BLOCK
    row = tl.program_id(0) * rows + tl.arange(0, rows)
    at = row[:, None] * _BLOCK + tl.arange(0, _BLOCK)[None, :]
    mask = at < n
    there = row * _BLOCK < n
    before = parts.load_master(weight, weight_low, at, mask, _FP32 if predicts else form)
    grad = parts.as_fp32(tl.load(gradient + at, mask, 0), arriving)
    floor, floor_sq = tl.load(exp_avg_floor + row, there, 0.0), tl.load(exp_avg_sq_floor + row, there, 0.0)
    m = parts.decode_8bit(tl.load(exp_avg + at, mask, 0), floor[:, None], True)
    v = parts.decode_8bit(tl.load(exp_avg_sq + at, mask, 0), floor_sq[:, None], False)
    w, m, v = parts.adam_element(before, m, v, grad, scalars, True)
    parts.store_master(weight, weight_low, at, w, mask, _FP32 if predicts else form)
    if predicts:
        parts.store(shown, at, parts.predicted(w, before, ahead), mask, form)
    noise, noise_sq = _noises(index, at, key_low, key_high, _CUT)
    _encode_blocks(m, noise, exp_avg, exp_avg_floor, at, mask, row, there, True)
    _encode_blocks(v, noise_sq, exp_avg_sq, exp_avg_sq_floor, at, mask, row, there, False)


@jit(do_not_specialize=("n",))
def join(weight, weight_low, master, n, form: tl.constexpr, size: tl.constexpr):
    """Join ``n`` fp32 masters of a 16-bit `form`, `size` elements per program."""
    at = tl.program_id(0) * size + tl.arange(0, size)
    mask = at < n
    tl.store(master + at, parts.load_master(weight, weight_low, at, mask, form), mask)


@jit(do_not_specialize=("n",))
def split(weight, weight_low, master, n, form: tl.constexpr, size: tl.constexpr):
    """The reverse of `join`."""
    at = tl.program_id(0) * size + tl.arange(0, size)
    mask = at < n
    parts.store_master(weight, weight_low, at, tl.load(master + at, mask, 0.0), mask, form)


@jit()
def _row(gradient, at, form: tl.constexpr):
    """What the elements of a row add to each lane."""
    one = parts.square(parts.as_fp32(tl.load(gradient + at), form))
    two = parts.square(parts.as_fp32(tl.load(gradient + at + LANES), form))
    three = parts.square(parts.as_fp32(tl.load(gradient + at + 2 * LANES), form))
    four = parts.square(parts.as_fp32(tl.load(gradient + at + 3 * LANES), form))
    return one + two + three + four


@jit(do_not_specialize=("n",), do_not_specialize_on_alignment=("gradient",))
def square_sums(gradient, sums, n, piece: tl.constexpr, form: tl.constexpr):
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
        lanes += parts.square(parts.as_fp32(tl.load(start + at, at < count, 0), form))
    tl.store(sums + tl.program_id(0) * LANES + lane, lanes)
