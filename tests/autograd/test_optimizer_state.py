"""`optimizer.state` is read and written like that of plain PyTorch, with the same bits."""

import copy
from collections import defaultdict
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from gradient_uses import Net, Training, assert_alike
from lightning.fabric.utilities.optimizer import _optimizer_to_device
from lightning.pytorch.core.optimizer import LightningOptimizer
from runtime.conftest import Wrap
from state_uses import RULES, USES, plainly, snapshot, train
from torch import nn

import pagoda
from pagoda.errors import PagodaError, UsageError

SMALL = {"page_size": 4096, "unit_limit": "3KiB"}


def places(path: Path) -> dict[str, pagoda.Memory]:
    return {
        "ram": pagoda.Memory(host="4MiB", **SMALL),
        "ssd": pagoda.Memory(host="160KiB", ssd=f"{path}:4MiB", **SMALL),
        "device": pagoda.Memory(device="cpu:48KiB", host="4MiB", **SMALL),
    }


def cases() -> list[Any]:
    """Every use with every rule in every place. Each use once is not slow."""
    combinations = [(place, rule) for rule in RULES for place in ("ssd", "ram", "device")]
    found = []
    for index, use in enumerate(USES):
        for number, (place, rule) in enumerate(combinations):
            if use == "gradients" and rule in ("adamw-bf16", "adamw-8bit"):
                continue  # each of several functions in a row rounds to the format of moments
            marks = () if number == 7 * index % len(combinations) else pytest.mark.slow
            found.append(pytest.param(place, rule, use, marks=marks, id=f"{use}-{place}-{rule}"))
    return found


@pytest.mark.parametrize(("place", "rule", "use"), cases())
def test_every_use_of_a_state_has_the_bits_of_torch_alone(
    place: str, rule: str, use: str, wrap: Wrap, tmp_path: Path
) -> None:
    model, optimizer = wrap(Net(), places(tmp_path)[place], rule=RULES[rule](), precision="fp32")
    found = train(Training(model, optimizer), use)
    assert_alike(found, plainly(use, rule), use)


@pytest.mark.parametrize(
    ("place", "settings"),
    [
        ("ram", {"gradient_accumulation_steps": 1}),  # units are updated during backward
        ("ssd", {"gradient_accumulation_steps": 1, "max_grad_norm": 1e9}),  # and speculatively
        ("device", {"max_grad_norm": 1e9}),
    ],
)
@pytest.mark.parametrize("use", ["resampled", "popped", "count"])
def test_updates_that_began_early_are_settled_first(
    place: str, settings: Any, use: str, wrap: Wrap, tmp_path: Path
) -> None:
    memory = places(tmp_path)[place]
    model, optimizer = wrap(Net(), memory, rule=RULES["torch-adamw"](), precision="fp32", **settings)
    assert_alike(train(Training(model, optimizer), use), plainly(use, "torch-adamw"), use)


def test_with_asynchronous_updates_a_parameter_begins_anew_too(wrap: Wrap) -> None:
    model, optimizer = wrap(Net(), update="async")
    of = Training(model, optimizer)
    take_steps(of, 3)
    optimizer.state[of.params[0]]["exp_avg"].zero_()
    assert not optimizer.state[of.params[0]]["exp_avg"].any()
    del optimizer.state[of.params[1]]
    take_steps(of, 2)
    assert [int(optimizer.state[param]["step"]) for param in of.params[:2]] == [5, 2]


def take_steps(of: Training, steps: int) -> None:
    for number in range(steps):
        of.loss(number).backward()
        of.optimizer.step()
        of.optimizer.zero_grad()


def test_states_of_one_step_are_refused_while_units_are_updated_during_backward(wrap: Wrap) -> None:
    model, optimizer = wrap(Net(), gradient_accumulation_steps=1)
    of = Training(model, optimizer)
    of.loss(0).backward()
    with pytest.raises(UsageError, match="between backward and step"):
        _ = optimizer.state
    optimizer.step()
    moment, entry = optimizer.state[of.params[0]]["exp_avg"], optimizer.state[of.params[0]]
    of.loss(1).backward()
    with pytest.raises(UsageError, match="between backward and step"):
        moment.sum()
    entry.clear()
    with pytest.raises(UsageError, match="between backward and step"):
        optimizer.step()


@pytest.mark.parametrize(("rule", "entries"), [("torch-adamw", 8), ("sgd", 8), ("sgd-alone", 0)])
def test_before_the_first_step_there_are_no_states(rule: str, entries: int, wrap: Wrap) -> None:
    model, optimizer = wrap(Net(), rule=RULES[rule](), precision="fp32")
    of = Training(model, optimizer)
    state = optimizer.state
    assert not state
    assert of.params[0] not in state
    assert not optimizer.state_dict()["state"]
    take_steps(of, 1)
    assert len(state) == len(optimizer.state_dict()["state"]) == entries


def test_states_stay_in_pages(wrap: Wrap) -> None:
    model, optimizer = wrap(Net())
    take_steps(of := Training(model, optimizer), 1)
    held = [value for entry in optimizer.state.values() for value in entry.values()]
    assert max(value.untyped_storage().nbytes() for value in held) <= 16
    assert [*optimizer.state] == of.params


WRONG: dict[str, tuple[Callable[[Any, Any], object], str]] = {
    "missing": (lambda state, param: state[param].pop("exp_avg"), "has no exp_avg, but AdamW needs all"),
    "unknown": (
        lambda state, param: state[param].update(mine=torch.ones(1)),
        "keep others in a dictionary of your own",
    ),
    "text": (lambda state, param: state[param].update(exp_avg="none"), "keep others in a dictionary of your own"),
    "shape": (lambda state, param: state[param].update(exp_avg=torch.ones(2)), "has shape"),
    "part of a count": (lambda state, param: state[param].update(step=1.5), "counts no updates"),
    "in two places": (lambda state, param: state[param].update(exp_avg=state[param]["exp_avg_sq"]), "the same tensor"),
    "two counts": (lambda state, param: state[param].update(step=torch.ones(2)), "counts no updates"),
    "negative": (lambda state, param: state[param]["step"].fill_(-1), "counts no updates"),
    "list": (lambda state, param: state.update({param: [1]}), "is a dictionary"),
    "another key": (lambda state, param: state.update(rho={"value": 1}), "no parameter of this optimizer"),
    "another tensor": (lambda state, param: state.update({torch.ones(3): {"a": 1}}), "no parameter of this optimizer"),
}


USED_BY = [*zip(WRONG, cycle(["step", "state_dict", "save_checkpoint"]), strict=False)]


@pytest.mark.parametrize(("wrong", "used_by"), USED_BY)
def test_what_has_no_place_in_pages_is_refused(wrong: str, used_by: str, wrap: Wrap, tmp_path: Path) -> None:
    model, optimizer = wrap(Net())
    take_steps(of := Training(model, optimizer), 1)
    before = optimizer.state_dict()["state"]
    kept = dict(optimizer.state[of.params[0]])
    change, told = WRONG[wrong]
    optimizer.state.pop(of.params[1])
    change(optimizer.state, of.params[0])
    with pytest.raises(PagodaError, match=told):
        getattr(optimizer, used_by)(*([tmp_path / "saved"] if used_by == "save_checkpoint" else []))
    for key in [key for key in optimizer.state if all(key is not param for param in of.params)]:
        del optimizer.state[key]
    kept["step"] = torch.tensor(1.0)
    optimizer.state[of.params[0]] = kept
    after = optimizer.state_dict()["state"]
    assert_alike(after, {key: entry for key, entry in before.items() if key != 1}, "nothing else was written")


def test_only_a_dictionary_takes_the_place_of_states(wrap: Wrap) -> None:
    _, optimizer = wrap(Net())
    with pytest.raises(UsageError, match="dictionary of dictionaries"):
        optimizer.state = None


def test_changes_are_in_checkpoints_and_state_dicts(wrap: Wrap, tmp_path: Path) -> None:
    model, optimizer = wrap(Net(), places(tmp_path)["ssd"])
    take_steps(of := Training(model, optimizer), 2)
    state, (first, second, third, *_) = optimizer.state, of.params
    del state[first]
    state[second]["step"].fill_(40)
    state[third]["exp_avg"] = torch.ones_like(third)
    optimizer.save_checkpoint(tmp_path / "saved")
    saved, moment = optimizer.state_dict(), state[third]["exp_avg"]
    assert [*saved["state"]] == [*range(1, 8)]
    assert (saved["state"][1]["step"], saved["state"][2]["exp_avg"].min()) == (40, 1)
    assert next(name for name, _ in optimizer.named_states()) == "layers.0.bias"
    assert int(pagoda.OptimizerState(optimizer).state_dict()["state"]["layers.0.weight"]["step"]) == 0
    take_steps(of, 2)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    for load in (lambda: optimizer.load_checkpoint(tmp_path / "saved"), lambda: optimizer.load_state_dict(saved)):
        load()
        with pytest.raises(UsageError, match="which is gone"):
            moment.sum()
        moment = optimizer.state[third]["exp_avg"]
        assert optimizer.state is not state
        assert first not in optimizer.state
        assert_alike(snapshot(optimizer.state, of.params), saved["state"], "loaded")
    optimizer.load_checkpoint(tmp_path / "saved")
    take_steps(of, 2)
    assert_alike(dict(model.state_dict()), weights, "resumed")


def test_a_moment_that_was_removed_is_gone(wrap: Wrap) -> None:
    model, optimizer = wrap(Net())
    take_steps(of := Training(model, optimizer), 1)
    moment = optimizer.state[of.params[0]]["exp_avg"]
    optimizer.state.clear()
    assert moment.any()  # as in plain PyTorch, until its memory is needed
    take_steps(of, 1)
    for use in (moment.sum, moment.zero_):
        with pytest.raises(UsageError, match="which is gone"):
            use()


class Mixed(nn.Module):
    """Parameters that are tied, frozen, of several dtypes, cut into tiles, or trained later."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.norm = nn.Embedding(64, 64).bfloat16(), nn.LayerNorm(64)
        self.head = nn.Linear(64, 64, bias=False).bfloat16()
        self.head.weight = self.embed.weight
        self.frozen, self.later = nn.Linear(64, 64).requires_grad_(False), nn.Linear(64, 64).requires_grad_(False)

    def forward(self) -> torch.Tensor:
        x = self.later(self.frozen(self.norm(self.embed(torch.arange(64)).float())))
        return self.head(x.bfloat16()).float().square().mean()


def test_every_kind_of_parameter_has_its_states(wrap: Wrap) -> None:
    model: Any = Mixed()
    tiles = pagoda.Tiles(tile_limit="4KiB")
    model, optimizer = wrap(model, precision=None, tiles=tiles, reserve=model.later.parameters())

    def step() -> None:
        model().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    assert all(param in optimizer.state for param in optimizer.param_groups[0]["params"])
    assert len(optimizer.state) == len(optimizer.param_groups[0]["params"]) > 4  # with tiles of the tied weight
    model.later.requires_grad_(True)
    optimizer.add_param_group({"params": model.later.parameters()})
    step()
    counts = {param.dtype: int(entry["step"]) for param, entry in optimizer.state.items()}
    assert {entry["exp_avg"].dtype for entry in optimizer.state.values()} == {torch.float32}
    assert counts.keys() == {torch.bfloat16, torch.float32}
    assert int(optimizer.state[next(model.later.parameters())]["step"]) == 1
    for param, entry in optimizer.state.items():  # ReLoRA's reset
        entry["exp_avg"] = torch.zeros_like(param.data)
        entry["exp_avg_sq"] = torch.zeros_like(param.data)
    step()
    before = optimizer.state_dict()["state"]
    optimizer.state.pop(model.norm.weight)
    step()
    assert int(optimizer.state[model.norm.weight]["step"]) == 1
    assert sorted(int(entry["step"]) for entry in before.values())[-1] == 3


class Counting(torch.optim.Optimizer):
    """Keeps two numbers of Python."""

    def __init__(self, params: Any, lr: float = 2**-5) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    state = self.state[param]
                    state["step"] = state.get("step", 0) + 1
                    state["size"] = param.grad.abs().max().item()
                    state.setdefault("sum", torch.zeros_like(param)).mul_(0.5).add_(param.grad)
                    param.sub_(state["sum"], alpha=group["lr"] / state["step"])


@pytest.mark.parametrize("use", ["read", "held", "all zeroed", "swapped", "new entries", "popped", "from copies"])
def test_numbers_of_a_class_are_read_and_set(use: str, wrap: Wrap) -> None:
    model, optimizer = wrap(Net(), rule=pagoda.Optim(Counting), precision="fp32")
    found = train(Training(model, optimizer), use)
    assert_alike(found, train(Training(other := Net(), Counting(other.parameters())), use), use)


def test_wrappers_of_trainers_show_and_set_the_states(wrap: Wrap) -> None:
    model, optimizer = wrap(Net())
    take_steps(of := Training(model, optimizer), 1)
    wrapped: Any = LightningOptimizer(optimizer)
    del wrapped.state[of.params[0]]
    _optimizer_to_device(optimizer, torch.device("cpu"))
    take_steps(of, 1)
    assert [int(entry["step"]) for entry in wrapped.state.values()].count(1) == 1
    wrapped.state = defaultdict(dict)
    take_steps(of, 1)
    assert {int(entry["step"]) for entry in optimizer.state.values()} == {1}


def test_schedulers_and_checkpoints_in_the_background_leave_the_states_alone(wrap: Wrap, tmp_path: Path) -> None:
    model, optimizer = wrap(Net())
    scheduler = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 2)
    of = Training(model, optimizer)
    for number in range(4):
        take_steps(of, 1)
        scheduler.step()
        optimizer.state[of.params[0]]["exp_avg"].mul_(0.5)
        optimizer.save_checkpoint(tmp_path / f"saved-{number}", wait=False)
    assert int(optimizer.state[of.params[0]]["step"]) == 4


WRITES: dict[str, Callable[[dict[str, torch.Tensor]], object]] = {
    "copy_": lambda weights: weights["layers.1.weight"].copy_(torch.ones(24, 24)),
    "a row": lambda weights: weights["layers.1.weight"][3].zero_(),
    "of many": lambda weights: [weight.mul_(0.5) for weight in weights.values()],
}


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("write", WRITES)
def test_a_write_to_a_copy_of_a_weight_is_refused(write: str, kept: bool, wrap: Wrap) -> None:
    model, optimizer = wrap(Net())
    of = Training(model, optimizer)
    weights = model.state_dict()
    WRITES[write](weights)
    if not kept:
        del weights
    with pytest.raises(UsageError, match=r"returned for 'layers\..*strict=False"):
        of.loss(0)
    take_steps(of, 1)
    WRITES[write](model.state_dict())
    with pytest.raises(UsageError, match="It is a copy"):
        optimizer.save_checkpoint("never")


def test_copies_of_weights_are_read_loaded_and_cloned(wrap: Wrap) -> None:
    model, optimizer = wrap(Net(), precision="fp32", tiles=pagoda.Tiles(tile_limit="4KiB"))
    of = Training(model, optimizer)
    weights = model.state_dict()
    mine, other = copy.deepcopy(weights), {name: weight.clone() for name, weight in weights.items()}
    mine["layers.0.weight"].zero_()
    other["layers.0.weight"].zero_()
    Net().load_state_dict(weights)
    take_steps(of, 1)
    weights["layers.0.weight"].fill_(0.25)  # as torch.distributed.checkpoint.load writes
    model.load_state_dict(weights)
    take_steps(of, 1)
    with torch.inference_mode():
        weights = model.state_dict()
    weights["layers.0.weight"].detach().sum()
    take_steps(of, 1)


def test_a_write_to_a_copy_of_a_moment_is_refused_unless_it_is_loaded(wrap: Wrap) -> None:
    model, optimizer = wrap(Net())
    take_steps(of := Training(model, optimizer), 1)
    copies = optimizer.state_dict()["state"]
    copy.deepcopy(copies)[0]["exp_avg"].zero_()
    take_steps(of, 1)
    copies[1]["exp_avg"].zero_()
    with pytest.raises(UsageError, match=r"state_dict\(\) returned for 'exp_avg of layers.0.bias'"):
        of.loss(0)
    copies = optimizer.state_dict()
    copies["state"][1]["exp_avg"].zero_()
    optimizer.load_state_dict(copies)
    take_steps(of, 1)
