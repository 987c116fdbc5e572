"""Random worlds: a program that trains, on a make-believe machine that does what the scheduler says.

The program uses units, makes gradients, steps, evaluates, saves and loads, and is interrupted at any moment; it checks
that what it reads are the weights that the algorithm says. What is checked besides is in `memory.py`, `machine.py`
and `compute.py`.

    python -m tests.schedule.worlds 1000          # worlds with seeds 0 to 999
    python -m tests.schedule.worlds 1 4711        # that one, with its events and operations printed
"""

import random
import sys
import time
import traceback
from collections.abc import Callable, Collection
from typing import Any

from pagoda.plan.trace import Access
from pagoda.schedule.operations import SchedulePlan
from pagoda.schedule.scheduler import Scheduler

from .compute import Compute, HasFailedError, NoRoomError
from .memory import Home, Truth, ViolationError, require
from .rules import Rules


class World(Compute):
    """One run."""

    def __init__(
        self, seed: int, make: Callable[[SchedulePlan], Any] = Scheduler, log: bool = False, haste: int = 0
    ) -> None:
        """Worlds of one seed, but another `haste`, are the same program on machines whose lanes end otherwise."""
        rng = random.Random(seed)
        super().__init__(Rules.draw(rng), make, rng, random.Random(3 * seed + haste))
        self.log = [] if log else None
        self.recorded_before: list[Access] | None = None
        """The same of the step before."""
        self.trace = [*self.plan.trace.accesses[:-1]]
        self.turn = 0
        """Steps since the last drain."""

    # --- the step ---

    def a_step(self) -> None:
        rng = self.rng
        passes = [False] * (self.rules.accumulation - 1) + [True]
        if not self.plan.during_backward and rng.random() < 0.1:
            passes.append(True)  # more than were announced
        if rng.random() < self.rules.reorders:
            self.order = tuple(rng.sample(self.order, len(self.order)))
        if self.plan.ranks_fetch_alike and self.plan.spills and not self.plan.during_backward:
            trained = [unit for unit, of in enumerate(self.plan.units) if of.trained]
            self.theirs = [unit for unit in trained if rng.random() < self.rules.departures]
        if self.haste.random() < 0.5:
            self.take_part()
        whole = True
        for last in passes:
            whole = self.a_pass(last) and whole
        decided_late = not self.plan.during_backward
        if self.lost or (not whole and (decided_late or rng.random() < 0.5)):
            self.drop_gradients()
            return
        while self.take_part():
            pass
        self.until(self.settled, "the norm")
        if self.scheduler.versions.failed:
            raise HasFailedError
        infinite = any(step == self.steps and step in self.truths[unit].passes for unit, step in self.infinite)
        if self.lost or (infinite and rng.random() < 0.5):
            self.drop_gradients()
            return
        skipped = rng.random() < 0.1 or (infinite and (decided_late or rng.random() < 0.5))
        clipped = decided_late and rng.random() < self.rules.clips
        units = range(len(self.truths))
        changed = [unit for unit in units if decided_late and rng.random() < 0.1]
        self.note("step", self.steps, "skipped" * skipped, "clipped" * clipped, changed)
        self.decide(stand=self.begun() if skipped else units, otherwise=units if clipped else changed)
        self.turn_over()
        self.scheduler.end_step(clipped, skipped, changed)
        self.check_trace()
        self.collect()

    def begun(self) -> list[int]:
        """Units whose updates stand, whatever becomes of the step."""
        begun = sorted(self.begun_early)
        for unit in begun:
            early = self.plan.during_backward and self.steps in self.truths[unit].passes
            require(early, f"an update of unit {unit} stands, though nobody has asked for it")
        return begun

    def decide(self, stand: Collection[int], otherwise: Collection[int] = ()) -> None:
        """The step is over: of units that do not `stand`, it has changed nothing."""
        for unit, truth in enumerate(self.truths):
            if self.steps in truth.passes and unit in stand:
                truth.asked += 1
                truth.rules[self.steps] = "otherwise" if unit in otherwise else "as guessed"
                self.updated[self.steps].add(unit)
                continue
            truth.passes.pop(self.steps, None)
            for buffers in (self.gradients, self.on_ssd, self.queued):
                buffers.pop((unit, self.steps), None)
        self.begun_early.clear()
        self.steps += 1
        self.lost, self.dropped = False, frozenset()

    def turn_over(self) -> None:
        """A step is over: what the next one reads."""
        most, self.turn = self.plan.max_staleness, self.turn + 1
        for unit, truth in enumerate(self.truths):
            if most:
                truth.shown = truth.closed
            if not most or (self.turn + unit) % most == 0:
                truth.closed = truth.asked
            if not most:
                truth.shown = truth.asked

    def drop_gradients(self) -> None:
        self.note("drop gradients")
        self.theirs.clear()
        begun = self.begun()
        self.dropped = frozenset(range(len(self.truths))) - {*begun}
        self.scheduler.drop_gradients()
        self.wait(self.settled, "gradients to arrive")
        self.decide(stand=begun)
        if self.plan.max_staleness is None:
            for truth in self.truths:
                truth.shown = truth.asked

    def check_trace(self) -> None:
        """A step that was like the one before is what the next ones are expected to be; another is not."""
        if self.used_any:
            trace: list[Access] = []
            for access in self.scheduler.order.trace.accesses[:-1]:
                if not self.plan.units[access.unit].routed and trace[-1:] != [access]:
                    trace.append(access)
            if self.recorded == self.recorded_before:
                require(trace == self.recorded, "two steps were alike, but the trace is another")
            elif not self.rules.experts:
                require(trace == self.trace, "the trace is another, but no two steps were alike")
            self.recorded_before, self.trace = self.recorded, trace
        self.recorded, self.used_any = [], False

    # --- between steps ---

    def drain(self, afterwards: Callable[[], None] = lambda: None) -> None:
        self.note("drain")
        self.collect()
        self.at_rest, self.turn = True, 0
        self.ahead.clear()
        for truth in self.truths:
            truth.closed = truth.asked
            truth.shown = truth.shown if self.used_any and self.plan.max_staleness is not None else truth.asked
        self.scheduler.drain(True)
        try:
            self.until(lambda: self.scheduler.updates.drained, "updates to end")
            begun = self.begun()
            for unit, truth in enumerate(self.truths):
                asked, newest = truth.asked + (unit in begun), self.homes[unit].newest
                require(newest == asked, f"unit {unit} is drained to version {newest}, not {asked}")
        finally:
            self.scheduler.drain(False)
            self.collect()
        afterwards()

    def begin_checkpoint(self) -> None:
        if self.plan.max_staleness is not None:
            self.drain()
        self.scheduler.prepare_checkpoint()
        self.until(lambda: self.scheduler.updates.prepared, "undone updates")
        if self.rng.random() < 0.1:
            return
        self.checkpoint = {unit: truth.asked for unit, truth in enumerate(self.truths)}
        self.checkpoint.update({unit: self.truths[unit].asked + 1 for unit in self.begun()})
        self.saved = {}
        self.in_place = {unit for unit in self.checkpoint if self.rng.random() < 0.2}
        self.note("checkpoint", self.checkpoint, "in place", self.in_place)
        self.scheduler.begin_checkpoint(sorted(self.in_place))
        self.collect()

    def end_checkpoint(self) -> None:
        self.until(lambda: not self.scheduler.checkpoint.left, "the checkpoint")
        if self.checkpoint is not None:
            require(self.saved == self.checkpoint, f"the checkpoint has {self.saved}, not {self.checkpoint}")
            self.scheduler.end_checkpoint()
        self.checkpoint = None

    def published(self) -> None:
        """Nothing to wait for: a drain shows what it has applied, unless a step has begun."""
        for unit, home in enumerate(self.homes):
            require(home.weights == self.truths[unit].shown, f"unit {unit} is drained, and shows {home.weights}")

    def overwrite(self) -> None:
        """The program writes weights in their home."""
        self.published()
        unit = self.rng.randrange(len(self.homes))
        self.note("overwritten", unit)
        self.homes[unit].edition += 1
        self.scheduler.overwritten(unit)
        self.collect()

    def load(self) -> None:
        """Every state is replaced. Versions begin at 0 again."""
        self.wait(lambda: self.scheduler.idle and not self.lent, "operations to end")
        self.note("restored")
        for unit, home in enumerate(self.homes):
            readers = home.readers.total() + home.state_readers
            require(not readers, f"somebody reads unit {unit}, though nothing is under way")
            self.homes[unit] = Home(front=home.front, extent=home.extent, edition=home.edition + 1)
            self.truths[unit] = Truth()
        self.gradients.clear()
        self.on_ssd.clear()
        self.ahead.clear()
        self.scheduler.restored()
        require(
            not self.scheduler.checkpoint.left and not self.scheduler.versions.failed,
            "what has failed stays so",
        )
        self.collect()

    def recover(self) -> None:
        """After an update has failed: the step is dropped, and all states are loaded."""
        self.note("recover")
        self.dropped = frozenset(range(len(self.truths)))
        self.scheduler.drop_gradients()
        self.collect()
        self.wait(lambda: self.scheduler.idle, "operations to end")
        self.queued.clear()
        self.begun_early.clear()
        self.steps, self.lost, self.dropped = self.scheduler.steps, False, frozenset()
        self.checkpoint, self.saved = None, {}
        self.reserve = [None] * len(self.reserve)
        self.load()

    # --- the whole ---

    def run(self) -> None:
        for what in (*[self.a_round] * self.rules.steps, self.finish):
            while True:
                try:
                    what()
                except HasFailedError:
                    self.recover()
                except NoRoomError:
                    self.drop_gradients()
                else:
                    break
                if what == self.a_round:
                    break
        for unit, truth in enumerate(self.truths):
            steps = sorted(truth.passes)
            require(truth.applied == steps, f"unit {unit} has the gradients of {truth.applied}, not {steps}")
            for step in steps:
                require(truth.used_rules[step] == truth.rules.get(step), f"unit {unit}, step {step}: another update")
            home = self.homes[unit]
            require(home.states == home.newest == len(steps), f"unit {unit}: {home}")
        self.check_nothing_is_taken()

    def a_round(self) -> None:
        old, self.held_over = self.held_over, []
        try:
            self.a_step()
        finally:
            for let_go in old:
                let_go()
        if self.rng.random() < 0.2 and self.checkpoint is None:
            self.begin_checkpoint()
        if self.rng.random() < 0.5:
            self.end_checkpoint()
        roll = self.rng.random()
        if roll < 0.2:
            self.drain(self.published)
        elif roll < 0.3:
            self.end_checkpoint()
            self.drain(self.overwrite if roll < 0.25 else self.load)

    def finish(self) -> None:
        self.drain()
        for let_go in self.held_over:
            let_go()
        self.held_over = []
        self.end_checkpoint()
        while self.advance():
            pass
        if self.scheduler.versions.failed:
            raise HasFailedError


def compare(one: World, other: World) -> None:
    """Ranks do alike what must be done alike, however fast their lanes are."""
    for mine, theirs in zip(one.fetched, other.fetched, strict=False):
        require(mine == theirs, f"one rank fetches {mine}, another {theirs}")
    require(len(one.fetched) == len(other.fetched), "one rank fetches more than another")
    require(one.updated == other.updated, "ranks update different units")


def run(seed: int, make: Callable[[SchedulePlan], Any] = Scheduler, log: bool = False) -> str | None:
    """Run a world; what went wrong in it, if anything."""
    world = World(seed, make, log)
    try:
        world.run()
        if world.plan.ranks_fetch_alike:
            other = World(seed, make, haste=1)
            other.run()
            compare(world, other)
    except ViolationError as error:
        wrong = f"seed {seed}: {error}"
    except (AssertionError, LookupError, ValueError) as error:
        wrong = f"seed {seed}: {error!r}"  # the scheduler has contradicted itself
        if log:
            traceback.print_exc()
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
