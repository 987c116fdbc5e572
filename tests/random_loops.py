"""Random training loops: what users do with a model, its gradients and its optimizer, in any order, drawn from a seed.

    python tests/random_loops.py FIRST [LAST]

plays the loops of these seeds, and prints each that fails with a shorter one that fails, too, and all refusals.

A loop is played by plain PyTorch and in pages. Losses, what the loop has read, weights and optimizer states have the
same bits where the rule has those of plain PyTorch, else those of the loop with all of its state in RAM. What Pagoda
refuses is counted, and the loop is played without it; so is what plain PyTorch refuses.
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
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("PAGODA_POISON", "1")

import pytest
import torch
from gradient_uses import ADD_ANOTHER, ONE_NUMBER, READS, WRITES, Training, assert_alike, clip_exactly
from reference import split
from torch import nn
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

import pagoda
from pagoda.runtime import lanes
from pagoda.schedule import updates

WIDTH, TOKENS, LIMIT = 40, 6, 2.0**-6
TIMEOUT_S = 300


class Block(nn.Module):
    """A part of a model, named by its kind."""

    def __init__(self, kind: str, tied: nn.Parameter) -> None:
        super().__init__()
        self.kind = kind
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.5))
        if kind == "tied":
            self.inner: Any = nn.Linear(WIDTH, WIDTH)
            self.inner.weight = tied
        elif kind == "experts":
            self.router = nn.Linear(WIDTH, 4)
            self.inner = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        elif kind == "lora":
            self.inner = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
            self.down, self.up = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH, bias=False)
        else:
            self.inner = KINDS[kind]()
        if kind == "frozen":
            self.requires_grad_(False)
        if kind == "bf16":
            self.inner.bfloat16()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale * torch.tanh(self._inner(x)).to(x.dtype)

    def _inner(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "experts":
            shares, chosen = self.router(x).softmax(-1).max(-1)
            picked = [expert(x) * (chosen == at)[..., None] for at, expert in enumerate(self.inner) if at in chosen]
            return shares[..., None] * torch.stack(picked).sum(0)
        if self.kind == "lora":
            return self.inner(x) + self.up(self.down(x))
        if self.kind == "embedding":
            return self.inner((x[..., 0].float() * 16).long() % 32)
        if self.kind == "attention":
            return self.inner(x, x, x, need_weights=False)[0]
        if self.kind in ("conv", "batchnorm"):
            return self.inner(x.transpose(1, 2)).transpose(1, 2)
        if self.kind == "lstm":
            return self.inner(x)[0]
        return self.inner(x.to(self.inner.weight.dtype) if self.kind == "bf16" else x)


KINDS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "deep": lambda: nn.Sequential(nn.Linear(WIDTH, 64), nn.Dropout(0.1), nn.GELU(), nn.Linear(64, WIDTH)),
    "norm": lambda: nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)),
    "lstm": lambda: nn.LSTM(WIDTH, WIDTH, batch_first=True),
    "attention": lambda: nn.MultiheadAttention(WIDTH, 2, batch_first=True),
    "conv": lambda: nn.Conv1d(WIDTH, WIDTH, 3, padding=1),
    "embedding": lambda: nn.Embedding(32, WIDTH),
    "frozen": lambda: nn.Linear(WIDTH, WIDTH),
    "bf16": lambda: nn.Linear(WIDTH, WIDTH),
    "batchnorm": lambda: nn.BatchNorm1d(WIDTH),
}


class Stack(nn.Module):
    """Blocks, of which a pass may leave one out, or fail at one."""

    def __init__(self, kinds: tuple[str, ...]) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(kind, self.first.weight) for kind in kinds)

    def forward(
        self, x: torch.Tensor, without: int = -1, fails_at: int = -1, run: Callable[..., Any] = lambda block, x: block(x)
    ) -> torch.Tensor:
        x = self.first(x.to(self.first.weight.dtype))
        for index, block in enumerate(self.blocks):
            if index == fails_at:
                raise ArithmeticError("a forward that fails")
            if index != without:
                x = run(block, x)
        return x.float()


# --- what a loop is ---------------------------------------------------------------------------------------------

PLAINLY: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 2.0**-5, "momentum": 0.5, "weight_decay": 0.25}),
    "adamw": (torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1}),
    "adagrad": (torch.optim.Adagrad, {"lr": 1e-2}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 1e-3, "momentum": 0.5}),
}
"""Classes of torch."""
RULES: dict[str, Any] = {
    **{name: pagoda.Optim(kind, **settings) for name, (kind, settings) in PLAINLY.items()},
    "own sgd": pagoda.SGD(**PLAINLY["sgd"][1]),
    "own adamw": pagoda.AdamW(lr=1e-2, weight_decay=0.1),
    "8bit": pagoda.AdamW(lr=1e-2, moments="8bit"),
    "lion": pagoda.Lion(lr=1e-3, weight_decay=0.1),
    "adafactor": pagoda.Adafactor(lr=1e-2),
    "muon": pagoda.Muon(lr=1e-2),
}
PLACES: dict[str, dict[str, float]] = {
    "ram": {"host": 1},
    "ssd": {"host": 1},
    "some ssd": {"host": 2},
    "device": {"host": 1, "device": 1},
    "device and ssd": {"host": 1.2, "device": 1.2},
    "large device": {"host": 1, "device": 4},
}
"""Tier -> times the least budget that `wrap` accepts."""
AXES: dict[str, tuple[Any, ...]] = {
    "dtype": ("fp32", "bf16", "fp16", "bf16+fp32"),
    "clip": (None, LIMIT),
    "announced": (None, 1, 2),
    "activations": ("keep", "recompute", "offload", "recompute+offload"),
    "update": ("sync", "async", "predicted", "speculate"),
    "tiles": (None, "4KiB"),
    "unit": ("8KiB", "4KiB", "64KiB"),
    "groups": (1, 2, "reserve"),
    "hooks": (None, "gradient", "accumulated", "module"),
    "schedule": (None, "step", "cosine"),
    "waits": (False, True),
}
"""The first value of each is the usual one. `waits`: small work is left to lanes' threads, too."""


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
    def rounds(self) -> bool:
        """Whether weights are rounded masters."""
        return self.settings["dtype"] == "bf16" or "bf16" in self.blocks

    @property
    def is_plain(self) -> bool:
        """Whether plain PyTorch has the same bits. Updates multiply by all factors at once, in fp32."""
        of, used = self.settings, {*self.program}
        products, clips = used & (ONE_NUMBER | {"numbers by foreach"}), "clipped" in used
        return (
            (self.rule in PLAINLY or self.rule == "own sgd")
            and of["dtype"] in ("fp32", "bf16")
            and of["tiles"] is None
            and of["update"] in ("sync", "speculate")
            and sum((bool(products), clips, of["clip"] is not None)) <= (0 if self.rounds else 1)
            and not (self.rounds and (self.rule == "own sgd" or "sam" in used))
        )


def clamp_gradient(param: Any) -> None:
    param.grad.clamp_(-0.25, 0.25)


class Loop(Training):
    """A loop on its way, in pages or, without a place, in plain PyTorch."""

    def __init__(self, case: Case, place: str | None, folder: Path) -> None:
        self.case, self.folder, self.paged = case, folder, place is not None
        self.saved: Any
        self.reserved: Any
        self.numbers, self.number, self.stepped = random.Random(case.seed), 0, False
        self.saved = self.reserved = None
        super().__init__(*self.opened(place))
        self.params = [param for param in self.model.parameters() if param.requires_grad]
        self.shadow = [param.detach().clone() for param in self.params]
        self.schedule = self.scheduled()

    def built(self) -> tuple[Stack, Any]:
        """The model and its param groups."""
        torch.manual_seed(self.case.seed)
        model, of = Stack(self.case.blocks), self.case.settings
        if of["dtype"] == "bf16":
            model.bfloat16()
        params = [param for param in model.parameters() if param.requires_grad]
        groups = [{"params": params}]
        if of["groups"] == 2:
            groups = [{"params": params[::2]}, {"params": params[1::2], "lr": 2.0**-6}]
        if of["groups"] == "reserve":
            groups = [{"params": params[:-1]}]
            self.reserved = params[-1].requires_grad_(False)
        if of["hooks"] == "module":
            model.blocks[0].register_forward_hook(lambda _m, _i, out: out * 0.5)
        return model.train(), groups

    def opened(self, place: str | None) -> tuple[Any, Any]:
        """A new model and optimizer."""
        model, groups = self.built()
        if place is None:
            kind, settings = PLAINLY.get(self.case.rule, PLAINLY["sgd"])
            optimizer: Any = with_masters(kind, groups, settings) if self.case.rounds else kind(groups, **settings)
        else:
            sizes = dict.fromkeys(PLACES[place], 4096)
            while True:
                try:
                    model, optimizer = self.wrapped(model, groups, place, sizes)
                    break
                except pagoda.BudgetError as refused:
                    if refused.tier not in sizes or (refused.needed_bytes or 0) <= sizes[refused.tier]:
                        raise
                    sizes[refused.tier] = int(refused.needed_bytes * PLACES[place][refused.tier])
                model, groups = self.built()
        for param in model.parameters() if (how := self.case.settings["hooks"]) != "module" else ():
            if how == "gradient" and param.requires_grad:
                param.register_hook(lambda grad: grad.clamp(-0.5, 0.5))
            elif how == "accumulated" and param.requires_grad:
                param.register_post_accumulate_grad_hook(clamp_gradient)
        return model, optimizer

    def wrapped(self, model: Stack, groups: Any, place: str, sizes: dict[str, int]) -> tuple[Any, Any]:
        of = self.case.settings
        given: dict[str, Any] = {"host": sizes["host"], "unit_limit": of["unit"], "page_size": 4096}
        if "device" in sizes:
            given["device"] = f"cpu:{sizes['device']}"
        if "ssd" in place or "offload" in of["activations"]:
            given["ssd"] = f"{tempfile.mkdtemp(dir=self.folder)}:64MiB"
        if place == "large device":
            given["split"] = pagoda.Split(device_update_share=1.0)
        dtype, _, gradients = of["dtype"].partition("+")
        own = dtype == "fp32" or (dtype == "bf16" and not gradients)
        scale = pagoda.LossScale(initial=256.0, growth_interval=2) if dtype == "fp16" else None
        late = {"async": pagoda.Updates("async"), "predicted": pagoda.Updates("async", predict=True)}
        return pagoda.wrap(
            model,
            RULES[self.case.rule],
            param_groups=groups,
            reserve=[*model.parameters()] if of["groups"] == "reserve" else (),
            memory=pagoda.Memory(**given),
            precision=pagoda.MixedPrecision(None if own else dtype, gradients or None, scale),
            clip_grad_norm=of["clip"],
            accumulation_steps=of["announced"],
            update=late.get(of["update"], pagoda.Updates(speculate=True) if of["update"] == "speculate" else "sync"),
            activations=of["activations"],
            tiles=of["tiles"] and pagoda.Tiles(tile_limit=of["tiles"]),
        )

    def scheduled(self) -> Any:
        kind = self.case.settings["schedule"]
        if kind == "step":
            return torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)
        return kind and torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 4)

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
            clip_exactly(self.params, LIMIT)
        self.optimizer.step(*() if closure is None else (closure,))
        self.stepped = True
        if self.schedule is not None:
            self.schedule.step()

    def states(self) -> dict[int, Any]:
        """Those of the optimizer. Adagrad has some before the first step."""
        states = copy.deepcopy(self.optimizer.state_dict()["state"])
        return {index: state for index, state in states.items() if state.get("step", 1)}

    def outcome(self) -> list[Any]:
        """All that the loop has found, and all states."""
        weights = {name: value.clone() for name, value in self.model.state_dict().items()}
        found = [*self.found, weights, self.states()]
        for tier, peak in self.optimizer.stats.peak_bytes.items() if self.paged else ():
            assert peak <= pagoda.plan_of(self.model).peak_bytes[tier], tier
        return found

    def play(self) -> list[Any]:
        """Everything in the program. Raises Refused where something raises."""
        for index, action in enumerate((*self.case.program, "step")):
            if self.stepped and (action in PASSES or action in GRADIENTS):
                self.zero_grad()
            try:
                ACTIONS[action](self)
            except Exception as error:
                raise RefusedError(index, error) from error
        return self.outcome()

    def close(self) -> None:
        if self.paged:
            self.optimizer.close()


def with_masters(kind: Any, groups: Any, settings: Any) -> torch.optim.Optimizer:
    """A class of torch with fp32 masters of the model's parameters, as `pagoda.Optim` has them."""
    pairs: list[tuple[Any, Any]] = []

    class WithMasters(kind):  # type: ignore[misc]
        def add_param_group(self, group: dict[str, Any]) -> None:
            new = [(param, nn.Parameter(param.detach().float())) for param in group["params"]]
            pairs.extend(new)
            super().add_param_group({**group, "params": [master for _, master in new]})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            if closure is not None:
                with torch.enable_grad():
                    closure()
            for param, master in pairs:
                master.grad = None if param.grad is None else param.grad.float()
                master.copy_(torch.where(rounded(master, param) == param, master, param))
            super().step()
            for param, master in pairs:
                param.copy_(rounded(master, param))

        def zero_grad(self, set_to_none: bool = True) -> None:
            for param, _ in pairs:
                if param.grad is not None:
                    param.grad = None if set_to_none else torch.zeros_like(param)

    return WithMasters(groups, **settings)


def rounded(master: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return split(master)[0] if like.dtype is torch.bfloat16 else master


# --- what users do ----------------------------------------------------------------------------------------------

Action = Callable[[Loop], object]


def two_losses(of: Loop) -> None:
    out = of.model(of.inputs())
    of.scaled(out[0].square().mean()).backward(retain_graph=True)
    of.scaled(out[1].abs().mean()).backward()


def retained(of: Loop) -> None:
    loss = of.loss()
    loss.backward(retain_graph=True)
    (loss * 0.5).backward()


def partly(of: Loop) -> None:
    of.loss().backward(inputs=[param for param in of.params[::2] if param.requires_grad])


def reversed_graphs(of: Loop) -> None:
    losses = [of.loss(), of.loss()]
    for loss in losses[::-1]:
        loss.backward()


def evaluate(of: Loop, mode: Callable[[], Any] = torch.no_grad) -> None:
    of.model.eval()
    with mode():
        of.loss()
    of.model.train()


def evaluated_meanwhile(of: Loop) -> None:
    loss = of.loss()
    with torch.no_grad():
        of.loss()
    loss.backward()


def penalised(of: Loop) -> None:
    (of.loss() + of.scaled(0.01 * sum(param.float().square().sum() for param in of.params))).backward()


def failing_forward(of: Loop) -> None:
    try:
        of.loss(fails_at=of.any_block())
    except ArithmeticError:
        of.zero_grad()


def failing_backward(of: Loop) -> None:
    at = of.any_block()

    def run(block: Any, x: torch.Tensor) -> Any:
        if block is of.model.blocks[at] and x.requires_grad:
            x.register_hook(lambda _: (_ for _ in ()).throw(ArithmeticError("a backward that fails")))
        return block(x)

    try:
        of.loss(run=run).backward()
    except ArithmeticError:
        of.zero_grad()


def one_block(of: Loop) -> None:
    block = of.model.blocks[of.any_block()]
    of.scaled(block(of.inputs().to(block.scale.dtype)).float().square().mean()).backward()


def of_inputs(of: Loop) -> None:
    x = of.inputs().requires_grad_()
    of.found += torch.autograd.grad(of.model(x).sum(), x)
    of.loss().backward()


def in_a_thread(of: Loop) -> None:
    with ThreadPoolExecutor(1) as thread:
        thread.submit(lambda: of.loss().backward()).result()


def autocast(of: Loop) -> None:
    with torch.autocast("cpu", torch.bfloat16, enabled=of.case.settings["dtype"] != "fp16"):
        loss = of.loss()
    loss.backward()


def hooked(of: Loop) -> None:
    handle = of.any_param().register_hook(lambda grad: grad * 0.5)
    of.loss().backward()
    handle.remove()


def closure_step(of: Loop) -> None:
    def closure() -> torch.Tensor:
        of.zero_grad()
        loss = of.loss()
        loss.backward()
        return loss

    of.step(closure)


def change_weights(change: Callable[[Any], object], how: Callable[[], Any] = torch.no_grad) -> Action:
    def changed(of: Loop) -> None:
        with how():
            change(of.any_param())

    return changed


def average(of: Loop) -> None:
    with torch.no_grad():
        for kept, param in zip(of.shadow, of.params, strict=True):
            kept.lerp_(param.to(kept.dtype), 0.25)
    of.found += [kept.clone() for kept in of.shadow]


def take_average(of: Loop) -> None:
    with torch.no_grad():
        for kept, param in zip(of.shadow, of.params, strict=True):
            param.copy_(kept)


def gathered(of: Loop) -> None:
    with pagoda.gathered(of.params[:3], modify=True), torch.no_grad():
        of.found.append(of.params[0].clone())
        of.params[1].mul_(0.5)


def resident(of: Loop) -> None:
    with pagoda.resident(of.model) if of.paged else nullcontext():
        evaluate(of)


def reload_optimizer(of: Loop) -> None:
    of.optimizer.load_state_dict(copy.deepcopy(of.optimizer.state_dict()))


def reload_weights(of: Loop) -> None:
    of.model.load_state_dict({name: value.clone() for name, value in of.model.state_dict().items()})


def load_other_weights(of: Loop) -> None:
    of.model.load_state_dict(of.built()[0].state_dict())


def load_some_weights(of: Loop) -> None:
    of.model.load_state_dict(of.built()[0].blocks[0].state_dict(prefix="blocks.0."), strict=False)


def freeze(of: Loop) -> None:
    of.any_param().requires_grad_(False)


def unfreeze(of: Loop) -> None:
    for param in of.params:
        param.requires_grad_(True)


def add_group(of: Loop) -> None:
    of.optimizer.add_param_group({"params": [of.reserved.requires_grad_(True)], "lr": 2.0**-7})
    of.params.append(of.reserved)
    of.shadow.append(of.reserved.detach().clone())


def set_groups(key: str, value: Any) -> Action:
    def change(of: Loop) -> None:
        for group in of.optimizer.param_groups:
            group[key] = value

    return change


def save(of: Loop, wait: bool = True) -> None:
    if of.paged:
        of.saved = Path(tempfile.mkdtemp(dir=of.folder)) / "saved"
        of.optimizer.save_checkpoint(of.saved, wait=wait)
    else:
        of.saved = copy.deepcopy((of.model.state_dict(), of.optimizer.state_dict(), masters(of))), torch.get_rng_state()


def masters(of: Loop) -> list[torch.Tensor]:
    return [master.detach() for group in of.optimizer.param_groups for master in group["params"]]


def restore(of: Loop) -> None:
    """What was saved last, in a loop that goes on."""
    if of.saved is None:
        return
    of.zero_grad()
    if of.paged:
        of.optimizer.load_checkpoint(of.saved)
        return
    (weights, states, kept), generator = of.saved
    of.model.load_state_dict(weights)
    of.optimizer.load_state_dict(copy.deepcopy(states))
    for master, value in zip(masters(of), kept, strict=True):
        master.copy_(value)
    torch.set_rng_state(generator)


def resume(of: Loop) -> None:
    """In another process, as it were, with other memory."""
    save(of)
    frozen = [param.requires_grad for param in of.params]
    place = of.numbers.choice([*PLACES])
    of.close()
    of.model, of.optimizer = of.opened(place if of.paged else None)
    of.params = [param for param in of.model.parameters() if param.requires_grad]
    for param, trains in zip(of.params, frozen, strict=True):
        param.requires_grad_(trains)
    schedule, of.schedule = of.schedule, of.scheduled()
    if schedule is not None:
        of.schedule.load_state_dict(schedule.state_dict())
    restore(of)


PASSES: dict[str, Action] = {
    "pass": lambda of: of.loss().backward(),
    "pass without": lambda of: of.loss(without=of.any_block()).backward(),
    "penalised": penalised,
    "evaluated meanwhile": evaluated_meanwhile,
    "checkpointed": lambda of: of.loss(run=partial(checkpoint, use_reentrant=False)).backward(),
    "two graphs": lambda of: (of.loss() * of.loss()).backward(),
    "of inputs": of_inputs,
    "in a thread": in_a_thread,
    "autocast": autocast,
    "hooked": hooked,
    "one block": one_block,
    "partly": partly,
    "two losses": two_losses,
    "retained": retained,
    "reversed": reversed_graphs,
    "failing forward": failing_forward,
    "failing backward": failing_backward,
}
ONCE = [*PASSES][:12]
"""Those that have one backward."""
GRADIENTS: dict[str, Action] = {
    **{name: lambda of, read=read: of.note(read(of)) for name, read in READS.items()},
    **WRITES,
    "clipped": lambda of: clip(of),
    "clipped by method": lambda of: of.optimizer.clip_grad_norm_(LIMIT) if of.paged else clip(of),
}
STATES: dict[str, Action] = {}
"""Reads and writes of `optimizer.state`."""
ANYWHERE: dict[str, Action] = {
    "evaluated": evaluate,
    "inference": partial(evaluate, mode=torch.inference_mode),
    "resident": resident,
    "weights read": lambda of: of.found.extend(param.float().norm(1) for param in of.params),
    "weights copied": lambda of: of.found.extend(param.detach().clone() for param in of.params),
    "weights scaled": change_weights(lambda param: param.mul_(0.5)),
    "weights clamped": change_weights(lambda param: param.clamp_(-0.125, 0.125)),
    "a row of weights": change_weights(lambda param: param[0].zero_()),
    "data of weights": change_weights(lambda param: param.data.mul_(2), nullcontext),
    "averaged": average,
    "average taken": take_average,
    "gathered": gathered,
    "state dict": lambda of: of.found.append({k: v.clone() for k, v in of.model.state_dict().items()}),
    "optimizer dict": lambda of: of.found.append(of.states()),
    "optimizer reloaded": reload_optimizer,
    "weights reloaded": reload_weights,
    "other weights": load_other_weights,
    "some weights": load_some_weights,
    "freeze": freeze,
    "unfreeze": unfreeze,
    "group added": add_group,
    "rate": set_groups("lr", 2.0**-6),
    "decay": set_groups("weight_decay", 2.0**-3),
    "drained": lambda of: of.optimizer.drain() if of.paged else None,
    "collected": lambda of: gc.collect(),
    "saved": save,
    "saved meanwhile": partial(save, wait=False),
    "zeroed": Loop.zero_grad,
    "step": Loop.step,
    **STATES,
}
"""Between steps, and between backward and `step()`."""
BETWEEN: dict[str, Action] = {"restored": restore, "resumed": resume}
STEPS: dict[str, Action] = {"step": Loop.step, "step of closure": closure_step}
ACTIONS = PASSES | GRADIENTS | ANYWHERE | BETWEEN | STEPS
FACTORS = ONE_NUMBER | {"numbers by foreach", "clipped", "clipped by method"}
"""Uses that multiply gradients by numbers. The update multiplies by all of these at once, in fp32."""


def clip(of: Loop) -> None:
    nn.utils.clip_grad_norm_(of.params, LIMIT) if of.paged else clip_exactly(of.params, LIMIT)


# --- drawing, playing, shrinking --------------------------------------------------------------------------------


def drawn(seed: int) -> Case:
    """The loop of a seed."""
    of = random.Random(seed)
    settings = {name: of.choice([values[0]] * 2 + [*values]) for name, values in AXES.items()}
    kinds = [kind for kind in KINDS if settings["dtype"] == "fp32" or kind != "batchnorm"]
    blocks = tuple(of.choices([*kinds, "tied", "experts", "lora"], k=of.randint(2, 4)))
    program: list[str] = []

    def some(names: Any, most: int) -> None:
        program.extend(of.choices([*names], k=of.randint(0, most)))

    for _ in range(of.randint(2, 5)):
        some(ANYWHERE | BETWEEN, 2)
        for _ in range(settings["announced"] or of.randint(1, 2)):
            program.append(of.choice(ONCE if settings["announced"] else [*PASSES]))
            some(ANYWHERE, 1)
        if settings["announced"] is None or settings["clip"] is not None:
            some([name for name in GRADIENTS if settings["announced"] is None or name not in ADD_ANOTHER], 3)
        some(ANYWHERE, 1)
        program.append(of.choice(["step"] * 4 + [*STEPS]))
    return Case(seed, blocks, of.choice([*RULES]), of.choice([*PLACES]), settings, tuple(program))


class RefusedError(Exception):
    """An action raised."""


def played(case: Case, place: str | None) -> list[Any]:
    """What a loop leaves behind, in plain PyTorch or with Pagoda."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(), pytest.MonkeyPatch.context() as patched:
        warnings.simplefilter("ignore")
        patched.setattr(updates, "CALM_STEPS", 0)
        if case.settings["waits"]:
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
        place: str | None = None
        try:
            expected = played(case, place)
            place = case.place
            found = played(case, place)
            if not case.is_plain:
                place = "ram"
                expected = played(case, place)
            assert_alike(found, expected, "the loop")
            return None
        except RefusedError as error:
            index, cause = error.args
            action = (*case.program, "the last step")[index]
            if place is not None and not isinstance(cause, pagoda.PagodaError):
                return f"{action}: {cause!r}"
            if place is not None:
                refusals[f"{action}: {type(cause).__name__}: {general(cause)}"] += 1
            if index == len(case.program):
                return None
            case = replace(case, program=case.program[:index] + case.program[index + 1 :])
        except pagoda.ConfigError as error:
            refusals[f"wrap: {type(error).__name__}: {general(error)}"] += 1
            if case.settings == usual():
                return repr(error)
            changed = next(name for name in ("update", "activations", "tiles", *AXES) if not is_usual(case, name))
            case = replace(case, settings={**case.settings, changed: AXES[changed][0]})
        except Exception as error:
            return f"{'plain' if place is None else place}: {error!r}"


def usual() -> dict[str, Any]:
    return {name: values[0] for name, values in AXES.items()}


def is_usual(case: Case, name: str) -> bool:
    return bool(case.settings[name] == AXES[name][0])


def general(error: Exception) -> str:
    """A message without names and numbers."""
    return re.sub(r"'[^']*'|[\d.]+ ?(?:[KMG]?i?B\b)?", "*", str(error))[:150]


def shorter(case: Case) -> Iterator[Case]:
    """Loops with one thing less."""
    for length in sorted({len(case.program) // 2, len(case.program) // 4, 1} - {0}, reverse=True):
        for at in range(0, len(case.program), length):
            yield replace(case, program=case.program[:at] + case.program[at + length :])
    for name in AXES:
        if not is_usual(case, name):
            yield replace(case, settings={**case.settings, name: AXES[name][0]})
    if len(case.blocks) > 1:
        yield from (replace(case, blocks=case.blocks[:at] + case.blocks[at + 1 :]) for at in range(len(case.blocks)))
    yield from (replace(case, blocks=("linear",)), replace(case, rule="sgd"), replace(case, place="ram"))


def shrunk(case: Case) -> Case:
    """A short loop that fails, too."""
    while (less := next((c for c in shorter(case) if c != case and checked(c, Counter())), None)) is not None:
        case = less
    return case


def main(first: int, last: int) -> None:
    """Play the loops of these seeds."""
    refusals: Counter[str] = Counter()
    failed = 0
    for seed in range(first, last + 1):
        faulthandler.dump_traceback_later(TIMEOUT_S, exit=True)
        case = drawn(seed)
        wrong = checked(case, refusals)
        if wrong is not None:
            failed += 1
            print(f"seed {seed}: {wrong[:600]}", flush=True)
            short = shrunk(case)
            print(f"  {short}\n  {checked(short, Counter())}"[:1500], flush=True)
    print(f"{last + 1 - first} loops, {failed} failed. Refused:")
    for message, count in refusals.most_common():
        print(f"{count:6} {message}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(int(sys.argv[1]), int(sys.argv[-1]))
