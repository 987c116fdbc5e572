"""The update kernels compute what the rules define: bits, blocks, threads, formats, and how they were compiled."""

import os
import platform
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from typing import get_args

import numba
import pytest
import reference
import torch
from hypothesis import given, settings, strategies as st
from lion_pytorch import Lion as TheirLion
from pairwise import each_once

from pagoda.config.training import Precision
from pagoda.errors import ConfigError
from pagoda.jit import OPTIONS
from pagoda.optim import SGD, AdamW, Lion, flat, kernels
from pagoda.optim.arithmetic import BF16, FP16, FP32
from pagoda.optim.gradient_kernels import gradient_kernels
from pagoda.optim.jit import HAS_CONVERSIONS
from pagoda.optim.moments import BLOCK
from pagoda.optim.rule import DTYPES, ElementwiseRule

from .blocks import (
    ALL_RULES,
    EDGES,
    PREDICTING,
    RULES,
    States,
    assert_same_states,
    copy_of,
    floats,
    join,
    random_states,
    same_bits,
    split,
    update_part,
)

rules = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
precisions = pytest.mark.parametrize("precision", ["bf16", "fp32"])


@rules
@precisions
def test_a_kernel_gives_the_bits_of_the_reference(rule: ElementwiseRule, precision: Precision) -> None:
    """A NaN reaches what it reaches there."""
    ours, gradient = random_states(rule, precision, 50_007, seed=1)
    gradient[37] = torch.nan
    theirs = copy_of(ours)
    for step, grad_scale in ((1, 1.0), (2, 0.37), (3, 1.0), (1000, 1.0)):
        noise = rule.noise("layers.0.weight", step)
        flat.update(rule, ours, gradient, rule.scalars(step, grad_scale), noise)
        reference.update(rule, theirs, gradient, rule.scalars(step, grad_scale), noise)
        assert_same_states(ours, theirs)


@pytest.mark.parametrize("name", ["adamw", "adam", "sgd", "momentum", "nesterov", "signsgd", "lion"])
def test_every_combination_of_edge_values_gives_the_bits_of_the_reference(name: str) -> None:
    rule, edges = RULES[name], EDGES[torch.tensor([0, 1, 3, 4, 9, 16, 19, 22, 27, 30, 33])]
    names = [state.name for state in rule.states("fp32")]
    axes = [edges.abs() if each == "exp_avg_sq" else edges for each in (*names, "gradient")]
    *values, gradient = (axis.reshape(-1).contiguous() for axis in torch.meshgrid(*axes, indexing="ij"))
    for grad_scale in (1.0, 1e-6):
        ours = dict(zip(names, (value.clone() for value in values), strict=True))
        theirs = copy_of(ours)
        flat.update(rule, ours, gradient, rule.scalars(5, grad_scale))
        reference.update(rule, theirs, gradient, rule.scalars(5, grad_scale))
        assert_same_states(ours, theirs)


@settings(max_examples=40, deadline=None)
@given(
    rule=st.sampled_from(list(RULES.values())),
    precision=st.sampled_from(get_args(Precision)),
    n=st.integers(1, 3000),
    cuts=st.lists(st.integers(1, 2999), max_size=6),
    threads=st.integers(1, 3),
)
def test_bits_do_not_depend_on_block_boundaries_or_threads(
    rule: ElementwiseRule, precision: Precision, n: int, cuts: list[int], threads: int
) -> None:
    whole, gradient = random_states(rule, precision, n, seed=n)
    cut, scalars, noise = copy_of(whole), rule.scalars(4, 0.5), rule.noise("a", 4)
    flat.update(rule, whole, gradient, scalars, noise)
    step = BLOCK if rule is RULES["adamw-8bit"] else 1
    bounds = sorted({0, n, *(cut // step * step for cut in cuts if cut < n)})
    with ThreadPoolExecutor(threads) as pool:
        parts = map(slice, bounds[:-1], bounds[1:])
        list(pool.map(lambda part: update_part(rule, precision, cut, gradient, scalars, noise, part), parts))
    assert_same_states(whole, cut)


@each_once(form=[*product(get_args(Precision), (torch.bfloat16, torch.float16, torch.float32))], rule=[*RULES.values()])
def test_any_format_is_updated_as_fp32_is(form: tuple[Precision, torch.dtype], rule: ElementwiseRule) -> None:
    """So the 16-bit weight is the high half of its own master. With noise, which an element's index decides."""
    precision, gradient = form
    n, dtype = 4_999, DTYPES[precision]
    own = {s.name: torch.zeros(s.elements(n), dtype=s.dtype) for s in rule.own_states()}
    plain, master = copy_of(own), floats(5, n)
    weights = {"weight": master.clone()}
    if precision != "fp32":
        weights = dict(zip(("weight", "weight_low"), split(master, dtype), strict=True))
    for step in range(1, 4):
        grad, noise, scalars = floats(10 + step, n).to(gradient), rule.noise("name", step), rule.scalars(step, 0.25)
        flat.update(rule, weights | own, grad, scalars, noise)
        flat.update(rule, {"weight": master} | plain, grad.float(), scalars, noise)
        if precision == "fp16":  # what it cannot keep
            master = join(*split(master, dtype))
    assert weights["weight"].dtype is dtype
    assert same_bits(weights["weight"] if precision == "fp32" else join(*weights.values()), master)
    assert_same_states(own, plain)


@each_once(form=[*product(get_args(Precision), (torch.bfloat16, torch.float32))], name=[*PREDICTING])
def test_predicted_weights_are_as_many_steps_ahead_and_the_masters_are_those_of_an_update_without(
    form: tuple[Precision, torch.dtype], name: str
) -> None:
    (precision, gradient), rule, n = form, PREDICTING[name], 4_999
    dtype, plain_rule = DTYPES[precision], RULES[name.removesuffix(", predicting")]
    own = {s.name: torch.zeros(s.elements(n), dtype=s.dtype) for s in rule.own_states()}
    plain, master = copy_of(own), floats(5, n)
    weights = {"weight": torch.full((n,), torch.nan, dtype=dtype), "master": master.clone()}
    for step in range(1, 4):
        grad, noise, scalars = floats(10 + step, n).to(gradient), rule.noise("name", step), rule.scalars(step, 0.25)
        before = master.clone()
        flat.update(rule, weights | own, grad, scalars, noise)
        flat.update(plain_rule, {"weight": master} | plain, grad, scalars, noise)
        assert same_bits(weights["master"], master)
        assert same_bits(weights["weight"], flat.weights_of(master - (before - master) * rule.ahead, dtype))
        assert_same_states(own, plain)


@each_once(rule=[*ALL_RULES.values()], precision=get_args(Precision), n=[1, BLOCK, 5_003])
def test_new_states_written_elsewhere_are_those_of_an_update_in_place(
    rule: ElementwiseRule, precision: Precision, n: int
) -> None:
    """The old states stay, and targets may lie at any address, or be the old states."""
    old, gradient = random_states(rule, precision, n, seed=n)
    kept, new = copy_of(old), copy_of(old)
    noise = rule.noise("a", 4)
    numbers = (*(() if noise is None else (17, *noise)), *rule.arguments, *rule.scalars(4, 0.5))

    def update(states: States, *targets: int) -> None:
        elsewhere = bool(targets)
        kernel = kernels.update_kernel(rule, precision, gradient.dtype, elsewhere)
        kernel(*addresses(states), gradient.data_ptr(), n, *targets, *numbers)

    def addresses(states: States) -> list[int]:
        return [states[state.name].data_ptr() for state in rule.states(precision)]

    update(new)
    for shift in (0, 1):  # on a cache line, and off it
        room = {name: torch.zeros(len(state) + 64, dtype=state.dtype) for name, state in old.items()}
        places = {
            name: tensor[(-tensor.data_ptr() // tensor.itemsize) % (64 // tensor.itemsize) + shift :][: len(old[name])]
            for name, tensor in room.items()
        }
        update(old, *addresses(places))
        assert_same_states(places, new)
        assert_same_states(old, kept)
    update(old, *addresses(old))
    assert_same_states(old, new)


# --- torch's classes --------------------------------------------------------------------------------------------

SGDS = [
    {"lr": lr, "weight_decay": weight_decay, **momentum}
    for lr, weight_decay in ((0.1, 0.01), (0.1, 0.0), (0.0, 0.01))
    for momentum in ({}, {"momentum": 0.9}, {"momentum": 0.9, "dampening": 0.1}, {"momentum": 0.9, "nesterov": True})
]
HOSTILE = torch.cat((EDGES, torch.tensor([torch.inf, -torch.inf, torch.nan])))


def hostile(n: int, generator: torch.Generator) -> torch.Tensor:
    """Values shape [n], of which half are from `HOSTILE`."""
    picked = HOSTILE[torch.randint(len(HOSTILE), (n,), generator=generator)]
    return torch.where(torch.rand(n, generator=generator) < 0.5, picked, torch.randn(n, generator=generator))


@pytest.mark.skipif(not reference.TORCH_FUSES, reason="torch does not fuse on this CPU")
@pytest.mark.parametrize("foreach", [False, True])
def test_sgd_has_torchs_bits_with_every_setting_of_any_values_in_any_number(foreach: bool) -> None:
    generator = torch.Generator().manual_seed(6)
    for group in SGDS:
        rule, sizes = SGD(**group), (*range(1, 36), 63, 64, 65, 127, 1000, 5003)
        params = [torch.nn.Parameter(hostile(n, generator)) for n in sizes]
        ours = [{spec.name: torch.zeros(param.shape) for spec in rule.states("fp32")} for param in params]
        for states, param in zip(ours, params, strict=True):
            states["weight"].copy_(param.detach())
        optimizer = torch.optim.SGD(params, **group, foreach=foreach)
        for step in range(1, 4):
            for states, param in zip(ours, params, strict=True):
                gradient = hostile(len(param), generator)
                param.grad = gradient.clone()
                flat.update(rule, states, gradient, rule.scalars(step))
            optimizer.step()
        for states, param in zip(ours, params, strict=True):
            theirs = {name: optimizer.state[param][name] for name in states if name != "weight"}
            assert_same_states(states, {"weight": param.detach(), **theirs})


@pytest.mark.slow
def test_a_cpu_without_fused_instructions_computes_sgd_with_the_same_bits() -> None:
    environment = {**os.environ, "NUMBA_CPU_NAME": "generic"}
    tests = (f"{__file__}::test_a_kernel_gives_the_bits_of_the_reference", "-k", "sgd or momentum or nesterov")
    subprocess.run([sys.executable, "-m", "pytest", "-n", "0", *tests], check=True, env=environment)


def beside_torch(rule: ElementwiseRule) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Our states and those of torch's class after ten steps from zero states with random gradients."""
    n = 20_000
    states, _ = random_states(rule, "fp32", n, seed=3, edges=False)
    for state in rule.own_states():
        states[state.name].zero_()
    parameter = torch.nn.Parameter(states["weight"].clone())
    if isinstance(rule, Lion):
        optimizer: torch.optim.Optimizer = TheirLion([parameter], **rule.defaults())
    else:
        optimizer = getattr(torch.optim, rule.name)([parameter], **rule.defaults(), foreach=False)
    generator = torch.Generator().manual_seed(4)
    for step in range(1, 11):
        gradient = torch.randn(n, generator=generator)
        parameter.grad = gradient.clone()
        optimizer.step()
        flat.update(rule, states, gradient, rule.scalars(step))
    theirs = {state.name: optimizer.state[parameter][state.name] for state in rule.own_states()}
    return states, {"weight": parameter.detach(), **theirs}


@pytest.mark.parametrize("betas", [(0.9, 0.99), (0.95, 0.98), (0.9, 0.9)])
def test_bits_of_lion_are_those_of_its_package(betas: tuple[float, float]) -> None:
    assert_same_states(*beside_torch(Lion(lr=3e-3, betas=betas, weight_decay=0.1)))


@pytest.mark.parametrize("name", ["adamw", "adam"])
def test_ten_steps_agree_with_torch_within_rounding(name: str) -> None:
    """Each of at most ten operations rounds to 2**-24 of its result. In a step that moves what the weight moves by at
    most 16 roundings of it, the weight by two of its own; a buffer carries its errors on for every later step."""
    rule = RULES[name]
    steps, unit = 10, 2.0**-24
    states, theirs = beside_torch(rule)
    bound = unit * (16 * rule.lr * steps * steps + 4 * steps * theirs["weight"].abs())
    assert ((states["weight"] - theirs["weight"]).abs() <= bound).all()
    assert bound.max() < 1e-2 * rule.lr


# --- how they were compiled -------------------------------------------------------------------------------------


@pytest.mark.skipif(platform.machine() != "x86_64", reason="reads x86 assembly")
@pytest.mark.parametrize(
    ("name", "weights", "gradients", "elsewhere"),
    [
        ("adamw", FP16, FP16, False),
        ("adamw", FP32, FP16, True),
        (RULES["adamw-bf16"].kernel_name, BF16, BF16, False),
        (RULES["adamw-bf16"].kernel_name, BF16, BF16, True),
        ("sgd_momentum", FP32, BF16, False),
        ("lion", FP32, BF16, False),
    ],
)
def test_kernels_compile_to_vectors_in_which_only_sgd_and_lion_fuse(
    name: str, weights: int, gradients: int, elsewhere: bool
) -> None:
    """What is written elsewhere bypasses the cache."""
    if numba.core.config.CPU_NAME == "generic":
        pytest.skip("compiled for a generic CPU")
    rule = next(rule for rule in RULES.values() if rule.kernel_name == name)
    fresh = numba.njit(**OPTIONS)(kernels.compiled(name, weights, gradients, elsewhere, False).py_func)
    noise = () if rule.noise("", 1) is None else (0, 0, 0)
    fresh(*[0] * 6, *[0] * 4 * elsewhere, *noise, *rule.scalars(1))
    (assembly,) = fresh.inspect_asm().values()
    if HAS_CONVERSIONS:
        assert bool(re.search("vcvtph2ps.*%[yz]mm", assembly)) == (FP16 in (weights, gradients))
        assert bool(re.search("vcvtps2ph.*%[yz]mm", assembly)) == (weights == FP16)
    assert ("movnt" in assembly) == elsewhere
    fuses = name in ("sgd_momentum", "lion")
    assert bool(re.search("vfmadd...ps.*%[yz]mm", assembly)) == ("fmadd" in assembly) == fuses
    for absent in ("fnmadd", "fmaf", "rsqrt", "rcp"):
        assert absent not in assembly
    for present in ("mulps", *(("sqrtps", "divps") if "adam" in name else ())):
        assert present in assembly


_FLAGS = [*product((False, True), repeat=2)]
"""Whether a kernel writes elsewhere, and whether it predicts."""


def test_each_form_is_cached_in_files_of_its_own() -> None:
    """Several in one could be taken for each other: see `jit.kernel`."""
    forms = [(weights, gradients) for weights in (FP32, BF16, FP16) for gradients in (FP32, BF16, FP16)]
    names = {rule.kernel_name for rule in RULES.values()}
    made = [kernels.compiled(name, *pair, *flags) for name in names for pair in forms for flags in _FLAGS]
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    made += [taking for kept in dtypes for taking in gradient_kernels(kept)]
    made += [taking for arriving in dtypes[1:] for taking in gradient_kernels(torch.float32, arriving)]
    made += [kernels.halves(dtype, joining) for dtype in dtypes[1:] for joining in (False, True)]
    files = {kernel.stats.cache_path + kernel._cache._impl.filename_base for kernel in made}
    assert len(files) == len(made)


AFTER_WARM_UP = """
import warnings
warnings.simplefilter("error")
import torch
from pagoda.optim import AdamW, flat, kernels
from pagoda.optim.rule import DTYPES
from pagoda.optim.arithmetic import FORMS
from pagoda.optim.gradient_kernels import gradient_kernels
from pagoda.optim.warm import warm_up

def compiled():
    return [len(kernel.signatures) for kernel in used]

for precision in ("bf16", "fp32"):
    warm_up(AdamW(), precision, elsewhere=True)
    dtype = DTYPES[precision]
    used = [*gradient_kernels(dtype)]
    used += [kernels.compiled("adamw", FORMS[dtype], FORMS[dtype], elsewhere, False) for elsewhere in (False, True)]
    used += [kernels.halves(dtype, joining) for joining in (False, True) if precision != "fp32"]
    before = compiled()
    gradient, into = torch.ones(2, 10, dtype=dtype)
    states = {spec.name: torch.zeros(10, dtype=spec.dtype) for spec in AdamW().states(precision)}
    flat.update(AdamW(), states, gradient, AdamW().scalars(1))
    addresses = [state.data_ptr() for state in states.values()]
    elsewhere = kernels.update_kernel(AdamW(), precision, elsewhere=True)
    elsewhere(*addresses, gradient.data_ptr(), 10, *addresses, *AdamW().scalars(1))
    for take in used[:2]:
        take(into.data_ptr(), gradient.data_ptr(), 10)
    if precision != "fp32":
        master = torch.zeros(10)
        flat.split(master, states["weight"], states["weight_low"])
        flat.join(states["weight"], states["weight_low"], master)
    assert compiled() == before == [1] * len(used), (before, compiled())
"""


def test_after_warm_up_nothing_is_left_to_compile() -> None:
    """In a process of its own, where a kernel that Numba cannot cache would warn, too."""
    subprocess.run([sys.executable, "-c", AFTER_WARM_UP], check=True)


def test_tensors_a_kernel_cannot_take_are_refused_by_name() -> None:
    states, gradient = random_states(AdamW(), "bf16", 64)
    whole = states["exp_avg"]
    for unfit in (whole[1:], whole.double(), whole.repeat(2)[::2], whole.to("meta")):
        with pytest.raises(ConfigError, match=r"exp_avg has 6[34] elements of .*; it must have 64 of torch\.float32"):
            flat.update(AdamW(), {**states, "exp_avg": unfit}, gradient, AdamW().scalars(1))
    with pytest.raises(ConfigError, match=r"exp_avg has 3 elements of torch\.float64"):
        flat.encode_moment("exp_avg", torch.zeros(3, dtype=torch.float64), "8bit")
