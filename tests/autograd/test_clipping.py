"""Clipping by torch's own functions is exact, or refused in words: gradients are not where these functions look."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pairwise import each_once
from runtime.conftest import Wrap
from runtime.loops import Wrapped, assert_same_state, inputs, layers
from torch import nn
from zoo import RESIDENT, assert_equal

import pagoda
from pagoda.optimizer import PagedOptimizer

STEPS = 3
LR = 0.5
Params = list[nn.Parameter]
Clip = Callable[[Params, float], torch.Tensor]
clip_by_torch = nn.utils.clip_grad_norm_


def fresh() -> nn.Module:
    return layers(2)


def loss_of(model: nn.Module, seed: int) -> torch.Tensor:
    return model(inputs(seed), [0, 1])


@pytest.fixture
def wrap(wrap: Wrap) -> Wrap:
    """Wraps a fresh model with SGD, whose steps are as long as its gradients."""

    def wrap_one(memory: pagoda.Memory = RESIDENT, **options: Any) -> Wrapped:
        rule = pagoda.SGD(lr=LR, momentum=0.9)
        return wrap(fresh(), memory, rule=rule, **{"precision": "fp32", **options})

    return wrap_one


def trained(
    wrapped: Wrapped,
    before_step: Callable[[Any, PagedOptimizer], Any] = lambda model, optimizer: None,
    factor: float = 1.0,
    steps: int = STEPS,
) -> list[tuple[Any, float]]:
    """Of each step: what `before_step` returned, and the norm that Pagoda found."""
    model, optimizer = wrapped
    found = []
    for step in range(steps):
        optimizer.scale(loss_of(model, step) * factor).backward()
        returned = before_step(model, optimizer)
        optimizer.step()
        assert optimizer.stats.grad_norm is not None
        found.append((returned, optimizer.stats.grad_norm))
    return found


def in_two_calls(params: Params, limit: float) -> torch.Tensor:
    total = nn.utils.get_total_norm([p.grad for p in params if p.grad is not None])
    nn.utils.clip_grads_with_norm_(params, limit, total)
    return total


CLIPS: dict[str, Clip] = {
    "plain": clip_by_torch,
    "foreach": lambda params, limit: clip_by_torch(params, limit, foreach=True),
    "one by one": lambda params, limit: clip_by_torch(params, limit, foreach=False),
    "in two calls": in_two_calls,
}
FP16 = {"precision": pagoda.MixedPrecision("fp16", loss_scale=1024.0)}


@pytest.mark.parametrize(("limit", "options"), [(1e-3, {}), (1e-3, FP16), (1e6, {})])
def test_clipping_by_torch_is_clipping_by_wrap(limit: float, options: dict[str, Any], wrap: Wrap) -> None:
    """Loss scales do not show in norms."""
    twin = wrap(max_grad_norm=limit, **options)
    expected = [norm for _, norm in trained(twin)]
    for name, clip in CLIPS.items():
        model, optimizer = wrap(**options)
        found = trained((model, optimizer), lambda model, _, clip=clip: clip(list(model.parameters()), limit).item())
        norms = [norm for norm, _ in found]
        assert norms == pytest.approx(expected, rel=1e-12), name
        assert all((norm > limit) == (limit < 1) for norm in norms)
        assert_same_state((model, optimizer), twin)


def test_a_part_of_the_parameters_can_be_clipped(wrap: Wrap) -> None:
    """As torch does it, and what is clipped twice is clipped to both limits."""
    model, optimizer = wrap()
    plain = fresh()
    reference = torch.optim.SGD(plain.parameters(), lr=LR, momentum=0.9)
    for step in range(STEPS):
        norms = []
        for module, stepped in ((model, optimizer), (plain, reference)):
            loss_of(module, step).backward()
            for params, limit in ((module.get_submodule("layers.1"), 0.02), (module, 0.05)):
                norms.append(clip_by_torch(params.parameters(), limit).item())
            if module is model:  # which knows the norm of what was multiplied by different numbers
                norms.append(optimizer.clip_grad_norm_(0.02))
            else:
                norms.append(clip_by_torch(module.parameters(), 0.02).item())
            stepped.step()
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
    loss_of(plain, 0).backward()
    expected = nn.utils.get_total_norm(
        [p.grad for p in (*plain.parameters(), *other.parameters()) if p.grad is not None]
    )
    both = [*model.parameters(), *other.parameters()]
    assert clip_by_torch(both, 1e-3).item() == pytest.approx(expected.item(), rel=1e-5)
    optimizer.step()
    clipped = nn.utils.get_total_norm([p.grad for p in other.parameters() if p.grad is not None])
    moved = [model.state_dict()[name] - weight for name, weight in plain.state_dict().items()]
    total = (clipped**2 + (nn.utils.get_total_norm(moved) / LR) ** 2).sqrt()
    assert total.item() == pytest.approx(1e-3, rel=1e-3)


@each_once(by=["torch", "optimizer"], limits=[(1e-3, 2e-3), (2e-3, 1e-3)])
def test_of_wraps_limit_and_a_later_one_the_smaller_holds(limits: tuple[float, float], by: str, wrap: Wrap) -> None:
    first, second = limits
    mine, twin = wrap(max_grad_norm=first), wrap(max_grad_norm=min(first, second))

    def clip(model: Any, optimizer: PagedOptimizer) -> float:
        if by == "optimizer":
            return optimizer.clip_grad_norm_(second)
        return clip_by_torch(model.parameters(), second).item()

    for norm, found in trained(mine, clip):
        assert norm > 2e-3
        assert norm == pytest.approx(found, rel=1e-12)
    trained(twin)
    assert_same_state(mine, twin)


def halve(model: nn.Module, _optimizer: object) -> list[float]:
    norms = []
    for param in model.parameters():
        param.grad *= 0.5
        norms.append(param.grad.norm().item())
    return norms


def divide(model: nn.Module, _optimizer: object) -> list[float]:
    return [param.grad.div_(2).norm().item() for param in model.parameters() if param.grad is not None]


def norms_of(model: nn.Module, _optimizer: object) -> list[float]:
    return [param.grad.norm().item() for param in model.parameters() if param.grad is not None]


@pytest.mark.parametrize("change", [halve, divide])
def test_gradients_can_be_multiplied_by_a_number(change: Callable[..., list[float]], wrap: Wrap) -> None:
    """To the bits of a loss that was multiplied: 2 is a power of two."""
    mine, twin = wrap(), wrap()
    found, expected = trained(mine, change), trained(twin, norms_of, factor=0.5)
    assert [norms for norms, _ in found] == [norms for norms, _ in expected]
    assert_same_state(mine, twin)


@pytest.mark.parametrize("limit", [0.01, 1.2], ids=["bites", "does-not-any-more"])
def test_wrap_clips_what_gradients_are_once_multiplied(limit: float, wrap: Wrap) -> None:
    mine, twin = wrap(max_grad_norm=limit), wrap(max_grad_norm=limit)
    trained(mine, halve, steps=1)
    ((_, halved),) = trained(twin, factor=0.5, steps=1)
    assert (halved > limit) == (limit < 0.1)
    assert 2 * halved > limit
    for name, weight in mine[0].state_dict().items():
        # The 1e-6 that is added to a norm before dividing by it is half as much here.
        torch.testing.assert_close(weight, twin[0].state_dict()[name], rtol=0, atol=1e-7)


def test_gradients_that_are_not_finite_are_found_and_limits_that_are_none_refused(wrap: Wrap) -> None:
    model, optimizer = wrap()
    (loss_of(model, 0) * math.nan).backward()
    with pytest.raises(RuntimeError, match="non-finite"):
        clip_by_torch(model.parameters(), 1.0, error_if_nonfinite=True)
    clip_by_torch(model.parameters(), 1.0)
    with pytest.raises(pagoda.NonFiniteGradientError):
        optimizer.step()
    model.zero_grad()
    loss_of(model, 0).backward()
    for limit in (math.nan, -1.0):
        with pytest.raises(pagoda.UsageError, match="max_norm"):
            optimizer.clip_grad_norm_(limit)
    clip_by_torch(model.parameters(), math.nan)
    with pytest.raises(pagoda.UsageError, match="max_norm"):
        optimizer.step()


@pytest.mark.parametrize(("limit", "clips"), [(None, False), (0, False), (1.0, True)])
def test_zero_and_none_are_no_limit(wrap: Wrap, limit: float | None, clips: bool) -> None:
    model, _ = wrap(max_grad_norm=limit)
    assert pagoda.plan_of(model).options.clipping is clips


# --- too early, and too late -----------------------------------------------------------------------------------


def test_gradients_applied_during_backward_cannot_be_clipped_in_silence(wrap: Wrap) -> None:
    mine, twin = wrap(gradient_accumulation_steps=1), wrap(gradient_accumulation_steps=1)

    def clip(model: nn.Module, optimizer: PagedOptimizer) -> float:
        with pytest.raises(pagoda.UsageError, match=r"during backward\. Pass wrap\(max_grad_norm=\.\.\.\)"):
            clip_by_torch(model.parameters(), 1e-3)
        with pytest.raises(pagoda.UsageError, match="max_grad_norm"):
            optimizer.clip_grad_norm_(1e-3)
        return clip_by_torch(model.parameters(), math.inf).item()  # transformers' Trainer asks for the norm like this

    found, expected = trained(mine, clip), trained(twin)
    assert [norm for norm, _ in found] == pytest.approx([norm for _, norm in expected], rel=1e-12)
    assert_same_state(mine, twin)


def test_a_clip_belongs_to_the_gradients_that_are_there(wrap: Wrap) -> None:
    """Later gradients are added to what it has left; `zero_grad` ends it."""
    clips: tuple[Callable[[Any, PagedOptimizer], object], ...] = (
        lambda model, optimizer: clip_by_torch(model.parameters(), 1e-3),
        lambda model, optimizer: optimizer.clip_grad_norm_(1e-3),
    )
    twin, plain = wrap(), fresh()
    loss_of(twin[0], 1).backward()
    twin[1].step()
    loss_of(plain, 0).backward()
    clip_by_torch(plain.parameters(), 1e-3)
    loss_of(plain, 1).backward()
    for clip in clips:
        model, optimizer = wrap()
        loss_of(model, 0).backward()
        clip(model, optimizer)
        loss_of(model, 1).backward()
        for param, other in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(param.grad, other.grad, rtol=1e-5, atol=1e-7)
        model.zero_grad()
        loss_of(model, 1).backward()
        optimizer.step()
        assert_same_state((model, optimizer), twin)


def test_a_gradient_that_is_gone_is_not_asked_or_changed(wrap: Wrap) -> None:
    model, optimizer = wrap()
    loss_of(model, 0).backward()
    old = model.get_parameter("layers.1.0.weight").grad
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
    mine, twin = wrap(), wrap()

    def look(model: nn.Module, _optimizer: object) -> None:
        model.cpu().to("cpu").float()
        for param in model.parameters():
            grad = param.grad
            assert repr(grad) == repr(grad.clone()) == f"{grad}"
            assert "norm" in dir(grad)
            for same in (grad.cpu(), grad.to("cpu"), grad.detach(), grad.float(), grad.data):
                assert same.shape == param.shape
                assert same.norm() == grad.norm()

    trained(mine, look)
    trained(twin)
    assert_equal(mine[0].state_dict(), twin[0].state_dict())


REFUSED: dict[str, Callable[[torch.Tensor], object]] = {
    "memory": lambda grad: grad.storage(),
    "strides": lambda grad: grad.as_strided((2,), (1,)),
    "size": lambda grad: grad.resize_(2),
}


def test_what_would_keep_the_memory_of_a_gradient_is_refused_in_words(wrap: Wrap) -> None:
    model, _ = wrap()
    loss_of(model, 0).backward()
    for use in REFUSED.values():
        with pytest.raises(pagoda.UsageError, match=r"layers\.1\.0\.weight\.grad.*clone\(\)"):
            use(model.get_parameter("layers.1.0.weight").grad)


NEED_VALUES: dict[str, Callable[[torch.Tensor], object]] = {
    "read": lambda grad: grad.sum(),
    "write": lambda grad: grad.clamp_(-1, 1),
    "part": lambda grad: grad[0].mul_(2),
    "zero": lambda grad: grad.zero_(),
}


@pytest.mark.parametrize("use", NEED_VALUES)
def test_the_values_of_gradients_that_were_applied_during_backward_are_refused_in_words(use: str, wrap: Wrap) -> None:
    """Whether their unit has been updated yet or not."""
    model, optimizer = wrap(gradient_accumulation_steps=2)
    for seed in range(2):
        loss_of(model, seed).backward()
        param = model.get_parameter("layers.1.0.weight")
        with pytest.raises(
            pagoda.UsageError, match=r"layers\.1\.0\.weight.*max_grad_norm.*gradient_accumulation_steps"
        ):
            NEED_VALUES[use](param.grad)
    optimizer.step()


def test_gradients_that_a_step_has_used_are_refused_in_words_until_zero_grad(wrap: Wrap) -> None:
    """They exist until then, as in plain PyTorch. Another step does not use them again."""
    mine, twin = wrap(), wrap()
    for model, optimizer in (mine, twin):
        loss_of(model, 0).backward()
        optimizer.step()
    param = mine[0].get_parameter("layers.1.0.weight")
    for use in (
        lambda grad: grad.sum(),
        lambda grad: param * grad,
        lambda grad: grad.add_(1),
        lambda grad: grad.norm(),
    ):
        with pytest.raises(pagoda.UsageError, match=r"gone.*step\(\).*update_and_allocate"):
            use(param.grad)
    mine[0].cpu()  # moves gradients, too
    with pytest.warns(UserWarning, match="without a gradient"):
        mine[1].step()
    mine[1].zero_grad()
    assert param.grad is None
    assert_same_state(mine, twin)
