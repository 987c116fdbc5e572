"""The simulator: the scheduler drives a plan's steps on a model of hardware, as discrete events.

A simulated compute thread follows the plan's trace and tells the scheduler what it does. Simulated lanes carry out what
the scheduler asks for (`execution.py`). So this is a run with other durations. In it, nothing is clipped, called off or
saved, and no graph holds a lease that must make room. Between two events, every lane works at a constant rate: its own,
or its share of a common resource (the SSD's two directions, the link's, RAM, and the CPU if it computes).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from pagoda.plan.activations import OFFLOAD_LANES
from pagoda.plan.exchanges import ROWS, Exchange
from pagoda.plan.lanes import LANES, LaneName
from pagoda.plan.planner import Plan
from pagoda.plan.trace import Access, Gradient, Phase, gradients_of
from pagoda.plan.traffic import activations_at, exchanges_at
from pagoda.plan.units import enclosing
from pagoda.process import without_garbage_collection
from pagoda.schedule.activations import Activation, GraphActivations
from pagoda.schedule.operations import schedule_plan
from pagoda.schedule.records import Lease
from pagoda.schedule.scheduler import Scheduler
from pagoda.schedule.served import Served
from pagoda.schedule.waits import InFlight, charged
from pagoda.simulate.clock import SimulatedLanes, Task, Work
from pagoda.simulate.execution import Execution
from pagoda.simulate.hardware import Hardware
from pagoda.simulate.passes import FEW, Mark, first_passes, pass_begins, with_more_passes
from pagoda.simulate.rates import Rates, WorkOf, adamw_work
from pagoda.simulate.timeline import Timeline

_LEAST_STEPS, _MOST_STEPS = 3, 8
"""Number of simulated steps. The simulation stops when a step's last micro-batch takes as long as that of the previous
step. The last step is the result. It starts while the previous step's updates are under way."""
_MOST_ACCESSES = 6000
"""After this many accesses, no further step is simulated. Steps of thousands of leases vary by about 0.5%."""
_STEADY = 1e-4
"""Relative difference below which two steps count as equally long."""
_LATE_STEPS = 4
"""With asynchronous updates: number of measured steps, after half as many to warm up."""
_BACK = dict(OFFLOAD_LANES.values())
"""The lane on which activations leave -> the lane on which they come back."""
_IN_BACKWARD = 0.75
"""Share of a parameter's bookkeeping that happens in backward, where its lease is asked for again and its gradient
arrives."""


def simulate(plan: Plan, hardware: Hardware, tick_s: Sequence[float], work: WorkOf = adamw_work) -> Timeline:
    """One step of `plan` in steady state, on one rank of `hardware`.

    `tick_s` has the seconds of compute of each access of the plan's trace if nothing disturbs it; see `Compute`. `work`
    is that of the optimizer's updates. If many micro-batches are alike, only a few are simulated, provided those in the
    middle take equally long. With asynchronous updates, steps may differ permanently. Then seconds and stalls are means
    over several, and the timeline is that of the step closest to the mean.

    Raises ValueError unless `tick_s` has one number per access.
    """
    if len(tick_s) != len(plan.trace.accesses) - 1:
        raise ValueError(f"{len(tick_s)} times of compute for a trace of {len(plan.trace.accesses) - 1} accesses")
    rates, count = Rates(hardware, plan.ranks, plan.transfer_bytes, work), len(pass_begins(plan.trace))
    few = FEW
    with without_garbage_collection():
        while not plan.options.asynchronous and (trace := first_passes(plan.trace, tick_s, few)) is not None:
            simulation = Simulation(plan.retraced(trace), rates, tick_s[: len(trace.accesses) - 1])
            timeline = with_more_passes(simulation.run(), simulation.marks, count - few)
            if timeline is not None:
                return timeline
            few *= 2
        return Simulation(plan, rates, tick_s).run()


@dataclass(frozen=True)
class _Step:
    """When a step began and ended, how long compute waited, and what lanes ended in it."""

    start_s: float
    end_s: float
    stall_s: Mapping[str, float]
    tasks: Sequence[Task]
    accesses: Sequence[Served]
    last_pass_s: float
    """Seconds from the beginning of its last micro-batch."""

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


class Simulation:
    """A run. In every step, compute follows the trace, and lanes do the rest.

    Work that a step queues may end in the next step. Steps may differ permanently and alternate.
    """

    def __init__(self, plan: Plan, rates: Rates, tick_s: Sequence[float]) -> None:
        """`tick_s` is as in `simulate`, with one more number for `step()`."""
        self._plan = plan
        self._rates = rates
        self._lanes = SimulatedLanes(rates)
        accesses = plan.trace.accesses[:-1]
        self._compute_at = [self._computing(access, tick_s[tick]) for tick, access in enumerate(accesses)]
        self._compute_in_step = [Work(LaneName.COMPUTE, "step", 0, seconds) for seconds in tick_s[len(accesses) :]]
        among_ranks = plan.ranks.count > 1 or any(exchange.kind != ROWS for exchange in plan.exchanges)
        self._stalling: tuple[str, ...] = (*LANES, LaneName.COLLECTIVE) if among_ranks else LANES
        self._stall_s = dict.fromkeys(self._stalling, 0.0)
        scheduled = schedule_plan(plan)
        # All simulated steps use the same experts, so the trace shows when each is used.
        units = [replace(unit, routed=False) if unit.routed else unit for unit in scheduled.units]
        self._scheduler = Scheduler(replace(scheduled, units=units))
        self._execution = Execution(plan, self._scheduler, self._lanes, rates)
        self._activations = SimulatedActivations(plan, self._lanes, self._wait_for)
        self._exchanges = exchanges_at(plan)
        self._gradients: dict[int, list[Gradient]] = {}
        for gradient in gradients_of(plan.trace, frozenset(u.index for u in plan.units if u.trainable_numel)):
            self._gradients.setdefault(gradient.tick, []).append(gradient)
        self._in_flight_bytes = plan.gradients_in_flight_bytes
        self._around = enclosing(plan.units)
        self._begins = frozenset(pass_begins(plan.trace))
        self.marks: list[Mark] = []
        """Where the micro-batches of the last step begin."""
        self._accesses: list[Served] = []
        """The accesses of this step."""
        self._used: list[int] = []
        """Units that compute uses now."""

    def run(self) -> Timeline:
        """Simulate steps until two are equally long, and return the last. If steps differ permanently, return a mean of
        several."""
        steps = self._several() if self._plan.options.asynchronous else self._until_steady()
        step_s = fmean(step.seconds for step in steps)
        stall_s = {lane: fmean(step.stall_s[lane] for step in steps) for lane in self._stalling}
        shown = min(steps, key=lambda step: abs(step.seconds - step_s))
        start, end = shown.start_s, shown.end_s
        spans = tuple(task.span(since=start) for task in shown.tasks if task.end > start)
        accesses = tuple(served._replace(at_s=served.at_s - start) for served in shown.accesses)
        return Timeline(step_s, spans, stall_s, self._held_bytes(start, end), accesses)

    def _until_steady(self) -> list[_Step]:
        """Simulate until steps are steady. Returns the last step."""
        step = self._timed_step()
        least = 2 if len(self.marks) > 1 else _LEAST_STEPS  # the first waits for no updates, which later passes do not
        for count in range(1, _MOST_STEPS):
            before, step = step, self._timed_step()
            steady = abs(step.last_pass_s - before.last_pass_s) <= _STEADY * before.last_pass_s
            if count + 1 >= least and (steady or (count + 1) * len(self._compute_at) > _MOST_ACCESSES):
                break
        return [step]

    def _several(self) -> list[_Step]:
        for _ in range(_LATE_STEPS // 2):
            self.step()
        return [self._timed_step() for _ in range(_LATE_STEPS)]

    def _timed_step(self) -> _Step:
        start, self._stall_s = self._lanes.now, dict.fromkeys(self._stalling, 0.0)
        self._lanes.ended, self.marks, self._accesses = [], [], []
        self.step()
        last_pass_s = self._lanes.now - self.marks[-1].start_s
        self.marks = [replace(mark, start_s=mark.start_s - start) for mark in self.marks]
        return _Step(start, self._lanes.now, self._stall_s, self._lanes.ended, self._accesses, last_pass_s)

    def step(self) -> None:
        """Simulate one more step, until compute has finished it."""
        for tick, access in enumerate(self._plan.trace.accesses[:-1]):
            if tick in self._begins:
                self.marks.append(Mark(self._lanes.now, dict(self._stall_s)))
            self._use(access)
            for exchange in self._exchanges.get(tick, ()):
                self._wait_for(self._exchange(access, exchange))
            for part in self._activations.during(tick, self._compute_at[tick]):
                self._compute(part)
            for gradient in self._gradients.get(tick, ()):
                self._make(gradient)
        for work in self._compute_in_step:
            self._compute(work)
        self._release()
        self._let_offloads_end(most=0)
        self._lanes.python_waits()
        self._scheduler.end_step()
        self._execution.pump()

    def _use(self, access: Access) -> None:
        """Compute turns to a unit and waits for its weights."""
        unit, scheduler, execution = access.unit, self._scheduler, self._execution
        self._release(keep=self._around[unit])
        self._used.append(unit)
        found, start = scheduler.finds(unit, _has_arrived), self._lanes.now
        scheduler.access(access, recorded=False)
        execution.pump()
        self._wait(lambda: scheduler.ready(unit))
        self._accesses.append(Served(self._plan.source(unit), found, self._lanes.now - start, start))

    def _compute(self, work: Work) -> None:
        computed = self._lanes.submit(work)
        while not computed.done:
            self._lanes.advance()

    def _release(self, keep: frozenset[int] = frozenset()) -> None:
        """Compute has finished the units that it uses, except those in `keep`, which contain the next one."""
        for unit in self._used:
            if unit not in keep:
                self._scheduler.release(unit)
        self._used = [unit for unit in self._used if unit in keep]
        self._execution.pump()

    def _computing(self, access: Access, seconds: float) -> Work:
        """The compute of an access, and the runtime's own work on its thread, most of it when gradients arrive."""
        unit, backward = self._plan.units[access.unit], access.phase is Phase.BACKWARD
        share = _IN_BACKWARD if backward else 1 - _IN_BACKWARD
        bookkeeping = share * sum(slot.param.trainable for slot in unit.slots) * self._rates.parameter_s
        name = f"{'backward' if backward else 'forward'} {unit.name}"
        return Work(LaneName.COMPUTE, name, 0, seconds, python_s=bookkeeping)

    def _make(self, gradient: Gradient) -> None:
        """Autograd has made a gradient. Compute continues once it has a buffer and not too many bytes are on their
        way."""
        scheduler, execution = self._scheduler, self._execution
        scheduler.gradient(gradient.unit, complete=True, last=gradient.last)
        execution.pump()
        self._wait(lambda: not scheduler.buffer_awaited)
        self._let_offloads_end(self._in_flight_bytes)

    def _let_offloads_end(self, most: int) -> None:
        """Wait until at most `most` bytes of gradients are on their way."""
        for task in self._execution.offloads.above(most):
            if not task.done:
                self._wait_for(task)
                self._lanes.python_waits()

    def _exchange(self, access: Access, exchange: Exchange) -> Task:
        name = f"{exchange.kind} {self._plan.units[access.unit].name}"
        if exchange.kind == ROWS:
            lane = LaneName.D2H if access.phase is Phase.BACKWARD else LaneName.H2D
            return self._lanes.submit(self._lanes.move(lane, name, exchange.sent))
        seconds = self._rates.exchange_seconds(exchange)
        return self._lanes.submit(Work(LaneName.COLLECTIVE, name, exchange.sent, seconds))

    def _wait_for(self, task: Task) -> None:
        self._wait(lambda: task.done)

    def _wait(self, over: Callable[[], bool]) -> None:
        """Compute waits until a condition holds. The time is charged to the lanes that took it."""
        lanes, start = self._lanes, self._lanes.now
        while not over():
            lanes.advance()
        if lanes.now > start:
            for lane, seconds in charged(lanes.ended_work(), start, lanes.now, lanes.ended[-1].work.lane):
                self._stall_s[lane] += seconds

    def _held_bytes(self, start: float, end: float) -> dict[str, tuple[tuple[float, int], ...]]:
        """Bytes of every tier over a step."""
        fixed, of_frame, of_page = (self._plan.bytes_in_use(*one) for one in ((0, 0), (1, 0), (0, 1)))
        held_bytes: dict[str, tuple[tuple[float, int], ...]] = {}
        for tier in self._plan.bytes:
            account: list[tuple[float, int]] = []
            frame, page = of_frame[tier] - fixed[tier], of_page[tier] - fixed[tier]
            for seconds, (frames, pages) in self._execution.in_use:
                in_use = fixed[tier] + frames * frame + pages * page
                if seconds <= start:
                    account = [(0.0, in_use)]
                elif seconds <= end and in_use != account[-1][1]:
                    account.append((seconds - start, in_use))
            held_bytes[tier] = tuple(account)
        return held_bytes


def _has_arrived(lease: Lease) -> bool:
    """Whether the weights of a lease are in compute's memory."""
    return lease.filled


class SimulatedActivations:
    """The activations that a plan offloads. During an access, compute saves or uses them one after another."""

    def __init__(self, plan: Plan, lanes: SimulatedLanes, wait_for: Callable[[Task], None]) -> None:
        """`wait_for` makes compute wait for a task."""
        self._at = activations_at(plan)
        self._in_backward = [access.phase is Phase.BACKWARD for access in plan.trace.accesses]
        self._lanes = lanes
        self._wait_for = wait_for
        self._leaving = InFlight[Task]()
        self._tasks: dict[Activation, Task] = {}
        """What moves each activation, out or back."""
        self._saved: list[Activation] = []
        """The activations that backward has not used."""
        self._graph = self._new_graph()

    def during(self, tick: int, work: Work) -> Iterator[Work]:
        """The compute of an access, in as many parts as it saves or uses activations."""
        moves, backward = self._at.get(tick, ()), self._in_backward[tick]
        if backward:
            self._graph.begin_backward()
        parts = len(moves) or 1
        part = replace(work, seconds=work.seconds / parts, python_s=work.python_s / parts) if parts > 1 else work
        for lane, nbytes in moves:
            if backward:
                self._use(self._saved.pop())
            yield part
            if not backward:
                self._save(Activation(nbytes, payload=lane))
        if not moves:
            yield work

    def _new_graph(self) -> GraphActivations[Task]:
        return GraphActivations(self._leaving, self._offload, self._bring_back)

    def _save(self, activation: Activation) -> None:
        if not self._saved:
            self._graph = self._new_graph()
        self._saved.append(activation)
        self._graph.save(activation)
        self._graph.leave(activation)
        for task in self._leaving.above(self._graph.window):
            self._wait_for(task)

    def _use(self, activation: Activation) -> None:
        self._graph.use(activation)
        if (task := self._tasks.pop(activation, None)) is not None:
            self._wait_for(task)

    def _offload(self, activation: Activation) -> Task:
        return self._move(activation, activation.payload, "save activation")

    def _bring_back(self, activation: Activation) -> None:
        if self._tasks.pop(activation).done:
            self._move(activation, _BACK[activation.payload], "return activation")

    def _move(self, activation: Activation, lane: str, name: str) -> Task:
        task = self._tasks[activation] = self._lanes.submit(self._lanes.move(lane, name, activation.nbytes))
        return task
