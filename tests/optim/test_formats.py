"""fp16, and gradients in another format than weights: the bits of torch, and of the kernels for fp32."""

from typing import get_args

import numpy as np
import pytest
import reference
import torch
from hypothesis import given, strategies as st

from pagoda.config.training import Precision
from pagoda.jit import kernel
from pagoda.optim import SGD, Adam, AdamW, Lion, flat, fp16
from pagoda.optim.codecs import Key
from pagoda.optim.jit import bits_to_fp32, fp32_to_bits
from pagoda.optim.rule import ElementwiseRule, gradient_dtype, weight_states

SMALLEST_EXACT = 2.0**-16


def floats(seed: int, n: int, low: int = -45, high: int = 15) -> torch.Tensor:
    """Numbers of all magnitudes from 2**low to 2**high, and of both signs."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(low, high, (n,), generator=generator).float()
    signs = torch.randint(2, (n,), generator=generator) * 2 - 1
    return (1 + torch.rand(n, generator=generator)) * 2**exponents * signs


def split(master: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    weight, low = torch.empty(len(master), dtype=torch.float16), torch.empty(len(master), dtype=torch.int16)
    flat.split(master, weight, low)
    return weight, low


def join(weight: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    master = torch.empty(len(weight))
    flat.join(weight, low, master)
    return master


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view({2: torch.int16, 4: torch.int32}[tensor.itemsize])


def test_every_fp16_value_is_widened_and_split_as_torch_converts_it() -> None:
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.float16)
    widened = join(every, torch.zeros(len(every), dtype=torch.int16))
    assert torch.equal(widened.isnan(), every.isnan())
    numbers = ~every.isnan()
    assert torch.equal(bits(widened[numbers]), bits(every[numbers].float()))
    weight, low = split(every[numbers].float())
    assert torch.equal(bits(weight), bits(every[numbers]))
    assert not low[every[numbers].isfinite()].any()


@kernel
def convert_both_ways(fp32: np.ndarray, halves: np.ndarray, narrowed: np.ndarray, widened: np.ndarray) -> None:
    for i in range(len(fp32)):
        value = bits_to_fp32(fp32[i])
        narrowed[0, i], narrowed[1, i] = fp16.fp32_to_fp16(value), fp16.fp32_to_fp16_in_integers(value)
    for i in range(len(halves)):
        widened[0, i] = fp32_to_bits(fp16.fp16_to_fp32(halves[i]))
        widened[1, i] = fp32_to_bits(fp16.fp16_to_fp32_in_integers(halves[i]))


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


def test_weights_are_the_master_as_torch_rounds_it() -> None:
    halfway = torch.arange(0, 2**15 - 2**10, dtype=torch.int16).view(torch.float16).float()
    ties = (halfway + halfway.roll(-1)) / 2
    master = torch.cat([floats(0, 100_000), ties, -ties, torch.tensor([65519.9, 65520.0, 1e30, torch.inf, -torch.inf])])
    weight, _ = split(master)
    assert torch.equal(bits(weight), bits(master.half()))


def test_a_master_is_kept_exactly_from_the_magnitude_stated_on_and_within_the_bound_below() -> None:
    master = floats(1, 200_000)
    weight, low = split(master)
    kept = join(weight, low)
    exact = master.abs() >= SMALLEST_EXACT
    assert exact.any()
    assert not exact.all()
    assert torch.equal(kept[exact], master[exact])
    assert (kept - master).abs().max() <= 2.0**-40
    assert torch.equal(bits(join(*split(kept))), bits(kept))


@given(st.floats(width=32, allow_nan=False, min_value=-65504, max_value=65504))
def test_any_master_is_kept_within_the_bound(value: float) -> None:
    kept = join(*split(torch.tensor([value]))).item()
    assert kept == value if abs(value) >= SMALLEST_EXACT else abs(kept - value) <= 2.0**-40


def test_fp16_gradients_are_added_with_torchs_bits() -> None:
    mine = floats(2, 5000, -30, 15).half()
    for seed in range(3):
        arriving = floats(3 + seed, 5000, -30, 15).half()
        expected = mine + arriving
        squares = flat.add_gradient(mine, arriving)
        assert torch.equal(bits(mine), bits(expected))
        assert squares == pytest.approx(expected.double().square().sum().item(), rel=1e-12)
    stored = torch.empty_like(mine)
    assert flat.store_gradient(stored, mine) == pytest.approx(mine.double().square().sum().item(), rel=1e-12)
    assert torch.equal(bits(stored), bits(mine))
    mine[77] = 65504.0
    assert flat.add_gradient(mine, mine.clone()) == torch.inf


@pytest.mark.parametrize("arriving", [torch.bfloat16, torch.float16])
def test_gradients_are_accumulated_in_fp32_without_a_rounding(arriving: torch.dtype) -> None:
    n = 33_068
    parts = [floats(seed, n, -20, 10).to(arriving) for seed in range(3)]
    total = torch.empty(n)
    flat.store_gradient(total, parts[0])
    assert torch.equal(total, parts[0].float())
    for part in parts[1:]:
        squares = flat.add_gradient(total, part)
    assert torch.equal(total, parts[0].float() + parts[1].float() + parts[2].float())
    assert squares == pytest.approx(total.double().square().sum().item(), rel=1e-12)


RULES: list[ElementwiseRule] = [
    AdamW(weight_decay=0.1),
    AdamW(moments="bf16"),
    AdamW(moments="8bit"),
    Adam(),
    SGD(),
    SGD(momentum=0.9),
    Lion(),
]


@pytest.mark.parametrize("gradient", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("precision", get_args(Precision))
@pytest.mark.parametrize("rule", RULES, ids=lambda r: r.kernel_name)
def test_any_format_is_updated_as_fp32_is(rule: ElementwiseRule, precision: Precision, gradient: torch.dtype) -> None:
    """With noise, which an element's index decides."""
    n = 4_999
    dtype = gradient_dtype(precision)
    own = {s.name: torch.zeros(s.elements(n), dtype=s.dtype) for s in rule.own_states()}
    plain = {name: state.clone() for name, state in own.items()}
    weights = {s.name: torch.empty(n, dtype=s.dtype) for s in weight_states(precision)}
    master = floats(5, n, -12, 3)
    if precision == "fp32":
        weights["weight"].copy_(master)
    else:
        flat.split(master, weights["weight"], weights["weight_low"])
    for step in range(1, 4):
        grad = floats(10 + step, n, -12, 3).to(gradient)
        noise = rule.noise("name", step)
        assert noise is None or isinstance(noise, Key)
        scalars = rule.scalars(step, 0.25)
        flat.update(rule, weights | own, grad, scalars, noise)
        flat.update(rule, {"weight": master} | plain, grad.float(), scalars, noise)
        if precision == "fp16":  # what it cannot keep
            master = join(*split(master))
    found = weights["weight"] if precision == "fp32" else torch.empty(n)
    if precision != "fp32":
        flat.join(weights["weight"], weights["weight_low"], found)
    assert weights["weight"].dtype is dtype
    assert torch.equal(bits(found), bits(master))
    for name, state in own.items():
        assert torch.equal(state, plain[name]), name


def test_the_reference_splits_as_the_kernel_does() -> None:
    master = floats(6, 10_000)
    weight, low = reference.split_fp16(master)
    assert torch.equal(bits(weight), bits(split(master)[0]))
    assert torch.equal(low, split(master)[1])
    assert torch.equal(reference.join_fp16(weight, low), join(weight, low))
