"""What the runtime does is what the simulator says it does: the same lanes, the same work, in the same order."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from pairwise import each_once
from torch import nn

import pagoda
from pagoda.config.training import ActivationMode
from pagoda.optim.adamw import AdamW
from pagoda.optimizer import PagedOptimizer
from pagoda.plan.activations import ActivationPlan, Policy
from pagoda.plan.lanes import LaneName
from pagoda.plan.layout import GRAD
from pagoda.plan.planner import make_plan
from pagoda.plan.tiers import HOST, SSD
from pagoda.plan.trace import Access
from pagoda.plan.traffic import activations_at
from pagoda.prepare.construct import describe
from pagoda.runtime.lanes import Lane, Work, wait_all
from pagoda.runtime.timeline_recorder import TimelineRecorder
from pagoda.schedule.scheduler import Scheduler
from pagoda.simulate.simulation import simulate
from pagoda.simulate.timeline import TimelineSpan
from tests.forecast.machines import SMALL
from tests.zoo import BATCH, LENGTH, VOCABULARY, llama

ARENA, MOMENTS_ON_SSD, ALL_ON_SSD = "arena", "moments on SSD", "all on SSD"
PLACEMENTS = (ARENA, MOMENTS_ON_SSD, ALL_ON_SSD)
WIDTH = 128
Step = Callable[[nn.Module], torch.Tensor]


def chain() -> nn.Module:
    """Layers that backward uses, and completes, in exactly the reverse of forward's order."""
    return nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())))


def chain_loss(model: nn.Module) -> torch.Tensor:
    # An input that needs a gradient makes the first layer's backward use its weights, as all others do.
    hidden = torch.randn(4, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    return model(hidden).float().square().mean()


def llama_loss(model: nn.Module) -> torch.Tensor:
    ids = torch.randint(VOCABULARY, (BATCH, LENGTH))
    return model(input_ids=ids, labels=ids).loss


def memory(placement: str, directory: Path) -> pagoda.Memory:
    """Budgets in which either model's state lies where the placement says, with frames for a part of it."""
    common: dict[str, Any] = {"page_size": 4096, "unit_limit": "48KiB"}
    if placement == ARENA:
        return pagoda.Memory(host="64MiB", device="cpu:160KiB", **common)
    host = {MOMENTS_ON_SSD: "1100KiB", ALL_ON_SSD: "700KiB"}[placement]
    return pagoda.Memory(host=host, ssd=str(directory), **common)


def wrapped(model: nn.Module, placement: str, directory: Path, clip: float | None) -> PagedOptimizer:
    where = memory(placement, directory)
    return pagoda.wrap(
        model, AdamW(lr=1e-3), memory=where, max_grad_norm=clip, gradient_accumulation_steps=1, precision="bf16"
    )[1]


def steps(model: nn.Module, optimizer: PagedOptimizer, loss: Step, count: int) -> None:
    for _ in range(count):
        loss(model).backward()
        optimizer.step()
        optimizer.zero_grad()


def settle(optimizer: PagedOptimizer) -> None:
    """Wait until every lane has done what it was given, next step's prefetches included."""
    optimizer.synchronize()
    for lane in optimizer._engine._lanes.values():
        meeting = threading.Barrier(len(lane._threads))
        wait_all([lane.submit(lambda meeting=meeting: (meeting.wait(), None)[1]) for _ in lane._threads])


def count(spans: Iterable[TimelineSpan], *verbs: str) -> Counter[tuple[str, str]]:
    """(lane, name) -> spans whose name begins with one of the verbs."""
    return Counter((span.lane, span.name) for span in spans if span.name.partition(" ")[0] in verbs)


def recorded(model: nn.Module, optimizer: PagedOptimizer, before: int, count: int) -> list[TimelineSpan]:
    """What lanes do in some steps, and beyond the end of the last, for what it leaves to the next."""
    steps(model, optimizer, llama_loss, before)
    settle(optimizer)
    recorder = TimelineRecorder()
    for lane in optimizer._engine._lanes.values():
        lane.report = recorder.add
    steps(model, optimizer, llama_loss, count)
    settle(optimizer)
    return [
        span for span in recorder.timeline({}, {}, None, 0).spans if span.name != span.lane
    ]  # `settle` has no label


@each_once(placement=PLACEMENTS, clip=[None, 1.0])
def test_measured_and_predicted_have_the_same_lanes_and_the_same_work(
    placement: str, clip: float | None, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = llama()
    with wrapped(model, placement, tmp_path, clip) as optimizer:
        spans = recorded(model, optimizer, before=2, count=2)
        plan = pagoda.plan_of(model)
    step = simulate(plan, SMALL, [1e-3] * (len(plan.trace.accesses) - 1))
    assert {span.lane for span in spans} | {LaneName.COMPUTE} == {span.lane for span in step.spans}
    streams = ("read", "write")
    assert set(count(spans, *streams)) - set(count(step.spans, *streams)) == set()
    # How often a unit is fetched or its gradient spilled depends on when other operations end.
    on_ssd = {("ssd_write", f"spill {u.name}") for u in plan.units if plan.placement.home(u.index, GRAD) == SSD}
    assert set(count(spans, "spill")) <= on_ssd
    # In two steps, though, each is fetched: the first one's update ends a lease that was there.
    assert set(count(spans, "fetch")) == set(count(step.spans, "fetch"))
    assert count(spans, "update") == {span: 2 * blocks for span, blocks in count(step.spans, "update").items()}
    offloads = {("d2h", f"offload {unit.name}"): 2 for unit in plan.units}
    assert count(spans, "offload") == offloads, "the gradients of a unit travel together"
    assert set(count(step.spans, "offload")) == set(offloads)


@each_once(kind=["chain", "llama"], placement=PLACEMENTS, clip=[None, 1e6])
def test_compute_tells_the_scheduler_what_the_simulated_one_does(
    kind: str, placement: str, clip: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Operations are the same then, but for what depends on when others end."""
    told: list[Any] = []
    access, gradient, end_step = Scheduler.access, Scheduler.gradient, Scheduler.end_step

    def accessed(scheduler: Scheduler, to: Access, recorded: bool = True) -> None:
        told.append(to)
        access(scheduler, to, recorded)

    def made(scheduler: Scheduler, unit: int, complete: bool, last: bool, *others: Any) -> None:
        if complete and kind == "chain":  # elsewhere, the gradients of a unit may come after the next one is used
            told.append((unit, last))
        gradient(scheduler, unit, complete, last, *others)

    def stepped(scheduler: Scheduler, *decided: Any, **changed: Any) -> None:
        told.append("step")
        end_step(scheduler, *decided, **changed)

    monkeypatch.setattr(Scheduler, "access", accessed)
    monkeypatch.setattr(Scheduler, "gradient", made)
    monkeypatch.setattr(Scheduler, "end_step", stepped)

    def last_step() -> list[Any]:
        (*_, start, end) = (at for at, what in enumerate(told) if what == "step")
        of_step = [what for what, _ in groupby(told[start:end])]
        told.clear()
        return of_step

    torch.manual_seed(0)
    model, loss = (llama(), llama_loss) if kind == "llama" else (chain(), chain_loss)
    with wrapped(model, placement, tmp_path, clip) as optimizer:
        steps(model, optimizer, loss, 4)
        plan = pagoda.plan_of(model)
    live = last_step()
    simulate(plan, SMALL, [1e-3] * (len(plan.trace.accesses) - 1))
    assert live == last_step()


def test_compute_is_at_work_between_accesses_but_for_its_waits(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = llama()
    with wrapped(model, ALL_ON_SSD, tmp_path, 1.0) as optimizer:
        steps(model, optimizer, llama_loss, 3)
        optimizer.trace_next_step()
        steps(model, optimizer, llama_loss, 1)
        timeline, plan = optimizer.timeline, pagoda.plan_of(model)
    assert timeline is not None
    spans = sorted((s for s in timeline.spans if s.lane == LaneName.COMPUTE), key=lambda span: span.start_s)
    for span, following in pairwise(spans):
        assert span.end_s <= following.start_s + 1e-9
    assert 0 <= spans[0].start_s < spans[-1].end_s <= timeline.step_s
    assert timeline.busy_s[LaneName.COMPUTE] <= timeline.step_s - sum(timeline.stall_s.values()) + 1e-6
    names = [name for name, _ in groupby(span.name for span in spans)]
    accesses = [f"{a.phase.name.lower()} {plan.units[a.unit].name}" for a in plan.trace.accesses[:-1]]
    assert names == [*accesses, "step"]
    assert set(timeline.held_bytes) == set(plan.peak_bytes)
    for tier, points in timeline.held_bytes.items():
        assert 0 < max(nbytes for _, nbytes in points) <= plan.peak_bytes[tier]


# --- activations ---------------------------------------------------------------------------------------------


def order(spans: Iterable[TimelineSpan], lane: str) -> list[str]:
    """What a lane did with activations and gradients, consecutive work of a kind as one."""
    verbs = (span.name.partition(" ")[0] for span in spans if span.lane == lane)
    return [verb for verb, _ in groupby(verb for verb in verbs if verb in ("save", "return", "offload"))]


@each_once(mode=["offload", "recompute+offload"], place=[HOST, SSD])
def test_what_is_moved_is_what_is_planned(place: str, mode: ActivationMode, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, rule = llama(), AdamW(lr=1e-3)
    root = describe(model)
    away = {"device": "cpu:160KiB"} if place == HOST else {"ssd": str(tmp_path)}
    memory = pagoda.Memory(host="64MiB", **away, page_size=4096, unit_limit="48KiB")
    _, optimizer = pagoda.wrap(
        model, rule, memory=memory, gradient_accumulation_steps=1, activations=mode, precision="bf16"
    )
    with optimizer:
        spans = recorded(model, optimizer, before=2, count=1)
        live = pagoda.plan_of(model)
    sizes = live.activations.sizes
    saved = ActivationPlan((Policy(mode),) * len(sizes.blocks), sizes=sizes)
    plan = make_plan(root, rule.states("bf16"), live.budgets, live.options, saved=saved)
    assert (plan.layout, plan.placement) == (live.layout, live.placement)
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


@pytest.mark.parametrize(
    ("placement", "slow"),
    [(ARENA, "h2d"), (ARENA, "d2h"), (ALL_ON_SSD, "ssd_read"), (ALL_ON_SSD, "ssd_write"), (MOMENTS_ON_SSD, "update")],
)
def test_a_wait_is_charged_to_the_lane_that_took_the_time(
    placement: str, slow: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    do = Lane._do

    def slowly(lane: Lane, work: Work) -> Any:
        time.sleep(0.01 if lane.name == slow else 0.0)
        return do(lane, work)

    torch.manual_seed(0)
    model = chain()
    with wrapped(model, placement, tmp_path, 1.0) as optimizer:
        monkeypatch.setattr(Lane, "_do", slowly)
        steps(model, optimizer, chain_loss, 3)
        stats = optimizer.stats
    assert stats.stall_s[slow] > 0.5 * sum(stats.stall_s.values()) > 0.0
