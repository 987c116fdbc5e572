"""What each rank does in a test: functions that `rank_server` calls in every process of a group."""

import io
import os
import pkgutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import gradient_uses
import state_uses
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from forked import end_with_parent
from reference import InMemory
from rich.console import Console
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map
from transformers import LlamaConfig, LlamaForCausalLM
from zoo import Outcome, Recipe, assert_equal, batch, loss_of, precision_of, take_step

import pagoda
from pagoda.checkpoint.export import export
from pagoda.checkpoint.state import ParameterState
from pagoda.errors import RankError, StorageError
from pagoda.memory.identity import partial
from pagoda.mesh.world import join, launched
from pagoda.models import build_model
from pagoda.optim.rule import TensorRule
from pagoda.optim.warm import warm_up as warm_up_kernels
from pagoda.plan.options import Options
from pagoda.plan.planner import make_plan
from pagoda.plan.ranks import Ranks
from pagoda.plan.tiers import Budgets
from pagoda.prepare.construct import describe
from pagoda.ranks.experts import ExpertExchange
from pagoda.ranks.gathering import SharedWeights
from pagoda.ranks.service import Requests, Service
from pagoda.ranks.start import in_common, rank_independent_text
from pagoda.ranks.transport import Transport
from pagoda.runtime.store import Store
from pagoda.schedule import updates
from pagoda.train import TrainConfig, run

PAGE = 4096
RULES: dict[str, Any] = {
    "muon": lambda: pagoda.Muon(lr=1e-2),
    "adafactor": lambda: pagoda.Adafactor(lr=1e-2, beta1=0.9),
    "adagrad": lambda: pagoda.Optim(torch.optim.Adagrad, lr=1e-2),
    "adamw": lambda: pagoda.AdamW(lr=1e-2, weight_decay=0.1),
    "adamw-8bit": lambda: pagoda.AdamW(lr=1e-2, weight_decay=0.1, moments="8bit"),
}
"""Rules by the names that tests give."""


def recipe_of(said: dict[str, Any]) -> Recipe:
    """A recipe, whose rule is said by name."""
    rule = RULES[said["rule"]]() if "rule" in said else None
    return Recipe(**{**{name: value for name, value in said.items() if name != "late"}, "rule": rule})


def settings_of(
    rule: str | None = None,
    tiles: dict[str, Any] | None = None,
    guess: bool = False,
    late: bool = False,
    predict: bool = False,
    partition: bool = False,
    **others: Any,
) -> dict[str, Any]:
    """What `wrap` is given for settings that are said in JSON."""
    given = {**others, "optimizer": RULES[rule or "adamw"]()}
    if "precision" in given:
        given["precision"] = precision_of(given["precision"])
    if tiles is not None:
        given["tiles"] = pagoda.Tiles(**tiles)
    if not guess:
        given["update"] = pagoda.Updates(speculate=False)
    if late:
        given["update"] = pagoda.Updates("async", predict=predict)
    if partition:
        given["activations"] = pagoda.Activations(given["activations"], partition_activations=True)
    return given


def warm_up() -> None:
    """Compile everything before forks, and import what a step and a checkpoint need."""
    for precision in ("bf16", "fp32"):
        warm_up_kernels(pagoda.AdamW(), precision)
        warm_up_kernels(pagoda.Muon(), precision)
        warm_up_kernels(RULES["adafactor"](), precision)
    with tempfile.TemporaryDirectory() as folder:
        train_saved(Path(folder), {"model": "llama", "steps": 1}, saves=[f"{folder}/step-1"])


def in_pages(
    model: nn.Module,
    rule: Any,
    kind: str,
    out: Path,
    mesh: Any,
    room: int = 0,
    kept: int | None = None,
    **settings: Any,
) -> tuple[nn.Module, Any]:
    """Wrap a model with budgets of a kind: everything in RAM ("ram"); moments on SSD ("moments-ssd"); everything on SSD
    with the least RAM possible ("ssd"), and `room` bytes more; any of them with a small memory for compute ("arena");
    or with one in which homes are chosen again after two steps ("adapting");
    or with too little for all weights ("small-device");
    or all states, or half of them, updated on the device ("updated-on-device", "half-on-device"), living there
    ("home-on-device"), or both ("both-on-device")."""
    sizes: dict[str, Any] = {"page_size": PAGE, "unit_limit": "64KiB", "host": "64MiB", "ssd_checkpoints": kept}
    if "ssd" in kind or settings.get("activations") == "offload":
        sizes["ssd"] = f"{out}:64MiB"
    if kind == "moments-ssd":  # 2 bytes a parameter are weights
        of_each = 11 if settings.get("update", pagoda.Updates()).asynchronous else 4  # late updates keep a second copy
        sizes["host"] = of_each * sum(param.numel() for param in model.parameters()) + room
    elif "ssd" in kind:
        sizes["host"] = PAGE
    if "arena" in kind:
        sizes["device"] = f"cpu:{PAGE}"
    if kind == "small-device":
        sizes["device"] = "cpu:512KiB"
    if "adapting" in kind:
        sizes |= {"device": "cpu:4MiB", "adapt_after": 2}
    if isinstance(rule, TensorRule):
        room += 8 * PAGE  # each rank holds another number of pages
    if "on-device" in kind:
        copies = isinstance(rule, TensorRule) and rule.copies
        shares = {"updated": (0.0, 1.0), "half": (0.0, 0.5), "home": (1.0, float(copies)), "both": (1.0, 1.0)}
        home, updated = shares[kind.partition("-")[0]]
        split = pagoda.Split(device_home_share=home, device_update_share=updated)
        # Where both are asked for, there is room for a part of what the device updates.
        sizes |= {"device": "cpu:1MiB" if kind.startswith("both") else "cpu:8MiB", "split": split}
    while True:
        try:
            return pagoda.wrap(
                model, rule, memory=pagoda.Memory(**sizes), mesh=mesh, **{"precision": "bf16", **settings}
            )
        except pagoda.BudgetError as refused:  # which says how much is enough, on the rank that lacks it
            if refused.tier == "device":
                sizes["device"] = f"cpu:{refused.needed_bytes}"
            elif refused.needed_bytes is not None:
                sizes["host"] = refused.needed_bytes + room


def wrapped(
    recipe: Recipe, kind: str, out: Path, stage: int, replicas: int = 1, ordered: bool = False, **options: Any
) -> tuple[nn.Module, Any]:
    """A model of the zoo, wrapped by every rank."""
    return in_pages(
        recipe.build(),
        recipe.rule or pagoda.AdamW(lr=1e-2, weight_decay=0.1, moments=recipe.moments),
        kind,
        out,
        pagoda.open_mesh(stage=stage, replicas=replicas, ordered_sums=ordered),
        precision=precision_of(recipe.precision),
        max_grad_norm=recipe.clip,
        gradient_accumulation_steps=recipe.accumulation if recipe.announced else None,
        **options,
    )


def refusal(work: Callable[[], Any]) -> str:
    """The error of something that Pagoda refuses."""
    try:
        work()
    except pagoda.PagodaError as error:
        return f"{type(error).__name__}: {error}"
    return "it is not refused"


def place() -> tuple[int, int]:
    """Rank and number of ranks."""
    world = launched()
    return world.rank, world.size


def take_steps(
    made: Recipe,
    model: nn.Module,
    optimizer: Any,
    outcome: Outcome,
    parts: int,
    steps: range,
    left_out: list[list[int]] | None = None,
    lengths: dict[str, int] | None = None,
    evaluated: list[tuple[int, int, str]] | None = None,
    factors: list[float] | None = None,
    in_turn: bool = False,
) -> None:
    """Each rank takes its share of the `parts` micro-batches of a step, whose losses are divided such that gradients
    are the mean over all: neighbours, or every so many-th if they take them `in_turn`.

    `left_out` has (step, part) of those that nobody takes; `lengths` has the tokens of those that are shorter, by part.
    `evaluated` has (step, rank, when) of evaluations that one rank makes by itself: "before" its forward, "in" its
    step, between forward and backward, or "after" backward. `factors` has what losses are multiplied by, by step.
    """
    rank, size = place()
    generator = torch.Generator().manual_seed(1)
    for step in range(steps.stop):
        losses = []
        for part in range(parts):
            data = batch(made.model, generator)
            its = part % size if in_turn else part * size // parts
            mine = its == rank and [step, part] not in (left_out or [])
            if step < steps.start or not mine:
                continue
            length = (lengths or {}).get(str(part))
            evaluations = [when for at, who, when in evaluated or [] if (at, who) == (step, rank)]
            if "before" in evaluations:
                evaluate(model, data)
            loss = loss_of(model(**{name: values[:, :length] for name, values in data.items()} if length else data))
            if "in" in evaluations:
                evaluate(model, data)
            factor = factors[step] if factors else 1.0
            optimizer.scale(loss * factor / (parts // size)).backward()
            if "after" in evaluations:
                found = evaluate(model, data)
                assert found == loss.item(), f"the weights have changed before the step: {found} for {loss.item()}"
            losses.append(loss.item())
        if step >= steps.start:
            outcome.losses.append(losses)
            take_step(optimizer, outcome)
            outcome.guesses.append((optimizer.stats.updates_kept, optimizer.stats.updates_called_off))


def evaluate(model: nn.Module, data: dict[str, torch.Tensor]) -> float:
    """The loss of a forward that no step is made of."""
    with torch.no_grad():
        return loss_of(model(**data)).item()


def slowed(method: Callable[..., None]) -> Callable[..., None]:
    """The same method, which takes longer."""

    def slowly(*arguments: Any) -> None:
        time.sleep(0.01)
        method(*arguments)

    return slowly


def train(
    out: Path,
    recipe: dict[str, Any],
    kind: str = "ram",
    stage: int = 3,
    replicas: int = 1,
    parts: int = 0,
    guesses: bool | None = None,
    ordered: bool = False,
    **departures: Any,
) -> dict[str, Any]:
    """Train a model and return everything that it leaves behind; by default, each rank has a micro-batch a step.

    With `guesses`, updates guess that nothing is clipped, and there is room for what they write. To begin a version and
    to free one is slow, so that whatever does not wait for that shows.
    """
    room = 0
    if guesses is not None:
        updates.CALM_STEPS = 0
        for method in (Store.begin_version, Store.free):
            setattr(Store, method.__name__, slowed(method))
        recipe = {**recipe, "steps": len(departures["factors"]), "announced": True}
    made = recipe_of(recipe)
    if guesses is not None and kind != "ssd":
        room = sum(param.numel() for param in made.build().parameters()) * 2 + 16 * PAGE
    update = pagoda.Updates("async" if "late" in recipe else "sync", speculate=bool(guesses))
    model, optimizer = wrapped(made, kind, out, stage, replicas, ordered, room=room, update=update)
    outcome = Outcome()
    take_steps(made, model, optimizer, outcome, parts or place()[1], range(made.steps), in_turn=ordered, **departures)
    order = getattr(optimizer._engine.collectives, "order", None)
    found = {"guesses": outcome.guesses, "parameters": pagoda.plan_of(model).parameters}
    found |= {} if order is None else {"served": order.served, "asked": order.asked}
    return {**found, **left_behind(model, optimizer, outcome)}


def train_saved(
    out: Path, recipe: dict[str, Any], saves: list[str], loads: str | None = None, stage: int = 3
) -> dict[str, Any]:
    """Train from a checkpoint, or from the start, a step for each directory of `saves`, and save a checkpoint there in
    place of the one before; give back the state at each, the tensors copied in, and the commits at the end."""
    made = recipe_of(recipe)
    model, optimizer = wrapped(made, "ssd", out, stage, kept=1)
    done, states, outcome, last = 0, {}, Outcome(), loads
    with mock.patch.object(ParameterState, "copy_in", autospec=True, side_effect=ParameterState.copy_in) as copy_in:
        if loads is not None:
            done = optimizer.load_checkpoint(loads)["step"]
            states["loaded"] = state_of(model, optimizer)
    for step, directory in enumerate(saves, done + 1):
        take_steps(made, model, optimizer, outcome, place()[1], range(step - 1, step))
        replaces = [] if last is None else [Path(last)]
        optimizer.save_checkpoint(directory, {"step": step}, wait=True, replaces=replaces)
        states[Path(directory).name] = state_of(model, optimizer)
        last = directory
    commits = len(optimizer._engine.store.ssd.commits)
    optimizer.close()
    return {"states": states, "losses": outcome.losses, "commits": commits, "copied": copy_in.call_count}


@dataclass(frozen=True)
class Moment:
    """When a rank dies in a save: at a call of a function, where `at(directory of the checkpoint, *arguments)`."""

    victim: int
    function: str
    at: Callable[..., bool]
    after: bool = False
    """Once the call has ended, not before."""


MOMENTS: dict[str, Moment] = {
    "its pages are not committed": Moment(
        1, "memory.ssd.tier.PageSnapshot.commit", lambda last, _, at, *__: at == last
    ),
    "its pages are committed": Moment(
        1, "memory.ssd.tier.PageSnapshot.commit", lambda last, _, at, *__: at == last, True
    ),
    "all have agreed": Moment(0, "checkpoint.directory.sync_directory", lambda last, at: at == partial(last)),
    "the checkpoint has its name": Moment(0, "checkpoint.directory.sync_directory", lambda last, _: last.exists()),
    "the one before is gone": Moment(0, "checkpoint.directory.Removable.retire", lambda *_: True, after=True),
}


def die_while_saving(out: Path, moment: str, saves: list[str], **settings: Any) -> None:
    """As `train_saved`, but a rank is killed in the last save."""
    dies = MOMENTS[moment]
    call = pkgutil.resolve_name(f"pagoda.{dies.function}")

    def dying(*arguments: Any) -> Any:
        if not dies.at(Path(saves[-1]), *arguments):
            return call(*arguments)
        if dies.after:
            call(*arguments)
        os.kill(os.getpid(), signal.SIGKILL)

    if place()[0] == dies.victim:
        owner, _, name = dies.function.rpartition(".")
        setattr(pkgutil.resolve_name(f"pagoda.{owner}"), name, dying)
    train_saved(out, saves=saves, **settings)


def joined(state: Any) -> Any:
    """A state dict with whole tensors in place of tensors divided over ranks."""
    return tree_map(lambda value: value.full_tensor() if isinstance(value, DTensor) else value, state)


def state_of(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    """Weights and moments, whole."""
    return {"weights": joined(model.state_dict()), "states": joined(optimizer.state_dict()["state"])}


def left_behind(
    model: nn.Module,
    optimizer: Any,
    outcome: Outcome,
    state_of: Callable[[nn.Module, Any], dict[str, Any]] = state_of,
) -> dict[str, Any]:
    """What a run has shown and leaves behind, once it is over."""
    plan = pagoda.plan_of(model)
    found = {
        "losses": outcome.losses,
        "norms": outcome.norms,
        "peak": optimizer.stats.peak_bytes,
        "plan_peak": dict(plan.peak_bytes),
        "lines": {tier: dict(lines) for tier, lines in plan.bytes.items()},
        "kept": optimizer.stats.activation_bytes.kept,
        **state_of(model, optimizer),
    }
    optimizer.close()
    return found


def stateful(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    """What torch's distributed checkpoints save."""
    return {"model": pagoda.ModelState(model), "optim": pagoda.OptimizerState(optimizer)}


def save_or_resume(
    model: nn.Module,
    optimizer: Any,
    take: Callable[[range], Outcome],
    directory: str,
    way: str,
    resumes: bool,
    state_of: Callable[[nn.Module, Any], dict[str, Any]] = state_of,
) -> dict[str, Any]:
    """Take two steps and save a checkpoint of Pagoda, or one of torch ("dcp"); or load what was saved so. Then take one
    more step. Returns the state before that step, and its losses and norms."""
    if not resumes:
        take(range(2))
    elif way == "dcp":
        dcp.load(stateful(model, optimizer), checkpoint_id=directory)
    else:
        assert optimizer.load_checkpoint(directory) == {"step": 2}
    state = state_of(model, optimizer)
    if not resumes and way == "dcp":
        dcp.save(stateful(model, optimizer), checkpoint_id=directory)
    elif not resumes:
        optimizer.save_checkpoint(directory, {"step": 2}, wait=False)
    after = take(range(2, 3))
    optimizer.wait_for_checkpoint()
    optimizer.close()
    return {"losses": after.losses, "norms": after.norms, **state}


class Training:
    """A model of the zoo between its steps."""

    def __init__(self, out: Path, kind: str = "ram", stage: int = 3, **options: Any) -> None:
        self.model: Any
        self.model, self.optimizer = wrapped(Recipe("llama"), kind, out, stage, **options)

    def take(self, *steps: int) -> None:
        """Take the steps of a range."""
        take_steps(Recipe("llama"), self.model, self.optimizer, Outcome(), place()[1], range(*steps))


def gather_some(out: Path) -> list[torch.Tensor]:
    """A parameter before all ranks change it, and after that."""
    training = Training(out)
    model = training.model
    training.take(1)
    found = [model.state_dict()["model.norm.weight"].clone()]
    with pagoda.gathered(model.model.norm, modify=True), torch.no_grad():
        model.model.norm.weight += 1
    found.append(model.state_dict()["model.norm.weight"].clone())
    training.optimizer.close()
    return found


def generate_apart(out: Path) -> list[torch.Tensor]:
    """Logits of all ranks at once, and of one rank more often than of another."""
    recipe, place_of_all = Recipe("llama"), pagoda.Memory(device="cpu:1MiB", host="64MiB", page_size=4096)
    model: Any = recipe.build()
    model, optimizer = pagoda.wrap(
        model, pagoda.AdamW(lr=1e-2), memory=place_of_all, mesh=pagoda.open_mesh(), precision="bf16"
    )
    take_steps(recipe, model, optimizer, Outcome(), place()[1], range(1))
    ids = torch.arange(6)[None]
    with torch.no_grad():
        found = [model(input_ids=ids).logits]
        with pagoda.resident(model):
            found += [model(input_ids=ids).logits for _ in range(1 + 3 * place()[0])]
    take_steps(recipe, model, optimizer, Outcome(), place()[1], range(1))
    optimizer.close()
    return found


def train_run(out: Path, config: dict[str, Any]) -> dict[str, Any]:
    """What `pagoda train` does in each rank."""
    shown = io.StringIO()
    result = run(TrainConfig.from_settings(config), Console(file=shown))
    steps, options = (result.first_step, result.last_step), result.plan.options
    return {"steps": steps, "loss": result.final_loss, "shown": shown.getvalue(), "options": repr(options)}


def drawn_mixture(name: str, expert_parallel: int, seed: int, **settings: Any) -> tuple[nn.Module, Any]:
    """A mixture whose every rank draws weights of its own."""
    torch.manual_seed(seed + place()[0])
    mesh = pagoda.open_mesh(expert_parallel=expert_parallel)
    memory = pagoda.Memory(host="1GiB", unit_limit="64KiB")
    return pagoda.wrap(
        build_model(name, seq_len=16), pagoda.AdamW(), memory=memory, mesh=mesh, **{"precision": "bf16", **settings}
    )


def resave_experts(out: Path, model: str, source: str, expert_parallel: int) -> None:
    """Save a mixture as it was drawn, then load a checkpoint into it and save that again."""
    _, optimizer = drawn_mixture(model, expert_parallel, 0, precision="fp32")
    optimizer.save_checkpoint(out / "drawn", wait=True)
    optimizer.load_checkpoint(source)
    optimizer.save_checkpoint(out / "again", wait=True)
    optimizer.close()


def train_experts(out: Path, name: str, expert_parallel: int, source: str) -> dict[str, Any]:
    """The weights after three steps of a mixture on this rank's part of two sequences. It begins with the checkpoint
    `source`, which one rank writes as it draws it."""
    model, optimizer = drawn_mixture(name, expert_parallel, 0, precision="fp32")
    if expert_parallel == 1:
        optimizer.save_checkpoint(source, wait=True)
    optimizer.load_checkpoint(source)
    for step in range(3):
        ids = torch.randint(256, (2, 16), generator=torch.Generator().manual_seed(step))
        parts = [ids[place()[0] :][:1]] if expert_parallel > 1 else ids.split(1)
        for part in parts:
            (loss_of(model(input_ids=part, labels=part)) / len(parts)).backward()
        optimizer.step()
    full = pagoda.full_state_dict(model, all_ranks=True)
    optimizer.close()
    return full


def mixture(name: str, expert_parallel: int, seed: int) -> tuple[nn.Module, Any]:
    """A mixture after a step."""
    model, optimizer = drawn_mixture(name, expert_parallel, seed)
    ids = torch.randint(256, (2, 16))
    loss_of(model(input_ids=ids, labels=ids)).backward()
    optimizer.step()
    return model, optimizer


def pass_on_full_states(out: Path, name: str, expert_parallel: int) -> dict[str, Any]:
    """Give a mixture's weights to another one as a full state dict, then all of its state as torch's checkpoint."""
    model, optimizer = mixture(name, expert_parallel, seed=0)
    own, full = model.state_dict(), pagoda.full_state_dict(model)
    everywhere = pagoda.full_state_dict(model, all_ranks=True)
    state = stateful(model, optimizer)
    dcp.save(state, checkpoint_id=out / "dcp")
    export(model, out / "exported")
    saved = {key: joined(value.state_dict()) for key, value in state.items()}
    optimizer.close()
    other, optimizer = mixture(name, expert_parallel, seed=5)
    other.load_state_dict(everywhere, strict=False)
    loaded = other.state_dict()
    optimizer.zero_grad()
    state = stateful(other, optimizer)
    dcp.load(state, checkpoint_id=out / "dcp")
    restored = {key: joined(value.state_dict()) for key, value in state.items()}
    optimizer.close()
    result = {"own": own, "full": full, "loaded": loaded, "saved": saved, "restored": restored}
    return {**result, "everywhere": sorted(everywhere)}


def load_full_states(out: Path, name: str, source: str) -> dict[str, Any]:
    """Load torch's checkpoint of a mixture whose experts were divided."""
    model, optimizer = mixture(name, 1, seed=3)
    state = stateful(model, optimizer)
    dcp.load(state, checkpoint_id=source)
    restored = {key: joined(value.state_dict()) for key, value in state.items()}
    result = {"full": model.state_dict(), "restored": restored}
    optimizer.close()
    return result


def send_tokens(out: Path, trained: bool) -> dict[str, Any]:
    """Send tokens to experts that only double or triple them; none goes to those of the first rank."""
    exchange = ExpertExchange(pagoda.open_mesh(expert_parallel=2))
    rank = place()[0]
    tokens = torch.arange(8.0).view(4, 2).add(100 * rank).requires_grad_(trained)
    received, by_rank = exchange.to_experts(tokens, [0, 0, 3, 1])
    factors = torch.tensor([2.0, 3.0]).repeat(2).repeat_interleave(torch.tensor([n for row in by_rank for n in row]))
    results = exchange.from_experts(received * factors[:, None], [0, 0, 3, 1], by_rank)
    (results * torch.tensor([1.0, 10.0])).sum().backward()
    return {"tokens": tokens.detach(), "by_rank": by_rank, "results": results.detach(), "grad": tokens.grad}


def wrap_indivisible_experts(out: Path, name: str) -> str:
    """Give wrap a mesh that divides experts, and a model that does not allow that."""
    return refusal(lambda: drawn_mixture(name, 3, 0))


def die_behind_open_connections(_: Training) -> None:
    """Its connections stay open, as where a data loader's process has a copy of them."""
    if os.fork():
        time.sleep(60)
    end_with_parent(False)
    os.kill(os.getppid(), signal.SIGKILL)
    os.closerange(0, 3)  # nobody waits for what it prints
    time.sleep(60)  # longer than a test may take
    os._exit(0)


ALONE: dict[str, tuple[int, Callable[[Training], Any]]] = {
    "is killed": (0, lambda _: threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGKILL)).start()),
    "is killed behind open connections": (0, die_behind_open_connections),
    "is silent": (1, lambda _: time.sleep(5)),
    "reads": (0, lambda training: training.model.state_dict()),
}
"""What one of the ranks does, and which."""


def do_alone(out: Path, what: str, after: int, end: int) -> None:
    """One rank does something by itself after so many steps, and all go on to the end."""
    training = Training(out)
    training.take(after)
    rank, do = ALONE[what]
    if place()[0] == rank:
        do(training)
    training.take(after, end)


def fail_to_share(out: Path, lane: str) -> None:
    """The drive of rank 1 fails in the middle of its steps, when it reads or writes weights that ranks share."""
    training = Training(out, "ssd", stage=1)
    move = SharedWeights._move

    def fails(self: SharedWeights, used: str, *arguments: Any) -> None:
        if used == lane and training.optimizer.stats.step >= 2:
            raise StorageError("the drive is gone")
        move(self, used, *arguments)

    if place()[0] == 1:
        SharedWeights._move = fails
    training.take(5)
    training.optimizer.synchronize()


def leave_early(out: Path) -> None:
    """Rank 1 runs fewer steps than the others."""
    training = Training(out)
    training.take(2 if place()[0] == 1 else 5)
    training.optimizer.close()


def evaluate_late_weights(out: Path, together: bool) -> float | None:
    """Rank 0, or both, evaluate between steps of asynchronous training; on rank 1 the next step would begin."""
    training = Training(out, update=pagoda.Updates("async"))
    training.take(2)
    found = None
    if together or place()[0] == 0:
        found = evaluate(training.model, batch("llama", torch.Generator().manual_seed(1)))
    training.take(2, 4)
    training.optimizer.close()
    return found


def different_settings(out: Path) -> None:
    """Rank 1 has another learning rate."""
    rule = pagoda.AdamW(lr=1e-2 * (1 + place()[0]))
    pagoda.wrap(Recipe("llama").build(), rule, memory=pagoda.Memory(host="64MiB"), precision="bf16")


def not_finite(out: Path) -> str:
    """The error of a step in which the gradient of rank 1 is NaN: no rank changes a weight."""
    training = Training(out)
    model, optimizer = training.model, training.optimizer
    before = joined(model.state_dict())
    loss = loss_of(model(**batch("llama", torch.Generator().manual_seed(1))))
    (loss * (torch.nan if place()[0] == 1 else 1.0)).backward()
    error = refusal(optimizer.step)
    assert_equal(joined(model.state_dict()), before)
    optimizer.zero_grad()
    training.take(1)
    optimizer.close()
    return error


def not_finite_at_first(out: Path) -> str:
    """The error of a step in whose first pass a part of a gradient is infinite, of which each rank has another part,
    with an update during backward: no rank changes a weight."""
    model, optimizer = pagoda.wrap(
        nn.Linear(64, 64, bias=False),
        pagoda.SGD(lr=1.0),
        memory=pagoda.Memory(host="16MiB", page_size=4096),
        mesh=pagoda.open_mesh(),
        precision="fp32",
        max_grad_norm=None,
        gradient_accumulation_steps=2,
    )
    before = joined(model.state_dict())
    factors = torch.ones(64)
    for first in (torch.inf, 1.0):
        factors[0] = first
        (model(torch.ones(1, 64)) * factors).sum().backward()
    error = refusal(optimizer.step)
    assert_equal(joined(model.state_dict()), before)
    optimizer.close()
    return error


def meet(out: Path) -> list[int]:
    """What every rank says, which is its number."""
    join(launched())
    return Transport(launched()).announce(place()[0])


def ask_services(out: Path) -> dict[str, Any]:
    """The first rank asks the others for slices: one refuses a version, the other fails at another, both have the
    third."""
    world = launched()
    join(world)
    transport = Transport(world)

    def answer(unit: int, version: int) -> Iterator[torch.Tensor]:
        if version == 7 and transport.rank == 1:
            raise RankError("this one has no such version")
        if version == 6 and transport.rank == 2:
            raise ZeroDivisionError("a fault")
        yield torch.full((1000,), float(100 * transport.rank + 10 * unit + version))

    requests = Requests(transport)
    service = Service(requests, answer)
    errors, found = [], [torch.zeros(1000) for _ in range(2)]
    if transport.rank == 0:
        targets = [(rank, [torch.zeros(1000)]) for rank in (1, 2)]
        errors = [refusal(lambda: requests.ask(3, 7, targets)), refusal(lambda: requests.ask(3, 6, targets))]
        requests.ask(4, 8, [(rank, [found[rank - 1]]) for rank in (1, 2)])
    transport.announce([0])
    service.close()
    return {"errors": errors, "found": [values.unique().tolist() for values in found]}


def say_what_is_common(out: Path) -> list[str]:
    """What the ranks of some plans must have in common."""
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
    said = []
    for rule in (pagoda.AdamW(), pagoda.Muon(), pagoda.Adafactor(), pagoda.Optim(torch.optim.Adagrad)):
        root, states = describe(model), rule.states("bf16")
        plan = make_plan(root, states, Budgets(1 << 30), Options(PAGE, 16 << 10), Ranks(2, 2), rank=0)
        said.append(str(rank_independent_text(in_common(plan), root)))
    return said


def clip_by_torch(out: Path, stage: int) -> dict[str, Any]:
    """Train twice, clipped by `wrap` and by torch's function; then clip more tightly by the optimizer's."""
    found: dict[str, Any] = {}
    for by, limit in ("wrap", 0.1), ("torch", None):
        model, optimizer = wrapped(Recipe("llama", steps=3, clip=limit), "ram", out, stage)
        generator = torch.Generator().manual_seed(1 + place()[0])
        norms = []
        for _ in range(3):
            loss_of(model(**batch("llama", generator))).backward()
            if by == "torch":
                norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1).item())
            optimizer.step()
            norms += [optimizer.stats.grad_norm] if by == "wrap" else []
        found[by] = {"norms": norms, "weights": model.state_dict()}
        loss_of(model(**batch("llama", generator))).backward()
        found[by]["norm"] = optimizer.clip_grad_norm_(0.1)
        found[by]["clipped"] = optimizer.clip_grad_norm_(0.05)
        optimizer.step()
        optimizer.close()
    return found


class Halves(nn.Module):
    """Two layers, of which a forward may leave out the second, and a tower before them, if it uses both."""

    def __init__(self, tower: int = 0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tower = nn.Sequential(*(nn.Linear(8, 8) for _ in range(tower)))
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
        x = self.first(self.tower(x) if both else x)
        return (self.second(x) if both else x).sum()


def of_halves(**settings: Any) -> tuple[Any, Any]:
    memory = pagoda.Memory(host="4MiB", page_size=PAGE, unit_limit=1)
    return pagoda.wrap(Halves(), pagoda.AdamW(), memory=memory, precision="fp32", **settings)


def metrics_in_steps(out: Path, stage: int | None, passes: int, steady: bool) -> Any:
    """The weights after steps in which ranks add up their losses between forward and backward and in an evaluation. In
    each pass, only one rank uses the tower and the second layer: if not `steady`, not always the same. Without a
    `stage`, they are those of plain PyTorch."""
    rank, model, rule = place()[0], Halves(tower=4), pagoda.AdamW(lr=1e-2)
    optimizer: Any = InMemory(model.parameters(), rule)
    if stage is None:
        join(launched())
    else:
        memory = pagoda.Memory(host="4MiB", page_size=PAGE, unit_limit=1)
        mesh = pagoda.open_mesh(stage=stage)
        model, optimizer = pagoda.wrap(model, rule, memory=memory, mesh=mesh, precision="fp32")
    for step in range(5):
        for number in range(passes):
            has_image = rank == (0 if steady or step == 0 else (step + number) % 2)
            loss = model(torch.ones(2, 8) + rank + number, both=has_image or step == 3)
            dist.all_reduce(loss.detach().clone())
            loss.backward()
        if stage is None:
            for param in model.parameters():
                param.grad = torch.zeros_like(param) if param.grad is None else param.grad
                dist.all_reduce(param.grad)
                param.grad /= 2
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            dist.all_reduce(model(torch.ones(2, 8), both=rank == 0))
    return joined(model.state_dict())


def meet_before_a_forward(out: Path) -> None:
    """The second rank comes to a collective of the program before a forward, the first one after it."""
    model, _ = of_halves(mesh=pagoda.open_mesh())
    group = dist.new_group(timeout=timedelta(minutes=1))
    if place()[0] == 1:
        dist.all_reduce(torch.zeros(1), group=group)
    model(torch.ones(2, 8), both=True)
    dist.all_reduce(torch.zeros(1), group=group)


def change_between_steps(out: Path, how: str) -> Any:
    """The weights after steps between which they are loaded, though the step before did not use all of them, or after
    several drains of asynchronous updates."""
    model, optimizer = of_halves(update=pagoda.Updates("async" if how == "drain" else "sync"))
    for step in range(8):
        model(torch.ones(2, 8), both=step != 4).backward()
        optimizer.step()
        if how == "drain" and step > 1:
            optimizer.synchronize()
        elif how == "load" and step == 4:
            model.load_state_dict(Halves().state_dict())
    weights = joined(model.state_dict())
    optimizer.close()
    return weights


def use_weights_anywhere(out: Path, stage: int, ssd: bool) -> dict[str, Any]:
    """Weights, their average and a penalty's values after steps in which every rank reads weights outside forwards, and
    one rank more than the other. Between steps, all write."""
    torch.manual_seed(1)
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    memory = pagoda.Memory(host="512KiB", ssd=f"{out}:16MiB" if ssd else None, page_size=PAGE, unit_limit="2KiB")
    mesh = pagoda.open_mesh(stage=stage)
    model, optimizer = pagoda.wrap(model, pagoda.SGD(lr=0.125), memory=memory, precision="fp32", mesh=mesh)
    average = [torch.zeros(param.shape) for param in model.parameters()]
    penalties, rank = [], place()[0]
    for step in range(5):
        loss, penalty = model(torch.ones(2, 16)).square().mean(), sum(p.square().sum() for p in model.parameters())
        penalties.append(penalty.item())
        (loss + 0.01 * penalty).backward()
        if rank == 1 and step in (1, 3):
            assert model[2].weight.norm() > 0
        optimizer.step()
        if rank == 0 and step in (2, 3):
            assert torch.equal(model[1].weight, model[1].weight.clone())
        with torch.no_grad():
            for value, param in zip(average, model.parameters(), strict=True):
                value.lerp_(param, 0.25)
            model[3].weight.clamp_(-0.1, 0.1)
    weights = joined(model.state_dict())
    optimizer.close()
    return {"weights": weights, "average": dict(enumerate(average)), "penalties": penalties}


def use_gradients(out: Path, uses: list[str], stage: int, ssd: bool, clips: bool, passes: int) -> dict[str, list[Any]]:
    """What training with each use of gradients gives."""
    host, unit = ("88KiB", f"{out}:4MiB") if ssd else ("4MiB", None)
    memory = pagoda.Memory(host=host, ssd=unit, page_size=PAGE, unit_limit="3KiB")
    found = {}
    for use in uses:
        rule, mesh = pagoda.Optim(torch.optim.SGD, **gradient_uses.RULE), pagoda.open_mesh(stage=stage)
        clip = {"max_grad_norm": gradient_uses.LIMIT} if clips else {}
        model, optimizer = pagoda.wrap(gradient_uses.Net(), rule, memory=memory, mesh=mesh, precision="fp32", **clip)
        with optimizer:
            found[use] = gradient_uses.train(
                gradient_uses.Training(model, optimizer, (place()[0],)), use, passes=passes
            )
    return found


def gradients_of_experts(out: Path, model: str, expert_parallel: int) -> dict[str, torch.Tensor]:
    """The gradients of the experts that this rank has, after each was clamped; a step follows."""
    torch.manual_seed(0)
    mesh, memory = pagoda.open_mesh(expert_parallel=expert_parallel), pagoda.Memory(host="1GiB", unit_limit="64KiB")
    mixture, optimizer = pagoda.wrap(build_model(model, seq_len=16), pagoda.AdamW(), memory=memory, mesh=mesh)
    ids = torch.randint(256, (2, 16), generator=torch.Generator().manual_seed(place()[0]))
    loss_of(mixture(input_ids=ids, labels=ids)).backward()
    experts = {name: param for name, param in mixture.named_parameters() if ".experts." in name}
    found = {}
    for name, param in experts.items():
        found[f"{name} as it was"] = param.grad.clone()
        param.grad.clamp_(-1e-3, 1e-3)
        found[name] = param.grad.clone()
    optimizer.step()
    optimizer.close()
    return found


def use_states(out: Path, cases: list[tuple[str, str]], stage: int, ssd: bool) -> dict[str, list[Any]]:
    """What training with each use of `optimizer.state` gives."""
    host, unit = ("256KiB", f"{out}:4MiB") if ssd else ("4MiB", None)
    memory = pagoda.Memory(host=host, ssd=unit, page_size=PAGE, unit_limit="3KiB")
    found = {}
    for use, rule in cases:
        mesh = pagoda.open_mesh(stage=stage)
        model, optimizer = pagoda.wrap(
            gradient_uses.Net(), state_uses.RULES[rule](), memory=memory, mesh=mesh, precision="fp32"
        )
        with optimizer:
            found[f"{use} {rule}"] = state_uses.train(
                gradient_uses.Training(model, optimizer, (place()[0],)), use, losses=False
            )
    return found


def _double_the_weight(model: Any, _: Any) -> None:
    with torch.no_grad():
        model.first.weight.mul_(2)


def _set_the_gradient(model: Any, _: Any) -> None:
    model.first.weight.grad = torch.ones_like(model.first.weight)


USED_ALONE: dict[str, tuple[str, Callable[[Any, Any], object]]] = {
    "write a weight": ("start", _double_the_weight),
    "read a gradient": ("backward", lambda model, _: model.first.weight.grad.sum()),
    "write a gradient": ("backward", _set_the_gradient),
    "read a state": ("step", lambda _, state: state["exp_avg"].sum()),
    "write a state": ("step", lambda _, state: state["exp_avg"].zero_()),
    "remove a state": ("step", lambda _, state: state.clear()),
}
"""What a rank may do to the first weight, its gradient and its states, and after what."""


def use_alone(out: Path, what: str) -> str:
    """The error where one rank does something while the other goes on."""
    model, optimizer = of_halves()
    after, use = USED_ALONE[what]

    def at(point: str) -> None:
        if point == after:
            state = optimizer.state[model.first.weight] if after == "step" else None  # on all ranks
            if place()[0] == 0:
                use(model, state)

    def go_on() -> None:
        for _ in range(2):
            at("start")
            model(torch.ones(2, 8), both=True).backward()
            at("backward")
            optimizer.step()
            at("step")

    error = refusal(go_on)
    with suppress(Exception):
        optimizer.close()
    return error


def clip_unalike(out: Path, how: str) -> str:
    """The error where ranks clip gradients of different parameters, or multiply them by different numbers."""
    rank = place()[0]
    model, optimizer = of_halves()
    model(torch.ones(2, 8), both=how == "numbers" or rank == 0).backward()
    if how == "numbers":
        model.first.weight.grad.mul_(0.5 + rank)
        error = refusal(optimizer.step)
    else:
        error = refusal(lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1))
    with suppress(Exception):
        optimizer.close()
    return error


def divide_sequences(_: Path, divided: int, kv_heads: int, packed: bool, **settings: Any) -> dict[str, Any]:
    """Losses (of all ranks), norms and weights of a model whose sequences `divided` ranks divide. A step has two
    sequences, of all groups of ranks together."""
    world = launched()
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": kv_heads}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=2, vocab_size=100, use_cache=False)).train()
    how = {"memory": pagoda.Memory(host="64MiB"), "precision": "fp32", "max_grad_norm": 0.5, **settings}
    how["tiles"] = pagoda.Tiles(sequence_tiles=2)
    model, optimizer = pagoda.wrap(pagoda.chunked_loss(model), pagoda.AdamW(lr=1e-2), **how)
    sequences = pagoda.divide_sequences(model, divided)
    losses, norms = [], []
    for step in range(2):
        ids = torch.randint(0, 100, (2, 24), generator=torch.Generator().manual_seed(step))
        whole = {"input_ids": ids, "labels": ids.masked_fill(torch.arange(24) < 4, -100)}
        if packed:
            whole["position_ids"] = torch.cat([torch.arange(9), torch.arange(15)]).expand(2, -1)
        each = 2 * divided // world.size
        first = world.rank // divided * each
        part = sequences.part({name: tensor[first : first + each] for name, tensor in whole.items()})
        loss = part.loss(model(**part.inputs).logits)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        norms.append(optimizer.stats.grad_norm)
    weights = {name: tensor.clone() for name, tensor in pagoda.full_state_dict(model).items()}
    optimizer.close()
    return {"losses": losses, "norms": norms, "weights": weights}
