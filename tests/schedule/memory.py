"""The memory of a make-believe machine: it holds stamps in place of numbers.

The home of a unit's weights holds their version, a frame holds which unit and version was copied there, a gradient
buffer holds which backward passes have been added up. So whatever the scheduler overlooks shows as a wrong stamp,
whatever its own books say.
"""

import random
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from pagoda.schedule.operations import Kind, Operation, SchedulePlan
from pagoda.schedule.records import UpdateState
from pagoda.schedule.updates import MOST_ADMITTED

from .rules import Rules

TORN = -1
"""The stamp of what is being written."""
OTHERS = -2
"""The stamp of a gradient that only other ranks' backward has made."""
LANES = {
    Kind.FETCH: "h2d",
    Kind.RECLAIM: "executor",
    Kind.OFFLOAD: "d2h",
    Kind.SPILL: "ssd_write",
    Kind.RELOAD: "ssd_read",
    Kind.SAVE: "saver",
    Kind.SHARE: "collective",
}
"""UPDATE and UNDO are in the lane of the unit's updater."""


class ViolationError(AssertionError):
    """The scheduler has allowed something that must never be."""


def require(holds: bool, message: str) -> None:
    if not holds:
        raise ViolationError(message)


@dataclass
class Home:
    """What a unit's home holds."""

    extents: list[int] = field(default_factory=lambda: [0, 0])
    """Versions of the weights in both extents, TORN while other ranks' parts are missing. Only asynchronous updates use
    the second."""
    front: int = 0
    """Which of them is read."""
    newest: int = 0
    """Version of the newest weights."""
    states: int = 0
    """Version of the other states."""
    edition: int = 0
    """How often the weights were replaced by other means than an update."""
    kept: int | None = None
    """Version of the states that the reserve keeps for a checkpoint."""
    undo: int | None = None
    """Version of the states that an undo brings back."""
    extent: int = 0
    """The number of the extent with the newest values, as operations have it."""
    readers: Counter[int] = field(default_factory=Counter)
    """By extent: operations that read the weights now, and compute that does."""
    state_readers: int = 0

    @property
    def weights(self) -> int:
        """Version of the weights that are read."""
        return self.extents[self.front]


@dataclass
class Truth:
    """What the algorithm says of a unit, whatever the scheduler believes."""

    asked: int = 0
    """Steps that have asked for an update."""
    applied: list[int] = field(default_factory=list)
    """Steps whose gradients the newest weights contain."""
    passes: dict[int, Counter[int]] = field(default_factory=dict)
    """step -> the passes whose gradients autograd has made."""
    closed: int = 0
    """Of the steps that have asked, those whose update an asynchronous machine has begun, or is about to."""
    shown: int = 0
    """Version that accesses must read."""
    rules: dict[int, str] = field(default_factory=dict)
    """step -> the clipping and hyperparameters that `step()` has asked for."""
    used_rules: dict[int, str] = field(default_factory=dict)
    """step -> those that its update was made with."""
    consumed: set[int] = field(default_factory=set)
    """Steps whose gradient an update has read for the last time."""


class Memory:
    """What is there, and what changes at once when an operation begins.

    `rng` decides what the program does, `haste` when operations end.
    """

    def __init__(self, rules: Rules, make: Callable[[SchedulePlan], Any], rng: random.Random, haste: random.Random):
        self.rules, self.plan, self.rng, self.haste = rules, rules.plan, rng, haste
        self.scheduler = make(self.plan)
        self.log: list[str] | None = None
        units = range(len(self.plan.units))
        self.homes = [Home() for _ in units]
        self.truths = [Truth() for _ in units]
        self.holds = [0] * len(units)
        """References of graphs, and of compute, to weights in their home."""
        self.frames: list[Any] = [None] * self.plan.frame_pool
        """(unit, version, edition) of what each frame holds; TORN while it is being filled; None where it is free."""
        self.leases: dict[int, Operation] = {}
        """first frame -> the FETCH that was given it last."""
        self.references: dict[Operation, int] = {}
        """FETCH -> references of graphs, and of compute, to what it brought."""
        self.used_now: Counter[Operation] = Counter()
        """FETCH -> uses by compute now of what it brought."""
        self.pages: list[Any] = [None] * self.plan.buffer_pool
        """(unit, step) of the gradient that each page holds."""
        self.gradient_homes: dict[tuple[int, int], tuple[int, int]] = {}
        """(unit, home) -> (unit, step) of the gradient that it holds."""
        self.gradients: dict[tuple[int, int], Counter[int]] = {}
        """(unit, step) -> the passes that its buffer holds."""
        self.on_ssd: dict[tuple[int, int], Counter[int]] = {}
        self.queued: dict[tuple[int, int], deque[int]] = {}
        """(unit, step) -> the passes that autograd has made and that wait for OFFLOAD."""
        self.infinite: set[tuple[int, int]] = set()
        """(unit, step) of gradients that are not finite."""
        self.lanes: defaultdict[str, list[Operation]] = defaultdict(list)
        self.stalled: str | None = None
        """A lane in which nothing moves."""
        self.final: set[tuple[int, int]] = set()
        """(unit, step) of updates that have begun and that nothing will undo."""
        self.begun_early: set[int] = set()
        """Units whose update of this step is final already."""
        self.stages: dict[Operation, int] = {}
        """How far an UPDATE or a FETCH is."""
        self.found: dict[tuple[Operation, int], Counter[int]] = {}
        """(UPDATE, step) -> the gradient that it found."""
        self.readings: dict[Operation, tuple[int, int]] = {}
        """FETCH or SAVE -> (version, edition) that it reads."""
        self.read_from: dict[Operation, int] = {}
        """FETCH -> the extent that it reads."""
        self.lent: dict[int, int | None] = {}
        """unit -> the version that another rank reads; None while it waits."""
        self.theirs: list[int] = []
        """Units of which other ranks have a gradient of this step that has not come here yet."""
        self.held: dict[Operation, None] = {}
        """Reclaims that were answered: still held."""
        self.ahead: dict[int, tuple[int, int, int]] = {}
        """Updater -> (unit, version, edition) of the states that it has read ahead."""
        self.at_rest = False
        """Whether compute has used nothing since the last drain."""
        self.checkpoint: dict[int, int] | None = None
        """unit -> version that the checkpoint must have."""
        self.saved: dict[int, int] = {}
        self.in_place: set[int] = set()
        """Units whose states the reserve cannot keep."""
        self.copied: dict[int, Operation] = {}
        """unit -> the UPDATE that has kept its old states last."""
        self.reserve: list[int | None] = [None] * self.plan.reserve_pages
        """The unit whose states each page of the reserve has."""
        self.steps = 0
        self.lost = False
        """Whether a gradient of this step did not arrive."""
        self.dropped: frozenset[int] = frozenset()
        """Units whose gradients of this step have been dropped."""
        self.spill_failed = False
        """Whether a SPILL has failed since compute last gave up."""
        self.fetched: list[tuple[Any, ...]] = []
        """What was fetched, in order."""
        self.updated: defaultdict[int, set[int]] = defaultdict(set)
        """step -> units that were updated by its gradients."""

    def note(self, *words: object) -> None:
        if self.log is not None:
            self.log.append(" ".join(map(str, words)))

    # --- operations begin ---

    def collect(self) -> None:
        """Give new operations to their lanes, where they begin at once. Only where ranks agree does a FETCH wait, and a
        RECLAIM is answered before anything else happens."""
        while new := self.scheduler.take():
            for op in new:
                self.note("  operation", op.kind, op.unit, op.run or "", op.version, op.steps, "undoable" * op.undoable)
                if op.kind is Kind.RECLAIM and op.run is not None:
                    require(not self.used_now[self.leases[op.run.start]], f"unit {op.unit} is evicted while it is used")
                if op.kind is Kind.PUBLISH:
                    self.publish(op)
                elif op.kind is Kind.KEEP:
                    self.keep_update(op)
                elif op.kind is Kind.READ_AHEAD:
                    self.read_ahead(op)
                elif op.kind is Kind.RECLAIM and self.plan.ranks_fetch_alike:
                    self.answer(op)
                else:
                    self.lanes[self.lane(op)].append(op)
                    self.begin(op)

    def lane(self, op: Operation) -> str:
        return LANES.get(op.kind) or f"updater {self.plan.units[op.unit].updater}"

    def begin(self, op: Operation) -> None:
        home = self.homes[op.unit]
        if op.kind is Kind.FETCH:
            self.take_frames(op)
            if not self.plan.ranks_fetch_alike:
                self.begin_fetch(op)
        elif op.kind is Kind.UPDATE:
            self.begin_update(op)
        elif op.kind is Kind.SAVE:
            require(op.run is None or op.unit in self.copied, f"SAVE of unit {op.unit}, whose copy is not there yet")
            home.state_readers += op.run is None
            self.readings[op] = self.kept_or_now(op, home), home.edition
        elif op.kind is Kind.UNDO:
            require(home.undo is not None and not home.readers.total(), "UNDO of weights that somebody reads")
            home.extents[0] = home.newest = home.states = TORN
        elif op.kind is Kind.SHARE:
            require(self.plan.units[op.unit].shared, f"SHARE of unit {op.unit}, which this rank has alone")
        elif op.kind is Kind.SPILL:
            needed = self.lost or self.scheduler.versions.failed or self.needed(op.unit, op.steps[0])
            require(self.plan.spills, "SPILL where SSD has no room")
            require(needed, f"SPILL of {op.steps} of unit {op.unit}, which nobody needs")
        elif op.kind in (Kind.OFFLOAD, Kind.RELOAD):
            self.take_buffer(op)

    def take_frames(self, op: Operation) -> None:
        self.fetched.append((op.unit, op.run, op.version))
        for frame in self.span(op):
            require(self.frames[frame] is None, f"frame {frame} of unit {op.unit} is taken: {self.frames[frame]}")
            self.frames[frame] = TORN
        self.leases[op.run.start] = op
        self.references[op] = 0
        self.read_from[op] = self.homes[op.unit].front

    def has_begun(self, op: Operation) -> bool:
        return op in self.stages or self.begin_fetch(op)

    def begin_fetch(self, op: Operation) -> bool:
        """Begin to read the weights; False if they are not there yet, which may be only where ranks agree."""
        home = self.homes[op.unit]
        held, wanted = home.extents[self.read_from[op]], op.version
        if op.undoing is not None and home.undo is not None:
            require(self.plan.ranks_fetch_alike, f"FETCH of unit {op.unit} before it is as it was")
            return False
        if self.plan.ranks_fetch_alike and held < wanted:
            require(bool(op.steps), f"FETCH of version {wanted} of unit {op.unit} names no update to wait for")
            return False
        require(held == wanted, f"FETCH of version {wanted}, but the home has {held}")
        named = self.truths[op.unit].applied[wanted - 1 : wanted] if op.steps else [*op.steps]
        require(named == [*op.steps], f"FETCH of unit {op.unit} waits for {op.steps}, but {named} made its version")
        self.readings[op] = held, home.edition
        self.stages[op] = 0
        home.readers[self.read_from[op]] += 1
        return True

    def take_buffer(self, op: Operation) -> None:
        key = op.unit, op.steps[0]
        if op.run is None:
            require(op.home < self.plan.gradient_homes, f"unit {op.unit} has no home {op.home} for gradients")
            before = self.gradient_homes.get((op.unit, op.home))
            self.replace(before, key)
            self.gradient_homes[op.unit, op.home] = key
            homes = [place for place, held in self.gradient_homes.items() if held == key]
            require(len(homes) == 1, f"the gradient {key} is in {homes}")
            return
        self.pages = [None if stamp == key else stamp for stamp in self.pages]  # it may have had another buffer
        for page in self.span(op):
            self.replace(self.pages[page], key)
            self.pages[page] = key

    def replace(self, before: tuple[int, int] | None, key: tuple[int, int]) -> None:
        """A gradient takes a place. The one that was there must be on SSD, or not needed any more."""
        if before is not None and before != key:
            require(before in self.on_ssd or not self.needed(*before), f"{before} is lost: {key} takes its place")
            self.gradients.pop(before, None)

    def needed(self, unit: int, step: int) -> bool:
        """Whether an update may still read a gradient."""
        if step == self.steps and (self.lost or unit in self.dropped):
            return False  # the step is dropped, or will be
        decided = step < self.steps or self.plan.during_backward
        return step in self.truths[unit].passes and not (step in self.truths[unit].consumed and decided)

    def begin_update(self, op: Operation) -> None:
        home, truth = self.homes[op.unit], self.truths[op.unit]
        others = [other for other in self.lanes[self.lane(op)] if other.kind is Kind.UPDATE]
        require(len(others) <= MOST_ADMITTED, f"{len(others)} updates in one lane")
        require(home.states == home.newest == op.version - len(op.steps), f"UPDATE on {home} to {op.version}")
        require(not home.state_readers, "UPDATE of states that a checkpoint reads")
        require(not home.readers[self.written(op)], f"UPDATE of unit {op.unit}, which somebody reads")
        whole = self.plan.max_staleness is not None or home.extents[0] == home.newest
        require(whole, f"UPDATE of unit {op.unit}, of which ranks have yet to share the one before")
        ahead = self.ahead.pop(self.plan.units[op.unit].updater, None)
        stale = ahead is not None and ahead[0] == op.unit and ahead[1:] != (home.states, home.edition)
        require(not stale, f"UPDATE of unit {op.unit} from states that were read ahead too early")
        if op.run is not None:
            self.keep(op, home)
        if self.plan.max_staleness is None:
            require((op.home != home.extent) is op.undoable, f"UPDATE of unit {op.unit} to extent {op.home}")
        if op.undoable:
            require(self.checkpoint is None, "an UPDATE may have to be undone while a checkpoint needs room")
            home.undo = home.states
        for step in op.steps:
            self.check_gradient(op.unit, step)
            truth.used_rules[step] = truth.rules.get(step, "as guessed")
            self.found[op, step] = Counter(self.gradients.get((op.unit, step)))
            if not op.undoable:
                self.updated[step].add(op.unit)
                self.final.add((op.unit, step))
        early = self.plan.during_backward or self.plan.units[op.unit].speculated
        require(truth.asked >= op.version or early, "an update that nobody has asked for")
        home.extents[self.written(op)] = home.newest = home.states = TORN
        self.stages[op] = 0

    def keep(self, op: Operation, home: Home) -> None:
        """An UPDATE copies the old states to the reserve, for the checkpoint."""
        require(op.unit not in self.in_place, f"the states of unit {op.unit} cannot be kept")
        require(len(self.span(op)) == self.plan.units[op.unit].old_state_pages, "kept states fill other pages")
        require(self.wants_to_save(op.unit) == home.states, "states are kept that no checkpoint needs")
        for page in self.span(op):
            require(self.reserve[page] is None, f"page {page} of the reserve is unit {self.reserve[page]}'s")
            self.reserve[page] = op.unit
        home.kept = home.states

    def give_back(self, unit: int) -> None:
        """The checkpoint has read what was kept of a unit, or needs it no more."""
        self.homes[unit].kept = None
        self.reserve = [None if of == unit else of for of in self.reserve]

    def check_gradient(self, unit: int, step: int) -> None:
        key = unit, step
        doomed = self.lost and step == self.steps  # the step will be dropped, and the update undone
        if step in self.truths[unit].passes and not doomed:  # else the step was dropped, and the update will be undone
            require(self.gradients.get(key) == self.truths[unit].passes[step], f"{key} is {self.gradients.get(key)}")

    def publish(self, op: Operation) -> None:
        """The extent may be one that is yet to be written: then nobody reads it before."""
        self.homes[op.unit].front = op.home

    def keep_update(self, op: Operation) -> None:
        """An update before `step()` is final: a speculative one, or one that nothing will undo."""
        home = self.homes[op.unit]
        if op.about is None:
            self.begun_early.add(op.unit)
            return
        require(home.undo is not None, f"KEEP of unit {op.unit}, which has nothing to keep")
        home.extent = op.about.extent
        self.final.add((op.unit, op.steps[0]))

    def written(self, op: Operation) -> int:
        """Which of a home's extents an operation writes. Speculative updates write, here, in place."""
        return 0 if self.plan.max_staleness is None else op.home

    def read_ahead(self, op: Operation) -> None:
        """It must be worth it, and what is read must still be so when the update begins."""
        unit, home, truth = op.unit, self.homes[op.unit], self.truths[op.unit]
        require(self.plan.max_staleness is None and not self.at_rest, "READ_AHEAD while nothing should be")
        require(self.plan.units[unit].streamed, f"READ_AHEAD of unit {unit}, which has nothing to read")
        require(home.states != TORN, f"READ_AHEAD of unit {unit}, which is being updated")
        begun = unit in self.begun_early and self.steps not in truth.applied
        require(truth.asked <= home.newest and not begun, f"READ_AHEAD of unit {unit}, whose update is queued")
        guess = self.scheduler.weights(unit).guess
        require(
            guess is None or guess.state.name == UpdateState.ASKING.name,
            f"READ_AHEAD of unit {unit}, whose update may be undone",
        )
        self.ahead[self.plan.units[unit].updater] = unit, home.states, home.edition

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
            return self.holds[op.unit] > 0
        return self.references[self.leases[op.run.start]] > 0

    def free_frames(self, op: Operation) -> None:
        fetch = self.leases.pop(op.run.start)
        filled = fetch not in self.stages or self.stages[fetch] > 0
        require(filled or self.plan.ranks_fetch_alike, f"the frames of unit {op.unit} are freed before they are filled")
        del self.references[fetch]
        for frame in self.span(op):
            require(self.frames[frame] is not None, f"frame {frame} is freed twice")
            self.frames[frame] = None

    # --- checks ---

    def settled(self) -> bool:
        """Whether every gradient that autograd has made lies where it stays, and no other rank is behind."""
        self.collect()
        moving = any(op.kind is Kind.OFFLOAD for lane in self.lanes.values() for op in lane)
        return not (moving or self.lent or self.scheduler.gradients.held_back)

    def check_nothing_is_taken(self) -> None:
        """What the scheduler's books say once all is over: that nobody has forgotten to give anything back."""
        leased = sum(len(self.span(fetch)) for fetch in self.leases.values())
        require(
            self.scheduler.leases.frames.in_use == leased,
            f"{self.scheduler.leases.frames.in_use} frames are in use, not {leased}",
        )
        for fetch in self.leases.values():
            held = any(fetch.run == op.run for op in self.held)
            require(held or self.is_current(fetch), f"a lease of unit {fetch.unit} that has ended keeps its frames")
        gradients = self.scheduler.gradients
        require(gradients.pages.in_use == 0, "a gradient that nobody needs has a buffer")
        require({*map(len, gradients._homes)} == {self.plan.gradient_homes}, "a gradient that nobody needs has a home")
        reserve = self.scheduler.checkpoint.reserve
        require(reserve is None or not reserve.in_use, "the reserve holds states that nobody needs")

    def is_current(self, fetch: Operation) -> bool:
        lease = self.scheduler.leases._leases.get(fetch.unit)
        return lease is not None and lease.run == fetch.run

    def kept_or_now(self, op: Operation, home: Home) -> int:
        version = home.states if op.run is None else home.kept
        wanted = self.wants_to_save(op.unit)
        require(wanted is None or version == wanted, f"a checkpoint of version {wanted} reads {version} of {op.unit}")
        return version

    def wants_to_save(self, unit: int) -> int | None:
        return None if self.checkpoint is None else self.checkpoint[unit]

    def span(self, op: Operation) -> range:
        return range(op.run.start, op.run.stop)
