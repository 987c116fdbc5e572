"""Adafactor has the bits of its stated operations and order of sums; torch's class is close."""

import pytest
import torch
from pairwise import each_once

from pagoda.config.training import Precision
from pagoda.optim import Adafactor
from pagoda.optim.adafactor import as_matrices
from pagoda.optim.rule import DTYPES

from .blocks import States, assert_same_states, copy_of, join, randn, split

DEFAULTS = Adafactor()
OTHERS = Adafactor(lr=0.3, weight_decay=0.1, d=1.5, eps=(1e-5, 1e-2), beta2_decay=-0.5)
AVERAGED = Adafactor(lr=0.1, beta1=0.9, scale_parameter=False, relative_step=False)
RULES = (DEFAULTS, OTHERS, AVERAGED)
SHAPES = ((), (16,), (2500,), (33, 20), (130, 3), (3, 5, 7, 2), (70, 1100), (2, 3, 2100))


def fresh(rule: Adafactor, shape: tuple[int, ...], precision: Precision = "fp32") -> States:
    """A parameter's states, weights included."""
    states = {
        state.name: torch.zeros(own) for state in rule.own_states() if (own := state.shape("p", shape)) is not None
    }
    master = randn(shape, 0) * 0.1
    if precision == "fp32":
        return {"weight": master, **states}
    weight, low = split(master.view(-1), DTYPES[precision])
    return {"weight": weight.view(shape), "weight_low": low, **states}


def update(rule: Adafactor, step: int, states: States, gradient: torch.Tensor, grad_scale: float = 1.0) -> None:
    own = {name: state for name, state in states.items() if not name.startswith("weight")}
    rule.update(step, states["weight"], gradient, own, states.get("weight_low"), grad_scale)


# --- the definition, in plain torch -------------------------------------------------------------------------------


def folded(values: torch.Tensor) -> torch.Tensor:
    """The second half is added to the first, until one is left; the first is the largest power of two below all."""
    while len(values) > 1:
        half = 1 << (len(values) - 1).bit_length() - 1
        first = values[:half].clone()
        first[: len(values) - half] += values[half:]
        values = first
    return values[0]


def added(rows: torch.Tensor) -> torch.Tensor:
    """From the first to the last."""
    total = torch.zeros_like(rows[0])
    for row in rows:
        total = total + row
    return total


def row_sums(squares: torch.Tensor) -> torch.Tensor:
    """Of a matrix."""
    blocks = []
    for block in squares.split(1024, dim=1):
        padded = torch.nn.functional.pad(block, (0, -block.shape[1] % 128))
        blocks.append(folded(added(padded.unflatten(1, (-1, 128)).transpose(0, 1)).T))
    return folded(torch.stack(blocks))


def column_sums(squares: torch.Tensor) -> torch.Tensor:
    return folded(torch.stack([added(group) for group in squares.split(64)]))


def total(matrices: torch.Tensor) -> torch.Tensor:
    """The sum of squares of fp32 values."""
    blocks = [
        folded(added(block))
        for matrix in matrices.double().square()
        for group in matrix.split(64)
        for block in group.split(1024, dim=1)
    ]
    return folded(torch.stack(blocks))


def mean(sums: torch.Tensor, count: int) -> torch.Tensor:
    return sums.float() / torch.tensor(float(count))


def root(value: torch.Tensor) -> torch.Tensor:
    """Rounded once: torch's own on fp32 is not always, on a CPU."""
    return value.double().sqrt().float()


def defined(rule: Adafactor, step: int, states: States, gradient: torch.Tensor, grad_scale: float = 1.0) -> None:
    """`update` of fp32 weights, by the docstring of `adafactor`."""
    numbers = [torch.tensor(number) for number in rule.scalars(step, grad_scale)]
    scale, share, eps, floor, rate, least, most, decay, beta1, one_minus_beta1 = numbers
    matrices, rows, columns = shape = as_matrices(gradient.shape)
    g, w = gradient.view(shape) * scale, states["weight"].view(shape)
    column = states["col_var" if "col_var" in states else "variance"].view(matrices, 1, columns)
    ratio = torch.ones(matrices, rows, 1)
    for matrix, squares in enumerate(g.double().square()):
        column[matrix] += (mean(column_sums(squares), rows) - column[matrix]) * share
        if "row_var" in states:
            row = states["row_var"].view(matrices, rows)[matrix]
            row += (mean(row_sums(squares), columns) - row) * share
            ratio[matrix, :, 0] = row / torch.maximum(mean(folded(row.double()), rows), eps)
    u = g / root(torch.maximum(ratio * column, floor))
    size = root(mean(total(w), w.numel())) if rule.scale_parameter else torch.zeros(())
    over = root(mean(total(u), w.numel())) / most
    u = u * (rate * torch.maximum(size, least) / over.clamp(min=1.0))
    if "exp_avg" in states:
        moment = states["exp_avg"].view(shape)
        moment.copy_(moment * beta1 + u * one_minus_beta1)
        u = moment
    w.copy_(w * decay - u)


@each_once(shape=SHAPES, rule=RULES)
def test_the_kernels_have_the_bits_of_the_definition(rule: Adafactor, shape: tuple[int, ...]) -> None:
    ours, theirs = fresh(rule, shape), fresh(rule, shape)
    for step in range(1, 4):
        update(rule, step, ours, randn(shape, step), 0.7)
        defined(rule, step, theirs, randn(shape, step), 0.7)
    assert_same_states(ours, theirs)


def telling(rows: int, columns: int, seed: int, stride: int = 1) -> torch.Tensor:
    """Values whose sum of squares in a row tells in which order they were added, even when it is rounded to fp32.

    In each row, one square lies in the middle between two fp32 values, six are a quarter of its last place in fp64, and
    all others are zero. So the sum is above the middle only if three small ones come together before the large one.
    These seven are a multiple of `stride` apart.
    """
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.rand(rows, columns, generator=generator)
    first = torch.randint(stride, (rows, 1), generator=generator)
    order = torch.where(torch.arange(columns) % stride == first, drawn, 2.0).argsort(dim=1).argsort(dim=1)
    return torch.where(order == 0, 4097.0, torch.where(order < 7, 2.0**-15, 0.0))


TELLING = {
    "rows": telling(300, 2500, 0),
    "lanes": telling(300, 1000, 0, 64),
    "columns": telling(2500, 400, 0).T.contiguous(),
    "few rows": telling(1, 1100, 3).repeat(3, 1),
    "few columns": telling(9, 200, 0).T.contiguous(),
}


@pytest.mark.parametrize("name", TELLING)
def test_rows_and_columns_are_summed_in_the_stated_order(name: str) -> None:
    gradient = TELLING[name]
    ours, theirs = (fresh(DEFAULTS, tuple(gradient.shape)) for _ in range(2))
    update(DEFAULTS, 1, ours, gradient)
    defined(DEFAULTS, 1, theirs, gradient)
    assert_same_states(ours, theirs)


@pytest.mark.parametrize("shape", [(70, 2100), (200, 40), (3, 5, 70, 9)])
def test_weights_are_summed_in_the_stated_order(shape: tuple[int, ...]) -> None:
    gradient = randn(shape, 1)
    for seed in range(5):
        ours, theirs = (fresh(DEFAULTS, shape) for _ in range(2))
        ours["weight"], theirs["weight"] = (telling(1, gradient.numel(), seed).view(shape) for _ in range(2))
        update(DEFAULTS, 1, ours, gradient)
        defined(DEFAULTS, 1, theirs, gradient)
        assert_same_states(ours, theirs)


def test_factors_of_rows_are_summed_in_the_stated_order() -> None:
    """They are fp32, so two of them make the middle; the share of new squares is too small to change them."""
    shape, late = (40, 130, 2), 10**12
    factors = telling(40, 130, 0) ** 2
    factors[factors > 1] = 2.0**24
    factors[torch.arange(40), factors.argmin(dim=1)] = 1.0
    columns = randn((40, 1, 2), 0).abs()
    given = {"weight": torch.zeros(shape), "row_var": factors.view(40, 130, 1), "col_var": columns}
    ours, theirs = copy_of(given), copy_of(given)
    rule, gradient = Adafactor(eps=(1e-12, 1e-3)), torch.full(shape, 2.0**-15)
    update(rule, late, ours, gradient)
    defined(rule, late, theirs, gradient)
    assert_same_states(ours, theirs)


@each_once(precision=["bf16", "fp16", "fp32"], arriving=[torch.float32, torch.bfloat16, torch.float16])
def test_masters_and_gradients_count_as_if_they_were_fp32(precision: Precision, arriving: torch.dtype) -> None:
    shape = 40, 70
    ours, theirs = fresh(AVERAGED, shape, precision), fresh(AVERAGED, shape)
    for step in range(1, 3):
        if precision != "fp32":
            theirs["weight"] = join(ours["weight"].view(-1), ours["weight_low"]).view(shape)
        gradient = randn(shape, step).to(arriving)
        update(AVERAGED, step, ours, gradient)
        update(AVERAGED, step, theirs, gradient.float())
    if precision != "fp32":
        theirs["weight"], theirs["weight_low"] = split(theirs["weight"].view(-1), DTYPES[precision])
        theirs["weight"] = theirs["weight"].view(shape)
    assert_same_states(ours, theirs)


# --- torch --------------------------------------------------------------------------------------------------------


@each_once(shape=[*SHAPES, (300, 3000)], rule=[DEFAULTS, OTHERS])
def test_torchs_result_after_twenty_steps_is_close(rule: Adafactor, shape: tuple[int, ...]) -> None:
    settings = {name: getattr(rule, name) for name in ("lr", "weight_decay", "d", "eps", "beta2_decay")}
    states = fresh(rule, shape)
    parameter = torch.nn.Parameter(states["weight"].clone())
    theirs = torch.optim.Adafactor([parameter], foreach=False, **settings)
    for step in range(1, 21):
        parameter.grad = randn(shape, step)
        theirs.step()
        update(rule, step, states, randn(shape, step))
    weight, kept = parameter.detach(), theirs.state[parameter]
    moved = (weight - fresh(rule, shape)["weight"]).abs().max()
    assert (states.pop("weight") - weight).abs().max() <= 3e-5 * moved
    assert states.keys() == kept.keys() - {"step"}
    for name, state in states.items():
        torch.testing.assert_close(state, kept[name], rtol=1e-6, atol=0.0)


def test_steps_are_relative_to_time_and_parameter_unless_told_otherwise() -> None:
    def first_move(size: float, step: int, **settings: object) -> float:
        """RMS of a step of a parameter of that RMS, whose update is clipped to an RMS of 1."""
        rule = Adafactor(lr=1.0, **settings)
        states = fresh(rule, (8, 8)) | {"weight": torch.full((8, 8), size)}
        update(rule, step, states, torch.ones(8, 8))
        return (states["weight"] - size).norm().item() / 8

    assert first_move(2.0, 1) == pytest.approx(2.0, rel=1e-5)
    assert first_move(2.0, 1, scale_parameter=False) == pytest.approx(1.0, rel=1e-5)
    late = first_move(2.0, 100, scale_parameter=False)
    assert first_move(2.0, 100, scale_parameter=False, relative_step=False) == pytest.approx(10 * late, rel=1e-5)
