"""Clipping by torch's own functions is exact, or refused in words: gradients are not where these functions look."""

import copy
import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from zoo import RESIDENT, assert_equal

import pagoda
from pagoda.optimizer import PagedOptimizer

from .conftest import Wrap
from .loops import inputs, layers

STEPS = 3
LR = 0.5
Params = list[nn.Parameter]
Clip = Callable[[Params, float], torch.Tensor]


def fresh() -> nn.Module:
    return layers(2)


def loss_of(model: nn.Module, seed: int) -> torch.Tensor:
    return model(inputs(seed), [0, 1])  # type: ignore[no-any-return]


@pytest.fixture
def wrap(wrap: Wrap) -> Wrap:
    """Wraps a fresh model with SGD, whose steps are as long as its gradients."""

    def wrap_one(memory: pagoda.Memory = RESIDENT, **options: Any) -> tuple[nn.Module, PagedOptimizer]:
        rule = pagoda.SGD(lr=LR, momentum=0.9)
        return wrap(fresh(), memory, rule=rule, **{"precision": "fp32", **options})

    return wrap_one


def in_two_calls(params: Params, limit: float) -> torch.Tensor:
    total = nn.utils.get_total_norm([p.grad for p in params if p.grad is not None])
    nn.utils.clip_grads_with_norm_(params, limit, total)
    return total


def by_hand(params: Params, limit: float) -> torch.Tensor:
    """As loops wrote it before torch had a function for it."""
    total = sum(p.grad.detach().data.norm(2).item() ** 2 for p in params if p.grad is not None) ** 0.5
    for param in params:
        assert param.grad is not None
        param.grad.data.mul_(min(1.0, limit / (total + 1e-6)))
    return torch.tensor(total, dtype=torch.float64)


CLIPS: dict[str, Clip] = {
    "plain": nn.utils.clip_grad_norm_,
    "foreach": lambda params, limit: nn.utils.clip_grad_norm_(params, limit, foreach=True),
    "one by one": lambda params, limit: nn.utils.clip_grad_norm_(params, limit, foreach=False),
    "in two calls": in_two_calls,
    "by hand": by_hand,
}


@pytest.mark.parametrize("limit", [1e-3, 1e6], ids=["bites", "does-not"])
@pytest.mark.parametrize("clip", CLIPS)
def test_clipping_by_torch_is_clipping_by_wrap(clip: str, limit: float, wrap: Wrap) -> None:
    model, optimizer = wrap()
    twin, twin_optimizer = wrap(clip_grad_norm=limit)
    for step in range(STEPS):
        loss_of(model, step).backward()
        loss_of(twin, step).backward()
        norm = CLIPS[clip](list(model.parameters()), limit).item()
        optimizer.step()
        twin_optimizer.step()
        assert norm == pytest.approx(twin_optimizer.stats.grad_norm, rel=1e-12)
        assert (norm > limit) == (limit < 1)
    assert_equal(model.state_dict(), twin.state_dict())


def test_a_part_of_the_parameters_can_be_clipped(wrap: Wrap) -> None:
    """As torch does it, and what is clipped twice is clipped to both limits."""
    model, optimizer = wrap()
    plain = fresh()
    reference = torch.optim.SGD(plain.parameters(), lr=LR, momentum=0.9)
    for step in range(STEPS):
        norms = []
        for module, stepped in ((model, optimizer), (plain, reference)):
            loss_of(module, step).backward()
            for params, limit in ((module.get_submodule("layers.1"), 0.02), (module, 0.05), (module, 0.02)):
                norms.append(nn.utils.clip_grad_norm_(params.parameters(), limit).item())
            stepped.step()  # type: ignore[attr-defined]
            module.zero_grad()
        assert norms[:3] == pytest.approx(norms[3:], rel=1e-5)
        assert norms[0] > 0.02
        assert norms[1] > 0.05
    for name, weight in model.state_dict().items():
        torch.testing.assert_close(weight, plain.state_dict()[name], rtol=0, atol=1e-7, msg=name)
    assert (plain.get_parameter("layers.0.0.weight") - fresh().get_parameter("layers.0.0.weight")).abs().max() > 1e-5


def test_a_wrapped_and_a_plain_model_can_be_clipped_together(wrap: Wrap) -> None:
    model, optimizer = wrap()
    other, plain = fresh(), fresh()
    loss_of(model, 0).backward()
    loss_of(other, 1).backward()
    both = [*model.parameters(), *other.parameters()]
    loss_of(plain, 0).backward()
    gradients = [p.grad for p in (*plain.parameters(), *other.parameters()) if p.grad is not None]
    expected = nn.utils.get_total_norm(gradients)
    assert nn.utils.clip_grad_norm_(both, 1e-3).item() == pytest.approx(expected.item(), rel=1e-5)
    optimizer.step()
    clipped = nn.utils.get_total_norm([p.grad for p in other.parameters() if p.grad is not None])
    moved = [model.state_dict()[name] - weight for name, weight in plain.state_dict().items()]
    total = (clipped**2 + (nn.utils.get_total_norm(moved) / LR) ** 2).sqrt()
    assert total.item() == pytest.approx(1e-3, rel=1e-3)


@pytest.mark.parametrize("by", ["torch", "optimizer"])
@pytest.mark.parametrize(("first", "second"), [(1e-3, 2e-3), (2e-3, 1e-3)], ids=["looser-later", "tighter-later"])
def test_of_wraps_limit_and_a_later_one_the_smaller_holds(first: float, second: float, by: str, wrap: Wrap) -> None:
    model, optimizer = wrap(clip_grad_norm=first)
    twin, twin_optimizer = wrap(clip_grad_norm=min(first, second))
    for step in range(STEPS):
        loss_of(model, step).backward()
        loss_of(twin, step).backward()
        if by == "torch":
            norm = nn.utils.clip_grad_norm_(model.parameters(), second).item()
        else:
            norm = optimizer.clip_grad_norm_(second)
        optimizer.step()
        twin_optimizer.step()
        assert norm > 2e-3
        assert norm == pytest.approx(optimizer.stats.grad_norm, rel=1e-12)
    assert_equal(model.state_dict(), twin.state_dict())


def halve(param: nn.Parameter) -> None:
    assert param.grad is not None
    param.grad *= 0.5


def divide(param: nn.Parameter) -> None:
    assert param.grad is not None
    param.grad.div_(2)


@pytest.mark.parametrize("change", [halve, divide])
def test_gradients_can_be_multiplied_by_a_number(change: Callable[[nn.Parameter], None], wrap: Wrap) -> None:
    """To the bits of a loss that was multiplied: 2 is a power of two."""
    model, optimizer = wrap()
    twin, twin_optimizer = wrap()
    for step in range(STEPS):
        loss_of(model, step).backward()
        (loss_of(twin, step) / 2).backward()
        for param in model.parameters():
            change(param)
        mine = [p.grad.norm().item() for p in model.parameters() if p.grad is not None]
        assert mine == [p.grad.norm().item() for p in twin.parameters() if p.grad is not None]
        optimizer.step()
        twin_optimizer.step()
    assert_equal(model.state_dict(), twin.state_dict())


@pytest.mark.parametrize("limit", [0.01, 1.2], ids=["bites", "does-not-any-more"])
def test_wrap_clips_what_gradients_are_once_multiplied(limit: float, wrap: Wrap) -> None:
    model, optimizer = wrap(clip_grad_norm=limit)
    twin, twin_optimizer = wrap(clip_grad_norm=limit)
    loss_of(model, 0).backward()
    (loss_of(twin, 0) / 2).backward()
    for param in model.parameters():
        halve(param)
    optimizer.step()
    twin_optimizer.step()
    halved = twin_optimizer.stats.grad_norm
    assert halved is not None
    assert (halved > limit) == (limit < 0.1)
    assert 2 * halved > limit
    for name, weight in model.state_dict().items():
        # The 1e-6 that is added to a norm before dividing by it is half as much here.
        torch.testing.assert_close(weight, twin.state_dict()[name], rtol=0, atol=1e-7)


def test_clipping_by_torch_before_a_step_that_was_guessed_undoes_the_guess(wrap: Wrap, tmp_path: Path) -> None:
    model, optimizer = wrap(clip_grad_norm=1e6, accumulation_steps=1, update=pagoda.Updates(speculate=True))
    twin, twin_optimizer = wrap(clip_grad_norm=1e-3)
    loss_of(model, 0).backward()
    loss_of(twin, 0).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    optimizer.step()
    twin_optimizer.step()
    assert optimizer.stats.updates_undone > 0
    assert_equal(model.state_dict(), twin.state_dict())


def test_loss_scaling_does_not_show_in_norms(wrap: Wrap) -> None:
    model, optimizer = wrap(precision=pagoda.MixedPrecision("fp16", loss_scale=1024.0))
    twin, twin_optimizer = wrap(precision=pagoda.MixedPrecision("fp16", loss_scale=1024.0), clip_grad_norm=1e-3)
    optimizer.scale(loss_of(model, 0)).backward()
    twin_optimizer.scale(loss_of(twin, 0)).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1e-3).item()
    optimizer.step()
    twin_optimizer.step()
    assert norm == pytest.approx(twin_optimizer.stats.grad_norm, rel=1e-12)
    assert_equal(model.state_dict(), twin.state_dict())


def test_gradients_that_are_not_finite_are_found(wrap: Wrap) -> None:
    model, optimizer = wrap()
    (loss_of(model, 0) * math.nan).backward()
    with pytest.raises(RuntimeError, match="non-finite"):
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    with pytest.raises(pagoda.NonFiniteGradientError):
        optimizer.step()


@pytest.mark.parametrize("limit", [math.nan, -1.0])
def test_a_limit_that_is_none_is_refused(limit: float, wrap: Wrap) -> None:
    model, optimizer = wrap()
    loss_of(model, 0).backward()
    with pytest.raises(pagoda.UsageError, match="max_norm"):
        optimizer.clip_grad_norm_(limit)
    if math.isnan(limit):
        nn.utils.clip_grad_norm_(model.parameters(), limit)
        with pytest.raises(pagoda.UsageError, match="max_norm"):
            optimizer.step()


# --- what is updated during backward ---------------------------------------------------------------------------


def test_gradients_applied_during_backward_cannot_be_clipped_in_silence(wrap: Wrap) -> None:
    model, optimizer = wrap(accumulation_steps=1)
    twin, twin_optimizer = wrap(accumulation_steps=1)
    for step in range(STEPS):
        loss_of(model, step).backward()
        loss_of(twin, step).backward()
        twin_optimizer.step()
        with pytest.raises(pagoda.UsageError, match=r"during backward\. Pass wrap\(clip_grad_norm=\.\.\.\)"):
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        with pytest.raises(pagoda.UsageError, match="clip_grad_norm"):
            optimizer.clip_grad_norm_(1e-3)
        # Whoever only asks for the norm, as transformers' Trainer does, gets it.
        norm = nn.utils.clip_grad_norm_(model.parameters(), math.inf).item()
        optimizer.step()
        assert norm == pytest.approx(twin_optimizer.stats.grad_norm, rel=1e-12)
        assert all(param.grad is None for param in model.parameters())
    assert_equal(model.state_dict(), twin.state_dict())


@pytest.mark.parametrize("by", ["torch", "optimizer"])
def test_a_gradient_after_a_clip_is_refused(by: str, wrap: Wrap) -> None:
    """The factor of the gradients before it would be applied to it too."""
    model, optimizer = wrap()
    loss_of(model, 0).backward()
    if by == "torch":
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    else:
        optimizer.clip_grad_norm_(1e-3)
    with pytest.raises(pagoda.UsageError, match=r"after optimizer\.clip_grad_norm_.*torch's clip_grad_norm_"):
        loss_of(model, 1).backward()


def test_a_clip_by_torch_is_dropped_with_its_gradients(wrap: Wrap) -> None:
    model, optimizer = wrap()
    twin, twin_optimizer = wrap()
    loss_of(model, 0).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    model.zero_grad()
    loss_of(model, 1).backward()
    optimizer.step()
    loss_of(twin, 1).backward()
    twin_optimizer.step()
    assert_equal(model.state_dict(), twin.state_dict())


def test_a_gradient_that_is_gone_is_not_asked_or_changed(wrap: Wrap) -> None:
    model, optimizer = wrap()
    loss_of(model, 0).backward()
    old = model.get_parameter("layers.1.0.weight").grad
    assert old is not None
    optimizer.step()
    for _ in range(2):
        with pytest.raises(pagoda.UsageError, match="gone"):
            old.norm()
        with pytest.raises(pagoda.UsageError, match="gone"):
            old.mul_(2)
        loss_of(model, 1).backward()


# --- what becomes of markers -----------------------------------------------------------------------------------


def test_what_libraries_do_to_gradients_between_backward_and_step_changes_nothing(wrap: Wrap) -> None:
    """Lightning's teardown moves the module, and tools that show exceptions print its gradients."""
    model, optimizer = wrap()
    twin, twin_optimizer = wrap()
    loss_of(model, 0).backward()
    loss_of(twin, 0).backward()
    model.cpu().to("cpu").float()
    for param in model.parameters():
        grad = param.grad
        assert grad is not None
        assert "pages" in repr(grad)
        assert "pages" in f"{grad}"
        assert "norm" in dir(grad)
        for same in (grad.cpu(), grad.to("cpu"), grad.detach(), grad.float(), grad.data):
            assert same.shape == param.shape
            assert same.norm() == grad.norm()
    optimizer.step()
    twin_optimizer.step()
    assert_equal(model.state_dict(), twin.state_dict())


REFUSED: dict[str, tuple[Callable[[torch.Tensor], object], str]] = {
    "deepcopy": (copy.deepcopy, "cannot be copied or saved"),
    "copy": (copy.copy, "cannot be copied or saved"),
    "pickle": (pickle.dumps, "cannot be copied or saved"),
    "to zero": (lambda grad: grad.zero_(), "set_to_none=True"),
    "clamp": (lambda grad: grad.clamp_(-1, 1), "clipped by value"),
    "clamp of several": (lambda grad: torch._foreach_clamp_min_([grad], -1.0), "clipped by value"),
    "norm along a dimension": (lambda grad: grad.norm(dim=0), "2-norm"),
    "largest element": (lambda grad: grad.norm(math.inf), "2-norm"),
    "norm of a view": (lambda grad: grad.T.norm(), "2-norm"),
    "product with a tensor": (lambda grad: grad.mul_(torch.ones(160, 160)), "register_hook"),
    "product with itself": (lambda grad: grad.mul_(grad), "register_hook"),
    "read": (lambda grad: grad.tolist(), "register_hook"),
    "to numpy": (lambda grad: grad.numpy(), "register_hook"),
    "sum": (lambda grad: grad.sum(), "register_hook"),
    "sum with a number": (lambda grad: grad.add_(1.0), "register_hook"),
    "quotient": (lambda grad: grad / 2, "register_hook"),
    "clone": (lambda grad: grad.clone(), "register_hook"),
    "other data": (lambda grad: setattr(grad, "data", torch.ones(160, 160)), "register_hook"),
    "loss scaler": (
        lambda grad: torch._amp_foreach_non_finite_check_and_unscale_([grad], torch.zeros(1), torch.ones(1)),
        "GradScaler",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_needs_the_values_of_a_gradient_is_refused_in_words(case: str, wrap: Wrap) -> None:
    use, message = REFUSED[case]
    model, _ = wrap()
    loss_of(model, 0).backward()
    grad = model.get_parameter("layers.1.0.weight").grad
    assert grad is not None
    with pytest.raises(pagoda.UsageError, match=message):
        use(grad)
