"""A run moves the activations that a plan of the same sizes moves, on the same lanes, in the same order."""

from collections.abc import Iterable
from itertools import groupby
from pathlib import Path

import pytest
import torch

import pagoda
from pagoda.config.training import ActivationMode
from pagoda.construction.construct import describe
from pagoda.optim.adamw import AdamW
from pagoda.plan.activations import Policy, SavedBlocks
from pagoda.plan.ops import HOST, SSD
from pagoda.plan.planner import make_plan
from pagoda.plan.traffic import activations_at
from pagoda.runtime.timeline_recorder import TimelineRecorder
from pagoda.simulate.simulation import simulate
from pagoda.simulate.timeline import Span
from tests.forecast.machines import SMALL
from tests.runtime.test_timeline_recorder import count, llama_loss, settle, steps
from tests.zoo import llama

PIECE = 4096


def order(spans: Iterable[Span], lane: str) -> list[str]:
    """What a lane did with activations and gradients, consecutive work of a kind as one."""
    verbs = (span.name.partition(" ")[0] for span in spans if span.lane == lane)
    return [verb for verb, _ in groupby(verb for verb in verbs if verb in ("save", "return", "offload"))]


@pytest.mark.parametrize("mode", ["offload", "recompute+offload"])
@pytest.mark.parametrize("place", [HOST, SSD])
def test_what_is_moved_is_what_is_planned(place: str, mode: ActivationMode, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, rule = llama(), AdamW(lr=1e-3)
    root = describe(model)
    memory = (
        pagoda.Memory(host="64MiB", device="cpu:160KiB", page_size=PIECE, unit_limit="48KiB")
        if place == HOST
        else pagoda.Memory(host="64MiB", ssd=str(tmp_path), page_size=PIECE, unit_limit="48KiB")
    )
    _, optimizer = pagoda.wrap(model, rule, memory=memory, accumulation_steps=1, activations=mode)
    try:
        steps(model, optimizer, llama_loss, 2)
        settle(optimizer)
        recorder = TimelineRecorder()
        for lane in optimizer._engine._lanes.values():
            lane.recorder = recorder
        steps(model, optimizer, llama_loss, 1)
        settle(optimizer)
        live = pagoda.plan_of(model)
    finally:
        optimizer.close()
    spans = recorder.timeline({}, {}, None, 0).spans
    assert live.activations is not None
    sizes = live.activations.sizes
    assert sizes is not None
    saved = SavedBlocks(sizes, (Policy(mode),) * len(sizes.blocks))
    plan = make_plan(root, rule.states("bf16"), live.budgets, live.options, saved=saved)
    assert (plan.layout, plan.placement) == (live.layout, live.placement)
    assert plan.activations is not None
    assert plan.activations.peak == live.activations.peak
    assert plan.bytes == live.bytes

    parts = [part for block in sizes.blocks for part in block.saved(Policy(mode))]
    nbytes = sum(part.movable for part in parts)
    out, back = ("d2h", "h2d") if place == HOST else ("ssd_write", "ssd_read")
    moves = [move for of_tick in activations_at(plan).values() for move in of_tick]
    assert {lane for lane, _ in moves} == {out, back}
    for verb, lane in (("save", out), ("return", back)):
        done = [span for span in spans if span.name == f"{verb} activation"]
        assert {span.lane for span in done} == {lane}
        planned = sum(nbytes for moved, nbytes in moves if moved == lane)
        assert planned == sum(part.paged for part in parts)
        ran = sum(span.nbytes for span in done)
        # What is still on its way out when backward wants it is taken as it is.
        assert ran == nbytes if verb == "save" else nbytes - plan.activations.peak.kept <= ran <= nbytes
    step = simulate(plan, SMALL, [1e-3] * (len(plan.trace.accesses) - 1))
    if place == HOST:
        assert order(spans, out) == order(step.spans, out)
    verbs = ("save", "return")
    assert set(count(step.spans, *verbs)) == set(count(spans, *verbs))
