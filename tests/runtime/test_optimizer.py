"""The optimizer behaves as a torch optimizer, and where it cannot it says so."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pairwise import each_once
from torch import nn
from zoo import ALL_ON_SSD, assert_equal, squeeze

import pagoda
from pagoda.config.run import Moments
from pagoda.plan.lanes import LANES

from .conftest import Wrap
from .loops import Wrapped, assert_same_state, backward, inputs, layers

STEPS = 4


def step(wrapped: Wrapped, *seeds: int) -> None:
    """A step with a backward pass for each seed."""
    model, optimizer = wrapped
    for seed in seeds:
        backward(model, seed)
    optimizer.step()


def test_a_closure_runs_with_gradients_and_its_loss_is_returned(wrap: Wrap) -> None:
    model, optimizer = wrap(layers())
    twin, twin_optimizer = wrap(layers())

    def closure() -> float:
        optimizer.zero_grad()
        return backward(model, 1)

    assert optimizer.step(closure) == backward(twin, 1)
    twin_optimizer.step()
    assert_same_state((model, optimizer), (twin, twin_optimizer))


@each_once(clear=["optimizer", "model"], clip=[None, 0.1])
def test_cleared_gradients_never_happened(clear: str, clip: float | None, wrap: Wrap) -> None:
    """Cleared after a backward that reached more layers, and between a forward and its backward."""
    model, optimizer = wrap(layers(), max_grad_norm=clip)
    twin, twin_optimizer = wrap(layers(), max_grad_norm=clip)
    for seed in range(STEPS):
        backward(model, 100 + seed)
        loss = model(inputs(seed), [0, 1])
        (optimizer if clear == "optimizer" else model).zero_grad()
        assert all(p.grad is None for p in model.parameters())
        loss.backward()
        for name, param in model.named_parameters():
            assert (param.grad is None) == name.startswith("layers.2"), name
            if param.grad is not None:
                assert (param.grad.shape, param.grad.dtype) == (param.shape, param.dtype)
        backward(twin, seed, (0, 1))
        optimizer.step()
        twin_optimizer.step()
        assert optimizer.stats.grad_norm == twin_optimizer.stats.grad_norm
    assert_same_state((model, optimizer), (twin, twin_optimizer))


def test_the_state_of_torchs_adamw_can_be_loaded(wrap: Wrap) -> None:
    """And a state that has no moments makes those that were there go."""
    plain = layers()
    reference = torch.optim.AdamW(plain.parameters(), lr=3e-3, betas=(0.8, 0.9), weight_decay=0.2)
    model, optimizer = wrap(layers(), precision="fp32")
    start = optimizer.state_dict()
    assert start["state"] == {}
    for seed in range(2 * STEPS):
        if seed == STEPS:
            step((model, optimizer), seed)
            assert optimizer.state_dict()["state"]
            optimizer.load_state_dict(start)
            assert optimizer.state_dict()["state"] == {}
            model.load_state_dict(plain.state_dict())
            optimizer.load_state_dict(reference.state_dict())
            assert optimizer.param_groups[0]["betas"] == (0.8, 0.9)
        if seed >= STEPS:
            step((model, optimizer), seed)
        backward(plain, seed)
        reference.step()
        reference.zero_grad()
    for name, weight in model.state_dict().items():
        torch.testing.assert_close(weight, plain.state_dict()[name], rtol=0, atol=2e-6, msg=name)


@pytest.mark.parametrize("moments", ["fp32", "8bit"])
def test_a_state_that_means_another_update_is_refused(moments: Moments, wrap: Wrap) -> None:
    def saved(kind: Any, model: nn.Module, **settings: Any) -> dict[str, Any]:
        optimizer = kind(model.parameters(), lr=0.1, **settings)
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        optimizer.step()
        state: dict[str, Any] = optimizer.state_dict()
        return state

    _, optimizer = wrap(nn.Linear(4, 6), rule=pagoda.AdamW(moments=moments), precision="fp32")
    before = optimizer.state_dict()
    amsgrad = saved(torch.optim.AdamW, nn.Linear(4, 6), amsgrad=True)
    others: list[tuple[dict[str, Any], str]] = [
        (amsgrad, "amsgrad is True; it must be False"),
        ({**amsgrad, "param_groups": before["param_groups"]}, "keeps no 'max_exp_avg_sq'"),
        (saved(torch.optim.AdamW, nn.Linear(4, 6), maximize=True), "maximize is True"),
        (saved(torch.optim.Adam, nn.Linear(4, 6)), "decoupled_weight_decay is False"),
        (saved(torch.optim.SGD, nn.Linear(4, 6), momentum=0.9), "AdamW cannot use: KeyError.'betas'"),
        (saved(torch.optim.AdamW, nn.Linear(6, 4)), r"'exp_avg' of 'weight' has shape \(4, 6\), but \(6, 4\)"),
    ]
    for state, message in others:
        with pytest.raises(pagoda.CheckpointError, match=message):
            optimizer.load_state_dict(state)
        assert_equal(optimizer.state_dict(), before)


def test_what_was_applied_during_backward_can_be_neither_changed_nor_dropped(wrap: Wrap) -> None:
    model, optimizer = wrap(layers(), gradient_accumulation_steps=1)
    backward(model, 1)
    with pytest.raises(pagoda.UsageError, match="were applied during backward"):
        optimizer.zero_grad()
    optimizer.param_groups[0]["lr"] = 5e-3
    with pytest.raises(pagoda.UsageError, match="param_groups changed"):
        optimizer.step()
    optimizer.param_groups[0]["lr"] = 1e-2
    optimizer.step()
    optimizer.zero_grad()
    optimizer.param_groups[0]["lr"] = 5e-3
    step((model, optimizer), 2)


BETWEEN: dict[str, Callable[[nn.Module, Any], object]] = {
    "evaluate": lambda model, optimizer: torch.no_grad()(model)(inputs(1), [0]),
    "read": lambda model, optimizer: pagoda.gathered(model).__enter__(),
    "load": lambda model, optimizer: model.load_state_dict(layers().state_dict()),
    "load-optimizer": lambda model, optimizer: optimizer.load_state_dict(
        torch.optim.AdamW(layers().parameters()).state_dict()
    ),
    "drop": lambda model, optimizer: (model.zero_grad(), optimizer.step()),
}


def test_states_of_which_some_were_updated_during_backward_are_neither_used_nor_written(wrap: Wrap) -> None:
    """With updates at `step()`, each of these would see or change the states before the update."""
    mine, twin = wrap(layers(), gradient_accumulation_steps=1), wrap(layers(), gradient_accumulation_steps=1)
    for between in BETWEEN.values():
        for model, _ in (mine, twin):
            backward(model, 1)
        with pytest.raises(pagoda.UsageError, match=r"(?s)during backward|between backward and step.*step\(\)"):
            between(*mine)
        for _, optimizer in (mine, twin):
            optimizer.step()
    assert_same_state(mine, twin)


@pytest.mark.parametrize("clip", [None, 1.0], ids=["no-clip", "clip"])
def test_more_backward_passes_than_announced_are_refused(clip: float | None, wrap: Wrap) -> None:
    model, _ = wrap(layers(), gradient_accumulation_steps=2, max_grad_norm=clip)
    backward(model, 1)
    backward(model, 2)
    with pytest.raises(pagoda.UsageError, match=r"gradient_accumulation_steps"):
        backward(model, 3)


def test_fewer_backward_passes_than_announced_are_one_step_all_the_same(wrap: Wrap) -> None:
    """As at the end of an epoch."""
    mine, twin = wrap(layers(), gradient_accumulation_steps=4), wrap(layers())
    for passes in (4, 2, 4):
        step(mine, *range(passes))
        step(twin, *range(passes))
    assert_same_state(mine, twin)


def test_stats_describe_the_step(wrap: Wrap, tmp_path: Path) -> None:
    model = layers()
    model, optimizer = wrap(model, squeeze(model, ALL_ON_SSD, tmp_path))
    assert optimizer.stats.step == 0
    moved: Counter[str] = Counter()
    for seed in range(4):
        backward(model, seed)
        optimizer.synchronize()  # so that the bytes of every update before are counted
        optimizer.step()
        stats = optimizer.stats
        moved.update(stats.bytes_moved)
        assert stats.step == seed + 1
        assert stats.grad_norm > 0
        assert stats.step_s > 0
        assert stats.faults >= 0
        assert 0 <= stats.hit_rate <= 1
        for figures in (stats.stall_s, stats.busy_s, stats.bytes_moved):
            assert set(figures) == set(LANES)
            assert all(figure >= 0 for figure in figures.values())
        assert sum(stats.stall_s.values()) <= stats.step_s
        plan = pagoda.plan_of(model)
        assert all(0 < peak <= plan.peak_bytes[tier] for tier, peak in stats.peak_bytes.items())
    grads = sum(p.numel() * p.element_size() for p in model.parameters())
    assert moved["d2h"] == 4 * grads
    assert moved["ssd_read"] >= 3 * 5 * grads  # the low half, two fp32 moments
    assert moved["ssd_write"] >= 3 * 6 * grads


def test_a_learning_rate_may_be_a_tensor_that_is_changed_in_place(wrap: Wrap) -> None:
    mine, twin = wrap(layers(), lr=torch.tensor(0.5)), wrap(layers(), lr=0.5)
    for seed in range(2):
        step(mine, seed)
        step(twin, seed)
        mine[1].param_groups[0]["lr"].fill_(0.25)
        twin[1].param_groups[0]["lr"] = 0.25
    expected = twin[0].state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in mine[0].state_dict().items())


def test_a_frozen_model_computes_from_pages(wrap: Wrap, tmp_path: Path) -> None:
    def frozen() -> Any:
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Linear(64, 64) for _ in range(24))).requires_grad_(False)

    x = torch.randn(2, 64, requires_grad=True)
    expected = frozen()(x)
    memory = pagoda.Memory(host="200KiB", ssd=f"{tmp_path}:1MiB", page_size=4096, unit_limit="20KiB")
    model, optimizer = wrap(frozen(), memory, precision="fp32")
    found = model(x)
    assert torch.equal(found, expected)
    slopes = [torch.autograd.grad(y.sum(), x)[0] for y in (found, expected)]
    assert torch.equal(*slopes)
    assert pagoda.plan_of(model).bytes["ssd"]["weight"] > 0
    with pytest.raises(pagoda.UsageError, match="frozen"):
        optimizer.step()
