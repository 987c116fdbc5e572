"""Between backward and `step()`, gradients are read and written like tensors, with the bits of plain PyTorch."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from gradient_uses import ADD_ANOTHER, LIMIT, ONE_NUMBER, RULE, USES, Net, Training, assert_alike, plainly, train
from runtime.conftest import Wrap

import pagoda
from pagoda.autograd.stepper import Stepper
from pagoda.runtime.gradients import GradientBuffers

SMALL = {"page_size": 4096, "unit_limit": "3KiB"}


def places(path: Path) -> dict[str, pagoda.Memory]:
    return {
        "ram": pagoda.Memory(host="4MiB", **SMALL),
        "ssd": pagoda.Memory(host="32KiB", ssd=f"{path}:4MiB", **SMALL),
        "device": pagoda.Memory(device="cpu:48KiB", host="4MiB", **SMALL),
    }


def rule() -> Any:
    return pagoda.Optim(torch.optim.SGD, **RULE)


SETTINGS: dict[str, tuple[dict[str, Any], int]] = {
    "plain": ({}, 1),
    "clipped": ({"max_grad_norm": LIMIT}, 1),
    "announced": (
        {"max_grad_norm": 1e3, "gradient_accumulation_steps": 1},
        1,
    ),  # with SSD, units are updated speculatively
    "accumulated": ({}, 2),
}


def cases() -> Iterator[Any]:
    """Every use in every setting and place. Each use once is not slow."""
    combinations = [(place, setting) for setting in SETTINGS for place in ("ssd", "ram", "device")]
    for index, use in enumerate(USES):
        for number, (place, setting) in enumerate(combinations):
            if use in {"announced": ADD_ANOTHER, "clipped": ONE_NUMBER}.get(setting, ()):
                continue  # more backwards than announced; or two factors: the last bits are those of their product
            marks = () if number == index % len(combinations) else pytest.mark.slow
            yield pytest.param(place, setting, use, marks=marks, id=f"{use}-{place}-{setting}")


@pytest.mark.parametrize(("place", "setting", "use"), cases())
def test_every_use_of_a_gradient_has_the_bits_of_torch_alone(
    place: str, setting: str, use: str, wrap: Wrap, tmp_path: Path
) -> None:
    options, passes = SETTINGS[setting]
    model, optimizer = wrap(Net(), places(tmp_path)[place], rule=rule(), precision="fp32", **options)
    found = train(Training(model, optimizer), use, passes=passes)
    assert_alike(found, plainly(use, setting == "clipped", passes), use)


@pytest.mark.parametrize("early", [True, False], ids=["before-wrap", "after-wrap"])
def test_hooks_after_accumulation_find_the_sum_and_may_change_it(early: bool, wrap: Wrap) -> None:
    runs = []
    for paged in (False, True):
        model: Any = Net()
        seen: list[float] = []

        def hook(param: Any, seen: list[float] = seen) -> None:
            seen.append(param.grad.abs().sum().item())
            param.grad.clamp_(-1e-3, 1e-3)

        def register(model: Any, hook: Any = hook) -> None:
            for param in model.parameters():
                param.register_post_accumulate_grad_hook(hook)

        if early or not paged:
            register(model)
        optimizer: Any = torch.optim.SGD(model.parameters(), **RULE)
        if paged:
            model, optimizer = wrap(model, rule=rule(), precision="fp32")
        if paged and not early:
            register(model)
        runs.append((train(Training(model, optimizer), "noise", passes=2), seen))
    assert_alike(*runs, "hooks")


def test_gradients_that_have_a_graph_are_refused_as_a_part_of_one(wrap: Wrap) -> None:
    """A penalty of them in the loss would have no effect."""
    model, _ = wrap(Net(), rule=rule(), precision="fp32")
    Training(model, None).loss(0).backward(create_graph=True)
    param = next(model.parameters())
    assert param.grad.requires_grad
    for use in (lambda: param.grad.norm(), lambda: torch.autograd.grad(param.grad, param, torch.ones_like(param))):
        with pytest.raises(pagoda.UsageError, match=r"layers\.0\.weight\.grad.*torch\.autograd\.grad"):
            use()
    assert param.grad.detach().norm() > 0
    with torch.no_grad():
        assert param.grad.norm() > 0


@pytest.mark.parametrize(
    ("precision", "gradients"), [("bf16", None), ("bf16", "fp32"), ("fp16", None)], ids=["bf16", "bf16-fp32", "fp16"]
)
def test_gradients_in_16_bits_are_those_of_torch_alone_and_what_is_not_written_keeps_its_precision(
    precision: Any, gradients: Any, wrap: Wrap
) -> None:
    """Also where pages have them in fp32, or scaled by the loss scale."""
    mixed = pagoda.MixedPrecision(precision, gradients=gradients, loss_scale=1024.0 if precision == "fp16" else None)
    model, optimizer = wrap(Net(), rule=rule(), precision=mixed)
    plain = Net().to(torch.bfloat16 if precision == "bf16" else torch.float16)
    optimizer.scale(Training(model, None).loss(0)).backward()
    Training(plain, None).loss(0).backward()
    for param, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert param.grad.dtype is other.grad.dtype
        torch.testing.assert_close(param.grad.clone(), other.grad, rtol=1e-2, atol=1e-4)
    optimizer.zero_grad()
    twin, steps = wrap(Net(), rule=rule(), precision=mixed)
    for param in twin.parameters():
        param.register_hook(lambda grad: grad.clone().index_fill_(0, torch.tensor([0]), 0))
    for module, stepped in ((model, optimizer), (twin, steps)):
        for number in range(2):
            stepped.scale(Training(module, None).loss(number) * 2.0**-12).backward()
        for param in model.parameters() if module is model else ():
            assert param.grad is not None
            param.grad[0] = 0
        stepped.step()
    masters = [
        [state["momentum_buffer"] for state in each.state_dict()["state"].values()] for each in (optimizer, steps)
    ]
    for one, two in zip(*masters, strict=True):
        assert torch.equal(one, two)
        assert one.abs().sum() > 0


@pytest.mark.parametrize("place", ["ram", "ssd", "device"])
def test_steps_without_a_forward_between_them_use_their_own_gradients(place: str, wrap: Wrap, tmp_path: Path) -> None:
    """As in evolution strategies. Nothing else waits for the updates, whose gradients are on SSD meanwhile."""
    weights = []
    for paged in (False, True):
        model: Any = Net()
        optimizer: Any = torch.optim.SGD(model.parameters(), **RULE)
        if paged:
            model, optimizer = wrap(model, places(tmp_path)[place], rule=rule(), precision="fp32")
        of = Training(model, optimizer)
        for _ in range(6):
            for param in model.parameters():
                param.grad = of.noise(param)
            optimizer.step()
            optimizer.zero_grad()
        weights.append([param.detach().clone() for param in model.parameters()])
    assert_alike(*weights, place)


@pytest.mark.parametrize("by", ["model", "optimizer"])
def test_gradients_set_to_zero_update_parameters_that_the_next_step_does_not_use(by: str, wrap: Wrap) -> None:
    """Also after `step()`, as weight decay and momentum do in plain PyTorch."""
    weights = []
    for paged in (False, True):
        model: Any = Net()
        optimizer: Any = torch.optim.SGD(model.parameters(), **RULE)
        if paged:
            model, optimizer = wrap(model, rule=rule(), precision="fp32")
        for step in range(4):
            Training(model, optimizer).loss(step, without=step % 2).backward()
            optimizer.step()
            (model if by == "model" else optimizer).zero_grad(set_to_none=False)
        weights.append([param.detach().clone() for param in model.parameters()])
    assert_alike(*weights, by)


def test_torchs_clipping_asks_for_each_gradient_alone(wrap: Wrap, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else its time would be quadratic in the number of units."""
    model, _ = wrap(Net(), places(Path())["ram"], rule=rule(), precision="fp32")
    Training(model, None).loss(0).backward()
    settled: list[int] = []
    settle = Stepper.settle

    def count(self: Stepper, gradients: Any) -> None:
        gradients = [*gradients]
        settled.append(len(gradients))
        settle(self, gradients)

    monkeypatch.setattr(Stepper, "settle", count)
    monkeypatch.delattr(GradientBuffers, "of_step")
    torch.nn.utils.clip_grad_norm_(model.parameters(), LIMIT)
    assert settled == [1] * 8
