"""Param groups, freezing and unfreezing: as torch's own optimizers have them, wherever the state lives."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, OneCycleLR
from zoo import RESIDENT, Outcome, llama

import pagoda
from pagoda.optimizer import PagedOptimizer

from .conftest import Wrap
from .loops import backward, layers

STEPS = 4
Groups = Callable[[nn.Module], Any]


def by_layer(model: nn.Module) -> list[dict[str, Any]]:
    """A group for each layer, with settings of its own; the last one has the defaults."""
    settings = [{"lr": 3e-3, "betas": (0.8, 0.9)}, {"weight_decay": 0.3, "eps": 1e-6}, {}]
    return [
        {"params": layer.parameters(), **own}
        for layer, own in zip(model.get_submodule("layers"), settings, strict=True)  # type: ignore[call-overload]
    ]


def assert_close_to_torch(model: nn.Module, plain: nn.Module) -> None:
    for name, weight in model.state_dict().items():
        torch.testing.assert_close(weight, plain.state_dict()[name], rtol=0, atol=2e-6, msg=name)


SCHEDULERS: dict[str, Callable[[Any], LRScheduler]] = {
    "one-for-all": lambda o: LambdaLR(o, lambda step: 0.5**step),
    "one-each": lambda o: LambdaLR(o, [lambda step: 0.5**step, lambda step: 1.0, lambda step: 1 / (1 + step)]),
    "one-cycle": lambda o: OneCycleLR(o, max_lr=[1e-2, 3e-3, 1e-3], total_steps=STEPS + 1),
}


@pytest.mark.parametrize("announced", [None, 1], ids=["at-step", "during-backward"])
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_groups_and_their_schedules_do_what_they_do_to_torchs_adamw(
    scheduler: str, announced: int | None, wrap: Wrap
) -> None:
    model = layers()
    model, optimizer = wrap(model, param_groups=by_layer(model), precision="fp32", accumulation_steps=announced)
    plain = layers()
    reference = torch.optim.AdamW(by_layer(plain), lr=1e-2, weight_decay=0.1)
    schedules = SCHEDULERS[scheduler](optimizer), SCHEDULERS[scheduler](reference)
    for step in range(STEPS):
        backward(model, step)
        backward(plain, step)
        for stepped in (optimizer, reference, *schedules):
            stepped.step()  # type: ignore[attr-defined]
        reference.zero_grad()
        for mine, other in zip(optimizer.param_groups, reference.param_groups, strict=True):
            for key in ("lr", "betas", "eps", "weight_decay"):
                assert mine[key] == other[key], key
    assert_close_to_torch(model, plain)


@pytest.mark.parametrize("announced", [None, 1], ids=["at-step", "during-backward"])
def test_a_frozen_parameter_keeps_weight_and_state(announced: int | None, wrap: Wrap) -> None:
    """And training goes on from there, as in torch."""
    model, optimizer = wrap(layers(), precision="fp32", accumulation_steps=announced)
    plain = layers()
    reference = torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.1)
    frozen = "layers.1.0.weight"
    for step in range(6):
        for module, stepped in ((model, optimizer), (plain, reference)):
            module.get_parameter(frozen).requires_grad_(step not in (2, 3))
            before = module.state_dict()[frozen].clone()
            backward(module, step)
            assert step not in (2, 3) or module.get_parameter(frozen).grad is None
            stepped.step()
            stepped.zero_grad()
            assert torch.equal(before, module.state_dict()[frozen]) == (step in (2, 3))
    assert_close_to_torch(model, plain)
    assert optimizer.state_dict()["state"][2]["step"] == 4


@pytest.mark.parametrize("announced", [None, 1], ids=["at-step", "during-backward"])
def test_a_parameter_frozen_at_first_can_be_unfrozen_if_it_is_in_a_group(announced: int | None, wrap: Wrap) -> None:
    """Gradual unfreezing: the groups have every parameter, as torch users write it."""
    model, plain = layers(), layers()
    for module in (model, plain):
        module.get_submodule("layers")[:2].requires_grad_(False)  # type: ignore[index]
    params = model.parameters()
    model, optimizer = wrap(model, param_groups=params, precision="fp32", accumulation_steps=announced)
    reference = torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.1)
    for step in range(6):
        for module, stepped in ((model, optimizer), (plain, reference)):
            if step in (2, 4):
                module.get_submodule("layers")[2 - step // 2].requires_grad_(True)  # type: ignore[index]
            backward(module, step)
            stepped.step()
            stepped.zero_grad()
    assert_close_to_torch(model, plain)
    assert [int(state["step"]) for state in optimizer.state_dict()["state"].values()] == [2, 2, 4, 4, 6, 6]


def test_reserved_parameters_join_with_a_group_of_their_own(wrap: Wrap) -> None:
    model, plain = layers(), layers()
    for module in (model, plain):
        module.get_submodule("layers")[0].requires_grad_(False)  # type: ignore[index]
    model, optimizer = wrap(model, reserve=model.get_submodule("layers.0"), precision="fp32")
    reference = torch.optim.AdamW([p for p in plain.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.1)
    for step in range(4):
        for module, stepped in ((model, optimizer), (plain, reference)):
            layer = module.get_submodule("layers.0")
            if step == 1:
                layer.requires_grad_(True)
            if step == 2:
                stepped.add_param_group({"params": layer.parameters(), "lr": 1e-3, "weight_decay": 0.0})
            backward(module, step)
            stepped.step()
            module.zero_grad()
    assert [len(group["params"]) for group in optimizer.param_groups] == [4, 2]
    assert optimizer.param_groups[1]["lr"] == 1e-3
    assert optimizer.param_groups[1]["eps"] == 1e-8
    assert_close_to_torch(model, plain)


def test_only_parameters_in_groups_or_reserved_have_state(wrap: Wrap) -> None:
    def state_bytes(**options: Any) -> int:
        model = layers()
        model.get_submodule("layers")[:2].requires_grad_(False)  # type: ignore[index]
        settings = {name: value(model) for name, value in options.items()}
        model, _ = wrap(model, **settings)
        return pagoda.plan_of(model).bytes["host"]["exp_avg"]

    one = state_bytes()
    assert state_bytes(reserve=lambda model: model.layers[0]) == 2 * one
    assert state_bytes(param_groups=lambda model: model.parameters()) == 3 * one
    assert state_bytes(reserve=lambda model: [model.layers[0], *model.layers[1].parameters()]) == 3 * one


def test_no_decay_groups_decay_matrices_only(wrap: Wrap) -> None:
    torch.manual_seed(0)
    model = llama()
    model.get_submodule("model.layers.0").requires_grad_(False)
    decayed, others = pagoda.no_decay_groups(model, 0.2)
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.2, 0.0)
    assert {p.ndim for p in decayed["params"]} == {2}
    assert {p.ndim for p in others["params"]} == {1}
    assert len(decayed["params"]) + len(others["params"]) == sum(p.requires_grad for p in model.parameters())
    model, optimizer = wrap(model, param_groups=[decayed, others], lr=1e-2)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.2, 0.0]
    assert len(pagoda.no_decay_groups(nn.LayerNorm(3), 0.1)) == 1


BAD_GROUPS: dict[str, tuple[Groups, str]] = {
    "a parameter of another model": (lambda model: [nn.Parameter(torch.ones(3, 5))], r"\(3, 5\).*not the model's"),
    "the same twice": (lambda model: [{"params": model.parameters()}] * 2, "again in"),
    "in two groups": (
        lambda model: [{"params": model.parameters()}, {"params": [model.layers[0][0].weight]}],
        r"'layers\.0\.0\.weight' is in param_groups\[0\] and again in param_groups\[1\]",
    ),
    "no params": (lambda model: [{"lr": 0.1}], r"param_groups\[0\] has no 'params'"),
    "a set": (lambda model: [{"params": set(model.parameters())}], "no order"),
    "a plain tensor": (lambda model: [torch.ones(3)], "Tensor where a parameter"),
    "a trainable one left out": (lambda model: model.layers[0].parameters(), r"'layers\.1.*reserve"),
    "settings out of range": (lambda model: [{"params": model.parameters(), "lr": -1.0}], "lr"),
}


@pytest.mark.parametrize("case", BAD_GROUPS)
def test_groups_that_cannot_be_meant_are_refused_before_anything_is_placed(case: str) -> None:
    groups, message = BAD_GROUPS[case]
    model = layers()
    given = groups(model)
    if case == "the same twice":
        given = [{"params": list(model.parameters())}] * 2
    with pytest.raises(pagoda.ConfigError, match=message):
        pagoda.wrap(model, pagoda.AdamW(), memory=RESIDENT, param_groups=given)
    pagoda.wrap(model, pagoda.AdamW(), memory=RESIDENT)[1].close()


def test_adding_what_has_no_room_is_refused_by_name(wrap: Wrap) -> None:
    model = layers()
    model.get_submodule("layers.0").requires_grad_(False)
    model, optimizer = wrap(model)
    with pytest.raises(pagoda.UsageError, match=r"'layers\.0\.0\.weight' has no room.*reserve"):
        optimizer.add_param_group({"params": model.get_submodule("layers.0").parameters()})
    with pytest.raises(pagoda.UsageError, match=r"'layers\.2\.0\.bias' is in a param group already"):
        optimizer.add_param_group({"params": model.get_parameter("layers.2.0.bias")})
    with pytest.raises(pagoda.UsageError, match="was not placed by wrap"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    assert len(optimizer.param_groups) == 1
    model.get_submodule("layers.0").requires_grad_(True)
    backward(model, 0)
    with pytest.raises(pagoda.UsageError, match=r"'layers\.0\.0\.weight' was frozen.*reserve"):
        optimizer.step()


# --- what is saved -------------------------------------------------------------------------------------------


def trained(wrap: Wrap, steps: int = 2) -> tuple[nn.Module, PagedOptimizer]:
    model = layers()
    model, optimizer = wrap(model, param_groups=by_layer(model))
    for step in range(steps):
        backward(model, step)
        optimizer.step()
    return model, optimizer


def outcome_of(model: nn.Module, optimizer: PagedOptimizer) -> Outcome:
    return Outcome(weights=model.state_dict(), optimizer=optimizer.state_dict())


def test_a_checkpoint_has_the_groups(wrap: Wrap, tmp_path: Path) -> None:
    model, optimizer = trained(wrap)
    optimizer.param_groups[1]["lr"] = 0.125
    optimizer.save_checkpoint(tmp_path / "step")
    twin, twin_optimizer = trained(wrap, steps=0)
    twin_optimizer.load_checkpoint(tmp_path / "step")
    assert [group["lr"] for group in twin_optimizer.param_groups] == [3e-3, 0.125, 1e-2]
    for module, stepped in ((model, optimizer), (twin, twin_optimizer)):
        backward(module, 9)
        stepped.step()
    outcome_of(model, optimizer).assert_same_bits(outcome_of(twin, twin_optimizer))
    _, other = wrap(layers())
    with pytest.raises(pagoda.CheckpointError, match=r"\[2, 2, 2\] parameters; this run has \[6\].*otherwise"):
        other.load_checkpoint(tmp_path / "step")


def test_a_state_dict_by_name_is_written_and_read_as_a_file(wrap: Wrap, tmp_path: Path) -> None:
    model, optimizer = trained(wrap)
    optimizer.param_groups[2]["weight_decay"] = 0.375
    optimizer.save_state_dict(tmp_path / "optimizer.pt")
    found = torch.load(tmp_path / "optimizer.pt", mmap=True)
    names = [name for name, _ in model.named_parameters()]
    assert [name for group in found["param_groups"] for name in group["params"]] == names
    for name, state in zip(names, optimizer.state_dict()["state"].values(), strict=True):
        assert found["state"][name].keys() == state.keys()
        assert all(torch.equal(found["state"][name][key], value) for key, value in state.items()), name
    assert dict(optimizer.named_states()).keys() == found["state"].keys()
    twin, twin_optimizer = trained(wrap, steps=0)
    twin.load_state_dict(model.state_dict())
    twin_optimizer.load_state_dict(found)
    assert twin_optimizer.param_groups[2]["weight_decay"] == 0.375
    assert [p.name for p in tmp_path.iterdir()] == ["optimizer.pt"]
    mine, other = optimizer.state_dict()["state"], twin_optimizer.state_dict()["state"]
    for index, state in mine.items():
        assert all(torch.equal(other[index][key], value) for key, value in state.items()), index
