"""GPU kernels give the bits of the CPU's: on a GPU where there is one, else in Triton's interpreter."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from pairwise import each_once
from triton_interpreter import round_fused_once

from pagoda.config.training import Precision
from pagoda.optim import Adafactor, adafactor_kernels
from pagoda.optim.adafactor import as_matrices
from pagoda.optim.rule import DTYPES
from pagoda.plan.buffers import BOUNCE_ELEMENTS

from . import test_adafactor as adafactor
from .blocks import (
    ALL_RULES,
    CASES,
    States,
    arguments,
    assert_same_states,
    join,
    random_states,
    random_values,
    same_bits,
    split,
    store_gradient,
    update,
)

pytest.importorskip("triton")
CUDA = torch.cuda.is_available()
if CUDA or os.environ.get("TRITON_INTERPRET") == "1":
    from pagoda.optim import triton_kernels

    round_fused_once()
else:
    pytest.skip("needs a GPU or TRITON_INTERPRET=1", allow_module_level=True)

DEVICE = torch.device("cuda" if CUDA else "cpu")
on_gpu = pytest.mark.skipif(not CUDA, reason="needs an NVIDIA GPU")


@pytest.fixture(autouse=True)
def _extremes_overflow() -> Iterator[None]:
    """The interpreter computes with numpy, which would warn of what the extremes are there for."""
    import numpy as np

    with np.errstate(all="ignore"):
        yield


def on_device(states: States) -> States:
    return {name: state.to(DEVICE) for name, state in states.items()}


def step(name: str, precision: Precision, states: States, gradient: torch.Tensor) -> None:
    kernel = triton_kernels.update_kernel(ALL_RULES[name], precision, gradient.dtype)
    kernel(list(states.values()), gradient, arguments(ALL_RULES[name]))


@each_once(
    name=[*ALL_RULES],
    precision=["bf16", "fp16", "fp32"],
    arriving=[(257, torch.float32), (700, torch.bfloat16), (1025, torch.float16), (257, torch.bfloat16)],
)
def test_any_number_of_elements_is_updated_and_none_beside_them(
    name: str, precision: Precision, arriving: tuple[int, torch.dtype]
) -> None:
    """By gradients of any dtype."""
    n, dtype = arriving
    theirs, gradient = random_states(ALL_RULES[name], precision, n + 256, seed=n)
    gradient = gradient[:n].to(dtype)
    ours = on_device({name: state.clone() for name, state in theirs.items()})
    step(name, precision, ours, gradient.to(DEVICE))
    update(name, precision, theirs, gradient)
    assert_same_states(ours, theirs)


@each_once(precision=["bf16", "fp16"], n=[1, 2500])
def test_masters_are_split_and_joined_with_the_bits_of_the_cpu(precision: Precision, n: int) -> None:
    master = random_values(n, 1e-1, torch.Generator().manual_seed(n), edges=True)
    theirs = split(master, DTYPES[precision])
    ours = [torch.zeros_like(half, device=DEVICE) for half in theirs]
    triton_kernels.convert_halves(*ours, master.to(DEVICE), joining=False)
    assert all(same_bits(mine.cpu(), half) for mine, half in zip(ours, theirs, strict=True))
    joined = torch.zeros(n, device=DEVICE)
    triton_kernels.convert_halves(*ours, joined, joining=True)
    assert same_bits(joined.cpu(), join(*theirs))


def random_gradient(precision: Precision, n: int, edges: bool = False) -> torch.Tensor:
    return random_values(n, 1.0, torch.Generator().manual_seed(n), edges).to(DTYPES[precision])


def square_sum(gradient: torch.Tensor, piece: int) -> list[float]:
    """The sums of a gradient's pieces, by the GPU's kernel."""
    pieces = -(-gradient.numel() // piece)
    sums = torch.full((pieces, 32), torch.nan, dtype=torch.float64, device=DEVICE)
    triton_kernels.square_sums(gradient.to(DEVICE), sums, piece)
    return [sum(lanes) for lanes in sums.tolist()]


def cpu_square_sum(gradient: torch.Tensor, piece: int) -> list[float]:
    return [store_gradient(torch.empty_like(part), part) for part in gradient.split(piece)]


@each_once(precision=["bf16", "fp16", "fp32"], n=[1, 100, 128, 1000, 2500])
def test_square_sums_have_the_bits_of_the_cpu(precision: Precision, n: int) -> None:
    gradient = random_gradient(precision, n, edges=n == 1000)
    assert square_sum(gradient, 1024) == cpu_square_sum(gradient, 1024)


ADAFACTORS = [
    (adafactor.DEFAULTS, (130, 3), "bf16", torch.bfloat16),
    (adafactor.AVERAGED, (2, 2, 4, 2), "fp16", torch.float32),
    pytest.param(adafactor.OTHERS, (2, 3, 1100), "fp32", torch.bfloat16, marks=pytest.mark.slow),
    pytest.param(adafactor.DEFAULTS, (2500,), "bf16", torch.float32, marks=pytest.mark.slow),
]


def check_adafactor(rule: Adafactor, theirs: States, gradients: list[torch.Tensor]) -> None:
    """Both kernels make the same of these states, step by step."""
    ours = on_device({name: state.clone() for name, state in theirs.items()})
    for step, gradient in enumerate(gradients, 1):
        for each, states, arrived in (
            (triton_kernels.update_adafactor, ours, gradient.to(DEVICE)),
            (adafactor_kernels.update, theirs, gradient),
        ):
            own = {name: state for name, state in states.items() if not name.startswith("weight")}
            scalars, low = rule.scalars(step, 0.5), states.get("weight_low")
            each(states["weight"], low, arrived, own, as_matrices(gradient.shape), scalars, rule.scale_parameter)
    assert_same_states(ours, theirs)


@pytest.mark.parametrize(("rule", "shape", "precision", "arriving"), ADAFACTORS)
def test_adafactor_has_the_bits_of_the_cpu(
    rule: Adafactor, shape: tuple[int, ...], precision: Precision, arriving: torch.dtype
) -> None:
    gradients = [adafactor.randn(shape, step).to(arriving) for step in (1, 2)]
    check_adafactor(rule, adafactor.fresh(rule, shape, precision), gradients)


@pytest.mark.parametrize(
    "gradient",
    [adafactor.telling(20, 1100, 0), adafactor.telling(20, 500, 0, 64), adafactor.telling(20, 200, 0).T.contiguous()],
    ids=["rows", "lanes", "columns"],
)
def test_adafactor_adds_up_in_the_order_of_the_cpu(gradient: torch.Tensor) -> None:
    states = adafactor.fresh(adafactor.DEFAULTS, tuple(gradient.shape))
    states["weight"] = adafactor.telling(1, gradient.numel(), 1).view(gradient.shape)
    check_adafactor(adafactor.DEFAULTS, states, [gradient])


PTX = """
import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from pagoda.optim import arithmetic, triton_adafactor, triton_updates

TYPES = dict.fromkeys(("n", "index", "key_low", "key_high", "matrices", "rows", "columns"), "i32")
TYPES |= dict.fromkeys(("column_var", "shares", "moment"), "*fp32")
TYPES |= dict.fromkeys(("sums", "weight_sum", "update_sum"), "*fp64")


def ptx(kernel, types, **constants):
    names = kernel.arg_names
    count = 8 if "has_moment" in constants else 7 if constants.get("rule", 0) > 1 else 9
    types = types | {"scalars": ("fp32",) * count}
    signature = {name: "constexpr" if name in constants else types.get(name, "fp32") for name in names}
    source = ASTSource(kernel, signature, {(names.index(name),): value for name, value in constants.items()})
    return triton.compile(source, GPUTarget("cuda", 90, 32), {"enable_fp_fusion": False}).asm["ptx"]

one_of = int(sys.argv[1])
for form in (0, 1, 2):
    weight = "*i16" if form else "*fp32"
    types = {**TYPES, "shown": weight, "weight": weight, "weight_low": weight, "gradient": weight}
    fp32, half = (types | dict.fromkeys(("first", "second"), kind) for kind in ("*fp32", "*i16"))
    codes = types | dict.fromkeys(("exp_avg", "exp_avg_sq"), "*u8")
    codes |= dict.fromkeys(("exp_avg_floor", "exp_avg_sq_floor"), "*fp32")
    kernels = [(triton_updates.update, fp32, {"rule": rule, "noisy": False, "size": 1024}) for rule in (0, 3, 1, 2, 4)]
    kernels.append((triton_updates.update, half, {"rule": 0, "noisy": True, "size": 1024}))
    kernels.append((triton_updates.adamw_8bit, codes, {"size": 1024}))
    whole = dict.fromkeys(("weight", "weight_low"), "*fp32")
    predicts = {"size": 1024, "predicts": True}
    kernels.insert(2, (triton_updates.update, fp32 | whole, {"rule": 0, "noisy": False, **predicts}))
    kernels.append((triton_updates.adamw_8bit, codes | whole, predicts))
    masters = types | {"master": "*fp32"}
    kernels += [(triton_updates.split, masters, {"size": 1024}), (triton_updates.join, masters, {"size": 1024})]
    kernels.append((triton_updates.square_sums, types, {"piece": 1 << 20}))
    kernels += [(triton_adafactor.sum_block, types, {"of": of}) for of in range(3)]
    kernels += [(triton_adafactor.step, types, {"has_moment": has, "size": 1024}) for has in (False, True)]
    kernels.append((triton_adafactor.sum_rows, types, {"tile": 16}))
    for kernel, types, constants in kernels[form % one_of :: one_of]:
        forms = {name: form for name in ("form", "arriving") if name in kernel.arg_names}
        if "predicts" in kernel.arg_names:
            forms["predicts"] = False
        fuses = constants.get("rule") in (arithmetic.SGD, arithmetic.SGD_MOMENTUM, arithmetic.LION)
        print("// Fuses:", fuses, ptx(kernel, types, **{**forms, **constants}))
"""


@pytest.mark.parametrize(("one_of", "kernels"), [(12, 6), pytest.param(1, 54, marks=pytest.mark.slow)])
def test_kernels_compile_for_a_gpu_without_approximate_operations_or_fused_ones_except_those_of_sgd_and_lion(
    one_of: int, kernels: int, tmp_path: Path
) -> None:
    """The compiler needs no GPU: what it makes for one divides and takes roots exactly, and fuses only where SGD and
    Lion say so. By default, two kernels of 18 in each precision, not the same ones."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", PTX, str(one_of)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(".entry") == kernels
    for exact in ("div.rn.f32", "sqrt.rn.f32", "mul.rn.f32", "add.rn.f32", "mul.rn.f64"):
        assert exact in done.stdout
    for other in ("fma.rn.f64", ".approx", ".full", ".ftz"):
        assert other not in done.stdout
    fuse = {(ptx.startswith("True"), "fma.rn.f32" in ptx) for ptx in done.stdout.split("// Fuses: ")[1:]}
    assert fuse == {(True, True), (False, False)}


# --- on a GPU ---------------------------------------------------------------------------------------------------


@on_gpu
@pytest.mark.gpu
@pytest.mark.parametrize(("name", "precision"), CASES)
def test_a_gpu_gives_the_bits_of_the_cpu_on_a_hundred_million_elements(name: str, precision: Precision) -> None:
    n = 100_000_000
    theirs, gradient = random_states(ALL_RULES[name], precision, n, seed=7)
    ours = on_device(theirs)
    for _ in range(2):
        step(name, precision, ours, gradient.to(DEVICE))
        update(name, precision, theirs, gradient)
    assert_same_states(ours, theirs)


@on_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_a_gpu_sums_squares_with_the_bits_of_the_cpu(precision: Precision) -> None:
    gradient = random_gradient(precision, 5 * BOUNCE_ELEMENTS + 12_345)
    assert square_sum(gradient, BOUNCE_ELEMENTS) == cpu_square_sum(gradient, BOUNCE_ELEMENTS)


@on_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(4000, 5000), (50_000, 64), (3, 1000, 1500), (2_000_000,)])
@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_a_gpu_updates_large_parameters_by_adafactor_with_the_bits_of_the_cpu(
    precision: Precision, shape: tuple[int, ...]
) -> None:
    gradients = [adafactor.randn(shape, step).to(DTYPES[precision]) for step in (1, 2)]
    check_adafactor(adafactor.OTHERS, adafactor.fresh(adafactor.OTHERS, shape, precision), gradients)
