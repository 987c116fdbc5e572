"""The AdamW kernels keep the contract: bits, blocks, threads, and how they were compiled."""

import platform
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numba
import pytest
import reference
import torch
from hypothesis import given, settings, strategies as st

from pagoda.config.training import Precision
from pagoda.errors import ConfigError
from pagoda.jit import OPTIONS
from pagoda.optim import AdamW, Scalars, flat, fp16, kernels
from pagoda.optim.elements import BF16, FP16, FP32
from pagoda.optim.gradient_kernels import gradient_kernels

from .blocks import EDGES, copy_of, random_block, same_bits

PRECISIONS: tuple[Precision, ...] = ("bf16", "fp32")
precisions = pytest.mark.parametrize("precision", PRECISIONS)


def scalars_at(step: int = 1, grad_scale: float = 1.0, **settings: float) -> Scalars:
    return AdamW(**settings).scalars(step, grad_scale)


def step_in_blocks(
    states: dict[str, torch.Tensor],
    gradient: torch.Tensor,
    scalars: Scalars,
    cuts: list[int],
    threads: int = 1,
) -> None:
    """One step by address, with block boundaries at ``cuts``, on plain Python threads."""
    n = gradient.numel()
    tensors = [*states.values(), gradient]
    kernel = kernels.update_kernel(AdamW(), "bf16" if gradient.dtype is torch.bfloat16 else "fp32")
    bounds = sorted({0, n, *(cut for cut in cuts if 0 < cut < n)})

    def block(start: int, end: int) -> None:
        kernel(*(t.data_ptr() + start * t.element_size() for t in tensors), end - start, *scalars)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(block, bounds[:-1], bounds[1:]))


@precisions
@pytest.mark.parametrize("edges", [False, True])
@pytest.mark.parametrize("grad_scale", [1.0, 0.37])
def test_kernel_gives_the_bits_of_the_reference(precision: Precision, edges: bool, grad_scale: float) -> None:
    ours, gradient = random_block(precision, 50_007, seed=1, edges=edges)
    theirs = copy_of(ours)
    for step in (1, 2, 3, 1000):
        scalars = scalars_at(step, grad_scale, lr=3e-3, weight_decay=0.1)
        flat.update(AdamW(), ours, gradient, scalars)
        reference.update(AdamW(), theirs, gradient, scalars)
        for name in ours:
            assert same_bits(ours[name], theirs[name]), (name, step)


def test_every_pair_of_edge_values_gives_the_bits_of_the_reference() -> None:
    w, m, v, g = (axis.reshape(-1) for axis in torch.meshgrid(EDGES, EDGES, EDGES.abs(), EDGES, indexing="ij"))
    for grad_scale in (1.0, 1e-6):
        ours = {"weight": w.clone(), "exp_avg": m.clone(), "exp_avg_sq": v.clone()}
        theirs = copy_of(ours)
        flat.update(AdamW(), ours, g.contiguous(), scalars_at(5, grad_scale))
        reference.update(AdamW(), theirs, g.contiguous(), scalars_at(5, grad_scale))
        assert all(same_bits(ours[name], theirs[name]) for name in ours)


@precisions
def test_a_nan_gradient_reaches_weight_and_moments(precision: Precision) -> None:
    states, gradient = random_block(precision, 100)
    gradient[37] = torch.nan
    flat.update(AdamW(), states, gradient, scalars_at())
    for name in ("weight", "exp_avg", "exp_avg_sq"):
        assert states[name].isnan().nonzero().tolist() == [[37]]


@settings(max_examples=30, deadline=None)
@given(
    precision=st.sampled_from(PRECISIONS),
    n=st.integers(1, 3000),
    cuts=st.lists(st.integers(1, 2999), max_size=6),
    threads=st.integers(1, 3),
)
def test_bits_do_not_depend_on_block_boundaries_or_threads(
    precision: Precision, n: int, cuts: list[int], threads: int
) -> None:
    whole, gradient = random_block(precision, n, seed=n, edges=True)
    cut = copy_of(whole)
    flat.update(AdamW(), whole, gradient, scalars_at(4, 0.5))
    step_in_blocks(cut, gradient, scalars_at(4, 0.5), cuts, threads)
    assert all(same_bits(whole[name], cut[name]) for name in whole)


def test_many_blocks_on_many_threads_give_the_bits_of_one_call() -> None:
    whole, gradient = random_block("bf16", 1_000_003, seed=9)
    cut = copy_of(whole)
    flat.update(AdamW(), whole, gradient, scalars_at())
    step_in_blocks(cut, gradient, scalars_at(), list(range(0, 1_000_003, 4096)), threads=4)
    assert all(same_bits(whole[name], cut[name]) for name in whole)


def test_ten_steps_agree_with_torch_adamw_within_rounding() -> None:
    """In fp32 both round each of about ten operations to 2**-24 of its result. In one step that moves the
    update, at most about lr, by under 16 * 2**-24 * lr, and the weight by 2 * 2**-24 of itself for the decay
    and the update. The moments carry their errors on, so the first counts once for every earlier step."""
    lr, steps, n = 1e-2, 10, 20_000
    states, _ = random_block("fp32", n, seed=3)
    states["exp_avg"].zero_()
    states["exp_avg_sq"].zero_()
    parameter = torch.nn.Parameter(states["weight"].clone())
    optimizer = torch.optim.AdamW([parameter], lr=lr, weight_decay=0.1, foreach=False)
    generator = torch.Generator().manual_seed(4)
    for step in range(1, steps + 1):
        gradient = torch.randn(n, generator=generator)
        parameter.grad = gradient.clone()
        optimizer.step()
        flat.update(AdamW(), states, gradient, scalars_at(step, lr=lr, weight_decay=0.1))
    unit = 2.0**-24
    expected = parameter.detach()
    bound = unit * (16 * lr * steps * steps + 4 * steps * expected.abs())
    assert ((states["weight"] - expected).abs() <= bound).all()
    assert bound.max() < 1e-3 * lr


def test_the_bf16_weight_is_its_own_fp32_master() -> None:
    split, gradient = random_block("bf16", 10_000, seed=5)
    whole = {
        "weight": reference.join(split["weight"], split["weight_low"]),
        "exp_avg": split["exp_avg"].clone(),
        "exp_avg_sq": split["exp_avg_sq"].clone(),
    }
    for step in (1, 2, 3):
        flat.update(AdamW(), split, gradient, scalars_at(step))
        flat.update(AdamW(), whole, gradient.float(), scalars_at(step))
    assert same_bits(reference.join(split["weight"], split["weight_low"]), whole["weight"])


@pytest.mark.skipif(platform.machine() != "x86_64", reason="reads x86 assembly")
@pytest.mark.parametrize(("weights", "gradients"), [(BF16, BF16), (FP32, FP32), (FP16, FP16), (FP32, FP16)])
def test_adamw_compiles_to_vectors_without_fused_operations(weights: int, gradients: int) -> None:
    if numba.core.config.CPU_NAME == "generic":
        pytest.skip("compiled for a generic CPU")
    fresh = numba.njit(**OPTIONS)(kernels.compiled("adamw", weights, gradients).py_func)
    fresh(*[0] * 6, *[0.5] * len(Scalars._fields))
    (assembly,) = fresh.inspect_asm().values()
    if fp16.HAS_CONVERSIONS:
        assert bool(re.search("vcvtph2ps.*%[yz]mm", assembly)) == (FP16 in (weights, gradients))
        assert bool(re.search("vcvtps2ph.*%[yz]mm", assembly)) == (weights == FP16)
    assert "fmadd" not in assembly
    assert "fnmadd" not in assembly
    assert "sqrtps" in assembly
    assert "divps" in assembly
    assert "rsqrt" not in assembly
    assert "rcp" not in assembly


def test_each_form_is_cached_in_files_of_its_own() -> None:
    """Several in one could be taken for each other: see `jit.kernel`."""
    forms = [(weights, gradients) for weights in (FP32, BF16, FP16) for gradients in (FP32, BF16, FP16)]
    made = [kernels.compiled(name, *pair) for name in ("adamw", "adamw_moments_8bit", "lion") for pair in forms]
    made += [taking for pair in forms for taking in gradient_kernels(*pair)]
    files = {kernel.stats.cache_path + kernel._cache._impl.filename_base for kernel in made}
    assert len(files) == len(set(made))


@precisions
def test_after_warm_up_nothing_is_left_to_compile(precision: Precision) -> None:
    """In a process of its own, where a kernel that Numba cannot cache would warn, too."""
    script = f"""
import warnings
warnings.simplefilter("error")
import torch
from pagoda.optim import AdamW, flat, formats, gradient_dtype, kernels
from pagoda.optim.elements import FORMS
formats.warm_up(AdamW(), {precision!r})
dtype = gradient_dtype({precision!r})
used = [*formats.gradient_kernels(dtype), kernels.compiled("adamw", FORMS[dtype], FORMS[dtype])]
used += formats.halves(dtype) if {precision!r} != "fp32" else ()
def compiled():
    return [len(kernel.signatures) for kernel in used]
before = compiled()
gradient = torch.ones(10, dtype=dtype)
states = {{spec.name: torch.zeros(10, dtype=spec.dtype) for spec in AdamW().states({precision!r})}}
flat.update(AdamW(), states, gradient, AdamW().scalars(1))
flat.store_gradient(gradient.clone(), gradient)
flat.add_gradient(gradient.clone(), gradient)
if {precision!r} != "fp32":
    master = torch.zeros(10)
    flat.split(master, states["weight"], states["weight_low"])
    flat.join(states["weight"], states["weight_low"], master)
assert compiled() == before == [1] * len(used), (before, compiled())
"""
    subprocess.run([sys.executable, "-c", script], check=True)


@precisions
def test_tensors_a_kernel_cannot_take_are_refused_by_name(precision: Precision) -> None:
    states, gradient = random_block(precision, 64)
    kernels.warm_up(AdamW(), precision)
    with pytest.raises(ConfigError, match="exp_avg has 63 elements; it must have 64"):
        flat.update(AdamW(), {**states, "exp_avg": states["exp_avg"][1:]}, gradient, scalars_at())
    with pytest.raises(ConfigError, match=r"exp_avg_sq is torch\.float64"):
        flat.update(AdamW(), {**states, "exp_avg_sq": states["exp_avg_sq"].double()}, gradient, scalars_at())
    with pytest.raises(ConfigError, match="gradient has strides"):
        flat.update(AdamW(), states, gradient.repeat(2)[::2], scalars_at())
    with pytest.raises(ConfigError, match="exp_avg is on meta"):
        flat.update(AdamW(), {**states, "exp_avg": states["exp_avg"].to("meta")}, gradient, scalars_at())
    with pytest.raises(ConfigError, match="exp_avg is missing"):
        flat.update(AdamW(), {k: v for k, v in states.items() if k != "exp_avg"}, gradient, scalars_at())
    with pytest.raises(ConfigError, match=r"src is torch\.float64"):
        flat.store_gradient(gradient, gradient.double())
    with pytest.raises(ConfigError, match=r"dst is torch\.float64"):
        flat.add_gradient(gradient.double(), gradient.double())
