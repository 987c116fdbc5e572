"""Where state lives, and when and how it moves, never changes a bit: every two settings of `wrap` together.

Each case is a tiny model that is trained for two or three steps with the settings of a row, and again with all of its
state in RAM, updated at the step, with every activation kept. Losses, norms, weights and optimizer states have the
same bits. The rows are such that each value of a setting meets each value of every other. `make test-all` takes more
values, in such rows that each three settings meet.
"""

from bisect import bisect
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from pairwise import Case, covering
from torch import nn
from zoo import ALL_ON_SSD, ARENA, ARENA_ALL_ON_SSD, HOST_WEIGHTS, PLACEMENTS, Outcome, least_host, loss_of

import pagoda
from pagoda.config.training import training_of
from pagoda.optim import Rule
from pagoda.optim.rule import StateSpec
from pagoda.plan.device_updates import slot_count, slot_pages
from pagoda.plan.layout import GRAD, WEIGHT
from pagoda.plan.options import Options
from pagoda.plan.planner import make_plan
from pagoda.plan.tiers import Budgets
from pagoda.plan.units import ModuleSpec
from pagoda.prepare.construct import describe
from pagoda.prepare.operator_tiles import Tiling
from pagoda.schedule import updates

CALM, CLIPPED = 0.01, 30.0
"""Factors of the loss: the gradients of the second are clipped, or overflow fp16."""


MODELS = {
    "plain": lambda: zoo.Plain(blocks=3, width=48),
    "llama": lambda: zoo.llama(layers=2),
    "gpt2": lambda: zoo.gpt2(layers=2),
    "t5": lambda: zoo.t5(layers=1, dropout=0.1),
    "conv": lambda: zoo.ConvNet(blocks=2),
    "untied": lambda: zoo.Plain(blocks=3, width=48, tied=False),
}
PLAIN = ("plain", "untied")
RULES: dict[str, Rule] = {
    "adamw": pagoda.AdamW(lr=1e-2, weight_decay=0.1),
    "adamw-bf16": pagoda.AdamW(lr=1e-2, moments="bf16"),
    "adamw-8bit": pagoda.AdamW(lr=1e-2, weight_decay=0.1, moments="8bit"),
    "sgd": pagoda.SGD(lr=1e-1),
    "lion": pagoda.Lion(lr=1e-3, weight_decay=0.1),
    "adafactor": pagoda.Adafactor(lr=1e-2, beta1=0.9),
    "muon": pagoda.Muon(lr=1e-2),
    "adagrad": pagoda.Optim(torch.optim.Adagrad, lr=1e-2),
}
"""One of each kind: as far as states are concerned, Adam is AdamW, SignSGD is SGD, and SGD with momentum is Lion."""
COPIED = ("muon", "adagrad")
WHOLE = ("adafactor", *COPIED)
"""Rules that take parameters whole."""
RAM = "ram"
UPDATED, HOME, BOTH = "updated-on-device", "home-on-device", "both-on-device"
"""In an arena that also updates about half of the units, or is home to them; all, where they are few. Or it updates
some and is home to a part of their states."""
UPDATED_FROM_SSD = "updated-on-device-from-ssd"
"""As UPDATED, with as much on SSD as can be."""
ADAPTING = "adapting"
"""As ARENA_ALL_ON_SSD for one step, and then home to what fits."""
LOOKED_UP = "looked-up"
"""As ARENA_ALL_ON_SSD, but the CPU looks up the embedding, whose weights are in RAM."""
PLACES = (RAM, *PLACEMENTS, UPDATED, UPDATED_FROM_SSD, HOME, BOTH, ADAPTING, LOOKED_UP)
ON_SSD = (HOST_WEIGHTS, ALL_ON_SSD, ARENA_ALL_ON_SSD, UPDATED_FROM_SSD, ADAPTING, LOOKED_UP)
NO_WEIGHTS_IN_RAM = (ALL_ON_SSD, ARENA_ALL_ON_SSD, UPDATED_FROM_SSD, ADAPTING, LOOKED_UP)
OFFLOADS = ("offload", "recompute+offload")
OWN = {"checkpoint": {"use_reentrant": False}, "reentrant": {"use_reentrant": True}}
"""Checkpoints that the model itself makes."""

LATE = ("async", "async, predicted")

LARGEST_UNIT = "128KiB"
"""Holds a block of most models."""
AXES = {
    "rule": (*RULES,),
    "activations": ("keep", "recompute", *OFFLOADS, "auto", *OWN),
    "model": (*MODELS,),
    "place": PLACES,
    "numbers": ("bf16", "fp16", "fp32", "bf16+fp32", "fp32+bf16"),
    "update": ("at step", "announced", "speculate", *LATE),
    "tiles": (None, "batch", "sequence", "layers"),
    "unit": ("4KiB", "32KiB", LARGEST_UNIT),
    "clip": (None, 0.5),
    "passes": (1, 2),
    "frozen": (False, True),
    "page": (4096, 16384),
}

DAILY = AXES | {
    "rule": tuple(rule for rule in RULES if rule not in ("adamw-bf16", "adagrad")),
    "place": tuple(place for place in PLACES if place not in (ARENA, UPDATED)),
    "model": tuple(name for name in MODELS if name not in ("gpt2", "qwen3")),
    "numbers": ("bf16", "fp16", "fp32", "bf16+fp32"),
}
"""For pairs. What is left out is much like another value: moments in 8 bits are kept in another form too, Muon is
copied as a class of torch is (which runtime/test_rules.py trains), the other arenas do all that a plain one does, BOTH
updates on the device from RAM, Llama stands for what is built alike, and optim/test_kernels.py has all forms of
gradients."""


def possible(case: Case) -> bool:
    """Whether `wrap` takes these settings together; those left out do not matter."""
    update, activations, place = case.get("update"), case.get("activations"), case.get("place")
    model = case.get("model", "untied" if place == LOOKED_UP else None)
    if model == "untied":
        place = case.get("place", LOOKED_UP)
    # Reentrant checkpoints deliver a gradient for each use of a block.
    several = activations == "reentrant" and (model in PLAIN or case.get("tiles") == "batch")
    return not (
        (case.get("rule") in WHOLE and case.get("tiles") == "layers")
        or (place == RAM and activations in OFFLOADS)  # nowhere to go
        or (model is not None and place is not None and (place == LOOKED_UP) != (model == "untied"))
        or (case.get("rule") in WHOLE and update == "async" and place in NO_WEIGHTS_IN_RAM)
        or (
            case.get("rule") in ("sgd", *WHOLE) and update == "async, predicted"
        )  # no momentum, or not element by element
        or (case.get("tiles") == "sequence" and model == "conv")  # it has no tokens
        or (place == ADAPTING and update in LATE)
        or (several and update in ("announced", "speculate"))
        or (update == "speculate" and "clip" in case and case["clip"] is None)
    )


def build(case: Case) -> nn.Module:
    torch.manual_seed(0)
    model = MODELS[case["model"]]()
    if case["activations"] in OWN:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=OWN[case["activations"]])
    if case["frozen"]:
        for param in [*model.parameters()][2::3]:
            param.requires_grad_(False)
    return model.train()


def settings(case: Case) -> dict[str, Any]:
    """The arguments of `wrap`."""
    announced = case["passes"] if case["update"] in ("announced", "speculate") else None
    in_pieces = pagoda.Tiles(sequence_tiles=2, per_token=("Block",) if case["model"] in PLAIN else ())
    batch, layers = pagoda.Tiles(batch_tiles=2), pagoda.Tiles(tile_limit="8KiB")
    tiles = {"batch": batch, "sequence": in_pieces, "layers": layers}.get(case["tiles"])
    update = pagoda.Updates("async", predict=case["update"] != "async") if case["update"] in LATE else "sync"
    return {
        "precision": zoo.precision_of(case["numbers"]),
        "max_grad_norm": case["clip"],
        "gradient_accumulation_steps": announced,
        "update": update,
        "activations": "keep" if case["activations"] in OWN else case["activations"],
        "tiles": tiles,
    }


def memory_of(case: Case, directory: Path) -> pagoda.Memory:
    """The least that a case can be trained in, for its placement."""
    place, page = case["place"], case["page"]
    looked_up = "1KiB" if place == LOOKED_UP else None
    memory = pagoda.Memory(
        host="64MiB", page_size=page, unit_limit=case["unit"], activations="400KiB", embedding_limit=looked_up
    )
    if place == RAM:
        return memory
    training = training_of(**settings(case))
    states = RULES[case["rule"]].predicting(training.ahead).states(case["numbers"].partition("+")[0])
    options, model = Options.of(training, memory), build(case)
    if training.tile_bytes is not None:
        size = states[0].dtype.itemsize
        Tiling(
            model,
            training.tile_bytes // size,
            in_blocks=any(state.per > 1 for state in states),
            most_looked_up=looked_up and memory.embedding_bytes // size,
        )
    root = describe(model)
    layout = make_plan(root, states, Budgets(1 << 40, looked_up and 1 << 40), options).layout
    if place not in (HOST_WEIGHTS, ALL_ON_SSD):
        split, beside, few, whole = None, 0, case["unit"] == LARGEST_UNIT, case["rule"] in COPIED
        if place in (UPDATED, UPDATED_FROM_SSD):
            split = pagoda.Split(device_update_share=1.0 if few or whole else 0.6)
        elif place in (HOME, BOTH):
            updated = float(whole) if place == HOME else 1.0 if few or whole else 0.8
            split = pagoda.Split(device_home_share=1.0, device_update_share=updated)
            late = options.asynchronous
            names = (*(s.name for s in layout.states), *[GRAD] * (1 + late), *[WEIGHT] * late)
            beside = sum(map(layout.total_pages, names))
            beside = beside if few else beside // (2 if place == HOME else 3)
        if split is not None and split.device_update_share:
            beside += slot_count(layout) * slot_pages(layout)
        device = (layout.lease_pages(ahead=1) + beside) * page
        memory = replace(memory, device=f"cpu:{device}", split=split)
        if place == ADAPTING:
            homes = sum(map(layout.total_pages, (*(state.name for state in layout.states), GRAD)))
            memory = replace(memory, device=f"cpu:{2 * device + homes * page + (1 << 20)}", adapt_after=1)
        options = replace(options, split=split)
    if place in ON_SSD:
        host = least_host(root, states, Budgets(page, memory.device_pages, 1 << 40), options)
        if place == HOST_WEIGHTS:
            pages = range(host // page, (64 << 20) // page)
            host = page * pages[bisect(pages, False, key=lambda count: holds(count * page, root, states, options))]
        memory = replace(memory, host=host)
    if place in ON_SSD or case["activations"] in OFFLOADS:
        memory = replace(memory, ssd=f"{directory}:1GiB")
    return memory


def holds(host: int, root: ModuleSpec, states: tuple[StateSpec, ...], options: Options) -> bool:
    """Whether so many bytes of RAM are home to all weights."""
    return "weight" not in make_plan(root, states, Budgets(host, None, 1 << 40), options).bytes.get("ssd", {})


def factors_of(case: Case) -> tuple[float, ...]:
    """Of the loss in each step. Updates that are late or undone have states of a step before them."""
    return (CALM, CLIPPED, CALM) if case["update"] in (*LATE, "speculate") else (CLIPPED, CALM)


def loop_of(case: Case) -> zoo.Loop:
    def loop(model: nn.Module, optimizer: Any, outcome: Outcome) -> None:
        generator = torch.Generator().manual_seed(1)
        for factor in case.get("steps", factors_of(case)):
            for _ in range(case["passes"]):
                loss = loss_of(model(**zoo.batch("conv" if case["model"] == "conv" else "llama", generator)))
                optimizer.scale(loss * (factor / case["passes"])).backward()
                outcome.losses.append(loss.item())
            zoo.take_step(optimizer, outcome)

    return loop


def train(case: Case, memory: pagoda.Memory) -> Outcome:
    return zoo.run(build(case), memory, loop_of(case), rule=RULES[case["rule"]], **settings(case))


@cache
def reference(*items: tuple[str, Any]) -> Outcome:
    """All state in RAM, one unit, one page size, updates at the step if they are not late, every activation kept."""
    case = dict(items)
    memory = pagoda.Memory(host="64MiB", unit_limit="64MiB", page_size=4096)
    if case["place"] == LOOKED_UP:
        memory = replace(memory, device="cpu:64MiB", embedding_limit="1KiB")
    return train(case, memory)


def check(case: Case, directory: Path) -> None:
    outcome = train(case, memory_of(case, directory))
    plan, place = outcome.plan, case["place"]
    on_ssd = {name for name in plan.bytes.get("ssd", {}) if name != "activations"}
    small = len(plan.units) < 4 or case["rule"] == "sgd"  # all may fit the buffers that are needed
    assert "weight" not in on_ssd or place in NO_WEIGHTS_IN_RAM
    assert not on_ssd or place in ON_SSD
    assert on_ssd or small or place not in (ALL_ON_SSD, ARENA_ALL_ON_SSD)
    assert ("device" in plan.bytes) == (place not in (RAM, HOST_WEIGHTS, ALL_ON_SSD))
    assert [unit.module for unit in plan.units if unit.on_host] == ["embed"] * (place == LOOKED_UP)
    there = plan.placement.units_with("device", ["weight"])
    updating = (UPDATED, UPDATED_FROM_SSD, BOTH)
    for units, places in ((plan.placement.passing, updating), (there, (HOME, BOTH, ADAPTING))):
        assert not units or place in places or (place == HOME and case["rule"] in COPIED)
        if place == ADAPTING and case["rule"] in COPIED:
            continue
        assert units or small or place not in places
    bits = {name: case[name] for name in ("rule", "model", "numbers", "tiles", "clip", "passes", "frozen")}
    # What a model does itself may add gradients up in another order.
    bits["activations"] = case["activations"] if case["activations"] in OWN else "keep"
    bits["steps"] = factors_of(case)
    # An embedding that is looked up is not cut into tiles.
    bits["place"] = LOOKED_UP if place == LOOKED_UP and case["tiles"] == "layers" else RAM
    bits["update"] = case["update"] if case["update"] in LATE else "at step"  # which changes the weights that are read
    outcome.assert_same_bits(reference(*bits.items()))


def named(case: Case) -> str:
    return ",".join(str(value) for value in case.values())


@pytest.fixture(autouse=True)
def _guesses_after_any_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(updates, "CALM_STEPS", 0)


@pytest.mark.parametrize("case", [*covering(DAILY, possible, tries=4)], ids=named)
def test_no_two_settings_change_a_bit(case: Case, tmp_path: Path) -> None:
    check(case, tmp_path)


SHARDS = 16


@cache
def triples() -> list[Case]:
    return [*covering(AXES, possible, strength=3, tries=2)]


@pytest.mark.slow
@pytest.mark.parametrize("shard", range(SHARDS))
def test_no_three_settings_change_a_bit(shard: int, tmp_path: Path) -> None:
    failed = []
    for number, case in enumerate(triples()[shard::SHARDS]):
        directory = tmp_path / str(number)
        directory.mkdir()
        try:
            check(case, directory)
        except Exception as error:
            failed.append(f"{named(case)}: {error!r}"[:600])
    assert not failed, "\n".join(failed)
