"""The optimizer behaves as a torch optimizer, and where it cannot it says so."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from pairwise import each_once
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from zoo import ALL_ON_SSD, Outcome, squeeze

import pagoda
from pagoda.optimizer import PagedOptimizer
from pagoda.plan.ops import LANES

from .conftest import Wrap
from .loops import backward, inputs, layers

STEPS = 4


@pytest.fixture
def wrapped(wrap: Wrap) -> Wrap:
    """Wraps a model, by default one of `Layers`."""

    def wrapped(model: nn.Module | None = None, *args: Any, **options: Any) -> tuple[nn.Module, PagedOptimizer]:
        return wrap(layers() if model is None else model, *args, **options)

    return wrapped


def state(model: nn.Module, optimizer: PagedOptimizer) -> Outcome:
    return Outcome(weights=model.state_dict(), optimizer=optimizer.state_dict())


def test_it_is_a_torch_optimizer_over_the_models_parameters(wrapped: Wrap) -> None:
    model, optimizer = wrapped()
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for p in model.parameters()]
    assert optimizer.param_groups[0]["lr"] == 1e-2
    assert optimizer.param_groups[0]["weight_decay"] == 0.1


def test_a_closure_runs_with_gradients_and_its_loss_is_returned(wrapped: Wrap) -> None:
    model, optimizer = wrapped()
    twin, twin_optimizer = wrapped()

    def closure() -> float:
        optimizer.zero_grad()
        return backward(model, 1)

    loss = optimizer.step(closure)
    assert loss == backward(twin, 1)
    twin_optimizer.step()
    state(model, optimizer).assert_same_bits(state(twin, twin_optimizer))


@each_once(clear=["optimizer", "model"], clip=[None, 0.1])
def test_cleared_gradients_never_happened(clear: str, clip: float | None, wrapped: Wrap) -> None:
    model, optimizer = wrapped(clip_grad_norm=clip)
    twin, twin_optimizer = wrapped(clip_grad_norm=clip)
    for step in range(STEPS):
        backward(model, 100 + step)
        (optimizer if clear == "optimizer" else model).zero_grad()
        assert all(p.grad is None for p in model.parameters())
        # What was cleared reached layer 2 as well; what counts does not.
        backward(model, step, (0, 1))
        backward(twin, step, (0, 1))
        optimizer.step()
        twin_optimizer.step()
        assert optimizer.stats.grad_norm == twin_optimizer.stats.grad_norm
    state(model, optimizer).assert_same_bits(state(twin, twin_optimizer))


def test_clearing_between_forward_and_backward_keeps_the_graph(wrapped: Wrap) -> None:
    model, optimizer = wrapped()
    twin, twin_optimizer = wrapped()
    for step in range(STEPS):
        loss = model(inputs(step), [0, 1, 2])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        backward(twin, step)
        twin_optimizer.step()
    state(model, optimizer).assert_same_bits(state(twin, twin_optimizer))


def test_a_gradient_is_none_exactly_when_there_is_none(wrapped: Wrap) -> None:
    model, optimizer = wrapped()
    assert all(p.grad is None for p in model.parameters())
    backward(model, 1, (0, 1))
    for name, param in model.named_parameters():
        assert (param.grad is None) == name.startswith("layers.2"), name
        if param.grad is not None:
            assert param.grad.shape == param.shape
            assert param.grad.dtype == param.dtype
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())


def test_state_dicts_resume_bit_for_bit_on_another_tier(wrapped: Wrap, tmp_path: Path) -> None:
    """Weights go through bf16 unless the master is loaded too, so fp32 is what resumes exactly through state dicts."""
    model, optimizer = wrapped(precision="fp32")
    scheduler = CosineAnnealingLR(optimizer, T_max=2 * STEPS)
    for step in range(STEPS):
        backward(model, step)
        optimizer.step()
        scheduler.step()
    saved = model.state_dict(), optimizer.state_dict(), scheduler.state_dict()
    assert saved[1]["param_groups"][0]["lr"] < 1e-2

    other = layers()
    on_ssd = squeeze(other, ALL_ON_SSD, tmp_path, precision="fp32", clipping=False)
    other, other_optimizer = wrapped(other, on_ssd, precision="fp32")
    other_scheduler = CosineAnnealingLR(other_optimizer, T_max=2 * STEPS)
    other.load_state_dict(saved[0])
    other_optimizer.load_state_dict(saved[1])
    other_scheduler.load_state_dict(saved[2])
    for step in range(STEPS, 2 * STEPS):
        assert backward(model, step) == backward(other, step)
        for stepped in (optimizer, other_optimizer, scheduler, other_scheduler):
            stepped.step()
    state(model, optimizer).assert_same_bits(state(other, other_optimizer))


def test_the_state_of_torchs_adamw_can_be_loaded(wrapped: Wrap) -> None:
    plain = layers()
    reference = torch.optim.AdamW(plain.parameters(), lr=3e-3, betas=(0.8, 0.9), weight_decay=0.2)
    for step in range(STEPS):
        backward(plain, step)
        reference.step()
        reference.zero_grad()
    model, optimizer = wrapped(precision="fp32")
    model.load_state_dict(plain.state_dict())
    optimizer.load_state_dict(reference.state_dict())
    assert optimizer.param_groups[0]["betas"] == (0.8, 0.9)
    for step in range(STEPS, 2 * STEPS):
        backward(model, step)
        optimizer.step()
        backward(plain, step)
        reference.step()
        reference.zero_grad()
    for name, weight in model.state_dict().items():
        torch.testing.assert_close(weight, plain.state_dict()[name], rtol=0, atol=2e-6, msg=name)


def test_loading_a_state_forgets_moments_that_it_does_not_have(wrapped: Wrap) -> None:
    model, optimizer = wrapped()
    start = optimizer.state_dict()
    assert start["state"] == {}
    backward(model, 1)
    optimizer.step()
    assert optimizer.state_dict()["state"]
    optimizer.load_state_dict(start)
    assert optimizer.state_dict()["state"] == {}


def test_hyperparameters_changed_after_their_use_during_backward_are_refused(wrapped: Wrap) -> None:
    model, optimizer = wrapped(accumulation_steps=1)
    backward(model, 1)
    optimizer.param_groups[0]["lr"] = 5e-3
    with pytest.raises(pagoda.UsageError, match="param_groups changed"):
        optimizer.step()
    optimizer.param_groups[0]["lr"] = 1e-2
    optimizer.step()
    optimizer.param_groups[0]["lr"] = 5e-3
    backward(model, 2)
    optimizer.step()


@pytest.mark.parametrize("clip", [None, 1.0], ids=["no-clip", "clip"])
def test_more_backward_passes_than_announced_are_refused(clip: float | None, wrapped: Wrap) -> None:
    model, _ = wrapped(accumulation_steps=2, clip_grad_norm=clip)
    backward(model, 1)
    backward(model, 2)
    with pytest.raises(pagoda.UsageError, match=r"accumulation_steps"):
        backward(model, 3)


def test_fewer_backward_passes_than_announced_are_one_step_all_the_same(wrapped: Wrap) -> None:
    """As at the end of an epoch."""
    model, optimizer = wrapped(accumulation_steps=4)
    twin, twin_optimizer = wrapped()
    for passes in (4, 2, 4):
        for seed in range(passes):
            backward(model, seed)
            backward(twin, seed)
        optimizer.step()
        twin_optimizer.step()
    state(model, optimizer).assert_same_bits(state(twin, twin_optimizer))


def test_gradients_applied_during_backward_cannot_be_dropped(wrapped: Wrap) -> None:
    model, optimizer = wrapped(accumulation_steps=1)
    backward(model, 1)
    with pytest.raises(pagoda.UsageError, match="were applied during backward"):
        optimizer.zero_grad()
    optimizer.step()
    optimizer.zero_grad()


def test_stats_describe_the_step(wrapped: Wrap, tmp_path: Path) -> None:
    model = layers()
    model, optimizer = wrapped(model, squeeze(model, ALL_ON_SSD, tmp_path))
    assert optimizer.stats.step == 0
    moved: Counter[str] = Counter()
    for step in range(4):
        backward(model, step)
        optimizer.drain()  # so that the bytes of every update before are counted
        optimizer.step()
        stats = optimizer.stats
        moved.update(stats.bytes_moved)
        assert stats.step == step + 1
        assert stats.grad_norm is not None
        assert stats.grad_norm > 0
        assert stats.step_s > 0
        assert stats.faults >= 0
        assert 0 <= stats.prefetch_hit_rate <= 1
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


def test_a_learning_rate_may_be_a_tensor_that_is_changed_in_place(wrapped: Wrap) -> None:
    model, optimizer = wrapped(lr=torch.tensor(0.5))
    twin, twin_optimizer = wrapped(lr=0.5)
    for index in range(2):
        backward(model, index)
        backward(twin, index)
        optimizer.step()
        twin_optimizer.step()
        optimizer.param_groups[0]["lr"].fill_(0.25)
        twin_optimizer.param_groups[0]["lr"] = 0.25
    expected = twin.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())


def test_a_frozen_model_computes_from_pages(tmp_path: Path) -> None:
    def frozen() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Linear(64, 64) for _ in range(24))).requires_grad_(False)

    x = torch.randn(2, 64, requires_grad=True)
    expected = frozen()(x)
    memory = pagoda.Memory(host="200KiB", ssd=f"{tmp_path}:1MiB", page_size=4096, unit_limit="20KiB")
    model, optimizer = pagoda.wrap(frozen(), pagoda.AdamW(), memory=memory, precision="fp32")
    with optimizer:
        found = model(x)
        assert torch.equal(found, expected)
        slopes = [torch.autograd.grad(y.sum(), x)[0] for y in (found, expected)]
        assert torch.equal(*slopes)
        assert pagoda.plan_of(model).bytes["ssd"]["weight"] > 0
        with pytest.raises(pagoda.UsageError, match="frozen"):
            optimizer.step()
