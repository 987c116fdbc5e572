"""Adam, SGD and Lion keep their contracts, and are what torch (or the package) of that name does."""

import math
import platform
from dataclasses import dataclass

import numba
import numpy as np
import pytest
import reference
import torch

from pagoda.config.training import Precision
from pagoda.errors import ConfigError
from pagoda.jit import OPTIONS
from pagoda.optim import SGD, Adam, ElementwiseRule, Lion, flat, kernels

from .blocks import EDGES, copy_of, random_block, same_bits

RULES: dict[str, ElementwiseRule] = {
    "adam": Adam(lr=3e-3, weight_decay=0.1),
    "sgd": SGD(lr=3e-2, weight_decay=0.1),
    "momentum": SGD(lr=3e-2, momentum=0.9, dampening=0.1, weight_decay=0.1),
    "nesterov": SGD(lr=3e-2, momentum=0.9, nesterov=True),
    "lion": Lion(lr=3e-3, weight_decay=0.1),
}
rules = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
precisions = pytest.mark.parametrize("precision", ["bf16", "fp32"])


def block_of(
    rule: ElementwiseRule, precision: Precision, n: int, seed: int = 0, edges: bool = False
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Random states of a rule, in the order of its kernel, and a gradient."""
    return random_block(precision, n, seed=seed, edges=edges, moments=[state.name for state in rule.own_states()])


@rules
@precisions
@pytest.mark.parametrize("edges", [False, True])
def test_kernel_gives_the_bits_of_the_reference(rule: ElementwiseRule, precision: Precision, edges: bool) -> None:
    ours, gradient = block_of(rule, precision, 50_007, seed=1, edges=edges)
    theirs = copy_of(ours)
    for step, grad_scale in ((1, 1.0), (2, 0.37), (3, 1.0), (1000, 1.0)):
        scalars = rule.scalars(step, grad_scale)
        flat.update(rule, ours, gradient, scalars)
        reference.update(rule, theirs, gradient, scalars)
        for name in ours:
            assert same_bits(ours[name], theirs[name]), (name, step)


@rules
def test_every_triple_of_edge_values_gives_the_bits_of_the_reference(rule: ElementwiseRule) -> None:
    w, m, g = (axis.reshape(-1) for axis in torch.meshgrid(EDGES, EDGES, EDGES, indexing="ij"))
    ours = {"weight": w.clone()}
    for state in rule.own_states():
        ours[state.name] = m.abs() if state.name == "exp_avg_sq" else m.clone()
    theirs = copy_of(ours)
    flat.update(rule, ours, g.contiguous(), rule.scalars(5))
    reference.update(rule, theirs, g.contiguous(), rule.scalars(5))
    assert all(same_bits(ours[name], theirs[name]) for name in ours)


@rules
@precisions
def test_bits_do_not_depend_on_block_boundaries(rule: ElementwiseRule, precision: Precision) -> None:
    whole, gradient = block_of(rule, precision, 3001, seed=2, edges=True)
    cut = copy_of(whole)
    scalars = rule.scalars(4, 0.5)
    flat.update(rule, whole, gradient, scalars)
    for start, stop in ((0, 1), (1, 255), (255, 2048), (2048, 3001)):
        flat.update(rule, {n: s[start:stop] for n, s in cut.items()}, gradient[start:stop], scalars)
    assert all(same_bits(whole[name], cut[name]) for name in whole)


@rules
def test_the_bf16_weight_is_its_own_fp32_master(rule: ElementwiseRule) -> None:
    split, gradient = block_of(rule, "bf16", 10_000, seed=5)
    whole = copy_of(split)
    whole["weight"] = reference.join(split["weight"], whole.pop("weight_low"))
    for step in (1, 2, 3):
        flat.update(rule, split, gradient, rule.scalars(step))
        flat.update(rule, whole, gradient.float(), rule.scalars(step))
    assert same_bits(reference.join(split["weight"], split["weight_low"]), whole["weight"])


@pytest.mark.skipif(platform.machine() != "x86_64", reason="reads x86 assembly")
@rules
def test_kernels_compile_to_vectors_without_fused_operations(rule: ElementwiseRule) -> None:
    if numba.core.config.CPU_NAME == "generic":
        pytest.skip("compiled for a generic CPU")
    fresh = numba.njit(**OPTIONS)(kernels.update_kernel(rule, "bf16").py_func)
    fresh(*[0] * (len(rule.states("bf16")) + 2), *rule.scalars(1))
    (assembly,) = fresh.inspect_asm().values()
    assert "fmadd" not in assembly
    assert "fnmadd" not in assembly
    assert "mulps" in assembly


@dataclass(frozen=True)
class Theirs:
    """torch's class of a rule."""

    rule: ElementwiseRule
    kind: type[torch.optim.Optimizer]
    settings: dict[str, object]


def lion_pytorch(params: list[torch.nn.Parameter], **settings: float) -> torch.optim.Optimizer:
    from lion_pytorch import Lion as TheirLion

    return TheirLion(params, **settings)


EXACT = {
    "sgd": Theirs(SGD(lr=2**-5, weight_decay=2**-4), torch.optim.SGD, {"foreach": False}),
    "momentum": Theirs(
        SGD(lr=2**-5, momentum=0.9, dampening=0.5, weight_decay=2**-4), torch.optim.SGD, {"foreach": False}
    ),
    "nesterov": Theirs(SGD(lr=2**-5, momentum=0.5, nesterov=True), torch.optim.SGD, {"foreach": False}),
    "lion": Theirs(Lion(lr=3e-3, betas=(0.875, 0.96875), weight_decay=0.1), lion_pytorch, {}),
}


def beside_torch(
    rule: ElementwiseRule, theirs: Theirs, steps: int = 10
) -> tuple[dict[str, torch.Tensor], torch.Tensor, dict[str, torch.Tensor]]:
    """Our states, and torch's parameter and states, after as many steps from zero states with random gradients."""
    n = 20_000
    states, _ = block_of(rule, "fp32", n, seed=3)
    for state in rule.own_states():
        states[state.name].zero_()
    parameter = torch.nn.Parameter(states["weight"].clone())
    optimizer = theirs.kind([parameter], **rule.defaults(), **theirs.settings)
    generator = torch.Generator().manual_seed(4)
    for step in range(1, steps + 1):
        gradient = torch.randn(n, generator=generator)
        parameter.grad = gradient.clone()
        optimizer.step()
        flat.update(rule, states, gradient, rule.scalars(step))
    return states, parameter.detach(), optimizer.state[parameter]


@pytest.mark.parametrize("theirs", EXACT.values(), ids=EXACT)
def test_bits_are_torchs_where_a_fused_product_is_exact(theirs: Theirs) -> None:
    states, parameter, others = beside_torch(theirs.rule, theirs)
    assert same_bits(states["weight"], parameter)
    for state in theirs.rule.own_states():
        assert same_bits(states[state.name], others[state.name])


@pytest.mark.parametrize("name", ["adam", "sgd", "momentum", "nesterov"])
def test_ten_steps_agree_with_torch_within_rounding(name: str) -> None:
    """Each of at most ten operations rounds to 2**-24 of its result. In a step that moves what the weight moves by at
    most 16 roundings of it, the weight by two of its own; a buffer carries its errors on for every later step."""
    rule = RULES[name]
    kind = torch.optim.Adam if isinstance(rule, Adam) else torch.optim.SGD
    steps, unit = 10, 2.0**-24
    states, expected, _ = beside_torch(rule, Theirs(rule, kind, {"foreach": False}), steps)
    largest_move = rule.lr if isinstance(rule, Adam) else rule.lr * 5 * 10
    bound = unit * (16 * largest_move * steps * steps + 4 * steps * expected.abs())
    assert ((states["weight"] - expected).abs() <= bound).all()
    assert not torch.equal(states["weight"], block_of(rule, "fp32", 20_000, seed=3)[0]["weight"])


@pytest.mark.parametrize(
    ("rule", "field", "value"),
    [
        (SGD, "lr", -1.0),
        (SGD, "momentum", math.nan),
        (SGD, "dampening", "much"),
        (SGD, "nesterov", True),
        (Lion, "betas", (0.9, 1.0)),
        (Lion, "weight_decay", -1),
        (Adam, "eps", 0.0),
    ],
)
def test_a_setting_out_of_range_is_refused_by_name(rule: type[ElementwiseRule], field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"{rule.name} {field}"):
        rule(**{field: value})


def test_a_group_cannot_have_momentum_that_the_rule_has_no_buffer_for() -> None:
    with pytest.raises(ConfigError, match="momentum"):
        SGD().with_group({**SGD().defaults(), "momentum": 0.9})
    assert SGD(momentum=0.5).with_group({**SGD(momentum=0.9).defaults(), "lr": 1}) == SGD(momentum=0.9, lr=1.0)


@rules
def test_defaults_are_those_of_torch(rule: ElementwiseRule) -> None:
    if isinstance(rule, Lion):
        theirs = lion_pytorch([torch.nn.Parameter(torch.zeros(1))]).defaults
    else:
        theirs = getattr(torch.optim, rule.name)([torch.zeros(1)]).defaults
    mine = type(rule)().defaults()
    assert mine == {name: theirs[name] for name in mine}


@rules
def test_scalars_are_fp32_values(rule: ElementwiseRule) -> None:
    for scalar in rule.scalars(3, 1 / 3):
        assert type(scalar) is float
        assert float(np.float32(scalar)) == scalar


def test_what_each_rule_takes_a_parameter() -> None:
    def nbytes(rule: ElementwiseRule) -> int:
        return sum(state.dtype.itemsize for state in rule.states("bf16"))

    assert [nbytes(rule) for rule in RULES.values()] == [12, 4, 8, 8, 8]
