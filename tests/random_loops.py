"""Random training loops: what users do with a model, its gradients and its optimizer, in any order, drawn from a seed.

    python tests/random_loops.py FIRST [LAST]

plays the loops of these seeds. It prints each that fails, with a shorter one that fails, too, and all refusals.

A loop is played by plain PyTorch and in pages. What it has read, losses, weights and optimizer states have the same
bits where the rule has those of plain PyTorch, else those of the loop with all of its state in RAM. What Pagoda refuses
is counted, and the loop is played without it; so is what plain PyTorch refuses.
"""

import copy
import faulthandler
import gc
import os
import random
import re
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("PAGODA_POISON", "1")

import pytest
import state_uses
import torch
from gradient_uses import ADD_ANOTHER, ONE_NUMBER, READS, WRITES, Training, assert_alike, clip_exactly
from torch import nn
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

import pagoda
from pagoda.runtime import lanes
from pagoda.schedule import updates

WIDTH, TOKENS, LIMIT, TIMEOUT_S = 40, 6, 2.0**-6, 600


class Experts(nn.Module):
    """One of four for each token. Some may get none."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shares, chosen = self.router(x).softmax(-1).max(-1)
        found = [expert(x) * (chosen == at)[..., None] for at, expert in enumerate(self.experts) if at in chosen]
        return shares[..., None] * torch.stack(found).sum(0)


ADAPTED = ((WIDTH, WIDTH, False), (WIDTH, 4, True), (4, WIDTH, True))
"""Inputs and outputs of layers, and whether they train: a frozen one, and a trained adapter behind it."""
Part = tuple[Callable[[], nn.Module], Callable[[Any, torch.Tensor], torch.Tensor]]


def called(make: Callable[[], nn.Module]) -> Part:
    return make, lambda part, x: part(x)


PARTS: dict[str, Part] = {
    "linear": called(lambda: nn.Linear(WIDTH, WIDTH)),
    "tied": called(lambda: nn.Linear(WIDTH, WIDTH)),
    "frozen": called(lambda: nn.Linear(WIDTH, WIDTH).requires_grad_(False)),
    "deep": called(lambda: nn.Sequential(nn.Linear(WIDTH, 64), nn.Dropout(0.1), nn.GELU(), nn.Linear(64, WIDTH))),
    "norm": called(lambda: nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH, bias=False))),
    "experts": called(Experts),
    "adapted": called(lambda: nn.Sequential(*(nn.Linear(*sizes).requires_grad_(trains) for *sizes, trains in ADAPTED))),
    "bf16": (lambda: nn.Linear(WIDTH, WIDTH).bfloat16(), lambda part, x: part(x.to(part.weight.dtype))),
    "lstm": (lambda: nn.LSTM(WIDTH, WIDTH, batch_first=True), lambda part, x: part(x)[0]),
    "attention": (lambda: nn.MultiheadAttention(WIDTH, 2, batch_first=True), lambda part, x: part(x, x, x)[0]),
    "conv": (lambda: nn.Conv1d(WIDTH, WIDTH, 3, padding=1), lambda part, x: part(x.mT).mT),
    "embedding": (lambda: nn.Embedding(32, WIDTH), lambda part, x: part((x[..., 0].float() * 16).long() % 32)),
    "batchnorm": (lambda: nn.BatchNorm1d(WIDTH), lambda part, x: part(x.mT).mT),
}


class Block(nn.Module):
    """A part of some kind, and a vector that the block holds itself."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.scale, self.part, self._use = nn.Parameter(torch.full((WIDTH,), 0.5)), PARTS[kind][0](), PARTS[kind][1]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale * torch.tanh(self._use(self.part, x)).to(x.dtype)


class Stack(nn.Module):
    """Blocks, of which a pass may leave one out, or fail at one."""

    def __init__(self, kinds: tuple[str, ...]) -> None:
        super().__init__()
        self.first, self.blocks = nn.Linear(WIDTH, WIDTH), nn.ModuleList(map(Block, kinds))
        for block, kind in zip(self.blocks, kinds, strict=True):
            if kind == "tied":
                block.part.weight = self.first.weight

    def forward(self, x: torch.Tensor, without: int = -1, run: Any = None) -> torch.Tensor:
        x = self.first(x.to(self.first.weight.dtype))
        for index, block in enumerate(self.blocks):
            if index != without:
                x = block(x) if run is None else run(block, x)
        return x.float()


# --- what a loop is ---------------------------------------------------------------------------------------------

PLAIN: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 2.0**-5, "momentum": 0.5, "weight_decay": 0.25}),
    "adamw": (torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1}),
    "adagrad": (torch.optim.Adagrad, {"lr": 1e-2}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 1e-3, "momentum": 0.5}),
}
RULES: dict[str, Any] = {
    **{name: pagoda.Optim(kind, **settings) for name, (kind, settings) in PLAIN.items()},
    "own sgd": pagoda.SGD(**PLAIN["sgd"][1]),
    "own adamw": pagoda.AdamW(lr=1e-2, weight_decay=0.1),
    "8bit": pagoda.AdamW(lr=1e-2, moments="8bit"),
    "lion": pagoda.Lion(lr=1e-3, weight_decay=0.1),
    "adafactor": pagoda.Adafactor(lr=1e-2),
    "muon": pagoda.Muon(lr=1e-2),
}
REFERENCE, ADAPTING = "all in ram", "adapting device"
PLACES: dict[str, dict[str, float]] = {
    REFERENCE: {"host": 1},
    "ram": {"host": 1},
    "ssd": {"host": 1},
    "some ssd": {"host": 2},
    "device": {"host": 1, "device": 1},
    "device, ssd": {"host": 1.2, "device": 1.2},
    "updating device": {"host": 1, "device": 4},
    "home device": {"host": 1, "device": 4},
    ADAPTING: {"host": 1.5, "device": 12},
}
"""Tier -> times the least budget that `wrap` accepts."""
SPLITS = {
    "updating device": pagoda.Split(device_update_share=1.0),
    "home device": pagoda.Split(device_home_share=1.0, device_update_share=1.0),
}
UPDATES = {
    "sync": pagoda.Updates(),
    "async": pagoda.Updates("async"),
    "predicted": pagoda.Updates("async", predict=True),
    "speculative": pagoda.Updates(speculate=True),
}
AXES: dict[str, tuple[Any, ...]] = {
    "dtype": ("fp32", "bf16", "fp16", "bf16+fp32"),
    "clip": (None, LIMIT),
    "announced": (None, 1, 2),
    "activations": ("keep", "recompute", "offload", "recompute+offload"),
    "update": (*UPDATES,),
    "tiles": (None, "4KiB"),
    "unit": ("8KiB", "4KiB", "64KiB"),
    "page": (4096, 16384),
    "groups": ("one", "two", "reserve"),
    "hooks": (None, "gradient", "accumulated", "forward", "backward"),
    "schedule": (None, "step", "cosine"),
    "inline": (True, False),
}
"""Settings. The first value of each is the usual one. `inline`: whether small work is done without lanes' threads."""
USUAL = {name: values[0] for name, values in AXES.items()}


@dataclass(frozen=True)
class Case:
    """A loop."""

    seed: int
    blocks: tuple[str, ...]
    rule: str
    place: str
    settings: Mapping[str, Any]
    program: tuple[str, ...]

    @property
    def is_other(self) -> bool:
        """Whether it has other numbers or parameters than plain PyTorch, of which functions may raise."""
        of = self.settings
        return of["dtype"] == "fp16" or of["update"] in ("async", "predicted") or of["tiles"] is not None

    @property
    def is_plain(self) -> bool:
        """Whether plain PyTorch has the same bits. Updates multiply by all factors at once, in fp32."""
        of, factors = self.settings, [0]
        for action in self.program:
            factors[-1] += action in FACTORS
            factors += [0] * (action in STEPS)
        known = self.rule in ("own sgd" if of["schedule"] is None else "", *PLAIN) and "bf16" not in self.blocks
        return known and of["dtype"] == "fp32" and not self.is_other and max(factors) + (of["clip"] is not None) < 2

    def calm(self, name: str) -> "Case":
        """With the usual value of a setting."""
        return replace(self, settings={**self.settings, name: USUAL[name]})

    def without(self, at: int, count: int = 1) -> "Case":
        """Without a part of the program."""
        return replace(self, program=self.program[:at] + self.program[at + count :])


class Loop(Training):
    """A loop on its way, in pages or, without a place, in plain PyTorch."""

    def __init__(self, case: Case, place: str | None, folder: Path) -> None:
        self.case, self.folder, self.place, self.paged = case, folder, place, place is not None
        self.numbers, self.number, self.stepped = random.Random(case.seed), 0, False
        self.saved: Any = None
        super().__init__(nn.Module(), None)
        self.open()
        self.shadow = [param.detach().clone() for param in self.params]

    def built(self) -> tuple[Stack, list[dict[str, Any]]]:
        """A new model and its param groups."""
        torch.manual_seed(self.case.seed)
        model, of = Stack(self.case.blocks).train(), self.case.settings
        if "bf16" in of["dtype"]:
            model.bfloat16()
        if of["groups"] == "reserve":
            model.first.bias.requires_grad_(False)
        params = [param for param in model.parameters() if param.requires_grad]
        if of["hooks"] == "forward":
            model.blocks[0].register_forward_hook(lambda _module, _args, out: out * 0.5)
        if of["hooks"] == "backward":
            model.blocks[0].register_full_backward_hook(lambda _module, grads, _: tuple(grad * 0.5 for grad in grads))
        if of["groups"] == "two":
            return model, [{"params": params[::2]}, {"params": params[1::2], "lr": 2.0**-6}]
        return model, [{"params": params}]

    def open(self) -> None:
        """Begin with a new model and optimizer, in the least memory."""
        self.kept: Any = None
        place = self.place or REFERENCE
        sizes = dict.fromkeys(PLACES[place], 4096)
        while True:
            self.model, groups = self.built()
            if not self.paged:
                kind, settings = PLAIN.get(self.case.rule, PLAIN["sgd"])
                self.optimizer = kind(groups, **settings)
                break
            try:
                self.model, self.optimizer = self.wrapped(groups, place, sizes)
                break
            except pagoda.BudgetError as refused:
                if refused.tier not in sizes or (refused.needed_bytes or 0) <= sizes[refused.tier]:
                    raise
                sizes[refused.tier] = int(refused.needed_bytes * PLACES[place][refused.tier])
        of, schedulers = self.case.settings, torch.optim.lr_scheduler
        self.params = [param for param in self.model.parameters() if param.requires_grad]
        for param in self.params:
            if of["hooks"] == "gradient":
                param.register_hook(lambda grad: grad.clamp(-0.5, 0.5))
            if of["hooks"] == "accumulated":
                param.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", p.grad.clamp(-0.25, 0.25)))
        made = {"step": schedulers.StepLR, "cosine": schedulers.CosineAnnealingLR}
        self.schedule = of["schedule"] and made[of["schedule"]](self.optimizer, 2)

    def wrapped(self, groups: Any, place: str, sizes: Mapping[str, int]) -> tuple[Any, Any]:
        of = self.case.settings
        given: dict[str, Any] = {"host": sizes["host"], "unit_limit": of["unit"], "page_size": of["page"]}
        if "device" in sizes:
            given["device"] = f"cpu:{sizes['device']}"
            given["adapt_after"] = 2 if place == ADAPTING else None
            given["split"] = SPLITS.get(place)
        if "ssd" in place or "offload" in of["activations"]:
            given["ssd"] = f"{tempfile.mkdtemp(dir=self.folder)}:64MiB"
        dtype, _, gradients = of["dtype"].partition("+")
        converts = "fp16" if dtype == "fp16" else None
        scale = pagoda.LossScale(init_scale=256.0, growth_interval=2) if dtype == "fp16" else None
        return pagoda.wrap(
            self.model,
            RULES[self.case.rule],
            param_groups=groups,
            reserve=[*self.model.parameters()] if of["groups"] == "reserve" else (),
            memory=pagoda.Memory(**given),
            precision=pagoda.MixedPrecision(converts, gradients or None, scale),
            max_grad_norm=of["clip"],
            gradient_accumulation_steps=of["announced"],
            update=UPDATES[of["update"]],
            activations=of["activations"],
            tiles=of["tiles"] and pagoda.Tiles(tile_limit=of["tiles"]),
        )

    def inputs(self) -> torch.Tensor:
        """Other ones each time."""
        self.number += 1
        return torch.randn(2, TOKENS, WIDTH, generator=torch.Generator().manual_seed(self.number))

    def loss(self, number: int = 0, without: int = -1, **options: Any) -> torch.Tensor:
        loss = self.model(self.inputs(), without, **options).square().mean()
        self.found.append(loss.item())
        return self.scaled(loss)

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        return self.optimizer.scale(loss) if self.paged else loss

    def note(self, found: Any) -> None:
        self.found.append(tree_map_only(torch.Tensor, torch.clone, found))

    def any_param(self) -> Any:
        return self.numbers.choice(self.params)

    def any_block(self) -> int:
        return self.numbers.randrange(len(self.case.blocks))

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()
        self.stepped = False

    def step(self, closure: Any = None) -> None:
        if self.stepped:
            self.zero_grad()
        if not self.paged and self.case.settings["clip"] is not None:
            closure = closure and closure() and None
            clip_exactly(self.params, LIMIT)
        self.optimizer.step(*() if closure is None else (closure,))
        self.stepped = True
        if self.schedule is not None:
            self.schedule.step()

    def clip(self) -> None:
        nn.utils.clip_grad_norm_(self.params, LIMIT) if self.paged else clip_exactly(self.params, LIMIT)

    def states(self) -> dict[int, Any]:
        """Those of the optimizer, by parameter. Adagrad has some before the first step, and a look makes empty ones."""
        states = copy.deepcopy(self.optimizer.state_dict()["state"])
        return {index: state for index, state in sorted(states.items()) if state and state.get("step", 1)}

    def save(self, wait: bool = True) -> None:
        if self.paged:
            self.saved = Path(tempfile.mkdtemp(dir=self.folder)) / "saved"
            self.optimizer.save_checkpoint(self.saved, wait=wait)
        else:
            self.saved = copy.deepcopy((self.model.state_dict(), self.optimizer.state_dict(), torch.get_rng_state()))

    def restore(self) -> None:
        """What was saved last."""
        if self.saved is None:
            return
        self.zero_grad()
        if self.paged:
            self.optimizer.load_checkpoint(self.saved)
            return
        weights, states, generator = copy.deepcopy(self.saved)
        self.model.load_state_dict(weights)
        self.optimizer.load_state_dict(states)
        torch.set_rng_state(generator)

    def resume(self) -> None:
        """As if in another process, with other memory."""
        self.save()
        trains, place, schedule = [p.requires_grad for p in self.params], self.numbers.choice([*PLACES]), self.schedule
        if self.place not in (None, REFERENCE):
            self.place = place
        self.close()
        self.open()
        for param, does in zip(self.params, trains, strict=True):
            param.requires_grad_(does)
        if schedule is not None:
            self.schedule.load_state_dict(schedule.state_dict())
        self.restore()

    def play(self) -> list[Any]:
        """All that the loop has found, and all states at its end. Raises RefusedError where something raises."""
        for index, action in enumerate((*self.case.program, "step")):
            if self.stepped and (action in PASSES or action in GRADIENTS):
                self.zero_grad()
            try:
                ACTIONS[action](self)
            except Exception as error:
                raise RefusedError(index, error) from error
        self.note([self.model.state_dict(), self.states()])
        for tier, peak in self.optimizer.stats.peak_bytes.items() if self.place not in (None, ADAPTING) else ():
            assert peak <= pagoda.plan_of(self.model).peak_bytes[tier], tier
        return self.found

    def close(self) -> None:
        if self.paged:
            self.optimizer.close()


# --- what users do ----------------------------------------------------------------------------------------------

Action = Callable[[Loop], object]


def backward(*losses: torch.Tensor) -> None:
    for loss in losses:
        loss.backward(retain_graph=True)


def evaluate(of: Loop, mode: Callable[[], Any] = torch.no_grad) -> None:
    of.model.eval()
    with mode():
        of.loss()
    of.model.train()


def failing(of: Loop, in_backward: bool) -> None:
    at = of.any_block()

    def run(block: Any, x: torch.Tensor) -> Any:
        if block is of.model.blocks[at]:
            x.register_hook(lambda _: 1 // 0) if in_backward else 1 // 0
        return block(x)

    try:
        of.loss(run=run).backward()
    except ZeroDivisionError:
        of.zero_grad()


def one_block(of: Loop) -> None:
    block = of.model.blocks[of.any_block()]
    of.scaled(block(of.inputs().to(block.scale.dtype)).float().square().mean()).backward()


def of_inputs(of: Loop) -> None:
    x = of.inputs().requires_grad_()
    of.found += torch.autograd.grad(of.model(x).sum(), x)
    of.loss().backward()


def autocast(of: Loop) -> None:
    with torch.autocast("cpu", torch.bfloat16, enabled=of.case.settings["dtype"] != "fp16"):
        loss = of.loss()
    loss.backward()


def hooked(of: Loop) -> None:
    handle = of.any_param().register_hook(lambda grad: grad * 0.5)
    of.loss().backward()
    handle.remove()


def anomalies(of: Loop) -> None:
    with torch.autograd.detect_anomaly():
        of.loss().backward()


def step_of_scaler(of: Loop) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    of.zero_grad()
    scaler.scale(of.loss()).backward()
    scaler.unscale_(of.optimizer)
    if not of.paged and of.case.settings["clip"] is not None:
        clip_exactly(of.params, LIMIT)
    scaler.step(of.optimizer)
    of.stepped = True


def step_of_closure(of: Loop) -> None:
    def closure() -> torch.Tensor:
        of.zero_grad()
        loss = of.loss()
        loss.backward()
        return loss.detach()

    of.step(closure)


def change(how: Callable[[Any], object], mode: Callable[[], Any] = torch.no_grad) -> Action:
    """Change some parameter."""

    def changed(of: Loop) -> None:
        with mode():
            how(of.any_param())

    return changed


def average(of: Loop, back: bool = False) -> None:
    with torch.no_grad():
        for kept, param in zip(of.shadow, of.params, strict=False):
            (param.copy_ if back else kept.copy_)(kept.lerp(param.to(kept.dtype), 0.25))
    of.note(of.shadow)


def gathered(of: Loop) -> None:
    with pagoda.gathered(of.params[:3], modify=True), torch.no_grad():
        of.note(of.params[0])
        of.params[1].mul_(0.5)


def resident(of: Loop) -> None:
    with pagoda.resident(of.model) if of.paged else nullcontext():
        evaluate(of)


def load_weights(of: Loop, prefix: str = "") -> None:
    """Of a new model, or of a part of it."""
    weights = {name: value for name, value in of.built()[0].state_dict().items() if name.startswith(prefix)}
    of.model.load_state_dict(weights, strict=not prefix)


def unfreeze(of: Loop) -> None:
    for param in of.params:
        param.requires_grad_(True)


def add_group(of: Loop) -> None:
    of.optimizer.add_param_group({"params": [of.model.first.bias.requires_grad_(True)], "lr": 2.0**-7})
    of.params.append(of.model.first.bias)


def set_groups(of: Loop, **settings: float) -> None:
    for group in of.optimizer.param_groups:
        group.update(settings)


def noting(use: Callable[[Loop], Any]) -> Action:
    """Note what a use of `optimizer.state` returns. Entries are in the order of parameters, not of their first step.
    Those without states are dropped, as state dicts of Pagoda have none."""

    def noted(of: Loop) -> None:
        state = of.optimizer.state
        for param in [param for param in of.params if param in state]:
            entry = state.pop(param)
            if entry:
                state[param] = entry
        of.note(use(of))

    return noted


def swap_states(of: Loop) -> None:
    """Those of two parameters of one shape."""
    one, *others = (param for param in of.params if param.shape == of.params[0].shape)
    if others and one in of.optimizer.state and others[0] in of.optimizer.state:
        state = of.optimizer.state
        state[one], state[others[0]] = state[others[0]], state[one]


OF_A_LOOP = ("between", "gradients", "frozen", "swapped")
"""Uses of `optimizer.state` that are loops themselves, or know the shapes of a model."""
PASSES: dict[str, Action] = {
    "pass": lambda of: of.loss().backward(),
    "pass without": lambda of: of.loss(without=of.any_block()).backward(),
    "penalised": lambda of: (of.loss() + of.scaled(sum(p.float().square().sum() for p in of.params) * 0.01)).backward(),
    "evaluated meanwhile": lambda of: (of.loss(), evaluate(of))[0].backward(),
    "checkpointed": lambda of: of.loss(run=partial(checkpoint, use_reentrant=False)).backward(),
    "two graphs": lambda of: (of.loss() * of.loss()).backward(),
    "of inputs": of_inputs,
    "in a thread": lambda of: ThreadPoolExecutor(1).submit(PASSES["pass"], of).result(),
    "autocast": autocast,
    "anomalies": anomalies,
    "hooked": hooked,
    "one block": one_block,
    "partly": lambda of: of.loss().backward(inputs=[param for param in of.params[::2] if param.requires_grad]),
    "two losses": lambda of: backward(*(of.scaled(each.square().mean()) for each in of.model(of.inputs()))),
    "retained": lambda of: backward(*[of.loss()] * 2),
    "reversed": lambda of: backward(*[of.loss(), of.loss()][::-1]),
    "failing forward": partial(failing, in_backward=False),
    "failing backward": partial(failing, in_backward=True),
}
ONCE = [*PASSES][:13]
"""Those that have one backward."""
GRADIENTS: dict[str, Action] = {
    **{name: lambda of, read=read: of.note(read(of)) for name, read in READS.items()},
    **WRITES,
    "clipped": Loop.clip,
    "clipped by method": lambda of: of.optimizer.clip_grad_norm_(LIMIT) if of.paged else of.clip(),
}
STATES: dict[str, Action] = {
    **{f"states {name}": noting(use) for name, use in state_uses.USES.items() if name not in OF_A_LOOP},
    "states swapped": swap_states,
}
"""Reads and writes of `optimizer.state`."""
ANYWHERE: dict[str, Action] = {
    "evaluated": evaluate,
    "inference": partial(evaluate, mode=torch.inference_mode),
    "resident": resident,
    "weights read": lambda of: of.note([(param.float().norm(1), param.detach()) for param in of.params]),
    "weights scaled": change(lambda param: param.mul_(0.5)),
    "weights clamped": change(lambda param: param.clamp_(-0.125, 0.125)),
    "a row of weights": change(lambda param: param[0].zero_()),
    "data of weights": change(lambda param: param.data.mul_(2), nullcontext),
    "averaged": average,
    "average taken": partial(average, back=True),
    "gathered": gathered,
    "state dict": lambda of: of.note(of.model.state_dict()),
    "optimizer dict": lambda of: of.note(of.states()),
    "optimizer reloaded": lambda of: of.optimizer.load_state_dict(copy.deepcopy(of.optimizer.state_dict())),
    "weights reloaded": lambda of: of.model.load_state_dict({k: v.clone() for k, v in of.model.state_dict().items()}),
    "other weights": load_weights,
    "some weights": partial(load_weights, prefix="blocks.0."),
    "frozen": lambda of: of.any_param().requires_grad_(False),
    "unfrozen": unfreeze,
    "group added": add_group,
    "rate": partial(set_groups, lr=2.0**-6),
    "decay": partial(set_groups, weight_decay=2.0**-3),
    "drained": lambda of: of.optimizer.synchronize() if of.paged else None,
    "collected": lambda of: gc.collect(),
    "saved": Loop.save,
    "saved meanwhile": partial(Loop.save, wait=False),
    "zeroed": Loop.zero_grad,
    "step": Loop.step,
}
"""Between steps, and between backward and `step()`."""
BETWEEN: dict[str, Action] = {"restored": Loop.restore, "resumed": Loop.resume}
STEPS: dict[str, Action] = {"step": Loop.step, "step of closure": step_of_closure, "step of scaler": step_of_scaler}
ACTIONS = PASSES | GRADIENTS | STATES | ANYWHERE | BETWEEN | STEPS
FACTORS = ONE_NUMBER | {"numbers by foreach", "clipped", "clipped by method"}

# --- drawing, playing, shrinking --------------------------------------------------------------------------------


def drawn(seed: int) -> Case:
    """The loop of a seed."""
    of, program = random.Random(seed), list[str]()
    settings = {name: of.choice([values[0]] * 4 + [*values]) for name, values in AXES.items()}
    kinds = [kind for kind in PARTS if settings["dtype"] == "fp32" or kind != "batchnorm"]
    announced, clips = settings["announced"], settings["clip"] is not None
    rule = of.choice([*PLAIN, *PLAIN, *RULES])
    anywhere = [*ANYWHERE] * 3 + [*STATES] * (rule != "adagrad")  # which has states before its first update

    def some(names: Iterable[str], most: int) -> None:
        names = [*names]
        program.extend(of.choices(names, k=of.randint(0, most)) if names else ())

    for _ in range(of.randint(2, 5)):
        some([*anywhere, *BETWEEN], 2)
        for _ in range(announced or of.randint(1, 2)):
            program.append(of.choice(ONCE if announced else [*PASSES]))
            some(anywhere if clips or not announced else (), 1)
        if clips or not announced:
            some([name for name in GRADIENTS if not (announced and name in ADD_ANOTHER)], 3)
            some(anywhere, 1)
        program.append(of.choice(["step"] * 4 + [*STEPS]))
    blocks = tuple(of.choices(kinds, k=of.randint(2, 4)))
    return Case(seed, blocks, rule, of.choice([*PLACES][1:]), settings, tuple(program))


class RefusedError(Exception):
    """An action raised: its place in the program, and the error."""


def played(case: Case, place: str | None) -> list[Any]:
    """What a loop leaves behind, in plain PyTorch or with Pagoda."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(), pytest.MonkeyPatch.context() as patched:
        warnings.simplefilter("ignore")
        patched.setattr(updates, "CALM_STEPS", 0)
        if not case.settings["inline"]:
            patched.setattr(lanes, "INLINE_BYTES", 0)
        of = Loop(case, place, Path(folder))
        try:
            torch.manual_seed(case.seed)
            return of.play()
        finally:
            of.close()


def checked(case: Case, refusals: Counter[str]) -> str | None:
    """What is wrong with a loop. Counts what Pagoda refuses in it."""
    while True:
        place = None
        try:
            expected = played(case, place)
            if not case.is_plain:
                expected = played(case, place := REFERENCE)
            assert_alike(played(case, place := case.place), expected, "the loop")
            return None
        except RefusedError as refused:
            index, error = refused.args
            action = (*case.program, "the last step")[index]
            if isinstance(error, pagoda.PagodaError):
                refusals[f"{action}: {general(error)}"] += 1
            elif place is not None and not (place == REFERENCE and (case.is_other or "experts" in case.blocks)):
                return f"{action}: {error!r}"
            if index == len(case.program):
                return None
            case = case.without(index)
        except pagoda.ConfigError as error:
            refusals[f"wrap: {general(error)}"] += 1
            changed = [name for name in ("update", "activations", "tiles", *AXES) if case.settings[name] != USUAL[name]]
            if not changed:
                return repr(error)
            case = case.calm(changed[0])
        except Exception as error:
            return f"{place}: {error!r}"


def general(error: Exception) -> str:
    """A message without names and numbers."""
    message = re.sub(r"'[^']*'|\d[\d.]*( ?[KMG]?i?B\b)?", "*", str(error))
    return f"{type(error).__name__}: {message[:150]}"


def shorter(case: Case) -> Iterator[Case]:
    """Loops with less."""
    for count in sorted({len(case.program) // 2, len(case.program) // 4, 1} - {0}, reverse=True):
        yield from (case.without(at, count) for at in range(0, len(case.program), count))
    yield from (case.calm(name) for name in AXES)
    for at in range(len(case.blocks) if len(case.blocks) > 1 else 0):
        yield replace(case, blocks=case.blocks[:at] + case.blocks[at + 1 :])
    yield from (replace(case, blocks=("linear",)), replace(case, rule="sgd"), replace(case, place="ram"))


def shrunk(case: Case) -> Case:
    """A short loop that fails, too."""
    while (
        less := next((each for each in shorter(case) if each != case and checked(each, Counter())), None)
    ) is not None:
        case = less
    return case


def main(first: int, last: int) -> None:
    """Play the loops of these seeds."""
    torch.set_num_threads(1)
    gc.freeze()
    refusals, failed = Counter[str](), 0
    for seed in range(first, last + 1):
        faulthandler.dump_traceback_later(TIMEOUT_S, exit=True)
        if (wrong := checked(case := drawn(seed), refusals)) is not None:
            failed += 1
            print(f"seed {seed}: {wrong[:600]}\n  {(short := shrunk(case))}\n  {checked(short, Counter())}", flush=True)
    print(f"{last + 1 - first} loops, {failed} failed. Refused:")
    for message, count in refusals.most_common():
        print(f"{count:6} {message}")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[-1]))
