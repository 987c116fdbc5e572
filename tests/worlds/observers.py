"""Observers: they see each event and operation of a world's scheduler, and know what must never be.

Each has books of its own, so what the scheduler overlooks shows whatever its own records say. They notice at once what
would give a wrong value only later, or only with other luck.
"""

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, ClassVar

from pagoda.memory.page import PageRun
from pagoda.plan.trace import Access
from pagoda.schedule import operations
from pagoda.schedule.event_log import EVENTS
from pagoda.schedule.operations import (
    Adopt,
    Ask,
    Confirm,
    Evict,
    Fetch,
    Free,
    GradientMove,
    Offload,
    Operation,
    Question,
    ReadAhead as ReadAheadOp,
    Reload,
    Request,
    Save,
    SchedulePlan,
    Share,
    Spill,
    Update,
)
from pagoda.schedule.records import GradientRecord, Lease
from pagoda.schedule.scheduler import Scheduler
from pagoda.schedule.updates import MOST_ADMITTED

Require = Callable[[bool, str], None]
Key = tuple[int, int]
"""A gradient: its unit and step."""
KINDS = [each for each in vars(operations).values() if isinstance(each, type) and issubclass(each, Operation)]
TORN = -1
"""The version of what is being written."""


class Observed(Scheduler):
    """The scheduler of a world. A method of an observer that has an event's name gets the event before the scheduler
    does; `after_NAME` gets it afterwards, `on_read` a unit that compute may read from then on, and `on_CLASS` each
    operation of that class that has been issued meanwhile."""

    def __init__(self, plan: SchedulePlan, require: Require, fetches_of_ranks: list[tuple[Any, ...]]) -> None:
        """`fetches_of_ranks`: what any rank has fetched, in order."""
        super().__init__(plan)
        self.fetches_of_ranks = fetches_of_ranks
        self.fetched = 0
        """How many of these this rank has fetched."""
        self.apart = False
        """Whether ranks have done different things, so that they may fetch different units from then on."""
        self.facts = Facts(self, require)
        self.observers = [self.facts, *(kind(self, require) for kind in OBSERVERS)]
        self.event = ""
        """The event that is being processed."""
        for name in EVENTS:
            before, after = self._methods(name), self._methods(f"after_{name}")
            setattr(self, name, partial(self._observe, name, getattr(self, name), before, after))
        self._on = {kind: self._methods(f"on_{kind.__name__.lower()}") for kind in KINDS}
        self._on_read = self._methods("on_read")

    def _methods(self, name: str) -> list[Callable[..., None]]:
        return [getattr(observer, name) for observer in self.observers if hasattr(observer, name)]

    def _observe(self, name: str, event: Any, before: Any, after: Any, *arguments: Any, **settings: Any) -> None:
        self.event = name
        for method in before:
            method(*arguments, **settings)
        issued = len(self._out)
        event(*arguments, **settings)
        for unit in self.facts.begin_reads():
            for method in self._on_read:
                method(unit)
        for operation in self._out[issued:]:
            for method in self._on[type(operation)]:
                method(operation)
        for method in after:
            method(*arguments, **settings)

    def at_end(self) -> None:
        """The program is over, and everything that it has asked for has ended."""
        for observer in self.observers:
            observer.at_end()


class Observer:
    """Something that sees events and operations."""

    def __init__(self, scheduler: Observed, require: Require) -> None:
        self.scheduler, self.require = scheduler, require
        self.plan, self.units = scheduler.plan, scheduler.plan.units
        self.facts = scheduler.facts if hasattr(scheduler, "facts") else None
        self.start()

    def start(self) -> None:
        """Before the first event."""

    def after_moved(self, *_: Any) -> None:
        """States have moved to their homes in another plan."""
        self.plan, self.units = self.scheduler.plan, self.scheduler.plan.units

    def at_end(self) -> None:
        """After the last one."""


class Facts(Observer):
    """What the others need to know, and no more than events say. An update changes a unit that nothing else changes,
    applies each gradient once, and only a whole one that the program has asked for."""

    def start(self) -> None:
        self.step = 0
        self.uses: Counter[int] = Counter()
        """Unit -> forwards and backwards that have begun to use it."""
        self.reads: Counter[int] = Counter()
        """Unit -> those of them that have found its weights."""
        self.newest = [0] * len(self.units)
        """By unit, the version of its newest states."""
        self.due = [0] * len(self.units)
        """By unit, the updates that are final or will be."""
        self.edition = [0] * len(self.units)
        """By unit, how often its states were replaced by other means than an update."""
        self.writer: dict[int, Operation] = {}
        """Unit -> the UPDATE that writes its states now."""
        self.made: Counter[Key] = Counter()
        """Gradient -> its parts that autograd has made."""
        self.arrived: Counter[Key] = Counter()
        """Gradient -> its parts that are in its buffer."""
        self.open: set[Key] = set()
        """Gradients of this step that no final update has taken."""
        self.asked: set[Key] = set()
        """Gradients whose update the program has asked for, and that is not final yet."""
        self.useless: set[Key] = set()
        """Gradients that were dropped, or that a final update has read."""
        self.lost: set[Key] = set()
        """Gradients of which a part has failed to arrive."""
        self.undoable: set[object] = set()
        """Updates that are not final."""

    # --- compute ---

    def access(self, access: Access, recorded: bool = True) -> None:
        self.uses[access.unit] += 1

    def release(self, unit: int) -> None:
        self.uses[unit] -= 1
        self.reads[unit] = min(self.reads[unit], self.uses[unit])

    def begin_reads(self) -> list[int]:
        """Compute goes on where it can: with which units."""
        begun = [unit for unit, uses in self.uses.items() if uses > self.reads[unit] and self.scheduler.ready(unit)]
        for unit in begun:
            self.reads[unit] = self.uses[unit]
        return begun

    def overwritten(self, unit: int) -> None:
        self.edition[unit] += 1

    # --- gradients ---

    def gradient(self, unit: int, *_: Any, **__: Any) -> None:
        self.made[unit, self.step] += 1
        self.open.add((unit, self.step))

    def reduce(self, unit: int, here: bool, *_: Any) -> None:
        if not here:
            self.gradient(unit)

    def end_step(self, clipped: bool = False, changed: Any = (), unused: Any = ()) -> None:
        dropped = {key for key in self.open if key[0] in unused}
        self.useless |= dropped
        self.asked |= self.open - dropped
        for unit, _ in self.open - dropped:
            self.due[unit] += 1
        self._next_step()

    def drop_gradients(self) -> None:
        self.useless |= self.open
        self._next_step()

    def _next_step(self) -> None:
        self.open = set()
        self.step += 1

    def needs(self, record: GradientRecord) -> bool:
        """Whether an update may still read a gradient."""
        return key_of(record) not in self.useless | self.lost

    # --- updates ---

    def on_update(self, op: Update) -> None:
        unit, require = op.unit, self.require
        require(unit not in self.writer, f"UPDATE of unit {unit} during another one")
        before = self.newest[unit]
        require(before == op.version - 1, f"UPDATE of unit {unit} from version {before} to {op.version}")
        others = [each for each in self.writer.values() if self._shares_updater(each, unit)]
        require(len(others) < MOST_ADMITTED, f"{len(others) + 1} updates in one lane")
        key = key_of(op.update.gradient)
        require(self.arrived[key] == self.made[key], f"UPDATE before the gradient {key} has arrived")
        undoable = op.update.speculative
        require(not undoable or key in self.open, f"UPDATE with {key} may be undone, but it is asked for")
        require(undoable or key in self.asked, f"UPDATE with {key}, which nobody has asked for")
        require(key not in self.useless | self.lost, f"UPDATE with {key}, which was lost, dropped or applied")
        if undoable:
            self.undoable.add(op.update)
        else:
            self.asked.discard(key)
        self.writer[unit] = op

    def _shares_updater(self, op: Update, unit: int) -> bool:
        return self.units[op.unit].updater == self.units[unit].updater

    def on_request(self, op: Request) -> None:
        key = key_of(op.gradient)
        self.require(self.plan.during_backward and key in self.open, f"an update with {key} is final too early")
        self.open.discard(key)
        self.asked.add(key)
        self.due[op.unit] += 1

    def on_confirm(self, op: Confirm) -> None:
        key = key_of(op.update.gradient)
        self.require(key in self.asked, f"an update with {key} is confirmed, which nobody has asked for")
        self.undoable.discard(op.update)
        self.asked.discard(key)
        if op.update.has_read:
            self.useless.add(key)
        if op.update.has_written:
            self.newest[op.unit] += 1

    def gradient_used(self, op: Update) -> None:
        if self.is_final(op):
            self.useless.add(key_of(op.update.gradient))

    def is_final(self, op: Update) -> bool:
        """Whether nothing undoes an UPDATE."""
        return op.update not in self.undoable

    def weights_written(self, op: Update) -> None:
        if self.is_final(op):
            self.newest[op.unit] = op.version

    def ended(self, op: Operation) -> None:
        if isinstance(op, Offload):
            self.arrived[key_of(op.gradient)] += 1
        self._over(op)

    def failed(self, op: Operation) -> None:
        if isinstance(op, Offload):
            self.lost.add(key_of(op.gradient))
        self._over(op)

    def refused(self, op: Update) -> None:
        if self.is_final(op):
            self.due[op.unit] -= 1
            self.useless.add(key_of(op.update.gradient))
        self._over(op)

    def _over(self, op: Operation) -> None:
        if isinstance(op, Update):
            del self.writer[op.unit]

    def restored(self, lags: Sequence[int] = ()) -> None:
        self.require(not self.writer, "states are replaced while something changes them")
        self.newest = [*lags] or [0] * len(self.units)
        self.due = [*self.newest]
        self.edition = [each + 1 for each in self.edition]
        self.useless |= self.asked
        self.asked.clear()

    def after_restored(self, *_: Any) -> None:
        self.require(not self.scheduler.broken, "what has failed stays so")

    def at_end(self) -> None:
        self.require(not self.asked and not self.writer, f"the gradients {sorted(self.asked)} are not applied")


def key_of(record: GradientRecord) -> Key:
    return record.unit, record.step


class Frames(Observer):
    """A frame belongs to one lease. It is free once it is filled and nothing uses its lease."""

    def start(self) -> None:
        self.owners: dict[int, Lease] = {}
        self.filled: set[Lease] = set()
        self.failed_to_fill: set[Lease] = set()
        self.ending: set[Lease] = set()
        """Leases that may have references."""

    def after_moved(self, *_: Any) -> None:
        super().after_moved()
        self.start()

    def on_fetch(self, op: Fetch) -> None:
        for frame in span(op.lease.run):
            self.require(frame not in self.owners, f"frame {frame} has two leases, the second one of unit {op.unit}")
            self.owners[frame] = op.lease

    def issued(self, op: Fetch) -> None:
        self.filled.add(op.lease)

    def ended(self, op: Operation) -> None:
        if isinstance(op, Fetch):
            self.filled.add(op.lease)

    def failed(self, op: Operation) -> None:
        if isinstance(op, Fetch):
            self.failed_to_fill.add(op.lease)

    def on_read(self, unit: int) -> None:
        if self.units[unit].lease_frames:
            self.require(
                self.scheduler.lease(unit) in self.filled, f"compute reads unit {unit}, whose lease is not filled"
            )

    def on_evict(self, op: Evict) -> None:
        self.require(not self.facts.reads[op.unit], f"unit {op.unit} is evicted while it is used")
        self.ending.add(op.lease)

    on_outdate = on_evict

    def reclaimed(self, op: Question, freed: bool) -> None:
        if freed:
            self.let_go(op)

    def let_go(self, op: Question) -> None:
        if isinstance(op, Ask):
            return
        filled = op.lease in self.filled | self.failed_to_fill or self.plan.ranks_fetch_alike
        self.require(filled, f"the frames of unit {op.unit} are free before they are filled")
        self.ending.remove(op.lease)
        for frame in span(op.lease.run):
            del self.owners[frame]

    def at_end(self) -> None:
        in_use = self.scheduler.leases.frames.in_use
        self.require(in_use == len(self.owners), f"{in_use} frames are in use, not {len(self.owners)}")
        for lease in self.owners.values():
            current = self.scheduler.lease(lease.unit) is lease or lease in self.ending
            self.require(current, f"a lease of unit {lease.unit} that has ended keeps its frames")


Run = tuple[str, int, int]
"""A run of a state: its tier, first page and pages."""


class Versions(Observer):
    """A run has one state of one unit. What reads it finds the version that it wants, and nothing changes it
    meanwhile."""

    def start(self) -> None:
        self.owners: dict[tuple[str, int], Run] = {}
        """(tier, page) -> the run that has it."""
        self.held: dict[Run, int] = {}
        """Run -> the version in it."""
        self.before: dict[Operation, list[int]] = {}
        """UPDATE -> the versions in the runs that it writes, from before it."""
        self.fetches: dict[Operation, Run | None] = {}
        """FETCHes and the runs that they read, if these are known."""
        self.lent: Counter[int] = Counter()
        """Unit -> other ranks that read it, or wait for it."""
        self.sharing: dict[Operation, int] = {}
        """SHAREs and their units."""
        self.wanted: dict[int, int] = {}
        """Unit -> the version that a checkpoint has not read yet."""
        self.one_version: Collection[int] = ()
        self.under_way = False
        self.saves: dict[Operation, list[Run]] = {}
        """SAVEs and the runs that they read."""
        self._begin_anew([0] * len(self.units), [0] * len(self.units))

    def _begin_anew(self, newest: Sequence[int], read: Sequence[int]) -> None:
        """By unit: the versions in the runs of its states, and in the run that accesses read."""
        self.owners.clear()
        self.held.clear()
        self.newest: list[list[Run]] = []
        self.read: list[Run | None] = []
        for unit in range(len(self.units)):
            weights = self.scheduler.weights(unit)
            self.newest.append(self._runs(unit, weights.runs))
            self.read.append(self._runs(unit, (weights.read,))[0] if weights.runs else None)
            for run in self.newest[unit]:
                self._take(run, newest[unit])
            if self.read[unit] not in (None, *self.newest[unit]):
                self._take(self.read[unit], read[unit])

    def _runs(self, unit: int, runs: Sequence[PageRun]) -> list[Run]:
        states = self.units[unit].states
        return [(states[state % len(states)][0], run.start, run.count) for state, run in enumerate(runs)]

    def _take(self, run: Run, version: int) -> None:
        for page in range(run[1], run[1] + run[2]):
            owner = self.owners.get((run[0], page))
            self.require(owner is None, f"page {page} of {run[0]} is in the runs {owner} and {run}")
            self.owners[run[0], page] = run
        self.held[run] = version

    def _weights(self, unit: int) -> int:
        return self.held[self.read[unit]] if self.read[unit] else self.facts.newest[unit]

    # --- compute and other ranks ---

    def on_fetch(self, op: Fetch) -> None:
        unit = op.unit
        incomplete = any(unit == shared for shared in self.sharing.values())
        self.fetches[op] = None
        if op.awaited is not None:
            self.require(self.plan.ranks_fetch_alike, f"FETCH of unit {unit} before its update has ended")
            return
        held = self._weights(unit)
        self.require(
            held == op.lease.version, f"FETCH of version {op.lease.version} of unit {unit}, whose home has {held}"
        )
        self.require(not incomplete, f"FETCH of unit {unit}, of which other ranks have a part")
        self.fetches[op] = self.read[unit]

    def on_adopt(self, op: Adopt) -> None:
        (run,) = self._runs(op.unit, (op.run,))
        held = self.held.get(run)
        right = held == op.version or self.scheduler.event == "replaced"
        self.require(right, f"accesses read version {held} of unit {op.unit}, not {op.version}")
        self.read[op.unit] = run

    def on_read(self, unit: int) -> None:
        weights = self.scheduler.weights(unit)
        if weights.read.count:
            held = self.held.get(self._runs(unit, (weights.read,))[0])
            self.require(held == weights.version, f"compute reads version {held} of unit {unit}, not {weights.version}")

    def on_share(self, op: Share) -> None:
        self.require(self.units[op.unit].shared, f"SHARE of unit {op.unit}, which this rank has alone")
        self.sharing[op] = op.unit

    def others_read(self, unit: int, begin: bool) -> None:
        self.lent[unit] += 1 if begin else -1

    # --- updates ---

    def on_update(self, op: Update) -> None:
        unit, require, asynchronous = op.unit, self.require, self.plan.asynchronous
        runs = self._runs(unit, op.update.runs)
        require(not (op.update.speculative and self.under_way), "an UPDATE takes room that a checkpoint needs")
        require(asynchronous or not self.lent[unit], f"UPDATE of unit {unit}, which another rank reads")
        for fetch in self.fetches:
            over = fetch.unit == unit and fetch.lease.version < op.version and not asynchronous
            require(not over, f"UPDATE of unit {unit}, whose version {fetch.lease.version} is being fetched")
        others = [each for each, shared in self.sharing.items() if shared == unit and each.update is not op.update]
        require(not others, f"UPDATE of unit {unit}, of which other ranks have yet to send the one before")
        read = self.facts.reads[unit] and not self.units[unit].lease_frames
        self.before[op] = []
        for run, newest in zip(runs, self.newest[unit], strict=True):
            if run != newest or not run[2]:
                if run[2]:
                    self._take(run, TORN)
                self.before[op].append(TORN)
                continue
            require(not op.update.speculative, f"UPDATE of unit {unit} in place, which may be undone")
            seen = run == self.read[unit] and (asynchronous or read)
            require(not seen, f"UPDATE of unit {unit}, which compute reads")
            require(self.wanted.get(unit) != op.version - 1, f"UPDATE of unit {unit}, which a checkpoint needs")
            self.before[op].append(self.held[run])
            self.held[run] = TORN
        both = any(run != newest for run, newest in zip(runs, self.newest[unit], strict=True)) and not asynchronous
        room = unit not in self.one_version or self.wanted.get(unit) != op.version - 1 or not both
        require(room, f"UPDATE of unit {unit}, of which SSD has no room for another version")

    def weights_written(self, op: Update) -> None:
        runs = self._runs(op.unit, op.update.runs)
        if runs and runs[0][2]:
            self.held[runs[0]] = op.version
        if self.facts.is_final(op):
            self.newest[op.unit] = runs

    def on_confirm(self, op: Confirm) -> None:
        if op.update.has_written:
            self.newest[op.unit] = self._runs(op.unit, op.update.runs)

    def on_free(self, op: Free) -> None:
        unit, state = op.unit, op.state
        run = (self.units[unit].states[state][0], op.run.start, op.run.count)
        needed = run in self.newest[unit] or run == self.read[unit] or run in self.fetches.values()
        writing = any(run in self._runs(unit, each.update.runs) for each in self.before if each.unit == unit)
        saving = any(run in runs for runs in self.saves.values())
        awaited = self.held[run] == self.wanted.get(unit) and self.held[run] != TORN and run in self.kept(unit)
        self.require(not (needed or writing or saving or awaited), f"the run {run} of unit {unit} is free too early")
        del self.held[run]
        for page in range(run[1], run[1] + run[2]):
            del self.owners[run[0], page]

    def kept(self, unit: int) -> list[Run]:
        """The runs of the version that a checkpoint has not read yet."""
        saving = self.scheduler.checkpoint._units[unit].runs
        return [] if saving is None else self._runs(unit, saving)

    def refused(self, op: Update) -> None:
        for run, held in zip(self._runs(op.unit, op.update.runs), self.before.pop(op), strict=True):
            if held != TORN:
                self.held[run] = held

    def ended(self, op: Operation) -> None:
        self.fetches.pop(op, None)
        self.sharing.pop(op, None)
        if isinstance(op, Update):
            del self.before[op]
            for run in self._runs(op.unit, op.update.runs):
                if run[2]:
                    self.held[run] = op.version
        elif isinstance(op, Save):
            del self.wanted[op.unit], self.saves[op]

    def failed(self, op: Operation) -> None:
        self.fetches.pop(op, None)
        self.sharing.pop(op, None)
        self.before.pop(op, None)
        if isinstance(op, Save):
            del self.wanted[op.unit], self.saves[op]

    # --- checkpoints ---

    def begin_checkpoint(self, one_version: Collection[int] = ()) -> None:
        self.require(not self.wanted, "a checkpoint begins before the one before is read")
        self.wanted = dict(enumerate(self.facts.due))
        self.one_version, self.under_way = one_version, True

    def end_checkpoint(self) -> None:
        self.under_way = False

    def on_save(self, op: Save) -> None:
        unit, wanted = op.unit, self.wanted.get(op.unit)
        self.require(op.version == wanted, f"SAVE of version {op.version} of unit {unit}, not {wanted}")
        runs = self._runs(unit, op.runs)
        for run in runs[: len(self.units[unit].states)]:
            held = self.held[run] if run[2] else wanted
            self.require(held == wanted, f"SAVE of unit {unit} reads version {held}, not {wanted}")
        self.saves[op] = [run for run in runs if run[2]]

    def after_refused(self, op: Update) -> None:
        if self.facts.is_final(op) and self.wanted.get(op.unit, 0) > self.facts.newest[op.unit]:
            self.wanted[op.unit] -= 1

    # --- other homes and values ---

    def after_moved(self, *_: Any) -> None:
        super().after_moved()
        self._begin_anew(self.facts.newest, self.facts.newest)

    def replaced(self, lags: Sequence[int] = ()) -> None:
        self.require(not self.fetches, "states are replaced while weights are fetched")
        self.wanted, self.under_way = {}, False
        self.saves.clear()

    def after_replaced(self, *_: Any) -> None:
        self.before.clear()
        self._begin_anew([TORN] * len(self.units), [TORN] * len(self.units))

    def restored(self, lags: Sequence[int] = ()) -> None:
        newest = [*lags] or [0] * len(self.units)
        self._begin_anew(newest, [0] * len(self.units))

    def after_restored(self, *_: Any) -> None:
        self.require(not self.scheduler.checkpoint.left, "the checkpoint outlives a restore")

    def at_end(self) -> None:
        for tier, pool in self.scheduler.versions.pools.items():
            used = sum(each == tier for each, _ in self.owners)
            self.require(pool.in_use == used, f"{pool.in_use} pages of {tier} hold states, not {used}")
            alone = {run for runs in self.newest for run in runs} | {*self.read}
            left = [run for run in self.held if run not in alone]
            self.require(not left or bool(self.fetches), f"nothing needs the runs {left}")  # else a FETCH may read one


class Buffers(Observer):
    """A page belongs to one gradient, and nobody takes a page, or moves it, while a gradient needs it."""

    def start(self) -> None:
        self.pages: dict[int, GradientRecord] = {}
        self.own: dict[tuple[int, int], GradientRecord] = {}
        """(unit, home) -> the gradient there."""
        self.place: dict[GradientRecord, PageRun] = {}
        self.moving: dict[Operation, GradientRecord] = {}
        """OFFLOADs, SPILLs and RELOADs."""
        self.read_by: dict[Operation, GradientRecord] = {}
        """UPDATEs that read gradients."""
        self.spilled: dict[GradientRecord, int] = {}
        """Gradient -> how many of its parts SSD has."""

    def on_offload(self, op: Offload) -> None:
        record = op.gradient
        self._check_at_rest(op, but=Offload)
        self._take(record)
        self.moving[op] = record

    def on_spill(self, op: Spill) -> None:
        record = op.gradient
        self.require(self.plan.spills, "SPILL where SSD has no room")
        needed = key_of(record) not in self.facts.useless
        self.require(needed, f"SPILL of the gradient {key_of(record)}, which nobody needs")
        self._check_at_rest(op)
        self._check_there(record)
        self.moving[op] = record

    def on_reload(self, op: Reload) -> None:
        record = op.gradient
        self._check_at_rest(op)
        self.require(self._is_on_ssd(record), f"RELOAD of the gradient {key_of(record)}, which SSD does not have")
        self._take(record)
        self.moving[op] = record

    def on_update(self, op: Update) -> None:
        record = op.update.gradient
        self._check_there(record)
        moved = [type(each).__name__ for each, of in self.moving.items() if of is record]
        self.require(not moved, f"UPDATE with the gradient {key_of(record)} during {moved}")
        self.read_by[op] = record

    def gradient_used(self, op: Update) -> None:
        del self.read_by[op]

    def ended(self, op: Operation) -> None:
        record = self.moving.pop(op, None)
        if isinstance(op, Spill):
            self.spilled[record] = self.facts.arrived[key_of(record)]

    def failed(self, op: Operation) -> None:
        self.moving.pop(op, None)
        self.read_by.pop(op, None)

    def refused(self, op: Update) -> None:
        self.read_by.pop(op, None)

    def _check_at_rest(self, op: GradientMove, but: type[Operation] | None = None) -> None:
        record = op.gradient
        self.require(
            not self._is_busy(record, but),
            f"{type(op).__name__} of the gradient {key_of(record)}, which is moved or read",
        )

    def _is_busy(self, record: GradientRecord, but: type[Operation] | None = None) -> bool:
        moved = any(of is record and type(op) is not but for op, of in self.moving.items())
        return moved or record in self.read_by.values()

    def _is_on_ssd(self, record: GradientRecord) -> bool:
        return self.spilled.get(record) == self.facts.arrived[key_of(record)]

    def _check_there(self, record: GradientRecord) -> None:
        """The gradient is in its pages."""
        there = all(self.pages.get(page) is record for page in span(self.place.get(record)))
        self.require(there, f"the gradient {key_of(record)} is not in its buffer")

    def _take(self, record: GradientRecord) -> None:
        """A gradient takes a place. The one that was there must be on SSD, or not needed any more."""
        unit, own, run = record.unit, record.own_buffer, record.run
        if run is None:
            assert own is not None
            self.require(own < self.plan.own_buffers, f"unit {unit} has no buffer {own} of its own")
            self._replace(self.own.get((unit, own)), record)
            self.own[unit, own] = record
            count = sum(each is record for each in self.own.values())
            self.require(count == 1, f"the gradient {key_of(record)} has {count} buffers")
            return
        if self.place.get(record) != run:
            for page in span(self.place.get(record)):
                if self.pages.get(page) is record:
                    del self.pages[page]
        for page in span(run):
            self._replace(self.pages.get(page), record)
            self.pages[page] = record
        self.place[record] = run

    def _replace(self, before: GradientRecord | None, record: GradientRecord) -> None:
        if before is not None and before is not record:
            free = not self._is_busy(before) and (self._is_on_ssd(before) or not self.facts.needs(before))
            self.require(free, f"the gradient {key_of(record)} takes the place of {key_of(before)}")

    def at_end(self) -> None:
        gradients = self.scheduler.gradients
        if self.facts.open and self.plan.ranks_fetch_alike:
            return  # another rank has a gradient for a step that this one does not take any more
        self.require(gradients.pages.in_use == 0, "a gradient that nobody needs has a buffer")
        free = {*map(len, gradients._own_buffers)}
        self.require(free == {self.plan.own_buffers}, "a gradient that nobody needs has a buffer")


class ReadAhead(Observer):
    """States are read ahead only where an update will find them unchanged."""

    def start(self) -> None:
        self.at_rest = False
        """Whether compute has used nothing since the last drain."""
        self.ahead: dict[int, tuple[int, int, int]] = {}
        """Updater -> (unit, version, edition) of what it has read."""

    def access(self, *_: Any, **__: Any) -> None:
        self.at_rest = False

    def drain(self, draining: bool, show: bool = True) -> None:
        if draining:
            self.at_rest = True
            self.ahead.clear()

    def restored(self, *_: Any) -> None:
        self.ahead.clear()  # what was read has been dropped: nothing may be under way while states are replaced

    def on_readahead(self, op: ReadAheadOp) -> None:
        unit, facts = op.unit, self.facts
        self.require(not self.at_rest, "READ_AHEAD while the program may write states")
        self.require(self.units[unit].streamed, f"READ_AHEAD of unit {unit}, which has nothing to read")
        self.require(unit not in facts.writer, f"READ_AHEAD of unit {unit}, which is being changed")
        self.require(facts.due[unit] <= facts.newest[unit], f"READ_AHEAD of unit {unit}, whose update is queued")
        guess = self.scheduler.weights(unit).speculative
        undoable = guess is not None and guess.has_written
        self.require(not undoable, f"READ_AHEAD of unit {unit}, whose update may be undone")
        self.ahead[self.units[unit].updater] = unit, facts.newest[unit], facts.edition[unit]

    def on_update(self, op: Update) -> None:
        unit = op.unit
        ahead = self.ahead.pop(self.units[unit].updater, None)
        now = op.version - 1, self.facts.edition[unit]
        stale = ahead is not None and ahead[0] == unit and ahead[1:] != now
        self.require(not stale, f"UPDATE of unit {unit} from states that were read ahead too early")


class Expectations(Observer):
    """A step that was like the one before is what the next ones are expected to be; another one is not."""

    def start(self) -> None:
        self.accesses: list[Access] = []
        """What this step has used, without experts."""
        self.used_any = False
        self.before: list[Access] | None = None
        """The same of the step before."""
        self.routed = {unit for unit, of in enumerate(self.units) if of.routed}

    def access(self, access: Access, recorded: bool = True) -> None:
        self.used_any |= recorded
        if recorded and access.unit not in self.routed and self.accesses[-1:] != [access]:
            self.accesses.append(access)

    def end_step(self, *_: Any, **__: Any) -> None:
        self.expected, self.assumed = self._trace(), self.scheduler.trace.assumed

    def after_end_step(self, *_: Any, **__: Any) -> None:
        if self.used_any:
            if self.assumed or self.accesses == self.before:
                self.require(self._trace() == self.accesses, "two steps were alike, but the trace is another")
            elif not self.routed:
                self.require(self._trace() == self.expected, "the trace is another, but no two steps were alike")
            self.before = self.accesses
        self.accesses, self.used_any = [], False

    def _trace(self) -> list[Access]:
        trace: list[Access] = []
        for access in self.scheduler.trace.accesses[:-1]:
            if access.unit not in self.routed and trace[-1:] != [access]:
                trace.append(access)
        return trace


class Agreement(Observer):
    """Where ranks must fetch alike, only what all of them see at the same point of their programs starts a fetch. So
    all ranks fetch the same."""

    ALONE: ClassVar = frozenset(
        (
            *("issued", "ended", "failed", "refused", "cannot_go_on", "gradient_used", "weights_written"),
            *("reduce", "others_read"),
        )
    )
    """Events that a rank has by itself."""

    def on_fetch(self, op: Fetch) -> None:
        alone = self.scheduler.event in self.ALONE
        if self.plan.ranks_fetch_alike:
            self.require(not alone, f"{self.scheduler.event} starts a fetch, which other ranks have elsewhere")
            self._compare((op.unit, op.lease.run, op.lease.version))

    def _compare(self, fetch: tuple[Any, ...]) -> None:
        if self.scheduler.apart:
            return
        fetches, place = self.scheduler.fetches_of_ranks, self.scheduler.fetched
        self.scheduler.fetched += 1
        if place == len(fetches):
            fetches.append(fetch)
        self.require(fetches[place] == fetch, f"one rank fetches {fetches[place]}, another {fetch}")


OBSERVERS: tuple[type[Observer], ...] = (Frames, Versions, Buffers, ReadAhead, Expectations, Agreement)


def span(run: PageRun | None) -> range:
    return range(0) if run is None else range(run.start, run.stop)
