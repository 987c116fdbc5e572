"""Adafactor and Muon give torch's bits with torch's settings, and what they have beyond torch does what it says."""

import math

import pytest
import reference
import torch

from pagoda.optim import Adafactor, AdamW, Muon, TensorRule

MATRICES = ((33, 20), (20, 33), (16, 16))


def randn(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def fresh(rule: TensorRule, shape: tuple[int, ...]) -> dict[str, torch.Tensor]:
    shapes = {state.name: state.shape("p", shape) for state in rule.own_states()}
    return {name: torch.zeros(own) for name, own in shapes.items() if own is not None}


def run(rule: TensorRule, shape: tuple[int, ...]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Weight and states after five steps."""
    weight, states = randn(shape, 0), fresh(rule, shape)
    for step in range(1, 6):
        rule.update(step, weight, randn(shape, step), states)
    return weight, states


ADAFACTORS = ({}, {"lr": 0.3, "weight_decay": 0.1, "d": 1.5, "eps": (1e-5, 1e-2), "beta2_decay": -0.5})
MUONS = (
    {"adjust_lr_fn": "match_rms_adamw"},
    {"lr": 1e-2, "adjust_lr_fn": "original", "nesterov": False, "weight_decay": 0.0},
)


@pytest.mark.parametrize(
    ("rule", "settings", "shape"),
    [
        *((Adafactor, settings, shape) for settings in ADAFACTORS for shape in (*MATRICES, (16,), (3, 5, 7, 2), ())),
        *((Muon, settings, shape) for settings in MUONS for shape in MATRICES),
    ],
)
def test_bits_are_torchs(rule: type[TensorRule], settings: dict[str, object], shape: tuple[int, ...]) -> None:
    parameter = torch.nn.Parameter(randn(shape, 0))
    more = {"foreach": False} if rule is Adafactor else {}
    theirs = getattr(torch.optim, rule.name)([parameter], **settings, **more)
    for step in range(1, 6):
        parameter.grad = randn(shape, step)
        theirs.step()
    weight, states = run(rule(**settings), shape)
    assert torch.equal(weight, parameter.detach())
    kept = theirs.state[parameter]
    assert states.keys() == kept.keys() - {"step"}
    assert all(torch.equal(states[name], kept[name]) for name in states)


def test_a_first_moment_averages_the_updates() -> None:
    plain, averaged = Adafactor(scale_parameter=False), Adafactor(scale_parameter=False, beta1=0.0)
    ours, states = run(averaged, (9, 8))
    assert torch.allclose(ours, run(plain, (9, 8))[0], rtol=1e-6, atol=1e-7)
    assert states["exp_avg"].shape == (9, 8)
    slow = run(Adafactor(scale_parameter=False, beta1=0.9), (9, 8))[0]
    assert (slow - randn((9, 8), 0)).norm() < (ours - randn((9, 8), 0)).norm()


def test_steps_are_relative_to_time_and_parameter_unless_told_otherwise() -> None:
    def first_move(size: float, step: int, **settings: object) -> float:
        """RMS of a step of a parameter of that RMS, whose update is clipped to an RMS of 1."""
        rule = Adafactor(lr=1.0, **settings)
        weight, before = torch.full((8, 8), size), torch.full((8, 8), size)
        rule.update(step, weight, torch.ones(8, 8), fresh(rule, (8, 8)))
        return (weight - before).norm().item() / 8

    assert first_move(2.0, 1) == pytest.approx(2.0, rel=1e-5)
    assert first_move(2.0, 1, scale_parameter=False) == pytest.approx(1.0, rel=1e-5)
    late = first_move(2.0, 100, scale_parameter=False)
    assert first_move(2.0, 100, scale_parameter=False, relative_step=False) == pytest.approx(10 * late, rel=1e-5)


def test_adafactors_state_beside_the_master_is_next_to_nothing() -> None:
    rows, columns, vectors = (state.shape("p", (1024, 4096)) for state in Adafactor().own_states())
    assert rows is not None
    assert columns is not None
    assert vectors is None
    assert math.prod(rows) + math.prod(columns) == 1024 + 4096


def test_muons_bits_of_all_else_are_adamws() -> None:
    weight, states = run(Muon(), (100,))
    adamw = AdamW(weight_decay=0.1)
    theirs = {"weight": randn((100,), 0), **fresh(Muon(), (100,))}
    for step in range(1, 6):
        reference.update(adamw, theirs, randn((100,), step), adamw.scalars(step))
    assert all(torch.equal(value, theirs[name]) for name, value in {"weight": weight, **states}.items())


@pytest.mark.parametrize(
    ("name", "shape", "matrix"),
    [
        ("model.layers.0.mlp.up_proj.weight", (64, 32), True),
        ("model.embed_tokens.weight", (64, 32), False),
        ("transformer.wte.weight", (64, 32), False),
        ("lm_head.weight", (64, 32), False),
        ("model.layers.0.norm.weight", (64,), False),
        ("conv.weight", (8, 4, 3, 3), False),
    ],
)
def test_each_parameter_of_muon_has_the_states_of_its_rule(name: str, shape: tuple[int, ...], matrix: bool) -> None:
    rule = Muon()
    kept = {state.name for state in rule.own_states() if state.shape(name, shape) is not None}
    assert kept == ({"momentum_buffer"} if matrix else {"exp_avg", "exp_avg_sq"})
    assert rule.takes_whole(name, shape) is rule.is_matrix(name, shape) is matrix
    assert not Muon(adamw_for=("*router*",)).is_matrix("block.router.weight", (4, 4))
    assert Muon(adamw_for=("*router*",)).is_matrix("model.embed_tokens.weight", (4, 4))
