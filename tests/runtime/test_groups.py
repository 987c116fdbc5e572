"""Param groups, freezing and unfreezing: as torch's own optimizers have them, wherever the state lives."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from pairwise import each_once
from reference import TORCH_FUSES
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, OneCycleLR
from zoo import ALL_ON_SSD, ARENA, HOST_WEIGHTS, RESIDENT, assert_equal, squeeze

import pagoda

from .conftest import Wrap
from .loops import Wrapped, assert_same_state, backward, layers, loss_of_layers

STEPS = 4
Groups = Callable[[Any], Any]
during_backward_too = pytest.mark.parametrize("announced", [None, 1], ids=["at-step", "during-backward"])


def frozen_at(*frozen: int) -> Any:
    """A model with some layers frozen."""
    model: Any = layers()
    for index in frozen:
        model.layers[index].requires_grad_(False)
    return model


def by_layer(model: Any) -> list[dict[str, Any]]:
    """A group for each layer, with settings of its own; the last one has the defaults."""
    settings = [{"lr": 3e-3, "betas": (0.8, 0.9)}, {"weight_decay": 0.3, "eps": 1e-6}, {}]
    return [{"params": layer.parameters(), **own} for layer, own in zip(model.layers, settings, strict=True)]


def torchs_adamw(params: Any) -> Any:
    return torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1)


def assert_trains_as_torch(
    mine: Wrapped, plain: tuple[Any, Any], steps: int, before: Callable[[Any, Any, int], object] = lambda *_: None
) -> None:
    """Both take the same steps; `before` is called with model, optimizer and number of each."""
    for step in range(steps):
        for model, optimizer in (mine, plain):
            before(model, optimizer, step)
            backward(model, step)
            optimizer.step()
            optimizer.zero_grad()
    for name, weight in mine[0].state_dict().items():
        torch.testing.assert_close(weight, plain[0].state_dict()[name], rtol=0, atol=2e-6, msg=name)


def steps_taken(wrapped: Wrapped) -> list[int]:
    return [int(state["step"]) for state in wrapped[1].state_dict()["state"].values()]


SCHEDULERS: dict[str, Callable[[Any], LRScheduler]] = {
    "one-for-all": lambda o: LambdaLR(o, lambda step: 0.5**step),
    "one-each": lambda o: LambdaLR(o, [lambda step: 0.5**step, lambda step: 1.0, lambda step: 1 / (1 + step)]),
    "one-cycle": lambda o: OneCycleLR(o, max_lr=[1e-2, 3e-3, 1e-3], total_steps=STEPS + 1),
}


@each_once(scheduler=[*SCHEDULERS], announced=[None, 1])
def test_groups_and_schedules_do_what_they_do_in_torch(scheduler: str, announced: int | None, wrap: Wrap) -> None:
    model, plain = layers(), layers()
    mine = wrap(model, param_groups=by_layer(model), precision="fp32", gradient_accumulation_steps=announced)
    reference = torchs_adamw(by_layer(plain))
    schedules = [SCHEDULERS[scheduler](optimizer) for optimizer in (mine[1], reference)]

    def advance(model: object, optimizer: Any, step: int) -> None:
        if step:
            schedules[optimizer is reference].step()
        if optimizer is reference:
            for own, other in zip(mine[1].param_groups, reference.param_groups, strict=True):
                assert all(own[key] == other[key] for key in ("lr", "betas", "eps", "weight_decay"))

    assert_trains_as_torch(mine, (plain, reference), STEPS, advance)


@pytest.mark.skipif(not TORCH_FUSES, reason="torch does not fuse on this CPU")
@pytest.mark.parametrize("placement", [None, HOST_WEIGHTS, ALL_ON_SSD, ARENA])
def test_groups_of_sgd_train_with_torchs_bits_wherever_they_are(
    placement: str | None, wrap: Wrap, tmp_path: Path
) -> None:
    """Also where a schedule changes rates and momenta, and layers have no gradients in a step."""

    def groups_of(model: Any) -> list[dict[str, Any]]:
        settings = [{"nesterov": True}, {"weight_decay": 0.3, "dampening": 0.1}, {}]
        return [{"params": layer.parameters(), **own} for layer, own in zip(model.layers, settings, strict=True)]

    rule, model, plain = pagoda.SGD(lr=0.1, momentum=0.9), layers(), layers()
    options = {"precision": "fp32", "clipping": False, "rule": rule}
    memory = RESIDENT if placement is None else squeeze(model, placement, tmp_path, **options)
    model, optimizer = wrap(model, memory, rule=rule, precision="fp32", param_groups=groups_of(model))
    theirs = torch.optim.SGD(groups_of(plain), lr=0.1, momentum=0.9)
    schedules = [OneCycleLR(each, max_lr=[1.0, 0.3, 0.1], total_steps=STEPS + 1) for each in (optimizer, theirs)]
    for step in range(STEPS):
        for each in (model, plain):
            backward(each, step, (0, 2) if step == 1 else (0, 1, 2))
        for each, schedule in zip((optimizer, theirs), schedules, strict=True):
            each.step()
            each.zero_grad()
            schedule.step()
    assert_equal(model.state_dict(), plain.state_dict())
    assert_equal(optimizer.state_dict()["state"], theirs.state_dict()["state"])


@during_backward_too
def test_a_frozen_parameter_keeps_weight_and_state(announced: int | None, wrap: Wrap) -> None:
    """And training goes on from there, as in torch."""
    mine, plain = wrap(layers(), precision="fp32", gradient_accumulation_steps=announced), layers()
    name, weights = "layers.1.0.weight", list[torch.Tensor]()

    def freeze(model: nn.Module, _optimizer: object, step: int) -> None:
        model.get_parameter(name).requires_grad_(step not in (2, 3))
        if model is mine[0]:
            weights.append(model.state_dict()[name])

    assert_trains_as_torch(mine, (plain, torchs_adamw(plain.parameters())), 6, freeze)
    assert [torch.equal(*pair) for pair in pairwise(weights)] == [False, False, True, True, False]
    assert steps_taken(mine) == [6, 6, 4, 6, 6, 6]


@during_backward_too
@pytest.mark.parametrize("passes", [1, 2])
def test_a_parameter_frozen_between_forward_and_backward_gets_no_gradient(
    passes: int, announced: int | None, wrap: Wrap
) -> None:
    """And keeps the one that it has from an earlier pass."""
    model, optimizer = wrap(layers(), precision="fp32", gradient_accumulation_steps=announced and passes)
    plain = layers()
    for each in (model, plain):
        for last in range(passes, 0, -1):
            loss = loss_of_layers(each)
            each.layers[1].requires_grad_(last > 1)
            loss.backward()
        assert (each.layers[1][0].weight.grad is None) == (passes == 1)
    optimizer.step()
    norm = torch.nn.utils.get_total_norm([param.grad for param in plain.parameters() if param.grad is not None])
    assert optimizer.stats.grad_norm == pytest.approx(norm.item(), rel=1e-5)


@during_backward_too
def test_a_parameter_frozen_at_first_can_be_unfrozen_if_it_is_in_a_group(announced: int | None, wrap: Wrap) -> None:
    """Gradual unfreezing: the groups have every parameter, as torch users write it."""
    model, plain = frozen_at(0, 1), frozen_at(0, 1)
    mine = wrap(model, param_groups=model.parameters(), precision="fp32", gradient_accumulation_steps=announced)

    def unfreeze(model: Any, _optimizer: object, step: int) -> None:
        if step in (2, 4):
            model.layers[2 - step // 2].requires_grad_(True)

    assert_trains_as_torch(mine, (plain, torchs_adamw(plain.parameters())), 6, unfreeze)
    assert steps_taken(mine) == [2, 2, 4, 4, 6, 6]


def test_reserved_parameters_join_with_a_group_of_their_own(wrap: Wrap) -> None:
    model, plain = frozen_at(0), frozen_at(0)
    mine = wrap(model, reserve=model.layers[0], precision="fp32")

    def join(model: Any, optimizer: Any, step: int) -> None:
        if step == 1:
            model.layers[0].requires_grad_(True)
        if step == 2:
            if model is plain:  # torch would step what came to no group
                model.zero_grad()
            optimizer.add_param_group({"params": model.layers[0].parameters(), "lr": 1e-3, "weight_decay": 0.0})

    reference = torchs_adamw([p for p in plain.parameters() if p.requires_grad])
    assert_trains_as_torch(mine, (plain, reference), STEPS, join)
    groups = mine[1].param_groups
    assert [len(group["params"]) for group in groups] == [4, 2]
    assert (groups[1]["lr"], groups[1]["eps"]) == (1e-3, 1e-8)


def test_only_parameters_in_groups_or_reserved_have_state(wrap: Wrap) -> None:
    def state_bytes(**options: Groups) -> int:
        model = frozen_at(0, 1)
        model, _ = wrap(model, **{name: value(model) for name, value in options.items()})
        return pagoda.plan_of(model).bytes["host"]["exp_avg"]

    one = state_bytes()
    assert state_bytes(reserve=lambda model: model.layers[0]) == 2 * one
    assert state_bytes(param_groups=lambda model: model.parameters()) == 3 * one
    assert state_bytes(reserve=lambda model: [model.layers[0], *model.layers[1].parameters()]) == 3 * one


def test_no_decay_groups_decay_matrices_only(wrap: Wrap) -> None:
    model = frozen_at(0)
    decayed, others = pagoda.no_decay_groups(model, 0.2)
    assert {id(p) for p in decayed["params"]} == {id(layer[0].weight) for layer in model.layers[1:]}
    assert {id(p) for p in others["params"]} == {id(layer[0].bias) for layer in model.layers[1:]}
    _, optimizer = wrap(model, param_groups=[decayed, others])
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.2, 0.0]
    assert len(pagoda.no_decay_groups(nn.LayerNorm(3), 0.1)) == 1


BAD_GROUPS: dict[str, tuple[Groups, str]] = {
    "a parameter of another model": (lambda model: [nn.Parameter(torch.ones(3, 5))], r"\(3, 5\).*not the model's"),
    "the same twice": (lambda model: [{"params": [*model.parameters()]}] * 2, "again in"),
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


def test_groups_that_cannot_be_meant_are_refused_before_anything_is_placed(wrap: Wrap) -> None:
    model = layers()
    for groups, message in BAD_GROUPS.values():
        with pytest.raises(pagoda.ConfigError, match=message):
            pagoda.wrap(model, pagoda.AdamW(), memory=RESIDENT, param_groups=groups(model), precision="bf16")
    wrap(model)


def test_adding_what_has_no_room_is_refused_by_name(wrap: Wrap) -> None:
    model, optimizer = wrap(frozen_at(0))
    for params, message in (
        (model.layers[0].parameters(), r"'layers\.0\.0\.weight' has no room.*reserve"),
        (model.layers[2][0].bias, r"'layers\.2\.0\.bias' is in a param group already"),
        ([nn.Parameter(torch.ones(3))], "was not placed by wrap"),
    ):
        with pytest.raises(pagoda.UsageError, match=message):
            optimizer.add_param_group({"params": params})
    with pytest.raises(pagoda.ConfigError, match=r"AdamW lr is '0\.1'"):
        optimizer.add_param_group({"params": [], "lr": "0.1"})
    assert len(optimizer.param_groups) == 1
    model.layers[0].requires_grad_(True)
    backward(model, 0)
    with pytest.raises(pagoda.UsageError, match=r"'layers\.0\.0\.weight' was frozen.*reserve"):
        optimizer.step()


# --- what is saved -------------------------------------------------------------------------------------------


def trained(wrap: Wrap, steps: int = 2) -> Wrapped:
    model = layers()
    model, optimizer = wrap(model, param_groups=by_layer(model))
    for step in range(steps):
        backward(model, step)
        optimizer.step()
    return model, optimizer


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
    assert_same_state((model, optimizer), (twin, twin_optimizer))
    _, other = wrap(layers())
    with pytest.raises(pagoda.CheckpointError, match=r"\[2, 2, 2\] parameters; this run has \[6\].*in other groups"):
        other.load_checkpoint(tmp_path / "step")


def test_a_state_dict_by_name_is_written_and_read_as_a_file(wrap: Wrap, tmp_path: Path) -> None:
    model, optimizer = trained(wrap)
    optimizer.param_groups[2]["weight_decay"] = 0.375
    optimizer.save_state_dict(tmp_path / "optimizer.pt")
    found = torch.load(tmp_path / "optimizer.pt", mmap=True)
    names = [name for name, _ in model.named_parameters()]
    assert [name for group in found["param_groups"] for name in group["params"]] == names
    for name, state in zip(names, optimizer.state_dict()["state"].values(), strict=True):
        assert_equal(found["state"][name], state)
    assert dict(optimizer.named_states()).keys() == found["state"].keys()
    twin, twin_optimizer = trained(wrap, steps=0)
    twin.load_state_dict(model.state_dict())
    twin_optimizer.load_state_dict(found)
    assert twin_optimizer.param_groups[2]["weight_decay"] == 0.375
    assert [p.name for p in tmp_path.iterdir()] == ["optimizer.pt"]
    assert_same_state((model, optimizer), (twin, twin_optimizer))
