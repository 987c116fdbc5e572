"""Codecs of moments: the error of each, and what must never be hidden."""

import os
import subprocess
import sys

import pytest
import reference
import torch
from hypothesis import given, settings, strategies as st

from pagoda.optim import AdamW, flat
from pagoda.optim.codecs import BLOCK, Key

from .blocks import random_states

either = pytest.mark.parametrize("moment", ["exp_avg", "exp_avg_sq"])


def map_of(moment: str) -> torch.Tensor:
    """Every value of the map, by code."""
    return flat.decode_moment(moment, (torch.arange(256, dtype=torch.uint8), torch.ones(1)))


# --- stochastic rounding ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [1.0, -3.1415927, 1e-3, 1.00390625, 1e-40, -1e-45, 2.5e38, 0.0])
def test_stochastic_rounding_is_exact_on_average(value: float) -> None:
    """Over every value of the noise, in float64: the mean is the value itself, the error below one unit of bf16."""
    noise = torch.arange(65536)
    values = torch.full((65536,), value, dtype=torch.float32)
    rounded = reference.round_noisily(values, noise).double()
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
    assert AdamW(moments="8bit").noise("weight", 1) is None


# --- 8 bits -----------------------------------------------------------------------------------------------------


@either
def test_the_map_is_the_papers(moment: str) -> None:
    signed = moment == "exp_avg"
    cells = [(2**e if signed else 2 ** (e + 1), 10.0 ** (e - 6)) for e in range(7)]
    values = [power * (0.1 + 0.9 * (j + 0.5) / n) for n, power in cells for j in range(n)]
    values = [0.0, *(values[:-1] if signed else values), 1.0]
    found = map_of(moment).double()
    expected = torch.tensor(values, dtype=torch.float64)
    torch.testing.assert_close(found[: len(values)], expected, rtol=1e-6, atol=0)
    if signed:
        assert torch.equal(found[128:], -found[:128])
        assert torch.signbit(found[128])


@either
@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 1000), magnitude=st.floats(-36, 37), spread=st.floats(0, 9), n=st.integers(1, 1000))
def test_each_element_gets_the_nearest_value_of_the_map(
    moment: str, seed: int, magnitude: float, spread: float, n: int
) -> None:
    """So the error is at most half the largest distance in the map, 1.11% of the scale for exp_avg and 0.39% for
    exp_avg_sq; and 28% or 19% of the element itself, if that is above 1e-4 of the scale."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(n, generator=generator) * 10.0 ** (magnitude - spread * torch.rand(n, generator=generator))
    signed = moment == "exp_avg"
    values = values if signed else values.abs()
    codes, scales = flat.encode_moment(moment, values, "8bit")
    scale = scales.repeat_interleave(BLOCK)[:n].double()
    error = (flat.decode_moment(moment, (codes, scales)).double() - values.double()).abs()
    table = map_of(moment).double()
    if not signed:
        table = table[1:]  # what is above zero never becomes zero: else it would move by m / eps without a gradient
    nearest = (values.double()[:, None] / scale[:, None] - table).abs().amin(1) * scale
    assert (error <= nearest * (1 + 1e-5) + 2e-6 * values.double().abs() + 1e-45).all()
    assert (error <= (0.0111 if signed else 0.0039) * scale).all()
    large = values.abs() > 1e-4 * scale
    assert (error[large] <= (0.28 if signed else 0.19) * values.double().abs()[large]).all()


@either
@pytest.mark.parametrize("n", [BLOCK, 40], ids=["whole blocks", "less than is encoded at a time"])
def test_codes_change_where_the_definition_says(moment: str, n: int) -> None:
    """At the least value that has a code, and at those beside it. In a block with 1, so that its scale is 1."""
    signed = moment == "exp_avg"
    codes, one = torch.arange(1, 128 if signed else 256), torch.ones(1)
    low, high = torch.zeros(len(codes), dtype=torch.int32), one.view(torch.int32).expand(len(codes))
    while (low < high).any():
        middle = (low + high) // 2
        has = reference.encode(torch.cat([middle.view(torch.float32), one]), signed)[0][:-1] >= codes
        low, high = torch.where(has, low, middle + 1), torch.where(has, middle, high)
    around = torch.cat([low + ulps for ulps in (-2, -1, 0, 1, 2)]).clamp(min=0).view(torch.float32)
    for values in (torch.cat([part, one]) for part in (around.clamp(max=1)).split(n - 1)):
        for sign in (1, -1) if signed else (1,):
            ours, theirs = flat.encode_moment(moment, values * sign, "8bit"), reference.encode(values * sign, signed)
            assert torch.equal(ours[0], theirs[0])
            assert torch.equal(flat.decode_moment(moment, ours), reference.decode(*theirs, signed))


@pytest.mark.slow
def test_a_cpu_without_byte_lookups_gives_the_same_bits() -> None:
    program = """
import reference
from optim.blocks import RULES, assert_same_states, copy_of, random_states, update
from pagoda.optim.jit import HAS_BYTE_LOOKUPS

assert not HAS_BYTE_LOOKUPS
rule = RULES["adamw-8bit"]
ours, gradient = random_states(rule, "bf16", 700)
theirs = copy_of(ours)
update("adamw-8bit", "bf16", ours, gradient)
reference.update(rule, theirs, gradient, rule.scalars(3, 0.37))
assert_same_states(ours, theirs)
"""
    environment = {**os.environ, "NUMBA_CPU_NAME": "generic", "PYTHONPATH": "tests"}
    subprocess.run([sys.executable, "-c", program], check=True, env=environment)


@either
def test_encoding_what_was_decoded_changes_no_bit(moment: str) -> None:
    values = torch.randn(100_000, generator=torch.Generator().manual_seed(0)) ** 3
    kept = flat.encode_moment(moment, values if moment == "exp_avg" else values.abs(), "8bit")
    again = flat.encode_moment(moment, flat.decode_moment(moment, kept), "8bit")
    assert torch.equal(kept[0], again[0])
    assert torch.equal(kept[1], again[1])
    bf16 = values.to(torch.bfloat16)
    assert torch.equal(flat.encode_moment(moment, flat.decode_moment(moment, (bf16,)), "bf16")[0], bf16)


@either
def test_blocks_of_zeros_denormals_and_huge_values(moment: str) -> None:
    blocks = torch.zeros(4, BLOCK)
    blocks[1] = 1e-39
    blocks[2] = torch.linspace(0, 3.4e38, BLOCK)
    blocks[3, 7] = 1.2e-38
    codes, scales = flat.encode_moment(moment, blocks.view(-1), "8bit")
    decoded = flat.decode_moment(moment, (codes, scales)).view(4, BLOCK)
    assert scales.tolist() == [0, 0, blocks[2].max().item(), blocks[3].max().item()]
    assert not decoded[:2].any()
    assert (decoded[2].double() - blocks[2].double()).abs().max() <= 0.0111 * 3.4e38
    assert torch.equal(decoded[3], blocks[3])


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_what_is_not_finite_is_never_hidden(poison: float) -> None:
    rule = AdamW(moments="8bit")
    states, gradient = random_states(rule, "fp32", 3 * BLOCK, edges=False)
    gradient[300] = poison
    flat.update(rule, states, gradient, rule.scalars(1))
    for moment in ("exp_avg", "exp_avg_sq"):
        nan = flat.decode_moment(moment, [states[spec.name] for spec in rule.states_of(moment)]).isnan()
        assert nan.view(3, BLOCK).all(1).tolist() == [False, True, False]
        assert nan.sum() == BLOCK
