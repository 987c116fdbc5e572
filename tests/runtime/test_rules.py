"""Every update rule: torch's own bits where it has the rule, resumed as if never ended; and what moments take."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import reference
import torch
from lion_pytorch import Lion as TheirLion
from own_optimizers import ScheduleFree, Whitened
from torch import nn
from zoo import ALL_ON_SSD, RESIDENT, Outcome, Recipe, assert_equal, losses_of, squeeze, train, usual_loop

import pagoda
from pagoda.config.run import Moments
from pagoda.optim import AdamW, Rule

from .conftest import Wrap

RECIPE = Recipe("plain", clip=0.5, steps=3)
ELEMENTWISE: dict[str, Rule] = {
    "adam": pagoda.Adam(lr=1e-2, weight_decay=0.1),
    "sgd": pagoda.SGD(lr=1e-1),
    "momentum": pagoda.SGD(lr=1e-1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "signsgd": pagoda.SignSGD(lr=1e-3, weight_decay=0.1),
    "lion": pagoda.Lion(lr=1e-3, weight_decay=0.1),
}
WHOLE: dict[str, Rule] = {
    "adafactor": pagoda.Adafactor(lr=1e-2, weight_decay=0.1),
    "muon": pagoda.Muon(lr=1e-2),
    "adagrad": pagoda.Optim(torch.optim.Adagrad, lr=1e-2),
    "lion-pytorch": pagoda.Optim(TheirLion, lr=1e-3),
    "whitened": pagoda.Optim(Whitened, lr=1e-2),
}
USUAL = ("lion", "adafactor", "muon", "adagrad")
"""One of each kind of state: `make test-all` takes the others too."""
every_rule = pytest.mark.parametrize(
    "rule",
    [
        pytest.param(rule, id=name, marks=() if name in USUAL else pytest.mark.slow)
        for name, rule in (ELEMENTWISE | WHOLE).items()
    ],
)


class InMemory:
    """Optimizers of torch with the methods that the loop uses."""

    def __init__(self, *optimizers: Any) -> None:
        self.optimizers = optimizers
        self.stats = type("Stats", (), {"grad_norm": None, "faults": 0, "bytes_moved": {}})()

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()


def in_memory(rule: Any, model: nn.Module) -> InMemory:
    """torch's optimizer of a rule."""
    if isinstance(rule, pagoda.Optim):
        return InMemory(rule.kind(model.parameters(), **rule.settings))
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, param in model.named_parameters():
        (matrices if rule.takes_whole(name, tuple(param.shape)) else others).append(param)
    muon = torch.optim.Muon(matrices, lr=rule.lr, adjust_lr_fn="match_rms_adamw")
    return InMemory(muon, reference.InMemory(others, AdamW(lr=rule.lr, weight_decay=0.1)))


@pytest.mark.parametrize("name", [name for name in WHOLE if name != "adafactor"])
def test_in_fp32_a_run_has_the_bits_of_torch_in_memory(name: str, tmp_path: Path) -> None:
    recipe = replace(RECIPE, rule=WHOLE[name], precision="fp32", clip=None)
    memory = squeeze(recipe.build(), ALL_ON_SSD, tmp_path, precision="fp32", clipping=False, rule=recipe.rule)
    ours = train(recipe, memory)
    model = recipe.build()
    theirs, optimizer = Outcome(), in_memory(recipe.rule, model)
    torch.manual_seed(2)
    usual_loop(recipe)(model, optimizer, theirs)
    assert ours.losses == theirs.losses
    assert_equal(ours.weights, model.state_dict())
    if len(optimizer.optimizers) == 1 and name != "whitened":  # whose list of tensors is several states here
        state = optimizer.optimizers[0].state_dict()["state"]
        mine = ours.optimizer["state"]
        assert mine.keys() == state.keys()
        for index, of in state.items():
            assert mine[index].keys() == of.keys()
            assert all(torch.equal(mine[index][key], value) for key, value in of.items())


def matrices() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(48, 48, bias=False) for _ in range(3)))


def take(model: nn.Module, optimizer: Any, steps: range) -> list[float]:
    def loss_of(step: int) -> torch.Tensor:
        x = torch.randn(4, 48, generator=torch.Generator().manual_seed(steps[step]))
        loss: torch.Tensor = model(x.to(next(model.parameters()).dtype)).float().square().mean()
        return loss

    return losses_of(loss_of, optimizer, len(steps))


@every_rule
def test_a_checkpoint_resumes_every_rule_without_a_changed_bit(rule: Rule, wrap: Wrap, tmp_path: Path) -> None:
    """In RAM, and where it was: pages of it are kept there, and adopted."""

    def build() -> nn.Module:
        model = matrices()
        model.append(nn.LayerNorm(48))
        model[-1].empty = nn.Parameter(torch.empty(3, 0))
        return model

    ssd = squeeze(build(), ALL_ON_SSD, tmp_path, rule=rule, unit_limit="4KiB")
    model, optimizer = wrap(build(), ssd, rule=rule, max_grad_norm=1.0)
    take(model, optimizer, range(2))
    optimizer.save_checkpoint(tmp_path / "checkpoint")
    losses = take(model, optimizer, range(2, 4))
    weights, state = model.state_dict(), optimizer.state_dict()
    optimizer.close()
    for memory in (ssd, RESIDENT):
        model, optimizer = wrap(build(), memory, rule=rule, max_grad_norm=1.0)
        optimizer.load_checkpoint(tmp_path / "checkpoint")
        assert take(model, optimizer, range(2, 4)) == losses
        assert_equal(model.state_dict(), weights)
        again = optimizer.state_dict()
        assert again["param_groups"] == state["param_groups"]
        assert_same_state(again, state)
        optimizer.close()
    other = wrap(build(), rule=rule)[1]
    other.load_state_dict(state)
    assert_same_state(other.state_dict(), state)


def assert_same_state(mine: dict[str, Any], other: dict[str, Any]) -> None:
    assert mine["state"].keys() == other["state"].keys()
    for index, of in other["state"].items():
        assert mine["state"][index].keys() == of.keys()
        for name, value in of.items():
            assert torch.equal(torch.as_tensor(mine["state"][index][name]), torch.as_tensor(value)), (index, name)


def test_a_state_that_no_parameter_has_is_no_damage(wrap: Wrap, tmp_path: Path) -> None:
    """Adafactor's `variance` is for vectors, and the model has none."""
    model, optimizer = wrap(matrices(), rule=WHOLE["adafactor"])
    take(model, optimizer, range(2))
    optimizer.save_checkpoint(tmp_path / "checkpoint")
    losses = take(model, optimizer, range(2, 4))
    optimizer.load_checkpoint(tmp_path / "checkpoint")
    assert take(model, optimizer, range(2, 4)) == losses


def test_what_cannot_be_run_with_a_rule_is_refused(tmp_path: Path) -> None:
    rule, model = WHOLE["muon"], RECIPE.build()
    memory = squeeze(model, ALL_ON_SSD, tmp_path, rule=rule, asynchronous=True, clipping=False)
    with pytest.raises(pagoda.ConfigError, match="Muon needs every weight in RAM"):
        pagoda.wrap(model, rule, memory=memory, update="async", precision="bf16")
    with pytest.raises(pagoda.ConfigError, match=r"pagoda.Optim\(torch.optim.Adagrad"):
        pagoda.wrap(matrices(), torch.optim.Adagrad, memory=RESIDENT, precision="bf16")
    with pytest.raises(pagoda.ConfigError, match="only supports 2D"):
        pagoda.wrap(nn.Linear(4, 4), pagoda.Optim(torch.optim.Muon), memory=RESIDENT, precision="bf16")


# --- classes that count in the group, and have other weights in evaluation -------------------------------------


def test_a_schedule_free_class_trains_evaluates_and_resumes_with_its_own_bits(wrap: Wrap, tmp_path: Path) -> None:
    """Also where a parameter has no gradient in a step: the count of its group goes on."""

    def build() -> Any:
        model = matrices()
        return model, [{"params": [*model[:2].parameters()], "lr": 0.25}, {"params": [*model[2].parameters()]}]

    def run(model: nn.Module, optimizer: Any, steps: range) -> list[Any]:
        optimizer.train()
        model[1].weight.requires_grad_(1 not in steps)
        losses = take(model, optimizer, steps)
        optimizer.eval()
        return [*losses, model(torch.ones(1, 48)).sum().item()]

    plain, groups = build()
    theirs = ScheduleFree(groups)
    expected = [run(plain, theirs, range(at, at + 2)) for at in (0, 2, 4)]
    rule, options = pagoda.Optim(ScheduleFree), {"precision": "fp32", "gradient_accumulation_steps": 1}
    model, groups = build()
    ssd = squeeze(model, ALL_ON_SSD, tmp_path, rule=rule, precision="fp32", clipping=False)
    model, optimizer = wrap(model, ssd, rule=rule, param_groups=groups, **options)
    x = torch.ones(1, 48)
    with pytest.raises(pagoda.UsageError, match="not in train mode"):  # and nothing has changed
        model(x).sum().backward()
    optimizer.zero_grad()
    assert [run(model, optimizer, range(at, at + 2)) for at in (0, 2)] == expected[:2]
    optimizer.save_checkpoint(tmp_path / "checkpoint")
    optimizer.close()
    model, groups = build()
    model, optimizer = wrap(model, rule=rule, param_groups=groups, **options)
    optimizer.load_checkpoint(tmp_path / "checkpoint")
    assert run(model, optimizer, range(4, 6)) == expected[2]
    assert_equal(model.state_dict(), plain.state_dict())
    mine, other = optimizer.state_dict(), theirs.state_dict()
    assert mine["param_groups"] == other["param_groups"]
    assert_same_state(mine, other)


# --- compressed moments --------------------------------------------------------------------------------------


@pytest.fixture
def linear(wrap: Wrap) -> Callable[..., Any]:
    """The optimizer of a layer after three steps."""

    def linear(moments: Moments, seed: int = 0) -> Any:
        torch.manual_seed(0)
        model, optimizer = wrap(nn.Linear(100, 70), rule=pagoda.AdamW(lr=1e-2, moments=moments, seed=seed))
        for scale in (1.0, 0.5, 2.0):
            model(torch.full((1, 100), scale, dtype=torch.bfloat16)).float().square().sum().backward()
            optimizer.step()
        return optimizer

    return linear


def test_the_seed_is_that_of_the_rounding(linear: Callable[..., Any]) -> None:
    moments = [linear("bf16", seed).state_dict()["state"][0]["exp_avg_sq"] for seed in (1, 1, 2)]
    assert torch.equal(moments[0], moments[1])
    assert not torch.equal(moments[0], moments[2])


@pytest.mark.parametrize("moments", ["bf16", "8bit"])
def test_a_state_dict_is_fp32_and_loads_without_a_changed_bit(moments: Moments, linear: Callable[..., Any]) -> None:
    state = linear(moments).state_dict()
    assert {s.dtype for s in state["state"][0].values()} == {torch.float32}
    for kind in (moments, "fp32"):
        other = linear(kind)
        other.load_state_dict(state)
        assert_same_state(other.state_dict(), state)


def test_the_moments_of_a_scalar_are_saved_to_a_file(wrap: Wrap, tmp_path: Path) -> None:
    class Scaled(nn.Linear):
        def __init__(self) -> None:
            super().__init__(48, 48)
            self.scale = nn.Parameter(torch.tensor(2.0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * self.scale

    model, optimizer = wrap(Scaled(), rule=AdamW(moments="8bit"))
    take(model, optimizer, range(1))
    optimizer.save_state_dict(tmp_path / "states")
    saved = torch.load(tmp_path / "states")["state"]
    assert_equal(saved, dict(optimizer.named_states()))


def test_numbers_that_a_class_counts_are_saved_to_a_file_with_the_updates_of_the_step(
    wrap: Wrap, tmp_path: Path
) -> None:
    class Counts(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for param in self.param_groups[0]["params"]:
                self.state[param]["count"] = self.state[param].get("count", 0) + 1
                param.sub_(param.grad)

    model, optimizer = wrap(nn.Linear(48, 48), rule=pagoda.Optim(Counts, lr=0.1))
    for count in (1, 2, 3):
        take(model, optimizer, range(1))
        optimizer.save_state_dict(tmp_path / "states")
        assert {entry["count"] for entry in torch.load(tmp_path / "states")["state"].values()} == {count}
