"""Random worlds: a make-believe machine that does what the scheduler says, and notices every wrong bit.

Memory holds stamps in place of numbers: the home of a unit's weights holds their version, a frame holds which unit and
version was copied there, a gradient buffer holds which backward passes have been added up. Lanes end their operations
at random moments. So whatever the scheduler overlooks shows as a wrong stamp, whatever its own books say: an evicted
unit in use, a gradient applied twice, a read one version late, a missing wait.

    python -m tests.schedule.worlds 1000          # worlds with seeds 0 to 999
    python -m tests.schedule.worlds 1 4711        # that one, with its events and operations printed
"""

import random
import sys
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from pagoda.plan.trace import STEP, Access, Phase, Trace
from pagoda.schedule.operations import Kind, Operation, SchedulePlan, UnitPlan
from pagoda.schedule.scheduler import Scheduler

LANES = {
    Kind.FETCH: "h2d",
    Kind.RECLAIM: "executor",
    Kind.OFFLOAD: "d2h",
    Kind.SPILL: "ssd_write",
    Kind.RELOAD: "ssd_read",
    Kind.UPDATE: "update",
    Kind.PUBLISH: "executor",
    Kind.UNDO: "update",
    Kind.SAVE: "saver",
}
_LONG = 2000
"""Operations after which compute must have what it waits for."""
TORN = -1
"""The stamp of what is being written."""


class ViolationError(AssertionError):
    """The scheduler has allowed something that must never be."""


def require(holds: bool, message: str) -> None:
    if not holds:
        raise ViolationError(message)


@dataclass
class Home:
    """What a unit's home holds."""

    weights: int = 0
    """Version of the weights that are read."""
    newest: int = 0
    """Version of the newest weights, which asynchronous updates write beside them."""
    states: int = 0
    """Version of the other states."""
    kept: int | None = None
    """Version of the states that the reserve keeps for a checkpoint."""
    undo: int | None = None
    """Version of the states that the reserve keeps for an undo."""
    undo_step: int = -1
    """The step of the update that may have to be undone."""
    readers: int = 0
    """Operations that read the weights now, and compute that does."""
    state_readers: int = 0


@dataclass
class Truth:
    """What the algorithm says of a unit, whatever the scheduler believes."""

    asked: int = 0
    """Steps that have asked for an update."""
    applied: list[int] = field(default_factory=list)
    """Steps whose gradients the newest weights contain."""
    passes: dict[int, Counter[int]] = field(default_factory=dict)
    """step -> the passes whose gradients autograd has made."""
    read: int | None = None
    """Version that this step has read."""
    holds: int = 0
    """References of graphs, and of compute, to weights in their home."""
    rules: dict[int, str] = field(default_factory=dict)
    """step -> the clipping and hyperparameters that `step()` has asked for."""
    used_rules: dict[int, str] = field(default_factory=dict)
    """step -> those that its update was made with."""
    consumed: set[int] = field(default_factory=set)
    """Steps whose gradient an update has read for the last time."""


@dataclass(frozen=True)
class Rules:
    """What a world is like. Drawn at random."""

    plan: SchedulePlan
    order: tuple[int, ...]
    accumulation: int
    holds: bool
    """Whether graphs refer to weights from forward to backward."""
    unread: frozenset[int]
    """Units of whose weights backward reads nothing, as of an embedding's: their gradients come without an access."""
    departures: float
    failures: float

    @staticmethod
    def draw(rng: random.Random) -> "Rules":
        count = rng.randint(1, 7)
        framed, staged = rng.random() < 0.7, rng.random() < 0.6
        mode = rng.choice(["clipped", "clipped", "under backward", "asynchronous"])
        speculates = mode == "clipped" and rng.random() < 0.5
        units = [
            UnitPlan(
                lease_frames=rng.randint(1, 3) if framed else 0,
                buffer_pages=rng.randint(1, 3) if staged and mode != "asynchronous" else 0,
                old_state_pages=rng.choice([0, 1, 2]),
                trained=rng.random() < 0.85,
                speculated=speculates and rng.random() < 0.8,
            )
            for _ in range(count)
        ]
        order = tuple(rng.sample(range(count), count))
        accumulation = rng.choice([1, 1, 2])
        uses = [Access(u, Phase.FORWARD) for u in order] + [Access(u, Phase.BACKWARD) for u in reversed(order)]
        holds = rng.random() < 0.4
        widest = max(unit.lease_frames for unit in units)
        most = sum(unit.lease_frames for unit in units)
        plan = SchedulePlan(
            units,
            Trace((*uses * accumulation, STEP)),
            frame_pool=4 * most + 3 * widest if holds else rng.randint(3 * widest, 3 * widest + most),
            buffer_pool=2 * max(unit.buffer_pages for unit in units) + rng.randint(0, 4),
            reserve_pages=rng.randint(0, 6),
            under_backward=mode == "under backward",
            max_staleness=rng.randint(0, 2) if mode == "asynchronous" else None,
        )
        unread = frozenset(u for u in order if rng.random() < 0.2)
        return Rules(
            plan, order, accumulation, holds, unread, rng.choice([0.0, 0.1, 0.3]), rng.choice([0.0, 0.0, 0.02])
        )


class World:
    """One run: compute, lanes and a checkpoint now and then."""

    def __init__(self, seed: int, make: Callable[[SchedulePlan], Any] = Scheduler, log: bool = False) -> None:
        self.rng = random.Random(seed)
        self.rules = Rules.draw(self.rng)
        self.plan = self.rules.plan
        self.scheduler = make(self.plan)
        self.log: list[str] | None = [] if log else None
        units = range(len(self.plan.units))
        self.homes = [Home() for _ in units]
        self.truths = [Truth() for _ in units]
        self.frames: list[Any] = [None] * self.plan.frame_pool
        """(unit, version) of what each frame holds; TORN while it is being filled."""
        self.pages: list[Any] = [None] * self.plan.buffer_pool
        """(unit, step) of the gradient that each page holds."""
        self.gradients: dict[tuple[int, int], Counter[int]] = {}
        """(unit, step) -> the passes that its buffer holds."""
        self.on_ssd: dict[tuple[int, int], Counter[int]] = {}
        self.queued: dict[tuple[int, int], deque[int]] = {}
        """(unit, step) -> the passes that autograd has made and that wait for OFFLOAD."""
        self.lanes: dict[str, list[Operation]] = {}
        self.stages: dict[Operation, int] = {}
        """How far an UPDATE is."""
        self.begun_with: dict[tuple[Operation, int], Counter[int]] = {}
        """(UPDATE, step) -> the gradient that it found."""
        self.readings: dict[Operation, tuple[int, int]] = {}
        self.held: dict[Operation, None] = {}
        """Reclaims that were answered: still held."""
        self.leases: dict[int, Operation] = {}
        """first frame -> the FETCH that has filled it."""
        self.references: dict[Operation, int] = {}
        """FETCH -> references of graphs to what it brought."""
        self.steps = self.made = 0
        self.checkpoint: dict[int, int] | None = None
        """unit -> version that the checkpoint must have."""
        self.saved: dict[int, int] = {}
        self.lost = False
        """Whether a gradient of this step did not arrive."""
        self.held_over: list[Callable[[], None]] = []
        """References of graphs that outlive their step."""

    # --- executing operations ---

    def note(self, *words: object) -> None:
        if self.log is not None:
            self.log.append(" ".join(map(str, words)))

    def collect(self) -> None:
        """Give new operations to their lanes, where they begin at once."""
        for op in self.scheduler.take():
            self.note("  operation", op.kind, op.unit, op.run or "", op.version, op.steps, "keeps" * op.keeps_old)
            self.lanes.setdefault(LANES[op.kind], []).append(op)
            self.begin(op)
        self.check_ledger()

    def begin(self, op: Operation) -> None:
        home, truth = self.homes[op.unit], self.truths[op.unit]
        if op.kind is Kind.FETCH:
            require(home.weights == op.version, f"FETCH of version {op.version}, but the home has {home.weights}")
            for frame in self.span(op):
                require(self.frames[frame] is None, f"frame {frame} of unit {op.unit} is taken: {self.frames[frame]}")
                self.frames[frame] = TORN
            home.readers += 1
        elif op.kind is Kind.UPDATE:
            self.begin_update(op, home, truth)
        elif op.kind is Kind.SAVE:
            home.state_readers += not op.keeps_old
            self.readings[op] = (self.kept_or_now(op, home), 0)
        elif op.kind is Kind.UNDO:
            require(home.undo is not None and not home.readers, "UNDO of weights that somebody reads")
            home.weights = home.newest = home.states = TORN
        elif op.kind is Kind.SPILL:
            require(
                self.lost or self.needed(op.unit, op.steps[0]),
                f"SPILL of {op.steps} of unit {op.unit}, which nobody needs",
            )
        elif op.kind in (Kind.OFFLOAD, Kind.RELOAD) and op.run is not None:
            key = op.unit, op.steps[0]
            self.pages = [None if stamp == key else stamp for stamp in self.pages]  # it may have had another buffer
            for page in self.span(op):
                self.take_page(page, key)

    def needed(self, unit: int, step: int) -> bool:
        """Whether an update may still read a gradient."""
        if self.lost and step == self.steps:
            return False  # the step will be dropped
        decided = step < self.steps or self.plan.under_backward
        return step in self.truths[unit].passes and not (step in self.truths[unit].consumed and decided)

    def take_page(self, page: int, key: tuple[int, int]) -> None:
        """A gradient takes a page. The one that was there must be on SSD, or not needed any more."""
        before = self.pages[page]
        if before is not None and before != key:
            require(before in self.on_ssd or not self.needed(*before), f"{before} is lost: {key} takes its page")
            self.gradients.pop(before, None)
        self.pages[page] = key

    def begin_update(self, op: Operation, home: Home, truth: Truth) -> None:
        require(home.states == home.newest == op.version - len(op.steps), f"UPDATE on {home} to {op.version}")
        require(op.keeps_old or not home.state_readers, "UPDATE of states that a checkpoint reads")
        if self.plan.max_staleness is None:
            require(not home.readers, f"UPDATE of unit {op.unit}, which somebody reads")
            home.weights = TORN
        if op.keeps_old:
            old = home.states
            if self.wants_to_save(op.unit) == old and op.unit not in self.saved:
                home.kept = old
            else:
                home.undo, home.undo_step = old, self.steps
        for step in op.steps:
            self.check_gradient(op.unit, step)
            truth.used_rules[step] = truth.rules.get(step, "as guessed")
            self.begun_with[op, step] = Counter(self.gradients.get((op.unit, step)))
        early = self.plan.under_backward or self.plan.units[op.unit].speculated
        require(truth.asked >= op.version or early, "an update that nobody has asked for")
        home.newest = home.states = TORN
        self.stages[op] = 0

    def check_gradient(self, unit: int, step: int) -> None:
        key = unit, step
        if step in self.truths[unit].passes:  # else the step was dropped, and the update will be undone
            require(self.gradients.get(key) == self.truths[unit].passes[step], f"{key} is {self.gradients.get(key)}")

    def advance(self) -> bool:
        """Let one operation come a stage further; False if none is under way."""
        self.collect()
        busy = [lane for lane in self.lanes.values() if lane]
        if not busy:
            return self.let_go_of_something()
        lane = self.rng.choice(busy)
        op = lane[0] if len(lane) == 1 or self.rng.random() < 0.7 else lane[1]
        if op.kind is Kind.UPDATE and self.stages[op] < 2:
            self.stages[op] += 1
            if self.stages[op] == 1:
                for step in op.steps:
                    found = self.gradients.get((op.unit, step))
                    dropped = step not in self.truths[op.unit].passes
                    require(
                        dropped or found == self.begun_with[op, step],
                        f"the gradient {step} of unit {op.unit} changed in use",
                    )
                self.truths[op.unit].consumed.update(op.steps)
                self.scheduler.gradient_used(op)
            else:
                self.publish(op)
                self.scheduler.weights_written(op)
            self.collect()
            return True
        lane.remove(op)
        may_fail = (Kind.SPILL, Kind.FETCH, Kind.SAVE, *([] if self.plan.under_backward else [Kind.OFFLOAD]))
        if op.kind in may_fail and self.rng.random() < self.rules.failures:
            self.fail(op)
        else:
            self.end(op)
        self.collect()
        return True

    def publish(self, op: Operation) -> None:
        home, truth = self.homes[op.unit], self.truths[op.unit]
        home.newest = op.version
        if self.plan.max_staleness is None:
            home.weights = op.version
        truth.applied += op.steps

    def end(self, op: Operation) -> None:
        self.note("  ended", op.kind, op.unit)
        home = self.homes[op.unit]
        if op.kind is Kind.RECLAIM:
            self.answer(op)
            return
        if op.kind is Kind.FETCH:
            require(home.weights == op.version, f"unit {op.unit} was changed to {home.weights} while it was fetched")
            home.readers -= 1
            for frame in self.span(op):
                self.frames[frame] = (op.unit, op.version)
            assert op.run is not None
            self.leases[op.run.start] = op
            self.references[op] = 0
        elif op.kind is Kind.OFFLOAD:
            key = op.unit, op.steps[0]
            self.gradients.setdefault(key, Counter())[self.queued[key].popleft()] += 1
            if key in self.on_ssd:
                del self.on_ssd[key]
        elif op.kind is Kind.SPILL:
            key = op.unit, op.steps[0]
            require({self.pages[page] for page in self.span(op)} == {key}, f"SPILL of {key} from another's pages")
            if key in self.gradients:  # else it was dropped
                self.on_ssd[key] = Counter(self.gradients[key])
        elif op.kind is Kind.RELOAD:
            key = op.unit, op.steps[0]
            require({self.pages[page] for page in self.span(op)} == {key}, f"RELOAD of {key} to another's pages")
            if self.needed(*key):  # else it was dropped, or will be
                require(key in self.on_ssd, f"RELOAD of {key}, of which SSD has no or old values")
                self.gradients[key] = Counter(self.on_ssd[key])
        elif op.kind is Kind.UPDATE:
            home.states = op.version
            del self.stages[op]
        elif op.kind is Kind.UNDO:
            assert home.undo is not None
            truth = self.truths[op.unit]
            truth.consumed -= {*truth.applied[home.undo :]}
            del truth.applied[home.undo :]
            home.weights = home.newest = home.states = home.undo
            home.undo, home.undo_step = None, -1
        elif op.kind is Kind.PUBLISH:
            require(not home.readers, f"PUBLISH of unit {op.unit}, which somebody reads")
            home.weights = home.newest
        elif op.kind is Kind.SAVE:
            version, _ = self.readings.pop(op)
            require(self.kept_or_now(op, home) == version, f"unit {op.unit} changed while it was saved")
            home.state_readers -= not op.keeps_old
            self.saved[op.unit] = version
            home.kept = None
        self.scheduler.ended(op)

    def fail(self, op: Operation) -> None:
        self.note("  failed", op.kind, op.unit)
        home = self.homes[op.unit]
        if op.kind is Kind.FETCH:
            home.readers -= 1
            assert op.run is not None
            self.leases[op.run.start] = op
            self.references[op] = 0
        elif op.kind is Kind.OFFLOAD:
            self.queued[op.unit, op.steps[0]].popleft()
            self.lost = self.lost or op.steps[0] == self.steps
        elif op.kind is Kind.SAVE:
            del self.readings[op]
            home.state_readers -= not op.keeps_old
            home.kept = None
            assert self.checkpoint is not None
            self.saved[op.unit] = self.checkpoint[op.unit]  # the checkpoint has failed, which concerns nobody else
        self.scheduler.failed(op)

    def answer(self, op: Operation) -> None:
        """RECLAIM: does anything refer to the frames of a lease, or to weights in their home?"""
        free = not self.referred_to(op)
        if free and op.run is not None:
            self.free_frames(op)
        elif not free:
            self.held[op] = None
        self.note("  reclaimed", op.unit, free)
        self.scheduler.reclaimed(op, free)

    def referred_to(self, op: Operation) -> bool:
        if op.run is None:
            return self.truths[op.unit].holds > 0
        return self.references[self.leases[op.run.start]] > 0

    def free_frames(self, op: Operation) -> None:
        assert op.run is not None
        del self.references[self.leases.pop(op.run.start)]
        for frame in self.span(op):
            require(self.frames[frame] is not None, f"frame {frame} is freed twice")
            self.frames[frame] = None

    def let_go_of_something(self) -> bool:
        free = [op for op in self.held if not self.referred_to(op)]
        if not free:
            return False
        op = self.rng.choice(free)
        del self.held[op]
        if op.run is not None:
            self.free_frames(op)
        self.note("  let go", op.unit)
        self.scheduler.let_go(op)
        self.collect()
        return True

    def check_ledger(self) -> None:
        """The reserve, and what each page holds, by the world's own account."""
        taken = sum(
            self.plan.units[unit].old_state_pages * ((home.kept is not None) + (home.undo_step == self.steps))
            for unit, home in enumerate(self.homes)
        )
        require(taken <= self.plan.reserve_pages, f"{taken} pages of the reserve are taken")

    def kept_or_now(self, op: Operation, home: Home) -> int:
        version = home.kept if op.keeps_old else home.states
        wanted = self.wants_to_save(op.unit)
        require(wanted is None or version == wanted, f"a checkpoint of version {wanted} reads {version} of {op.unit}")
        assert version is not None
        return version

    def wants_to_save(self, unit: int) -> int | None:
        return None if self.checkpoint is None else self.checkpoint[unit]

    def span(self, op: Operation) -> range:
        assert op.run is not None
        return range(op.run.start, op.run.stop)

    # --- compute ---

    def until(self, ready: Callable[[], bool], what: str) -> None:
        while self.rng.random() < 0.5 and (self.advance() or self.let_go_of_something()):
            pass
        self.collect()
        for _ in range(_LONG):
            if ready():
                return
            require(self.advance() or self.let_go_of_something(), f"compute waits for {what}, and nothing is under way")
        raise ViolationError(f"compute waits for {what} for ever")

    def use(self, access: Access) -> tuple[int, Operation | None]:
        """Access a unit, and check what compute finds there; returns the version, and the lease's FETCH."""
        unit = access.unit
        self.note("access", access)
        self.scheduler.access(access)
        self.until(lambda: self.scheduler.ready(unit), f"unit {unit}")
        home, truth = self.homes[unit], self.truths[unit]
        if not self.plan.units[unit].lease_frames:
            home.readers += 1
            truth.holds += 1
        version, fetch = home.weights, None
        if self.plan.units[unit].lease_frames:
            fetch = next((op for op in self.leases.values() if op.unit == unit and self.is_current(op)), None)
            require(fetch is not None, f"unit {unit} has no lease")
            assert fetch is not None
            contents = {self.frames[frame] for frame in self.span(fetch)}
            require(contents == {(unit, fetch.version)}, f"the lease of unit {unit} holds {contents}")
            version = fetch.version
            self.references[fetch] += 1
        if self.plan.max_staleness is None:
            require(version == truth.asked, f"unit {unit} is read at version {version}, not {truth.asked}")
        else:
            require(version >= truth.asked - self.plan.max_staleness, f"unit {unit} is read at {version}: too old")
            require(truth.read in (None, version), f"unit {unit} is read at {truth.read} and {version} in one step")
            truth.read = version
        return version, fetch

    def is_current(self, fetch: Operation) -> bool:
        lease = self.scheduler._leases.lease(fetch.unit)
        return lease is not None and lease.run == fetch.run

    def release(self, unit: int, found: tuple[int, Operation | None]) -> None:
        _, fetch = found
        home = self.homes[unit]
        self.check_intact(unit, found)
        if fetch is None:
            home.readers -= 1
            self.truths[unit].holds -= 1
        else:
            self.references[fetch] -= 1
        self.note("release", unit)
        self.scheduler.release(unit)
        self.collect()

    def check_intact(self, unit: int, found: tuple[int, Operation | None]) -> None:
        version, fetch = found
        if fetch is None:
            require(self.homes[unit].weights == version, f"unit {unit} was changed in use")
        else:
            contents = {self.frames[frame] for frame in self.span(fetch)}
            require(contents == {(unit, version)}, f"the lease of unit {unit} held {version} and now {contents}")

    def hold(self, unit: int, found: tuple[int, Operation | None]) -> Callable[[], None]:
        """A graph refers to weights until what this returns is called."""
        if found[1] is None:
            self.truths[unit].holds += 1
        else:
            self.references[found[1]] += 1

        step = self.steps

        def let_go() -> None:
            if found[1] is not None or step == self.steps:  # weights in their home change with the step
                self.check_intact(unit, found)
            if found[1] is None:
                self.truths[unit].holds -= 1
            else:
                self.references[found[1]] -= 1

        return let_go

    def a_pass(self, last: bool) -> bool:
        """Forward and backward, which may run twice; False if an exception interrupts it."""
        held: list[Callable[[], None]] = []
        used: set[int] = set()
        whole = self.walk(Phase.FORWARD, used, held, last) and self.walk(Phase.BACKWARD, used, held, last)
        if whole and not self.plan.under_backward and self.rng.random() < 0.1:
            whole = self.walk(Phase.BACKWARD, used, held, last)  # of a graph that was retained
        for let_go in held:
            if self.rng.random() < 0.2:
                self.held_over.append(let_go)
            else:
                let_go()
        return whole

    def walk(self, phase: Phase, used: set[int], held: list[Callable[[], None]], last: bool) -> bool:
        """Forward or backward; False if an exception interrupts it."""
        self.made += 1
        departures = self.rules.departures
        for unit in self.rules.order if phase is Phase.FORWARD else self.rules.order[::-1]:
            roll = self.rng.random()
            if (phase is Phase.FORWARD and roll < departures / 2) or (phase is Phase.BACKWARD and unit not in used):
                continue
            if roll > 1 - departures / 2 and not (self.plan.under_backward and phase is Phase.BACKWARD):
                self.evaluate(self.rng.randrange(len(self.plan.units)))
            trains = phase is Phase.BACKWARD and self.plan.units[unit].trained
            if trains and unit in self.rules.unread:
                self.gradient(unit, last)
                continue
            found = self.use(Access(unit, phase))
            used.add(unit)
            if phase is Phase.FORWARD and self.rules.holds and self.rng.random() < 0.5:
                held.append(self.hold(unit, found))
            if trains:
                self.gradient(unit, last)
            self.release(unit, found)
            if roll < departures / 20:
                return False
        if self.may_begin_checkpoint(0.1) and not self.plan.under_backward:
            self.begin_checkpoint()
        return True

    def evaluate(self, unit: int) -> None:
        if self.plan.under_backward and self.scheduler._gradients.get(unit) is not None:
            return
        found = self.use(Access(unit, Phase.FORWARD))
        self.release(unit, found)

    def gradient(self, unit: int, last: bool) -> None:
        key = unit, self.steps
        self.note("gradient", unit, "last" * last)
        parts = self.rng.choice([1, 1, 2])
        for part in range(parts):
            self.truths[unit].passes.setdefault(self.steps, Counter())[2 * self.made + part] += 1
            self.queued.setdefault(key, deque()).append(2 * self.made + part)
            self.scheduler.gradient(unit, complete=part == parts - 1, last=last)
            self.collect()
        self.until(lambda: not self.scheduler.gradients_held_back, f"a buffer for the gradient of {unit}")

    def may_begin_checkpoint(self, chance: float) -> bool:
        return self.checkpoint is None and self.scheduler.saved and self.rng.random() < chance

    def begin_checkpoint(self) -> None:
        if self.plan.max_staleness is not None:
            self.drain()
        self.scheduler.prepare_checkpoint()
        self.until(lambda: self.scheduler.prepared, "undone updates")
        self.checkpoint = {unit: truth.asked for unit, truth in enumerate(self.truths)}
        self.saved = {}
        self.note("checkpoint", self.checkpoint)
        self.scheduler.begin_checkpoint()
        self.collect()

    def drain(self) -> None:
        self.note("drain")
        self.scheduler.drain(True)
        self.until(lambda: self.scheduler.drained, "updates to end")
        self.scheduler.drain(False)

    def a_step(self) -> None:
        rng = self.rng
        passes = [False] * (self.rules.accumulation - 1) + [True]
        if not self.plan.under_backward and rng.random() < 0.1:
            passes.append(True)  # more than were announced
        whole = True
        for last in passes:
            whole = self.a_pass(last) and whole
        if not self.plan.under_backward and not self.lost and whole:
            self.scheduler.step_asked()
            self.until(lambda: self.scheduler.gradients_settled, "the norm")
        if (not whole or self.lost) and not self.plan.under_backward:
            self.note("drop gradients")
            self.scheduler.drop_gradients()
            self.until(lambda: self.scheduler.gradients_settled, "gradients to arrive")
            self.forget_step()
            self.steps += 1
            self.lost = False
            return
        if self.plan.under_backward:
            self.scheduler.step_asked()
            self.until(lambda: self.scheduler.gradients_settled, "the norm")
        decided_late = not self.plan.under_backward
        skipped, clipped = decided_late and rng.random() < 0.1, decided_late and rng.random() < 0.3
        with_gradient = [u for u, truth in enumerate(self.truths) if self.steps in truth.passes]
        changed = [u for u in with_gradient if decided_late and rng.random() < 0.1]
        self.note("step", self.steps, "skipped" * skipped, "clipped" * clipped, changed)
        if skipped:
            self.forget_step()
        for unit in with_gradient:
            self.truths[unit].asked += not skipped
            self.truths[unit].rules[self.steps] = "otherwise" if clipped or unit in changed else "as guessed"
        for truth in self.truths:
            truth.read = None
        self.steps += 1
        self.scheduler.scale_known(clipped, skipped, changed)
        self.collect()

    def forget_step(self) -> None:
        """Its gradients are dropped. The next one has another number."""
        for unit, truth in enumerate(self.truths):
            truth.passes.pop(self.steps, None)
            self.gradients.pop((unit, self.steps), None)
            self.on_ssd.pop((unit, self.steps), None)
            self.queued.pop((unit, self.steps), None)

    def run(self) -> None:
        for _ in range(self.rng.randint(1, 5)):
            old, self.held_over = self.held_over, []
            self.a_step()
            for let_go in old:
                let_go()
            if self.may_begin_checkpoint(0.2):
                self.begin_checkpoint()
            if self.rng.random() < 0.2:
                self.drain()
            if self.checkpoint is not None and self.scheduler.saved:
                self.end_checkpoint()
        self.drain()
        for let_go in self.held_over:
            let_go()
        self.until(lambda: self.scheduler.saved, "the checkpoint")
        self.end_checkpoint()
        while self.advance():
            pass
        for unit, truth in enumerate(self.truths):
            steps = sorted(truth.passes)
            require(truth.applied == steps, f"unit {unit} has the gradients of {truth.applied}, not {steps}")
            for step in steps:
                require(truth.used_rules[step] == truth.rules.get(step), f"unit {unit}, step {step}: another update")
            require(
                self.homes[unit].states == self.homes[unit].newest == len(steps), f"unit {unit}: {self.homes[unit]}"
            )

    def end_checkpoint(self) -> None:
        if self.checkpoint is not None:
            require(self.saved == self.checkpoint, f"the checkpoint has {self.saved}, not {self.checkpoint}")
        self.checkpoint = None


def run(seed: int, make: Callable[[SchedulePlan], Any] = Scheduler, log: bool = False) -> str | None:
    """Run a world; what went wrong in it, if anything."""
    world = World(seed, make, log)
    try:
        world.run()
    except ViolationError as error:
        wrong = f"seed {seed}: {error}"
    except (AssertionError, LookupError, ValueError) as error:
        wrong = f"seed {seed}: {error!r}"  # the scheduler has contradicted itself
    else:
        return None
    if world.log is not None:
        print(world.rules, *world.log, sep="\n")
    return wrong


if __name__ == "__main__":
    if len(sys.argv) > 2:
        sys.exit(run(int(sys.argv[2]), log=True))
    started = time.perf_counter()
    wrong = [found for seed in range(int(sys.argv[1])) if (found := run(seed)) is not None]
    print(*wrong[:20], f"{sys.argv[1]} worlds, {len(wrong)} wrong, {time.perf_counter() - started:.1f} s", sep="\n")
