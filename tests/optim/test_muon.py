"""Muon gives torch's bits on matrices and AdamW's on all else."""

import pytest
import reference
import torch

from pagoda.optim import AdamW, Muon


@pytest.mark.parametrize("shape", [(32, 48), (48, 32), (16, 16)])
@pytest.mark.parametrize("settings", [{}, {"adjust_lr_fn": "original", "nesterov": False, "weight_decay": 0.0}])
def test_bits_of_matrices_are_torchs(shape: tuple[int, int], settings: dict[str, object]) -> None:
    rule = Muon(lr=1e-2, **settings)
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(shape, generator=generator)
    parameter = torch.nn.Parameter(weight.clone())
    theirs = torch.optim.Muon([parameter], lr=1e-2, **{"adjust_lr_fn": rule.adjust_lr_fn, **settings})
    states = {"momentum_buffer": torch.zeros(shape)}
    for step in range(1, 5):
        gradient = torch.randn(shape, generator=generator)
        parameter.grad = gradient.clone()
        theirs.step()
        rule.update(step, weight, gradient.clone(), states)
    assert torch.equal(weight, parameter.detach())
    assert torch.equal(states["momentum_buffer"], theirs.state[parameter]["momentum_buffer"])


def test_bits_of_all_else_are_adamws() -> None:
    rule, adamw = Muon(lr=1e-2), AdamW(lr=1e-2, weight_decay=0.1)
    ours = {name: torch.zeros(100) for name in ("exp_avg", "exp_avg_sq")}
    weight = torch.randn(100, generator=torch.Generator().manual_seed(0))
    theirs = {"weight": weight.clone(), **{name: state.clone() for name, state in ours.items()}}
    for step in (1, 2, 3):
        gradient = torch.randn(100, generator=torch.Generator().manual_seed(step))
        rule.update(step, weight, gradient, ours)
        reference.update(adamw, theirs, gradient, adamw.scalars(step))
    assert torch.equal(weight, theirs["weight"])
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


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
def test_each_parameter_has_the_states_of_its_rule(name: str, shape: tuple[int, ...], matrix: bool) -> None:
    rule = Muon()
    assert rule.is_matrix(name, shape) is matrix
    kept = {state.name for state in rule.own_states() if state.shape(name, shape) is not None}
    assert kept == ({"momentum_buffer"} if matrix else {"exp_avg", "exp_avg_sq"})
    assert rule.takes_whole(name, shape) is matrix


def test_the_user_says_which_matrices_are_no_layers() -> None:
    assert not Muon(adamw_for=("*router*",)).is_matrix("block.router.weight", (4, 4))
    assert Muon(adamw_for=("*router*",)).is_matrix("model.embed_tokens.weight", (4, 4))
