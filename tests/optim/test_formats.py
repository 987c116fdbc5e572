"""Weights and gradients of 16 bits: masters are split and joined, and gradients stored and added, with torch's bits."""

from typing import get_args

import numpy as np
import pytest
import reference
import torch
from pairwise import each_once

from pagoda.config.training import Precision
from pagoda.jit import kernel
from pagoda.optim import arithmetic
from pagoda.optim.jit import bits_of, float_of
from pagoda.optim.rule import DTYPES
from pagoda.ranks.mean import mean_into, sum_into

from .blocks import EDGES, add_gradient, floats, join, random_values, same_bits, split, store_gradient

precisions = pytest.mark.parametrize("precision", get_args(Precision))
SIZES = [0, 1, 128, 257, 100_003]
SMALLEST_EXACT = 2.0**-16
FP16 = torch.float16


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """The bits, those of a NaN included."""
    return tensor.view({2: torch.int16, 4: torch.int32}[tensor.itemsize])


# --- masters ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("random", [False, True])
def test_a_bf16_split_is_lossless_for_every_bit_pattern(random: bool) -> None:
    """Every high half with its ties and ends, and patterns at random; a NaN comes back as the NaN it was."""
    high = np.arange(2**16, dtype=np.uint32) << 16
    ends = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=np.uint32)
    patterns = (high[:, None] | ends).reshape(-1)
    if random:
        patterns = np.random.default_rng(0).integers(0, 2**32, 400_000, dtype=np.uint32)
    master = torch.from_numpy(patterns.view(np.float32))
    halves = split(master, torch.bfloat16)
    for ours, theirs in zip(halves, reference.split(master), strict=True):
        assert torch.equal(raw(ours), raw(theirs))
    assert torch.equal(raw(join(*halves)), raw(master))
    assert torch.equal(raw(reference.join(*halves)), raw(master))


def test_weights_are_the_master_rounded_to_nearest() -> None:
    master = torch.cat([torch.randn(100_000), EDGES])
    tie = (master.view(torch.int32) & 0xFFFF) == 0x8000
    assert same_bits(split(master, torch.bfloat16)[0][~tie], master.bfloat16()[~tie])
    halfway = torch.arange(0, 2**15 - 2**10, dtype=torch.int16).view(FP16).float()
    ties = (halfway + halfway.roll(-1)) / 2
    master = torch.cat(
        [floats(0, 100_000, -45, 15), ties, -ties, torch.tensor([65519.9, 65520.0, 1e30, torch.inf, -torch.inf])]
    )
    assert same_bits(split(master, FP16)[0], master.half())


def test_every_fp16_value_is_widened_and_split_as_torch_converts_it() -> None:
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(FP16)
    widened = join(every, torch.zeros(len(every), dtype=torch.int16))
    assert same_bits(widened, every.float())
    numbers = every[~every.isnan()]
    weight, low = split(numbers.float(), FP16)
    assert same_bits(weight, numbers)
    assert not low[numbers.isfinite()].any()


@kernel
def convert_both_ways(fp32: np.ndarray, halves: np.ndarray, narrowed: np.ndarray, widened: np.ndarray) -> None:
    for i in range(len(fp32)):
        value = float_of(fp32[i])
        narrowed[0, i] = arithmetic.fp32_to_fp16(value)
        narrowed[1, i] = arithmetic.fp32_to_fp16_in_integers(value)
    for i in range(len(halves)):
        widened[0, i] = bits_of(arithmetic.fp16_to_fp32(halves[i]))
        widened[1, i] = bits_of(arithmetic.fp16_to_fp32_in_integers(halves[i]))


def test_a_cpu_without_instructions_for_fp16_converts_to_the_same_bits() -> None:
    """Every fp16 value; of fp32 every exponent, with mantissas around each one that fp16 has; NaNs' payloads too."""
    around = np.arange(0, 1 << 23, 1 << 12, dtype=np.uint32)[:, None] + np.array([0, 1, 0xFFF], dtype=np.uint32)
    exponents = np.arange(512, dtype=np.uint32) << np.uint32(23)
    fp32 = (exponents[:, None] + around.reshape(1, -1)).reshape(-1)
    halves = np.arange(1 << 16, dtype=np.uint16)
    narrowed, widened = np.empty((2, len(fp32)), np.uint16), np.empty((2, len(halves)), np.uint32)
    convert_both_ways(fp32, halves, narrowed, widened)
    assert np.array_equal(*narrowed)
    assert np.array_equal(*widened)


def test_an_fp16_master_is_kept_exactly_from_the_magnitude_stated_on_and_within_the_bound_below() -> None:
    master = floats(1, 200_000, -45, 15)
    halves = split(master, FP16)
    for ours, theirs in zip(halves, reference.split_fp16(master), strict=True):
        assert torch.equal(raw(ours), raw(theirs))
    kept = join(*halves)
    assert torch.equal(kept, reference.join_fp16(*halves))
    exact = master.abs() >= SMALLEST_EXACT
    assert exact.any()
    assert not exact.all()
    assert torch.equal(kept[exact], master[exact])
    assert (kept - master).abs().max() <= 2.0**-40
    assert torch.equal(raw(join(*split(kept, FP16))), raw(kept))


# --- gradients --------------------------------------------------------------------------------------------------


def random_gradient(precision: Precision, n: int, seed: int) -> torch.Tensor:
    return random_values(n, 1.0, torch.Generator().manual_seed(seed), False).to(DTYPES[precision])


def sum_of_squares(gradient: torch.Tensor) -> float:
    return gradient.double().square().sum().item()


@each_once(n=SIZES, precision=get_args(Precision))
def test_gradients_are_stored_and_added_with_torchs_bits_and_their_squares_summed(precision: Precision, n: int) -> None:
    source = random_gradient(precision, n, 1)
    ours = torch.full_like(source, torch.nan)
    total = store_gradient(ours, source)
    assert same_bits(ours, source)
    assert total == pytest.approx(sum_of_squares(source), rel=1e-12, abs=0)
    for seed in (2, 3):
        more = random_gradient(precision, n, seed) * 0.01
        total = add_gradient(ours, more)
        source += more
        assert same_bits(ours, source)
        assert total == pytest.approx(sum_of_squares(source), rel=1e-12, abs=0)


@precisions
def test_edge_values_and_ties_are_added_with_torchs_bits(precision: Precision) -> None:
    ties = torch.tensor([1.0, 256.0, 257.0, 2.0**-8, 3 * 2.0**-9, 2.0**-133, torch.inf, -torch.inf, torch.nan])
    values = torch.cat([EDGES, ties]).to(DTYPES[precision])
    ours, more = (axis.reshape(-1).clone() for axis in torch.meshgrid(values, values, indexing="ij"))
    theirs = ours + more
    add_gradient(ours, more)
    assert same_bits(ours, theirs)


@pytest.mark.parametrize("arriving", [torch.bfloat16, FP16])
def test_gradients_are_accumulated_in_fp32_without_a_rounding(arriving: torch.dtype) -> None:
    parts = [floats(seed, 33_068, -20, 10).to(arriving) for seed in range(3)]
    total = torch.empty(33_068)
    store_gradient(total, parts[0])
    assert torch.equal(total, parts[0].float())
    for part in parts[1:]:
        squares = add_gradient(total, part)
    assert torch.equal(total, parts[0].float() + parts[1].float() + parts[2].float())
    assert squares == pytest.approx(sum_of_squares(total), rel=1e-12)


@precisions
def test_a_sum_of_squares_is_finite_exactly_if_every_element_is(precision: Precision) -> None:
    for bad in (torch.nan, torch.inf, -torch.inf):
        for position in (0, 300, 999):
            gradient = random_gradient(precision, 1000, 1)
            gradient[position] = bad
            assert not np.isfinite(store_gradient(torch.zeros_like(gradient), gradient))
            assert not np.isfinite(add_gradient(torch.zeros_like(gradient), gradient))
    dtype = DTYPES[precision]
    largest = torch.full((1000,), torch.finfo(dtype).max, dtype=dtype)
    assert np.isfinite(store_gradient(torch.empty_like(largest), largest))
    assert not np.isfinite(add_gradient(largest, largest.clone()))


@precisions
def test_the_sum_of_squares_depends_only_on_the_values(precision: Precision) -> None:
    source = random_gradient(precision, 5001, 1)
    # Another address and alignment must not change the order of the sum.
    shifted = torch.cat([source[:1], source])[1:]
    assert len({store_gradient(torch.empty_like(s), s) for s in (source, shifted, source.clone())}) == 1


# --- means of several ranks' gradients -----------------------------------------------------------------------


@each_once(dtype=[torch.bfloat16, torch.float32, torch.float16], ranks=[1, 2, 3, 7], size=[1, 255, 40_000])
def test_a_mean_is_the_fp32_sum_in_the_order_of_ranks_rounded_once(dtype: torch.dtype, ranks: int, size: int) -> None:
    generator = torch.Generator().manual_seed(size + ranks)
    parts = [torch.randn(size, generator=generator).mul(3.0**rank).to(dtype) for rank in range(ranks)]
    expected = parts[0].float()
    for part in parts[1:]:
        expected = expected + part.float()
    total, mean = torch.empty(size), torch.empty(size, dtype=dtype)
    sum_into(total, parts)
    assert torch.equal(total, expected)
    mean_into(mean, total, ranks)
    assert torch.equal(mean, (expected / ranks).to(dtype))


def test_no_parts_are_zeros() -> None:
    total = torch.full((5,), torch.nan)
    sum_into(total, [])
    assert torch.equal(total, torch.zeros(5))


@each_once(value=[torch.nan, torch.inf, -torch.inf], dtype=[torch.bfloat16, torch.float32])
def test_what_is_not_finite_stays_so(dtype: torch.dtype, value: float) -> None:
    parts = [torch.zeros(300, dtype=dtype), torch.full((300,), value, dtype=dtype)]
    total, mean = torch.empty(300), torch.empty(300, dtype=dtype)
    sum_into(total, parts)
    mean_into(mean, total, 2)
    assert not mean.isfinite().any()
