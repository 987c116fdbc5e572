"""Compute in a random world: it uses units and makes gradients, and checks what it reads."""

import random
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from pagoda.plan.trace import Access, Phase
from pagoda.schedule.operations import Operation, SchedulePlan

from .machine import Machine
from .memory import ViolationError, require
from .rules import Rules

_LONG = 2000
"""Operations after which compute must have what it waits for."""
Found = tuple[int, Operation | None]
"""The version that compute has found, and the FETCH that brought it."""


class StoppedError(Exception):
    """The program gets an error in place of what it waits for."""


class HasFailedError(StoppedError):
    """An update has failed: the program cannot go on before all states are replaced."""


class NoRoomError(StoppedError):
    """A gradient could not be written to SSD, and nothing else makes room: the program drops the step."""


class Compute(Machine):
    """Forward and backward passes. What the program is otherwise, `begin_checkpoint` and `drain` included, is in
    `worlds.py`."""

    def __init__(self, rules: Rules, make: Callable[[SchedulePlan], Any], rng: random.Random, haste: random.Random):
        super().__init__(rules, make, rng, haste)
        self.order = rules.order
        self.made = 0
        """Passes so far."""
        self.held_over: list[Callable[[], None]] = []
        """References of graphs that outlive their step."""
        self.recorded: list[Access] = []
        """What this step has used, without experts."""
        self.used_any = False

    # --- waiting ---

    def wait(self, ready: Callable[[], bool], what: str) -> None:
        """Until something is so, whether or not an update has failed."""
        for _ in range(_LONG):
            if ready():
                return
            if not (self.advance() or self.let_go_of_something()):
                require(
                    self.spill_failed and self.scheduler.idle, f"compute waits for {what}, and nothing is under way"
                )
                self.spill_failed = False
                raise NoRoomError
        raise ViolationError(f"compute waits for {what} for ever")

    def until(self, ready: Callable[[], bool], what: str) -> None:
        while self.haste.random() < 0.5 and (self.advance() or self.let_go_of_something()):
            pass
        self.collect()
        self.wait(lambda: ready() or self.scheduler.versions.failed, what)
        if not ready():
            raise HasFailedError

    # --- using units ---

    def use(self, access: Access, recorded: bool = True) -> Found:
        """Access a unit, and check what compute finds there."""
        unit = access.unit
        self.note("access", access, "" if recorded else "not recorded")
        self.record(access, recorded)
        self.at_rest = False
        self.scheduler.access(access, recorded)
        self.collect()
        if self.rules.updaters_apart and self.checkpoint is None:
            self.stalled = f"updater {1 - self.plan.units[unit].updater}"
        try:
            self.until(lambda: self.scheduler.ready(unit), f"unit {unit}")
        except StoppedError:
            self.scheduler.release(unit)
            raise
        finally:
            self.stalled = None
        home, truth = self.homes[unit], self.truths[unit]
        version, fetch = home.weights, None
        if not self.plan.units[unit].lease_frames:
            home.readers[home.front] += 1
            self.holds[unit] += 1
        else:
            fetch = next((op for op in self.leases.values() if op.unit == unit and self.is_current(op)), None)
            require(fetch is not None, f"unit {unit} has no lease")
            version = fetch.version
            contents = {self.frames[frame] for frame in self.span(fetch)}
            require(contents == {(unit, version, home.edition)}, f"the lease of unit {unit} holds {contents}")
            self.references[fetch] += 1
            self.used_now[fetch] += 1
        require(version == truth.shown, f"unit {unit} is read at version {version}, not {truth.shown}")
        require(truth.asked - version <= (self.plan.max_staleness or 0), f"unit {unit} is read at {version}: too old")
        return version, fetch

    def record(self, access: Access, recorded: bool) -> None:
        self.used_any = self.used_any or recorded
        if recorded and not self.plan.units[access.unit].routed and self.recorded[-1:] != [access]:
            self.recorded.append(access)

    def release(self, unit: int, found: Found) -> None:
        self.check_intact(unit, found)
        if found[1] is None:
            self.homes[unit].readers[self.homes[unit].front] -= 1
        else:
            self.used_now[found[1]] -= 1
        self.drop_reference(unit, found)
        self.note("release", unit)
        self.scheduler.release(unit)
        self.collect()

    @contextmanager
    def using(self, access: Access, recorded: bool = True) -> Iterator[Found]:
        found = self.use(access, recorded)
        try:
            yield found
        finally:
            self.release(access.unit, found)

    def check_intact(self, unit: int, found: Found) -> None:
        version, fetch = found
        if fetch is None:
            require(self.homes[unit].weights == version, f"unit {unit} was changed in use")
        else:
            contents = {self.frames[frame] and self.frames[frame][:2] for frame in self.span(fetch)}
            require(contents == {(unit, version)}, f"the lease of unit {unit} held {version} and now {contents}")

    def drop_reference(self, unit: int, found: Found) -> None:
        if found[1] is None:
            self.holds[unit] -= 1
        else:
            self.references[found[1]] -= 1
        self.dropped_a_reference()

    def hold(self, unit: int, found: Found) -> Callable[[], None]:
        """A graph refers to weights until what this returns is called."""
        if found[1] is None:
            self.holds[unit] += 1
        else:
            self.references[found[1]] += 1
        step = self.steps

        def let_go() -> None:
            if found[1] is not None or step == self.steps:  # weights in their home change with the step
                self.check_intact(unit, found)
            self.drop_reference(unit, found)

        return let_go

    # --- forward and backward ---

    def a_pass(self, last: bool) -> bool:
        """Forward and backward, which may run twice; False if an exception interrupts it."""
        held: list[Callable[[], None]] = []
        path: list[int] = []
        try:
            whole = self.forward(path, held) and self.backward(path, last)
            if whole and not self.plan.during_backward and self.rng.random() < 0.1:
                whole = self.backward(path, last)  # of a graph that was retained
        finally:
            for let_go in held:
                if self.rng.random() < 0.2:
                    self.held_over.append(let_go)
                else:
                    let_go()
        return whole

    def forward(self, path: list[int], held: list[Callable[[], None]]) -> bool:
        """Appends the units that it uses to `path`; False if an exception interrupts it."""
        self.made += 1
        for unit in self.order:
            if self.rng.random() < self.rules.departures / 2:
                continue
            self.use_forward(unit, path, held)
            experts = self.rules.experts.get(unit, ())
            if experts:
                chosen = experts if self.rules.steady else self.rng.sample(experts, self.rng.randint(0, len(experts)))
                self.note("expect", chosen)
                self.scheduler.expect(chosen)
                self.collect()
                for expert in chosen:
                    self.use_forward(expert, path, held)
            if self.rng.random() < self.rules.departures / 20:
                return False
        return self.pass_ended()

    def use_forward(self, unit: int, path: list[int], held: list[Callable[[], None]]) -> None:
        with self.using(Access(unit, Phase.FORWARD)) as found:
            path.append(unit)
            self.evaluate_now_and_then()
            if self.rules.holds and self.rng.random() < 0.5:
                held.append(self.hold(unit, found))

    def backward(self, path: list[int], last: bool) -> bool:
        self.made += 1
        for unit in reversed(path):
            trained = self.plan.units[unit].trained
            if trained and unit in self.rules.unread:
                self.gradient(unit, last)
                continue
            with self.using(Access(unit, Phase.BACKWARD)):
                if not self.plan.during_backward:
                    self.evaluate_now_and_then()
                if trained:
                    self.gradient(unit, last)
            if self.rng.random() < self.rules.departures / 20:
                return False
        return self.pass_ended()

    def pass_ended(self) -> bool:
        """Between two passes the program may save, or look at the weights."""
        roll = self.rng.random()
        if roll < 0.1 and self.checkpoint is None and not self.plan.during_backward:
            self.begin_checkpoint()
        elif roll > 0.95:
            self.drain()
        return True

    def evaluate_now_and_then(self) -> None:
        """Another unit is used meanwhile, which is rarely taken for a part of the step."""
        if self.rng.random() > self.rules.departures / 2:
            return
        unit = self.rng.randrange(len(self.plan.units))
        with self.using(Access(unit, Phase.FORWARD), recorded=self.rng.random() < 0.3):
            pass

    def gradient(self, unit: int, last: bool) -> None:
        key = unit, self.steps
        self.note("gradient", unit, "last" * last)
        if self.rng.random() < self.rules.infinite:
            self.infinite.add(key)
        parts = self.rng.choice([1, 1, 2])
        for part in range(parts):
            self.truths[unit].passes.setdefault(self.steps, Counter())[2 * self.made + part] += 1
            self.queued.setdefault(key, deque()).append(2 * self.made + part)
            self.scheduler.gradient(unit, complete=part == parts - 1, last=last)
            self.collect()
        self.until(lambda: not self.scheduler.gradients.held_back, f"a buffer for the gradient of {unit}")
