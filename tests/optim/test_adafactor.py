"""Adafactor gives torch's bits with torch's settings, and the paper's options do what they say."""

import math

import pytest
import torch

from pagoda.optim import Adafactor

SHAPES = ((33, 20), (20, 33), (16,), (3, 5, 7, 2), ())


def fresh(rule: Adafactor, shape: tuple[int, ...]) -> dict[str, torch.Tensor]:
    shapes = {state.name: state.shape("p", shape) for state in rule.own_states()}
    return {name: torch.zeros(own) for name, own in shapes.items() if own is not None}


def gradients(shape: tuple[int, ...], steps: int = 5) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator) for _ in range(steps)]


def run(rule: Adafactor, shape: tuple[int, ...]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Weight and states after a few steps."""
    weight, states = torch.randn(shape, generator=torch.Generator().manual_seed(0)), fresh(rule, shape)
    for step, gradient in enumerate(gradients(shape), start=1):
        rule.update(step, weight, gradient.clone(), states)
    return weight, states


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    "settings", [{}, {"lr": 0.3, "weight_decay": 0.1, "d": 1.5, "eps": (1e-5, 1e-2), "beta2_decay": -0.5}]
)
def test_bits_are_torchs(shape: tuple[int, ...], settings: dict[str, object]) -> None:
    parameter = torch.nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(0)))
    theirs = torch.optim.Adafactor([parameter], foreach=False, **settings)
    for gradient in gradients(shape):
        parameter.grad = gradient.clone()
        theirs.step()
    weight, states = run(Adafactor(**settings), shape)
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
    start = torch.randn((9, 8), generator=torch.Generator().manual_seed(0))
    assert (slow - start).norm() < (ours - start).norm()


def test_steps_are_relative_to_time_and_parameter_unless_told_otherwise() -> None:
    def first_move(size: float, step: int, **settings: object) -> float:
        """RMS of a step of a parameter of that RMS, whose update is clipped to an RMS of 1."""
        rule = Adafactor(lr=1.0, **settings)
        weight, before = torch.full((8, 8), size), torch.full((8, 8), size)
        states = fresh(rule, (8, 8))
        rule.update(step, weight, torch.ones(8, 8), states)
        return (weight - before).norm().item() / 8

    assert first_move(2.0, 1) == pytest.approx(2.0, rel=1e-5)
    assert first_move(2.0, 1, scale_parameter=False) == pytest.approx(1.0, rel=1e-5)
    late = first_move(2.0, 100, scale_parameter=False)
    assert first_move(2.0, 100, scale_parameter=False, relative_step=False) == pytest.approx(10 * late, rel=1e-5)


def test_state_beside_the_master_is_next_to_nothing() -> None:
    rows, columns, vectors = (state.shape("p", (1024, 4096)) for state in Adafactor().own_states())
    assert rows is not None
    assert columns is not None
    assert vectors is None
    assert math.prod(rows) + math.prod(columns) == 1024 + 4096
