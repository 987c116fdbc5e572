"""Adafactor on a GPU, with the bits of `adafactor_kernels`: the same sums in the same order.

A program handles one block of a matrix, row by row. `adafactor` folds the results of blocks.
"""

import triton.language as tl

from pagoda.optim import factors, triton_parts as parts
from pagoda.optim.triton_parts import jit

ROWS, COLUMNS = tl.constexpr(factors.ROWS), tl.constexpr(factors.COLUMNS)
LANES = tl.constexpr(factors.LANES)
_COLUMN_LEVELS, _LANE_LEVELS = (tl.constexpr(n.value.bit_length() - 1) for n in (COLUMNS, LANES))
"""Number of times that columns and lanes are folded. Zeros at the end change no sum."""
OF_GRADIENT, OF_WEIGHT, OF_UPDATE = (tl.constexpr(number) for number in range(3))
"""The values whose squares `sum_block` sums."""


@jit()
def _block_of_program(rows, columns):
    """The number of a program's matrix, and the row and column of its block, counted in blocks."""
    number = tl.program_id(0).to(tl.int64)
    blocks, groups = tl.cdiv(columns, COLUMNS), tl.cdiv(rows, ROWS)
    return number // (groups * blocks), number // blocks % groups, number % blocks


@jit()
def _folded(values, rows: tl.constexpr, n: tl.constexpr, levels: tl.constexpr):
    """The sums of `rows` runs of n = 2 ** levels values, shape [rows, n]. The second half is added to the first until
    one value is left."""
    for level in tl.static_range(levels):
        low, high = tl.split(tl.permute(tl.reshape(values, [rows, 2, n >> (level + 1)]), [0, 2, 1]))
        values = low + high
    return tl.reshape(values, [rows])


@jit(do_not_specialize=("matrices", "rows", "columns"))
def sum_block(
    weight,
    weight_low,
    gradient,
    column_var,
    shares,
    sums,
    matrices,
    rows,
    columns,
    scale,
    floor,
    of: tl.constexpr,
    form: tl.constexpr,
    arriving: tl.constexpr,
):
    """Sums of squares in a block: of the gradients of each column, shape [groups, matrices, columns], or of all its
    weights or updates, one number per block."""
    matrix, group, block = _block_of_program(rows, columns)
    column = block * COLUMNS + tl.arange(0, COLUMNS)
    mask = column < columns
    total = tl.zeros([COLUMNS], tl.float64)
    for row in range(group * ROWS, tl.minimum(rows, (group + 1) * ROWS)):
        at = (matrix * rows + row) * columns + column
        if of == OF_WEIGHT:
            value = parts.load_master(weight, weight_low, at, mask, form)
        else:
            value = parts.as_fp32(tl.load(gradient + at, mask, 0), arriving) * scale
            if of == OF_UPDATE:
                share = tl.load(shares + matrix * rows + row)
                of_column = tl.load(column_var + matrix * columns + column, mask, 1.0)
                value = parts.factored_update(value, share, of_column, floor)
        total += tl.where(mask, parts.square(value), 0.0)
    if of == OF_GRADIENT:
        tl.store(sums + (group * matrices + matrix) * columns + column, total, mask)
    else:
        at = tl.program_id(0) + tl.arange(0, 1)
        tl.store(sums + at, _folded(tl.reshape(total, [1, COLUMNS]), 1, COLUMNS, _COLUMN_LEVELS))


@jit(do_not_specialize=("rows", "columns"))
def sum_rows(gradient, sums, rows, columns, scale, arriving: tl.constexpr, tile: tl.constexpr):
    """Sums of squares of the gradients of rows, shape [blocks, rows]. `rows` counts the rows of all matrices."""
    row = (tl.program_id(0) * tile + tl.arange(0, tile)).to(tl.int64)
    block = tl.program_id(1)
    there = row < rows
    end = tl.minimum(columns, (block + 1) * COLUMNS)
    lanes = tl.zeros([tile, LANES], tl.float64)
    for first in range(block * COLUMNS, end, LANES):
        column = first + tl.arange(0, LANES)
        mask = there[:, None] & (column < end)[None, :]
        at = row[:, None] * columns + column[None, :]
        lanes += parts.square(parts.as_fp32(tl.load(gradient + at, mask, 0), arriving) * scale)
    tl.store(sums + block.to(tl.int64) * rows + row, _folded(lanes, tile, LANES, _LANE_LEVELS), there)


@jit(do_not_specialize=("rows", "columns", "n"))
def step(
    weight,
    weight_low,
    gradient,
    moment,
    column_var,
    shares,
    weight_sum,
    update_sum,
    rows,
    columns,
    n,
    count,
    scalars,
    has_moment: tl.constexpr,
    form: tl.constexpr,
    arriving: tl.constexpr,
    size: tl.constexpr,
):
    """Update `n` weights, and the first moment if there is one."""
    scale, floor, rate, least, most, decay, beta1, one_minus_beta1 = scalars
    rate = parts.adafactor_rate(tl.load(weight_sum), tl.load(update_sum), count, rate, least, most)
    at = tl.program_id(0) * size + tl.arange(0, size)
    mask = at < n
    row = at // columns
    share = tl.load(shares + row, mask, 1.0)
    of_column = tl.load(column_var + row // rows * columns + at % columns, mask, 1.0)
    grad = parts.as_fp32(tl.load(gradient + at, mask, 0), arriving)
    u = parts.factored_update(grad * scale, share, of_column, floor)
    w = parts.load_master(weight, weight_low, at, mask, form)
    m = w
    if has_moment:
        m = tl.load(moment + at, mask, 0.0)
    w, m = parts.adafactor_element(w, m, u, (rate, decay, beta1, one_minus_beta1), has_moment)
    if has_moment:
        tl.store(moment + at, m, mask)
    parts.store_master(weight, weight_low, at, w, mask, form)
