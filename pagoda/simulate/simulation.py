"""The simulator: runs a plan's ops on a model of hardware, as discrete events.

It follows the runtime's rules, not a formula: lanes take work in the order in which it becomes ready, compute waits for
leases and for updates that are due, the ring bounds what streams, gradients leave under backward, and the most urgent
update goes first. Between two events every lane works at a constant rate: its own, or its share of what it shares (the
SSD's two directions, the link's, RAM, and the CPU where that is also what computes).
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

from pagoda.plan.layout import GRAD, WEIGHT
from pagoda.plan.ops import COLLECTIVE, DEVICE, HOST, LANES, SSD, Kind, Op
from pagoda.plan.placement import LEASES, STAGING
from pagoda.plan.planner import Plan
from pagoda.plan.ranks import ring_bytes
from pagoda.plan.trace import STEP, Access, Phase
from pagoda.plan.units import UnitSpec
from pagoda.simulate.activations import SimulatedActivations
from pagoda.simulate.asynchronous import SimulatedAsyncUpdater
from pagoda.simulate.hardware import Hardware
from pagoda.simulate.lanes import SimulatedLanes, Task
from pagoda.simulate.rates import Rates
from pagoda.simulate.timeline import COMPUTE, Span, Timeline
from pagoda.simulate.updates import SimulatedGradients, SimulatedUpdater

_LEAST_STEPS, _MOST_STEPS = 4, 8
"""Steps simulated: until one takes as long as the one before. The last is the result; it finds the others' updates
under way, and what the updater has learned to read ahead."""
_STEADY = 1e-4
"""Relative difference below which two steps took equally long."""
_SWEEPS = 4
"""With asynchronous updates: sweeps that are measured, each of as many steps as it may take, after half as many."""
_IN_BACKWARD = 0.75
"""Of a parameter's bookkeeping: there its lease is asked for once more, and its gradient comes."""
_FETCH_CHUNKS = 4
"""Pieces of a fetch from SSD to a device of its own: one is read while the one before is copied."""


def simulate(plan: Plan, hardware: Hardware, tick_s: Sequence[float]) -> Timeline:
    """One step of `plan` in steady state, on one rank of `hardware`.

    `tick_s` has the seconds of compute of each access of the plan's trace when nothing disturbs it; see `Compute`.
    With asynchronous updates a sweep over the states may take several steps, which differ: seconds and stalls are then
    means over several sweeps, and what each lane does when is that of the step that comes nearest to the mean.

    Raises ValueError when it does not have one number per access.
    """
    if len(tick_s) != len(plan.trace.accesses) - 1:
        raise ValueError(f"{len(tick_s)} times of compute for a trace of {len(plan.trace.accesses) - 1} accesses")
    return Simulation(plan, hardware, tick_s).run()


@dataclass(frozen=True)
class _Step:
    """When a step began and ended, and what compute waited for in it."""

    start_s: float
    end_s: float
    stall_s: Mapping[str, float]

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


class Simulation:
    """The live run: in every step compute walks along the trace, lanes and the updater follow.

    What a step has queued may end in the next one, and steps may differ for good, taking turns: only `drain` makes what
    has ended what the plan's ops say, once for each step.
    """

    def __init__(self, plan: Plan, hardware: Hardware, tick_s: Sequence[float]) -> None:
        self._plan = plan
        self._rates = Rates(hardware, plan.ranks, plan.transfer_bytes)
        self._lanes = SimulatedLanes(self._rates)
        self._tick_s = tick_s
        self._stalling = (*LANES, COLLECTIVE) if plan.ranks is not None else LANES
        self._stall_s = dict.fromkeys(self._stalling, 0.0)
        self._in_flight_bytes = plan.gradients_in_flight_bytes
        self._leased_pages = plan.leased_pages()
        self._leases: dict[int, Task] = {}
        self._moves: list[tuple[float, str, int]] = []
        """(seconds, tier, pages taken there, or given back if below zero) of lines that come and go."""
        self._offloads: deque[tuple[Task, int]] = deque()
        self._activations = SimulatedActivations(plan, self._lanes, self._rates, self._wait)
        self._gradients = SimulatedGradients(plan, lambda pages: self._note(HOST, pages))
        updated_on_device = plan.placement.updated_on_device | plan.placement.resident
        updater: type[SimulatedUpdater]
        updater = SimulatedUpdater if plan.options.max_staleness is None else SimulatedAsyncUpdater
        self._updaters = [updater(plan, self._lanes, self._rates)]
        if updated_on_device:
            self._updaters.append(SimulatedUpdater(plan, self._lanes, self._rates, on_device=True))
        self._updater_of = [self._updaters[unit.index in updated_on_device] for unit in plan.units]
        self._last_offload: dict[int, Task] = {}
        self._final = _final_backward(plan)
        self._speculated: dict[int, Task] = {}
        """unit -> its update under backward, whose gradient must be kept until `step()`: nothing is clipped here."""

    def run(self) -> Timeline:
        """The last of as many steps as it takes until two are equally long; or several, where steps differ for good."""
        most_stale = self._plan.options.max_staleness
        steps = self._until_steady() if most_stale is None else self._several_sweeps(most_stale + 1)
        step_s = fmean(step.seconds for step in steps)
        stall_s = {lane: fmean(step.stall_s[lane] for step in steps) for lane in self._stalling}
        shown = min(steps, key=lambda step: abs(step.seconds - step_s))
        start, end = shown.start_s, shown.end_s
        spans = tuple(
            Span(s.lane, s.name, s.start_s - start, s.end_s - start, s.nbytes)
            for s in self._lanes.spans
            if start < s.end_s <= end
        )
        return Timeline(step_s, spans, stall_s, self._ledger(start, end))

    def _until_steady(self) -> list[_Step]:
        """The last step, alone."""
        step = self._timed_step()
        for count in range(1, _MOST_STEPS):
            before, step = step, self._timed_step()
            if count + 1 >= _LEAST_STEPS and abs(step.seconds - before.seconds) <= _STEADY * before.seconds:
                break
        return [step]

    def _several_sweeps(self, steps_of_one: int) -> list[_Step]:
        for _ in range(_SWEEPS // 2 * steps_of_one):
            self.step()
        return [self._timed_step() for _ in range(_SWEEPS * steps_of_one)]

    def _timed_step(self) -> _Step:
        start, self._stall_s = self._lanes.now, dict.fromkeys(self._stalling, 0.0)
        self.step()
        return _Step(start, self._lanes.now, self._stall_s)

    def step(self) -> None:
        """One more step, until compute is through with it."""
        accesses = self._plan.trace.accesses
        last = len(accesses) - 1
        for tick, access in enumerate(accesses):
            if access == STEP:
                break
            self._issue(tick)
            unit = access.unit
            self._wait(self._updater_of[unit].published(unit))
            self._wait(self._leases.get(unit))
            for exchange in self._plan.exchanges_at.get(tick, ()):
                self._wait(self._exchange(exchange))
            self._activations.begin(tick)
            name = f"{'forward' if access.phase is Phase.FORWARD else 'backward'} {self._plan.units[unit].name}"
            seconds = self._tick_s[tick] + self._bookkeeping_s(access)
            self._lanes.run_until(self._lanes.submit(COMPUTE, name, 0, seconds))
            self._activations.end(tick)
            if access.phase is Phase.BACKWARD and self._plan.units[unit].trainable_numel:
                self._offload(unit, final=self._final.get(unit) == tick)
        while self._offloads:
            self._wait(self._offloads.popleft()[0])
        for unit in self._final:
            if unit in self._speculated:
                self._gradients.updated(unit, self._speculated.pop(unit))
            elif not self._plan.options.update_under_backward:
                self._queue_update(unit)
        for updater in self._updaters:
            updater.end_of_step()
            updater.pump()
        self._issue(last)

    def _bookkeeping_s(self, access: Access) -> float:
        """What the runtime does on the compute thread, most of it as gradients arrive."""
        share = _IN_BACKWARD if access.phase is Phase.BACKWARD else 1 - _IN_BACKWARD
        parameters = sum(slot.param.trainable for slot in self._plan.units[access.unit].slots)
        return share * parameters * self._rates.parameter_s

    def drain(self) -> Mapping[str, int]:
        """Let every lane end what it has; returns lane -> bytes of all that has ended since the first step."""
        self._lanes.run_out()
        moved: dict[str, int] = {}
        for span in self._lanes.spans:
            moved[span.lane] = moved.get(span.lane, 0) + span.nbytes
        return moved

    def _issue(self, tick: int) -> None:
        """Start the fetches that the plan has for a tick."""
        for op in self._plan.ops_at.get(tick, ()):
            if op.kind is Kind.EVICT:
                self._drop_lease(op.unit)
            elif op.unit not in self._leases:
                self._leases[op.unit] = self._fetch(op)
                self._note(self._plan.lease_tier, self._leased_pages[op.unit])

    def _fetch(self, op: Op) -> Task:
        """From a unit's home to its lease; what is whole is what every rank's slice makes."""
        pending = self._updater_of[op.unit].published(op.unit)
        after = [pending] if pending else []
        name = f"fetch {self._plan.units[op.unit].name}"
        if op.nbytes:
            after = [self._load(op, name, after)]
        unit = self._plan.units[op.unit]
        ranks, group = self._plan.ranks, self._plan.layout.group(unit)
        if ranks is None or not ranks.shards_weights or group == 1:
            return after[0]
        sent = ring_bytes(self._plan.layout.lease_of(unit) * self._plan.page_bytes, group)
        return self._lanes.submit(
            COLLECTIVE, f"gather {unit.name}", sent, self._rates.gather_seconds(sent, group), after
        )

    def _load(self, op: Op, name: str, after: list[Task]) -> Task:
        home = self._plan.placement.home(op.unit, WEIGHT)
        separate = self._plan.lease_tier == DEVICE
        if home != SSD or not separate:
            lane = "h2d" if separate else "ssd_read"
            return self._lanes.submit(lane, name, op.nbytes, self._rates.seconds(lane, op.nbytes), after)
        task = None
        cuts = [op.nbytes * index // _FETCH_CHUNKS for index in range(_FETCH_CHUNKS + 1)]
        for begin, end in pairwise(cuts):
            part = end - begin
            read = self._lanes.submit("ssd_read", name, part, self._rates.seconds("ssd_read", part), after)
            task = self._lanes.submit("h2d", name, part, self._rates.seconds("h2d", part), [read])
        assert task is not None
        return task

    def _exchange(self, op: Op) -> Task:
        ranks = self._plan.ranks
        assert ranks is not None
        name = f"tokens {self._plan.units[op.unit].name}"
        seconds = self._rates.exchange_seconds(op.nbytes, ranks.expert_parallel)
        return self._lanes.submit(COLLECTIVE, name, op.nbytes, seconds)

    def _reduce(self, unit: UnitSpec) -> list[Task]:
        """Add up every rank's gradient of a unit."""
        ranks, group = self._plan.ranks, self._plan.layout.group(unit)
        if ranks is None or group == 1:
            return []
        sent = ring_bytes(unit.trainable_numel * self._plan.layout.itemsize(GRAD), group)
        passes = 1 if ranks.shards_gradients else 2
        seconds = passes * self._rates.ring_seconds(sent, group)
        return [self._lanes.submit(COLLECTIVE, f"reduce {unit.name}", passes * sent, seconds)]

    def _offload(self, unit: int, final: bool) -> None:
        """A gradient has been computed: send it to its extent and onwards, unless that is where it was computed."""
        plan = self._plan
        if unit not in plan.placement.resident:
            self._send_gradient(unit)
        if final and (plan.options.update_under_backward or unit in plan.placement.speculated):
            self._queue_update(unit)
            self._updater_of[unit].pump()

    def _send_gradient(self, unit: int) -> None:
        plan = self._plan
        spec = plan.units[unit]
        nbytes = plan.layout.elements(spec, GRAD) * plan.layout.offloaded_itemsize
        for blocker in self._gradients.make_room(unit):
            self._wait(blocker)
        seconds = self._rates.seconds("d2h", nbytes)
        # Handing gradients over is part of what a parameter costs.
        task = self._lanes.submit("d2h", f"offload {spec.name}", nbytes, seconds, self._reduce(spec), pieces=0)
        self._offloads.append((task, spec.trainable_numel * plan.layout.offloaded_itemsize))
        self._last_offload[unit] = task
        while self._offloads and (
            self._offloads[0][0].done or sum(n for _, n in self._offloads) > self._in_flight_bytes
        ):
            self._wait(self._offloads.popleft()[0])
        if plan.placement.home(unit, GRAD) == SSD and not plan.options.update_under_backward:
            whole = plan.layout.pages(spec, GRAD) * plan.page_bytes
            seconds = self._rates.seconds("ssd_write", whole)
            spill = self._lanes.submit("ssd_write", f"spill {spec.name}", whole, seconds, [task])
            self._gradients.spilled(unit, spill)

    def _queue_update(self, unit: int) -> None:
        self._drop_lease(unit)
        settled = [self._last_offload[unit]] if unit in self._last_offload else []
        published = self._updater_of[unit].queue(unit, settled, reload=not self._gradients.holds(unit))
        if unit in self._plan.placement.speculated:
            self._speculated[unit] = published
        else:
            self._gradients.updated(unit, published)

    def _wait(self, task: Task | None) -> None:
        if task is None or task.done:
            return
        start = self._lanes.now
        self._lanes.run_until(task)
        self._stall_s[task.lane] += self._lanes.now - start

    def _drop_lease(self, unit: int) -> None:
        if self._leases.pop(unit, None) is not None:
            self._note(self._plan.lease_tier, -self._leased_pages[unit])

    def _note(self, tier: str | None, pages: int) -> None:
        assert tier is not None
        self._moves.append((self._lanes.now, tier, pages))

    def _ledger(self, start: float, end: float) -> dict[str, tuple[tuple[float, int], ...]]:
        """Every tier's account over a step. Leases and staging come and go, other lines are there for good."""
        ledger: dict[str, tuple[tuple[float, int], ...]] = {}
        for tier, lines in self._plan.bytes.items():
            in_use = sum(nbytes for line, nbytes in lines.items() if line not in (LEASES, STAGING))
            account = [(0.0, in_use)]
            for seconds, where, pages in self._moves:
                if where == tier and seconds <= end:
                    in_use += pages * self._plan.page_bytes
                    if seconds > start:
                        account.append((seconds - start, in_use))
                    else:
                        account[0] = (0.0, in_use)
            ledger[tier] = tuple(account)
        return ledger


def _final_backward(plan: Plan) -> dict[int, int]:
    """trainable unit -> tick of its last backward."""
    return {
        access.unit: tick
        for tick, access in enumerate(plan.trace.accesses)
        if access.phase is Phase.BACKWARD and plan.units[access.unit].trainable_numel
    }
