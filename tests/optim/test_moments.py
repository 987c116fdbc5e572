"""Formats of moments: the error of each, and what must never be hidden."""

import pytest
import reference
import torch
from hypothesis import given, settings, strategies as st

from pagoda.optim import AdamW, flat
from pagoda.optim.moments import BLOCK, CUT
from pagoda.optim.rule import Key

from .blocks import random_states

either = pytest.mark.parametrize("moment", ["exp_avg", "exp_avg_sq"])


# --- stochastic rounding ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [1.0, -3.1415927, 1e-3, 1.00390625, 1e-40, -1e-45, 2.5e38, 0.0])
def test_stochastic_rounding_is_exact_on_average(value: float) -> None:
    """Over every value of the noise, in float64: the mean is the value itself, the error below one unit of bf16."""
    noise = torch.arange(65536)
    values = torch.full((65536,), value, dtype=torch.float32)
    rounded = reference.encode_bf16(values, noise).double()
    assert rounded.mean().item() == values[0].item()
    assert (rounded - values.double()).abs().max() < 2.0**-7 * max(abs(value), 2.0**-126)


def test_noise_is_uniform_and_independent_between_moments_elements_steps_and_parameters() -> None:
    """Means and correlations of a million draws, within five standard deviations."""
    n = 1 << 20

    def draws(name: str, step: int) -> torch.Tensor:
        return reference.random_bits(n, Key.of(0, name, step))

    bits = draws("weight", 1)
    first, second = (bits & 0xFFFF).double() / 65536 - 0.5, (bits >> 16).double() / 65536 - 0.5
    others = [second, first.roll(1), first.roll(256)]
    others += [(draws(name, step) & 0xFFFF).double() / 65536 - 0.5 for name, step in (("weight", 2), ("bias", 1))]
    for one in (first, *others):
        assert abs(one.mean().item()) < 5 * (1 / 12 / n) ** 0.5
        assert one.var().item() == pytest.approx(1 / 12, rel=0.01)
    for other in others:
        assert abs((first * other).mean().item()) < 5 / 12 / n**0.5
    for bit in range(32):
        assert abs(((bits >> bit) & 1).double().mean().item() - 0.5) < 5 * 0.5 / n**0.5


def test_keys_are_as_defined() -> None:
    assert Key.of(0, "weight", 1) == Key(low=0x2159412C, high=0x3F4D8E97)
    keys = {Key.of(seed, name, step) for seed in range(3) for name in ("a", "b") for step in range(1, 4)}
    assert len(keys) == 18
    assert (
        AdamW(moments="8bit").noise("weight", 1) == AdamW(moments="bf16").noise("weight", 1) == Key.of(0, "weight", 1)
    )
    assert AdamW().noise("weight", 1) is None


# --- 8 bits -----------------------------------------------------------------------------------------------------


@either
def test_8_bits_are_a_float_counted_from_the_floor(moment: str) -> None:
    """At a floor of 1: steps of an eighth below, then 3 bits of the mantissa."""
    floats = [(1 + k % 8 / 8) * 2.0 ** (k // 8) for k in range(256)]
    found = flat.decode_moment(moment, (torch.arange(256, dtype=torch.uint8), torch.ones(1)))
    if moment == "exp_avg_sq":
        assert found.tolist() == floats
    else:
        assert found[:128].tolist() == [k / 8 for k in range(8)] + floats[:120]
        assert torch.equal(found[128:], -found[:128])
        assert torch.signbit(found[128])


@either
@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 1000), magnitude=st.floats(-36, 36), spread=st.floats(0, 9), n=st.integers(1, 1000))
def test_an_error_is_below_an_eighth(moment: str, seed: int, magnitude: float, spread: float, n: int) -> None:
    """Of the value, or of the floor if that is larger; with no noise, and with the largest."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(n, generator=generator) * 10.0 ** (magnitude - spread * torch.rand(n, generator=generator))
    signed = moment == "exp_avg"
    values = values if signed else values.abs()
    for noise in (0, (1 << CUT) - 1):
        codes, floors = reference.encode_8bit(values, torch.full((n,), noise), signed)
        floor = floors.repeat_interleave(BLOCK)[:n].double()
        exact = values.double() if signed else values.double().maximum(floor)
        error = (flat.decode_moment(moment, (codes, floors)).double() - exact).abs()
        assert (error <= exact.abs().maximum(floor) / 8 + 1e-39).all()
        assert (floors <= values.abs().amax() * 2.0 ** (-13 if signed else -30)).all()


@either
def test_rounding_to_8_bits_is_exact_on_average(moment: str) -> None:
    """Over the noise, evenly spaced: close to the largest value, and where steps are equal."""
    noise = torch.arange(1 << 12) << (CUT - 12)
    for value in (0.77, 3.3e-3, 6.3e-5, 1e-6):
        values = torch.full((len(noise) // BLOCK, BLOCK), value)
        values[:, 0] = 1.0
        kept = reference.encode_8bit(values.view(-1), noise, moment == "exp_avg")
        decoded = flat.decode_moment(moment, kept).view(values.shape).double()
        assert decoded[:, 1:].mean().item() == pytest.approx(value, rel=0.02)
        assert (decoded[:, 0] == 1.0).all()


def test_a_slow_average_does_not_stick() -> None:
    """After large gradients, a second moment falls to that of small ones, by less than half a step of 8 bits a time."""
    kept = {}
    for moments in ("fp32", "8bit"):
        rule = AdamW(lr=0.0, betas=(0.9, 0.99), moments=moments)
        states = {spec.name: torch.zeros(spec.elements(BLOCK), dtype=spec.dtype) for spec in rule.states("fp32")}
        for step in range(1, 601):
            gradient = torch.full((BLOCK,), 1.0 if step < 100 else 0.1)
            flat.update(rule, states, gradient, rule.scalars(step), rule.noise("weight", step))
        kept[moments] = flat.decode_moment("exp_avg_sq", [states[s.name] for s in rule.states_of("exp_avg_sq")])
    assert kept["8bit"].mean().item() == pytest.approx(kept["fp32"].mean().item(), rel=0.05)


@either
def test_encoding_what_was_decoded_changes_no_bit(moment: str) -> None:
    """Whatever the noise."""
    values = torch.randn(100_000, generator=torch.Generator().manual_seed(0)) ** 9
    kept = flat.encode_moment(moment, values if moment == "exp_avg" else values.abs(), "8bit")
    decoded = flat.decode_moment(moment, kept)
    for noise in (0, 1 << (CUT - 1), (1 << CUT) - 1):
        again = reference.encode_8bit(decoded, torch.full((100_000,), noise), moment == "exp_avg")
        assert torch.equal(flat.decode_moment(moment, again), decoded)
    bf16 = values.to(torch.bfloat16)
    assert torch.equal(flat.encode_moment(moment, flat.decode_moment(moment, (bf16,)), "bf16")[0], bf16)


@either
def test_blocks_of_zeros_denormals_and_huge_values(moment: str) -> None:
    blocks = torch.zeros(5, BLOCK)
    blocks[1] = 2.0**-140
    blocks[2] = torch.linspace(0, 1.59e38, BLOCK)
    blocks[3, 7] = 2.0**-126
    blocks[4, 3] = 1.6e38  # could be rounded up to 2**127, and twice this is infinity
    codes, floors = flat.encode_moment(moment, blocks.view(-1), "8bit")
    decoded = flat.decode_moment(moment, (codes, floors)).view(5, BLOCK)
    assert torch.equal(decoded[[0, 3]], blocks[[0, 3]])
    assert (decoded[1] - blocks[1]).abs().max() <= 2.0**-130
    assert decoded[2].isfinite().all()
    assert ((decoded[2] - blocks[2]).abs() <= blocks[2] / 8 + floors[2]).all()
    assert decoded[4].isnan().all()


def test_a_second_moment_above_zero_never_becomes_zero() -> None:
    """Otherwise the weight would move by m / eps."""
    values = torch.rand(BLOCK, generator=torch.Generator().manual_seed(0)) ** 40
    codes, floors = reference.encode_8bit(values, torch.zeros(BLOCK, dtype=torch.int64), False)
    assert (flat.decode_moment("exp_avg_sq", (codes, floors)) > 0).all()


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_what_is_not_finite_is_never_hidden(poison: float) -> None:
    rule = AdamW(moments="8bit")
    states, gradient = random_states(rule, "fp32", 3 * BLOCK, edges=False)
    gradient[300] = poison
    flat.update(rule, states, gradient, rule.scalars(1), rule.noise("weight", 1))
    for moment in ("exp_avg", "exp_avg_sq"):
        nan = flat.decode_moment(moment, [states[spec.name] for spec in rule.states_of(moment)]).isnan()
        assert nan.view(3, BLOCK).all(1).tolist() == [False, True, False]
        assert nan.sum() == BLOCK
