"""Storing and adding gradients, and the split of the master."""

import numpy as np
import pytest
import reference
import torch
from hypothesis import given, settings, strategies as st

from pagoda.config.training import Precision
from pagoda.optim import flat, gradient_dtype

from .blocks import EDGES, bits, random_block, same_bits

precisions = pytest.mark.parametrize("precision", ["bf16", "fp32"])
SIZES = [0, 1, 63, 64, 255, 256, 257, 1000, 100_003]


def random_gradient(precision: Precision, n: int, seed: int) -> torch.Tensor:
    return random_block(precision, n, seed=seed)[1]


def sum_of_squares(gradient: torch.Tensor) -> float:
    return gradient.double().square().sum().item()


@precisions
@pytest.mark.parametrize("n", SIZES)
def test_store_copies_and_sums_squares_as_float64_does(precision: Precision, n: int) -> None:
    source = random_gradient(precision, n, 1)
    stored = torch.full_like(source, torch.nan)
    total = flat.store_gradient(stored, source)
    assert same_bits(stored, source)
    assert total == pytest.approx(sum_of_squares(source), rel=1e-12, abs=0)


@precisions
@pytest.mark.parametrize("n", SIZES)
def test_add_gives_the_bits_of_torch_and_the_new_sum_of_squares(precision: Precision, n: int) -> None:
    ours = random_gradient(precision, n, 1)
    theirs = ours.clone()
    for seed in (2, 3):
        more = random_gradient(precision, n, seed) * 0.01
        total = flat.add_gradient(ours, more)
        theirs += more
        assert same_bits(ours, theirs)
        assert total == pytest.approx(sum_of_squares(theirs), rel=1e-12, abs=0)


@precisions
def test_add_gives_the_bits_of_torch_on_edge_values_and_ties(precision: Precision) -> None:
    ties = torch.tensor([1.0, 256.0, 257.0, 2.0**-8, 3 * 2.0**-9, 2.0**-133, torch.inf, -torch.inf, torch.nan])
    values = torch.cat([EDGES, ties]).to(gradient_dtype(precision))
    ours, more = (axis.reshape(-1).clone() for axis in torch.meshgrid(values, values, indexing="ij"))
    theirs = ours.clone()
    flat.add_gradient(ours, more)
    theirs += more
    assert same_bits(ours, theirs)


def test_add_gives_the_bits_of_torch_on_random_bf16_bit_patterns() -> None:
    patterns = torch.from_numpy(np.random.default_rng(0).integers(-(2**15), 2**15, (2, 500_000), dtype=np.int16))
    ours, more = patterns.view(torch.bfloat16)
    theirs = ours.clone()
    flat.add_gradient(ours, more)
    theirs += more
    assert same_bits(ours, theirs)


@precisions
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("position", [0, 300, 999])
def test_one_non_finite_element_makes_the_sum_non_finite(precision: Precision, bad: float, position: int) -> None:
    gradient = random_gradient(precision, 1000, 1)
    gradient[position] = bad
    stored = torch.zeros_like(gradient)
    assert not np.isfinite(flat.store_gradient(stored, gradient))
    assert not np.isfinite(flat.add_gradient(torch.zeros_like(gradient), gradient))


@precisions
def test_finite_elements_never_make_the_sum_non_finite(precision: Precision) -> None:
    largest = torch.full((1000,), torch.finfo(gradient_dtype(precision)).max, dtype=gradient_dtype(precision))
    assert np.isfinite(flat.store_gradient(torch.empty_like(largest), largest))


@precisions
def test_add_reports_an_overflow_to_infinity(precision: Precision) -> None:
    largest = torch.full((300,), torch.finfo(gradient_dtype(precision)).max, dtype=gradient_dtype(precision))
    assert not np.isfinite(flat.add_gradient(largest, largest.clone()))


@precisions
def test_the_sum_of_squares_depends_only_on_the_values(precision: Precision) -> None:
    source = random_gradient(precision, 5001, 1)
    # Another address and alignment must not change the order of the sum.
    shifted = torch.cat([source[:1], source])[1:]
    totals = {flat.store_gradient(torch.empty_like(s), s) for s in (source, shifted, source.clone())}
    assert len(totals) == 1


def assert_split_is_lossless(master: torch.Tensor) -> None:
    weight, low = torch.empty(len(master), dtype=torch.bfloat16), torch.empty(len(master), dtype=torch.int16)
    flat.split(master, weight, low)
    for ours, theirs in zip((weight, low), reference.split(master), strict=True):
        assert torch.equal(ours.view(torch.int16), theirs.view(torch.int16))
    joined = torch.empty_like(master)
    flat.join(weight, low, joined)
    # Raw bits, so that a NaN must come back as the NaN it was.
    assert torch.equal(joined.view(torch.int32), master.view(torch.int32))
    assert torch.equal(reference.join(weight, low).view(torch.int32), master.view(torch.int32))


def test_split_is_lossless_for_every_high_half_at_its_ties_and_ends() -> None:
    high = np.arange(2**16, dtype=np.uint32) << 16
    low = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=np.uint32)
    patterns = (high[:, None] | low).reshape(-1)
    assert_split_is_lossless(torch.from_numpy(patterns.view(np.float32)))


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), n=st.integers(1, 5000))
def test_split_is_lossless_for_random_bit_patterns(seed: int, n: int) -> None:
    patterns = np.random.default_rng(seed).integers(0, 2**32, n, dtype=np.uint32)
    assert_split_is_lossless(torch.from_numpy(patterns.view(np.float32)))


def test_the_weight_is_its_master_rounded_to_nearest() -> None:
    master = torch.cat([torch.randn(100_000), EDGES])
    weight, low = torch.empty(len(master), dtype=torch.bfloat16), torch.empty(len(master), dtype=torch.int16)
    flat.split(master, weight, low)
    tie = (master.view(torch.int32) & 0xFFFF) == 0x8000
    assert torch.equal(bits(weight)[~tie], bits(master.bfloat16())[~tie])
