"""`pagoda.Optim` finds out what a class keeps, runs its own code, and refuses what cannot be run unit by unit."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from lion_pytorch import Lion as TheirLion
from own_optimizers import Distance, Named, ScheduleFree, Whitened
from torch.optim import Optimizer

from pagoda.errors import ConfigError, UsageError
from pagoda.optim import Optim

from .blocks import randn as gradient

CLASSES: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "adagrad": (torch.optim.Adagrad, {"lr": 1e-2, "initial_accumulator_value": 0.1}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 1e-2, "momentum": 0.9, "centered": True}),
    "nadam": (torch.optim.NAdam, {"lr": 1e-2, "weight_decay": 0.1}),
    "adafactor": (torch.optim.Adafactor, {"lr": 1e-2}),
    "sgd": (torch.optim.SGD, {"lr": 1e-2}),
    "asgd": (torch.optim.ASGD, {"lr": 1e-2}),
    "rprop": (torch.optim.Rprop, {"lr": 1e-2}),
    "amsgrad": (torch.optim.AdamW, {"lr": 1e-2, "amsgrad": True}),
    "lion": (TheirLion, {"lr": 1e-3}),
}


class Step(Optimizer):
    """What the classes below share."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})
        self.seen = 0

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        self.seen += 1
        for group in self.param_groups:
            for param in group["params"]:
                self.move(param, group)

    def move(self, param: torch.nn.Parameter, group: dict[str, Any]) -> None:
        param.add_(param.grad, alpha=-group["lr"])


class ByTheNorm(Step):
    """Divides by the norm of all gradients."""

    def move(self, param: torch.nn.Parameter, group: dict[str, Any]) -> None:
        norm = sum(p.grad.norm().item() for p in group["params"])
        param.add_(param.grad, alpha=-group["lr"] / norm)


class OnTheSide(Step):
    """Counts its steps in an attribute."""

    def move(self, param: torch.nn.Parameter, group: dict[str, Any]) -> None:
        param.add_(param.grad, alpha=-group["lr"] / self.seen)


class LateInTheGroup(Step):
    """Notes in the group that weights are small, but only from some step on."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
            if group["k"] > 20:
                group["small"] = bool(group["params"][0].abs().max() < 1)


class Noisy(Step):
    """Adds noise."""

    def move(self, param: torch.nn.Parameter, group: dict[str, Any]) -> None:
        param.add_(torch.randn_like(param), alpha=group["lr"])


class Listed(Step):
    """Keeps a list."""

    def move(self, param: torch.nn.Parameter, group: dict[str, Any]) -> None:
        self.state[param].setdefault("history", []).append(1)


class Counting(Step):
    """Keeps Python numbers and a vector of rows."""

    def move(self, param: torch.nn.Parameter, group: dict[str, Any]) -> None:
        state = self.state[param]
        if not state:
            state.update(count=0, scale=1.0, rows=torch.zeros(param.shape[:1], dtype=torch.float64))
        state["count"] += 1
        state["scale"] *= 0.5
        state["rows"] = state["rows"] + param.grad.double().flatten(1).sum(1)
        param.add_(param.grad, alpha=-group["lr"] * state["scale"] / state["count"])


class LateState(Step):
    """Keeps a state from its tenth step on."""

    def move(self, param: torch.nn.Parameter, group: dict[str, Any]) -> None:
        if self.seen > 9:
            self.state[param]["extra"] = torch.zeros(1)


class InBlocks(Step):
    """Keeps a number for each 16 elements, the last ones included."""

    def move(self, param: torch.nn.Parameter, group: dict[str, Any]) -> None:
        of = self.state[param].setdefault("largest", torch.zeros(-(-param.numel() // 16)))
        padded = torch.nn.functional.pad(param.grad.flatten(), (0, 16 * len(of) - param.numel()))
        of.copy_(torch.maximum(of, padded.view(-1, 16).abs().amax(1)))
        param.sub_(param.grad / of.repeat_interleave(16)[: param.numel()].view_as(param), alpha=group["lr"])


class UpToASize(Step):
    """Keeps a matrix for each dimension of at most 16, as SOAP and Shampoo do, and None for others."""

    def move(self, param: torch.nn.Parameter, group: dict[str, Any]) -> None:
        kept = self.state[param].setdefault("by_dim", [torch.zeros(n, n) if n <= 16 else None for n in param.shape])
        for dim, of in enumerate(kept):
            if of is not None:
                rows = param.grad.transpose(0, dim).reshape(param.shape[dim], -1)
                param.sub_(of.add_(rows @ rows.T).trace() * param, alpha=group["lr"])


class LowRank(Step):
    """Keeps a rank of 4 of what is large, as GaLore does, and all of what is small."""

    def move(self, param: torch.nn.Parameter, group: dict[str, Any]) -> None:
        state, grad = self.state[param], param.grad
        if param.dim() < 2 or min(param.shape) < 16:
            param.sub_(state.setdefault("mean", torch.zeros_like(param)).lerp_(grad, 0.1), alpha=group["lr"])
        else:
            basis = state.setdefault("basis", torch.linalg.qr(grad)[0][:, :4].clone())
            mean = state.setdefault("of_rank", torch.zeros(4, param.shape[1])).lerp_(basis.T @ grad, 0.1)
            param.sub_(basis @ mean, alpha=group["lr"])


class ByIndex(Step):
    """Later parameters of a group move less."""

    def move(self, param: torch.nn.Parameter, group: dict[str, Any]) -> None:
        index = next(index for index, other in enumerate(group["params"]) if other is param)
        param.add_(param.grad, alpha=-group["lr"] / (1 + index))


class ClippedTogether(Step):
    """Limits the norm of all gradients, to more than that of a few small ones."""

    def move(self, param: torch.nn.Parameter, group: dict[str, Any]) -> None:
        norm = sum(p.grad.square().sum() for p in group["params"]) ** 0.5
        param.sub_(param.grad / max(1.0, norm / 100), alpha=group["lr"])


class NoisyIfLarge(Step):
    """Adds noise to large parameters."""

    def move(self, param: torch.nn.Parameter, group: dict[str, Any]) -> None:
        if param.numel() > 10_000:
            param.add_(torch.randn_like(param), alpha=group["lr"])


def kept_by(rule: Optim, name: str, shape: tuple[int, ...]) -> dict[str, torch.Tensor]:
    shapes = {state: state.shape(name, shape) for state in rule.own_states()}
    return {state.name: torch.zeros(own, dtype=state.dtype) for state, own in shapes.items() if own is not None}


Trained = tuple[torch.Tensor, torch.nn.Parameter, Optimizer, dict[str, torch.Tensor]]


def beside(rule: Optim, shape: tuple[int, ...], steps: int, **settings: Any) -> Trained:
    """A weight after some steps of a rule, one of its class in memory with that class, and what the rule keeps."""
    weight = gradient(shape, 0)
    parameter, kept = torch.nn.Parameter(weight.clone()), kept_by(rule, "p", shape)
    theirs = rule.kind([parameter], **settings)
    for step in range(1, steps + 1):
        parameter.grad = gradient(shape, step)
        theirs.step()
        rule.update(step, weight, gradient(shape, step), kept)
    assert torch.equal(weight, parameter.detach())
    return weight, parameter, theirs, kept


@pytest.mark.parametrize(("kind", "settings"), CLASSES.values(), ids=CLASSES)
def test_bits_and_states_are_those_of_the_class_in_memory_and_go_through_torchs_format(
    kind: type[Optimizer], settings: dict[str, Any]
) -> None:
    rule = Optim(kind, **settings)
    assert rule.steps_in({}) == 0
    for shape in ((6, 8), (9,), (4, 3, 2, 2)):
        _, parameter, theirs, kept = beside(rule, shape, 5, **settings)
        expected = {name: value for name, value in theirs.state[parameter].items() if value is not None}
        found = rule.torch_state(5, kept)
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(torch.as_tensor(found[name]), torch.as_tensor(value)), name
            assert type(found[name]) is type(value)
        assert bool(rule.steps_in(found)) == bool(found)
        back = rule.kept_states(found, "p", shape)
        assert back.keys() == kept.keys()
        assert all(torch.equal(back[name], kept[name]) for name in kept)


def test_a_clock_in_the_group_moves_as_in_memory_and_lists_of_tensors_are_states() -> None:
    for kind, names in ((ScheduleFree, {"z"}), (Whitened, {"squares_0", "squares_1"})):
        rule: Any = Optim(kind, lr=0.5)
        weight = gradient((6, 8), 0)
        parameter = torch.nn.Parameter(weight.clone())
        theirs, kept, group = kind([parameter], lr=0.5), kept_by(rule, "p", (6, 8)), rule.defaults()
        assert kept.keys() == names
        group |= rule.after_switch("train", group)
        getattr(theirs, "train", lambda: None)()
        for step in range(1, 4):
            parameter.grad = gradient((6, 8), step)
            theirs.step()
            rule.with_group(group).update(step, weight, gradient((6, 8), step), kept)
            group |= rule.after_step(group)
            assert torch.equal(weight, parameter.detach())
            assert {**group, "params": [parameter]} == theirs.param_groups[0]


def test_a_step_that_changes_more_of_the_group_than_was_tried_is_refused() -> None:
    rule = Optim(LateInTheGroup)
    with pytest.raises(UsageError, match=r"changes \['small'\] in param_groups"):
        rule.after_step({**rule.defaults(), "k": 20})


def test_settings_of_a_group_reach_the_class() -> None:
    rule = Optim(torch.optim.Adagrad, lr=1e-2)
    assert rule.defaults()["lr"] == 1e-2
    assert rule.defaults()["eps"] == 1e-10
    moved = rule.with_group({**rule.defaults(), "lr": torch.tensor(0.5), "params": []})
    assert moved.defaults()["lr"] == 0.5
    assert moved != rule
    assert moved == rule.with_group({**rule.defaults(), "lr": 0.5})
    slow, fast = torch.zeros(4), torch.zeros(4)
    rule.update(1, slow, torch.ones(4), kept_by(rule, "p", (4,)))
    moved.update(1, fast, torch.ones(4), kept_by(rule, "p", (4,)))
    assert torch.allclose(fast, 50 * slow)


def test_a_group_cannot_add_or_remove_states() -> None:
    """As `OneCycleLR` does, which gives SGD a momentum."""
    rule = Optim(torch.optim.SGD, lr=0.1)
    assert rule.with_group({**rule.defaults(), "lr": 0.0, "weight_decay": 0.1}).defaults()["lr"] == 0.0
    with pytest.raises(ConfigError, match="keeps no states, and others with"):
        rule.with_group({**rule.defaults(), "momentum": 0.9})
    with pytest.raises(ConfigError, match="momentum_buffer"):
        Optim(torch.optim.SGD, lr=0.1, momentum=0.9).with_group({**rule.defaults(), "momentum": 0.0})


def test_numbers_and_vectors_are_kept_as_they_are() -> None:
    rule = Optim(Counting)
    kept = kept_by(rule, "p", (6, 8))
    assert {name: (state.dtype, tuple(state.shape)) for name, state in kept.items()} == {
        "count": (torch.int64, ()),
        "scale": (torch.float64, ()),
        "rows": (torch.float64, (6,)),
    }
    weight = torch.zeros(6, 8)
    for step in (1, 2, 3):
        rule.update(step, weight, gradient((6, 8), step), kept)
    state = rule.torch_state(3, kept)
    assert (state["count"], state["scale"]) == (3, 0.125)
    assert type(state["count"]) is int
    assert kept["rows"].abs().sum() > 0


def test_a_closure_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"torch's LBFGS cannot be run: .*'closure'\. .*use another class"):
        Optim(torch.optim.LBFGS)


def test_a_setting_of_a_wrong_type_is_named() -> None:
    with pytest.raises(ConfigError, match=r"torch's Adagrad cannot be run: .*Its settings are \{'lr': 'x'\}"):
        Optim(torch.optim.Adagrad, lr="x")
    rule = Optim(torch.optim.Adagrad)
    with pytest.raises(ConfigError, match=r"torch's Adagrad's lr is 'x'; it must be a number, such as 0\.01"):
        rule.with_group({**rule.defaults(), "lr": "x"})


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (ByTheNorm, "depends on the others"),
        (OnTheSide, "outside `state`"),
        (Distance, r"computes \['d'\] in param_groups from all parameters"),
        (Named, "takes 'named_parameters', so its update .* depends on the parameter's name"),
        (Noisy, "draws random numbers"),
        (Listed, "changes from step to step"),
        (ByIndex, "depends on .* their order"),
        (ClippedTogether, "depends on the others"),
        (NoisyIfLarge, r"draws random numbers for a parameter of shape \[256, 256\].*such as pagoda\.AdamW"),
        (torch.optim.SparseAdam, "SparseAdam cannot be run"),
    ],
)
def test_what_cannot_be_run_unit_by_unit_is_refused(kind: type[Optimizer], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        Optim(kind)


def test_what_a_class_refuses_is_said_with_the_parameters_name() -> None:
    rule = Optim(torch.optim.Muon, lr=1e-2)
    (state,) = rule.own_states()
    assert state.shape("matrix", (30, 20)) == (30, 20)
    with pytest.raises(ConfigError, match=r"'norm.weight', of shape \[7\].*only supports 2D"):
        state.shape("norm.weight", (7,))
    with pytest.raises(ConfigError, match="Invalid learning rate"):
        Optim(torch.optim.Adagrad, lr=-1.0)
    with pytest.raises(ConfigError, match="wants a class"):
        Optim("adagrad")


def test_states_that_tiny_tensors_do_not_show_are_refused_when_they_come() -> None:
    rule = Optim(LateState)
    object.__setattr__(rule, "kind", partial(_old, LateState))
    with pytest.raises(UsageError, match="extra"):
        rule.update(1, torch.zeros(10, 10), torch.zeros(10, 10), {})


def _old(kind: Any, params: Any) -> Optimizer:
    optimizer = kind(params)
    optimizer.seen = 20
    return optimizer


@pytest.mark.parametrize("kind", [InBlocks, UpToASize, LowRank])
def test_states_may_depend_on_a_parameters_size(kind: type[Step]) -> None:
    for shape in ((6, 8), (24, 40), (24, 5), (37,)):
        beside(Optim(kind), shape, 3)


def test_states_without_a_rule_for_their_shape_are_refused_before_the_first_step() -> None:
    class Sparse(Step):
        def move(self, param: torch.nn.Parameter, group: dict[str, Any]) -> None:
            self.state[param]["chosen"] = (param.grad > param.grad.median()).nonzero()

    rule = Optim(Sparse)
    with pytest.raises(ConfigError, match=r"cannot update 'p', of shape \[9\].*'chosen'.*no known rule"):
        kept_by(rule, "p", (9,))


def test_an_update_tries_nothing_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs on a thread of its own, where that would put the program's random numbers back."""
    rule, weight = Optim(torch.optim.SGD, lr=0.5), torch.zeros(3, 5)

    fork, forks = torch.random.fork_rng, []

    def noted(*args: Any, **settings: Any) -> Any:
        forks.append(args)
        return fork(*args, **settings)

    monkeypatch.setattr(torch.random, "fork_rng", noted)
    for step in (1, 2):
        rule.update(step, weight, torch.ones(3, 5), {})
    assert torch.equal(weight, torch.full((3, 5), -1.0))
    assert not forks
