"""Codecs of moments: the kernels' bits, the error of each, and what must never depend on how a parameter is cut up."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import reference
import torch
from hypothesis import given, settings, strategies as st

from pagoda.config.training import Precision
from pagoda.errors import ConfigError
from pagoda.optim import AdamW, Key, Moments, flat, kernels
from pagoda.optim.codecs import BLOCK

from .blocks import EDGES, copy_of, random_block, same_bits
from .test_kernels import precisions, scalars_at

codecs = pytest.mark.parametrize("moments", ["bf16", "8bit"])
either = pytest.mark.parametrize("moment", ["exp_avg", "exp_avg_sq"])


def encoded_block(
    precision: Precision, moments: Moments, n: int, seed: int = 0, edges: bool = False
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """States and gradient of `random_block`, with its moments encoded, in the order of the kernels."""
    states, gradient = random_block(precision, n, seed=seed, edges=edges)
    rule = AdamW(moments=moments)
    kept = {}
    for moment in ("exp_avg", "exp_avg_sq"):
        tensors = flat.encode_moment(moment, states.pop(moment), moments)
        kept.update(zip((state.name for state in rule.states_of(moment)), tensors, strict=True))
    return {s.name: {**states, **kept}[s.name] for s in rule.states(precision)}, gradient


def byte_equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return same_bits(a, b) if a.is_floating_point() else torch.equal(a, b)


def map_of(moment: str) -> torch.Tensor:
    """Every value of the map, by code."""
    return flat.decode_moment(moment, (torch.arange(256, dtype=torch.uint8), torch.ones(1)))


def scale_of_each(scales: torch.Tensor, n: int) -> torch.Tensor:
    return scales.repeat_interleave(BLOCK)[:n]


@precisions
@codecs
@pytest.mark.parametrize("edges", [False, True])
def test_kernels_give_the_bits_of_the_reference(precision: Precision, moments: Moments, edges: bool) -> None:
    ours, gradient = encoded_block(precision, moments, 50_007, seed=1, edges=edges)
    theirs = copy_of(ours)
    for step in (1, 2, 3, 1000):
        scalars = scalars_at(step, 0.37, lr=3e-3, weight_decay=0.1)
        noise = AdamW(moments=moments, seed=5).noise("layers.0.weight", step)
        flat.update(AdamW(moments=moments), ours, gradient, scalars, noise)
        reference.update(AdamW(moments=moments), theirs, gradient, scalars, noise)
        for name in ours:
            assert byte_equal(ours[name], theirs[name]), (name, step)


@settings(max_examples=20, deadline=None)
@given(
    precision=st.sampled_from(["bf16", "fp32"]),
    moments=st.sampled_from(["bf16", "8bit"]),
    n=st.integers(1, 3000),
    cuts=st.lists(st.integers(1, 11), max_size=5),
    threads=st.integers(1, 3),
)
def test_bits_do_not_depend_on_how_a_parameter_is_cut(
    precision: Precision, moments: Moments, n: int, cuts: list[int], threads: int
) -> None:
    whole, gradient = encoded_block(precision, moments, n, seed=n)
    cut = copy_of(whole)
    noise = AdamW(moments=moments).noise("a", 4)
    flat.update(AdamW(moments=moments), whole, gradient, scalars_at(4), noise)
    specs = AdamW(moments=moments).states(precision)
    kernel = kernels.update_kernel(AdamW(moments=moments), precision)
    bounds = sorted({0, n, *(BLOCK * c for c in cuts if BLOCK * c < n)})

    def block(start: int, stop: int) -> None:
        addresses = [cut[spec.name].data_ptr() + spec.nbytes(start) for spec in specs]
        gradients = gradient.data_ptr() + start * gradient.element_size()
        kernel(*addresses, gradients, stop - start, *(() if noise is None else (start, *noise)), *scalars_at(4))

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(block, bounds[:-1], bounds[1:]))
    assert all(byte_equal(whole[name], cut[name]) for name in whole)


# --- stochastic rounding ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [1.0, -3.1415927, 1e-3, 1.00390625, 1e-40, -1e-45, 2.5e38, 0.0])
def test_stochastic_rounding_is_exact_on_average(value: float) -> None:
    """Over every value of the noise, in float64: the mean is the value itself, the error below one unit of bf16."""
    noise = torch.arange(65536)
    values = torch.full((65536,), value, dtype=torch.float32)
    rounded = reference.round_noisily(values, noise).double()
    assert rounded.mean().item() == values[0].item()
    assert (rounded - values.double()).abs().max() < 2.0**-7 * max(abs(value), 2.0**-126)


def test_values_that_bf16_has_and_the_extremes_stay_what_they_are() -> None:
    exact = EDGES.to(torch.bfloat16).float()
    exact = exact[exact.isfinite()]
    for noise in (0, 1, 65535):
        rounded = reference.round_noisily(exact, torch.full(exact.shape, noise))
        assert torch.equal(rounded.float(), exact)
    special = torch.tensor([torch.inf, -torch.inf, torch.nan, 3.4028235e38, -3.4028235e38])
    rounded = reference.round_noisily(special, torch.full(special.shape, 65535)).float()
    assert rounded[:2].tolist() == [torch.inf, -torch.inf]
    assert rounded[2].isnan()
    assert rounded[3:].isfinite().all()


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


def test_keys_are_what_the_contract_says() -> None:
    assert Key.of(0, "weight", 1) == Key(low=0x2159412C, high=0x3F4D8E97)
    keys = {Key.of(seed, name, step) for seed in range(3) for name in ("a", "b") for step in range(1, 4)}
    assert len(keys) == 18
    assert AdamW(moments="8bit").noise("weight", 1) is None


def test_a_second_moment_in_bf16_moves_by_less_than_its_unit() -> None:
    """Rounded to nearest it would stand still: 0.001 of the way to its goal is below half of bf16's unit."""
    n = 1 << 16
    states, _ = encoded_block("fp32", "bf16", n)
    states["exp_avg_sq_bf16"].fill_(1.0)
    gradient = torch.full((n,), 2.0)
    for step in range(1, 101):
        flat.update(AdamW(moments="bf16"), states, gradient, scalars_at(step), Key.of(0, "weight", step))
    expected = 4 - 3 * 0.999**100
    assert states["exp_avg_sq_bf16"].float().mean().item() == pytest.approx(expected, rel=1e-3)


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
@given(
    seed=st.integers(0, 1000),
    magnitude=st.floats(-36, 37),
    spread=st.floats(0, 9),
    n=st.integers(1, 1000),
)
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
    scale = scale_of_each(scales, n).double()
    error = (flat.decode_moment(moment, (codes, scales)).double() - values.double()).abs()
    table = map_of(moment).double()
    if not signed:
        table = table[1:]  # what is above zero never becomes zero
    nearest = (values.double()[:, None] / scale[:, None] - table).abs().amin(1) * scale
    assert (error <= nearest * (1 + 1e-5) + 2e-6 * values.double().abs() + 1e-45).all()
    assert (error <= (0.0111 if signed else 0.0039) * scale).all()
    large = values.abs() > 1e-4 * scale
    assert (error[large] <= (0.28 if signed else 0.19) * values.double().abs()[large]).all()


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
    states, gradient = encoded_block("fp32", "8bit", 3 * BLOCK)
    gradient[300] = poison
    flat.update(AdamW(moments="8bit"), states, gradient, scalars_at())
    for moment in ("exp_avg", "exp_avg_sq"):
        kept = [states[spec.name] for spec in AdamW(moments="8bit").states_of(moment)]
        nan = flat.decode_moment(moment, kept).isnan().view(3, BLOCK)
        assert nan[1].all()
        assert not nan[0].any()
        assert not nan[2].any()


def test_a_second_moment_above_zero_never_becomes_zero() -> None:
    """Else an element without a gradient in this step would move by m / eps."""
    values = torch.full((BLOCK,), 1e-30)
    values[0] = 1.0
    decoded = flat.decode_moment("exp_avg_sq", flat.encode_moment("exp_avg_sq", values, "8bit"))
    assert (decoded > 0).all()


def test_bytes_beside_the_weights() -> None:
    def beside(moments: Moments) -> float:
        return sum(s.dtype.itemsize / s.per for s in AdamW(moments=moments).states("bf16")[1:])

    assert [beside("fp32"), beside("bf16"), beside("8bit")] == [10, 6, 4 + 1 / 32]


def test_unknown_codecs_and_unfit_tensors_are_refused() -> None:
    with pytest.raises(ConfigError, match="AdamW moments is 'int4'; use one of fp32, bf16, 8bit"):
        AdamW(moments="int4")  # type: ignore[arg-type]
    states, gradient = encoded_block("bf16", "8bit", 600)
    with pytest.raises(ConfigError, match="exp_avg_scale has 2 elements; it must have 3"):
        flat.update(AdamW(moments="8bit"), {**states, "exp_avg_scale": torch.zeros(2)}, gradient, scalars_at())
    with pytest.raises(ConfigError, match=r"exp_avg is torch\.float64"):
        flat.encode_moment("exp_avg", torch.zeros(3, dtype=torch.float64), "8bit")
