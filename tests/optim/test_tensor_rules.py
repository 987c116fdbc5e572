"""Muon gives torch's bits with torch's settings, and what it has beyond torch does what it says."""

from typing import Any

import pytest
import reference
import torch

from pagoda.optim import AdamW, Muon

from .blocks import randn

MATRICES = ((33, 20), (20, 33), (16, 16))


def fresh(rule: Muon, shape: tuple[int, ...]) -> dict[str, torch.Tensor]:
    shapes = {state.name: state.shape("p", shape) for state in rule.own_states()}
    return {name: torch.zeros(own) for name, own in shapes.items() if own is not None}


def run(rule: Muon, shape: tuple[int, ...]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Weight and states after five steps."""
    weight, states = randn(shape, 0), fresh(rule, shape)
    for step in range(1, 6):
        rule.update(step, weight, randn(shape, step), states)
    return weight, states


MUONS = (
    {"adjust_lr_fn": "match_rms_adamw"},
    {"lr": 1e-2, "adjust_lr_fn": "original", "nesterov": False, "weight_decay": 0.0},
)


@pytest.mark.parametrize("shape", MATRICES)
@pytest.mark.parametrize("settings", MUONS, ids=["match_rms_adamw", "original"])
def test_bits_are_torchs(settings: dict[str, Any], shape: tuple[int, ...]) -> None:
    parameter = torch.nn.Parameter(randn(shape, 0))
    theirs = torch.optim.Muon([parameter], **settings)
    for step in range(1, 6):
        parameter.grad = randn(shape, step)
        theirs.step()
    weight, states = run(Muon(**settings), shape)
    assert torch.equal(weight, parameter.detach())
    kept = theirs.state[parameter]
    assert states.keys() == kept.keys() - {"step"}
    assert all(torch.equal(states[name], kept[name]) for name in states)


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
    assert rule.takes_whole(name, shape) is matrix
    assert not Muon(adamw_for=("*router*",)).takes_whole("block.router.weight", (4, 4))
    assert Muon(adamw_for=("*router*",)).takes_whole("model.embed_tokens.weight", (4, 4))
