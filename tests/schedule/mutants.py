"""Mutants of the scheduler: each breaks one rule, and random worlds must notice.

python -m tests.schedule.mutants              # the table: mutant, worlds until it was noticed, what they said
"""

import inspect
import signal
import sys
import time
from dataclasses import dataclass
from types import ModuleType

from pagoda.schedule import checkpoints, gradients, leases, order, scheduler, updates

from . import worlds

WORLD_S = 20
"""A world takes a few milliseconds: one that takes this long runs for ever."""
MODULES = ("experts", "order", "frames", "gradients", "versions", "checkpoints", "leases", "updates", "scheduler")
"""Each imports only those before it."""


@dataclass(frozen=True)
class Mutant:
    """One change of the source."""

    breaks: str
    module: ModuleType
    old: str
    new: str


MUTANTS = (
    # leases
    Mutant(
        "frames that something refers to are free",
        leases,
        "        if freed:\n            self._free(lease)",
        "        self._free(lease)",
    ),
    Mutant(
        "frames are free before they are filled",
        leases,
        "        if lease.filled or self._plan.agreed:\n            self._reclaim(lease)",
        "        self._reclaim(lease)",
    ),
    Mutant(
        "a fetch ahead of its update names none",
        updates,
        "if not self._plan.agreed or weights.version == weights.due",
        "if True or weights.version == weights.due",
    ),
    Mutant(
        "a lease stays when the weights change",
        leases,
        "        if lease is not None:\n            self._end(lease)",
        "        return",
    ),
    Mutant(
        "a fetch does not wait for the update",
        leases,
        "        if version is None:\n            return True",
        "        version = version or 0",
    ),
    Mutant("a unit in use may be evicted", leases, "settled and not self.users[lease.unit] and", "settled and"),
    Mutant("a fetch under way may be evicted", leases, "settled = lease.state is State.READY or", "settled = True or"),
    Mutant("what compute waits for is not fetched first", leases, "for wanted in [*self._wanted]", "for wanted in ()"),
    Mutant(
        "a fetch that ends is ready, though the weights have changed",
        leases,
        "if lease.state is State.FILLING:\n            lease.state",
        "if True:\n            lease.state",
    ),
    Mutant("a fetch that fails is ready", leases, "if failed and lease.state is not State.ENDED", "if False"),
    Mutant(
        "compute reads before the fetch is issued",
        leases,
        "(lease is not None and lease.state is State.READY)",
        "(lease is not None)",
    ),
    Mutant(
        "weights are read no more once they are issued",
        leases,
        "        lease.filled = True\n        if lease.state",
        "        lease.filled = True\n        self._fetching[lease.unit] = []\n        if lease.state",
    ),
    # leases that ranks agree on
    Mutant(
        "an update waits for a fetch that waits for it",
        leases,
        "return version in self._fetching[unit]",
        "return bool(self._fetching[unit])",
    ),
    Mutant(
        "ranks prefetch by how many fetches are under way",
        leases,
        "while self._plan.agreed or self._filling <",
        "while self._filling <",
    ),
    Mutant(
        "ranks fetch when their own update has ended",
        scheduler,
        "weights[unit].due if self.plan.agreed else",
        "weights[unit].due if False else",
    ),
    Mutant(
        "the end of an update lists a unit on a rank alone",
        scheduler,
        "        if not self.plan.agreed:  # else",
        "        if True:  # else",
    ),
    Mutant(
        "what makes room depends on when a rank issues",
        leases,
        "            if not self._plan.agreed:\n                self._note_idle",
        "            if True:\n                self._note_idle",
    ),
    Mutant(
        "a lease that is being filled makes no room on a rank",
        leases,
        "(self._plan.agreed and lease.state is State.FILLING)",
        "False",
    ),
    Mutant(
        "whether an update is early depends on a rank's fetches",
        scheduler,
        "freed and not self._used(operation.unit)",
        "freed and not self._in_use(operation.unit)",
    ),
    # gradients
    Mutant(
        "a gradient buffer is taken while it moves",
        gradients,
        "return self.arriving > 0 or self.transferring or self.in_use",
        "return self.in_use",
    ),
    Mutant(
        "a gradient buffer is taken while an update reads it",
        gradients,
        "return self.arriving > 0 or self.transferring or self.in_use",
        "return self.arriving > 0 or self.transferring",
    ),
    Mutant(
        "what SSD holds counts though more has arrived",
        gradients,
        "record.clean = record.clean and not record.made",
        "pass",
    ),
    Mutant("a spill that failed counts", gradients, "record.clean = record.clean and not failed", "pass"),
    Mutant(
        "an update does not wait for its gradient to be read back",
        gradients,
        "return not (lacking or record.transferring)",
        "return True",
    ),
    Mutant(
        "a dirty buffer is given away",
        gradients,
        "            if record.clean:\n                self._free(record)",
        "            if True:\n                self._free(record)",
    ),
    Mutant("a buffer is never spilled to make room", gradients, "if self._idle and not self._busy and", "if False and"),
    Mutant("gradients are spilled where they cannot be", gradients, "is not None and self._plan.spills", "is not None"),
    Mutant("gradients arrive in a buffer that an update reads", gradients, "or (record.in_use and record.made)", ""),
    Mutant(
        "a dropped gradient keeps its buffer",
        gradients,
        "        if record.dropped and not record.busy:\n            self._free(record)",
        "        pass",
    ),
    Mutant("a gradient's home has no end", gradients, "homes.pop(0) if homes else None", "homes[0] if homes else 0"),
    Mutant("two gradients share a home", gradients, "record.home = homes.pop(0)", "record.home = homes[0]"),
    Mutant(
        "a gradient's home is not given back",
        gradients,
        "            insort(self._homes",
        "            0 and insort(self._homes",
    ),
    Mutant(
        "the norm is known before gradients have arrived",
        scheduler,
        "return self._gradients.unsettled == 0",
        "return True",
    ),
    # updates
    Mutant(
        "weights are read while their update is due",
        updates,
        "if unit in self._speculative or weights.version != weights.due:",
        "if unit in self._speculative:",
    ),
    Mutant(
        "speculative weights are read",
        updates,
        "if unit in self._speculative or weights.version != weights.due:",
        "if weights.version != weights.due:",
    ),
    Mutant(
        "weights are older than the bound",
        updates,
        "weights.due - self._plan.max_staleness else None",
        "weights.due - self._plan.max_staleness - 1 else None",
    ),
    Mutant(
        "a step reads two versions",
        updates,
        "weights.newest == weights.version or weights.read or",
        "weights.newest == weights.version or",
    ),
    Mutant(
        "weights are exchanged while they are used", updates, " or updating or self._in_use(unit):", " or updating:"
    ),
    Mutant(
        "weights are read while they are exchanged", updates, "if self.failed or weights.publishing:", "if self.failed:"
    ),
    Mutant(
        "a dropped step has read the weights for ever",
        updates,
        "        self.undo_all()\n        self._step_over()",
        "        self.undo_all()\n        self._early.clear()",
    ),
    Mutant(
        "an update does not wait for who reads the weights",
        updates,
        "        elif self._in_use(unit):\n            return\n",
        "",
    ),
    Mutant(
        "an early update does not wait until nothing refers to the weights",
        updates,
        "        if not free:\n            return\n",
        "",
    ),
    Mutant(
        "what is due early is not said",
        updates,
        "            self._early.add(asked.unit)\n",
        "",
    ),
    Mutant(
        "what was due early is said of the step after one that was dropped",
        updates,
        "        self.undo_all()\n        self._step_over()",
        "        self.undo_all()",
    ),
    Mutant(
        "an update that stood is done again",
        scheduler,
        "elif not updates.stands(unit):",
        "elif not updates.stands(unit) or True:",
    ),
    Mutant(
        "an update begins before its gradients have arrived",
        updates,
        "        if not all(record.arrived for record in update.records):\n            return\n",
        "",
    ),
    Mutant(
        "a skipped step is applied",
        scheduler,
        "                gradients.drop(record)\n            elif not",
        "                updates.queue(record)\n            elif not",
    ),
    Mutant(
        "an update that has just begun to move is not waited for",
        updates,
        "weights.version = weights.newest\n            if self.readable",
        "weights.version = weights.due\n            if self.readable",
    ),
    Mutant("a second update of a unit is lost", updates, "        if weights.later:", "        if False:"),
    Mutant(
        "more updates than two are under way",
        updates,
        "while self._admitted[updater] < MOST_ADMITTED and",
        "while",
    ),
    Mutant("updaters wait for each other", updates, "while self._admitted[updater] <", "while sum(self._admitted) <"),
    # updates that may be undone
    Mutant(
        "a speculative update stands though gradients are clipped",
        scheduler,
        "        if clipped or skipped:\n            updates.undo_all()",
        "",
    ),
    Mutant(
        "a speculative update stands though it was another",
        scheduler,
        "        for unit in changed:\n            updates.undo(unit)",
        "",
    ),
    Mutant(
        "an access does not undo",
        scheduler,
        "        self._updates.undo(unit)\n        self._leases.access(unit)",
        "        self._leases.access(unit)",
    ),
    Mutant(
        "a gradient does not undo",
        scheduler,
        "        self._updates.undo(unit)\n        self._gradients.add",
        "        self._gradients.add",
    ),
    Mutant(
        "the gradient of an undone update is lost",
        updates,
        "self._gradients.used(record, last=not update.speculative)",
        "self._gradients.used(record, last=True)",
    ),
    Mutant(
        "drained updates may still be undone",
        updates,
        "            self.undo_all()\n            for unit",
        "            for unit",
    ),
    # updates that fail, or are refused
    Mutant(
        "a speculative update that failed is not undone",
        updates,
        "update.withdrawn, self._calm = True, 0",
        "self._calm = 0",
    ),
    Mutant(
        "a failed update that stands is undone",
        updates,
        "        if not update.speculative:\n            self.failed = True\n            return\n        self.times",
        "        self.times",
    ),
    Mutant(
        "training goes on after a failed update",
        updates,
        "            self.failed = True\n            return\n        self.times",
        "            return\n        self.times",
    ),
    Mutant(
        "a failed update keeps its gradients for ever",
        updates,
        "self._gradients.used(record, last=True)",
        "self._gradients.drop(record)",
    ),
    Mutant(
        "what has failed stays so",
        updates,
        "self.pending, self.failed, self._ahead = [0, 0], 0, False, -1",
        "self.pending, self._ahead = [0, 0], 0, -1",
    ),
    Mutant(
        "updates that had been admitted stay so",
        updates,
        "self._admitted, self.pending, self.failed, self._ahead = [0, 0], 0,",
        "self.pending, self.failed, self._ahead = 0,",
    ),
    Mutant(
        "old leases outlive what has been restored",
        scheduler,
        "            self._weights_changed(unit)\n            self._weights_readable(unit)\n",
        "            pass\n",
    ),
    Mutant(
        "old leases outlive what has been overwritten",
        scheduler,
        "        self._weights_changed(unit)\n        self._weights_readable(unit)\n        self._pump()",
        "        self._pump()",
    ),
    Mutant("a refused gradient counts as applied", updates, "        weights.due -= len(update.records)\n", ""),
    Mutant(
        "an update that was refused stands",
        updates,
        "            self._calm = 0\n            self._over(update)\n            return",
        "            self._calm = 0\n            self._finish(weights)\n            return",
    ),
    Mutant(
        "an update that was refused stays admitted",
        updates,
        "        self._release(update)\n        self.gradient_used(unit)",
        "        self.gradient_used(unit)",
    ),
    Mutant("a lost gradient is applied", updates, "if any(record.lost for record in update.records):", "if False:"),
    # reading ahead
    Mutant(
        "a unit whose update is queued is read ahead",
        updates,
        "self.weights[unit].update is None and unit not",
        "unit not",
    ),
    Mutant(
        "what may be undone is read ahead",
        updates,
        "update is None and unit not in self._speculative:",
        "update is None:",
    ),
    Mutant(
        "states are read ahead while updates are drained",
        updates,
        "or self._asynchronous or self.draining or self.failed:",
        "or self._asynchronous or self.failed:",
    ),
    Mutant(
        "states are read ahead for the other updater",
        updates,
        "        if not self._plan.units[unit].updater:\n            self._after",
        "        if True:\n            self._after",
    ),
    # checkpoints
    Mutant(
        "an update does not wait for the checkpoint",
        checkpoints,
        "return of_unit.version == version and of_unit.kept is None",
        "return False",
    ),
    Mutant(
        "two units keep their states in one place",
        checkpoints,
        "of_unit.kept = self.reserve.alloc(pages)",
        "of_unit.kept = Run(0, pages)",
    ),
    Mutant(
        "states that are being saved are overwritten",
        checkpoints,
        "if unit in self._in_place or self._units[unit].reading:",
        "if unit in self._in_place:",
    ),
    Mutant(
        "states that cannot be kept are",
        checkpoints,
        "if unit in self._in_place or self._units[unit].reading:",
        "if self._units[unit].reading:",
    ),
    Mutant(
        "a checkpoint reads states of another step",
        checkpoints,
        "is not None else self._settled(unit) == of_unit.version",
        "is not None else self._settled(unit) is not None",
    ),
    Mutant(
        "what was kept is read once its update has ended",
        checkpoints,
        "return of_unit.copied if of_unit.kept is not None else",
        "return of_unit.copied and self._settled(unit) is not None if of_unit.kept is not None else",
    ),
    Mutant("what is to be kept is read before it is", checkpoints, "return of_unit.copied if", "return True if"),
    Mutant(
        "updates overtake those that a checkpoint lacks",
        checkpoints,
        "return bool(self._behind) and unit not in self._behind",
        "return False",
    ),
    Mutant(
        "updates that were held back stay so",
        updates,
        "            for other in range(len(self.weights)):\n                self.retry(other)\n",
        "            pass\n",
    ),
    Mutant("a checkpoint reads what is being written", updates, "return None if busy else", "return"),
    Mutant("a save is forgotten while an update runs", updates, "        self.checkpoint.retry(unit)\n", ""),
    Mutant(
        "what waits for the checkpoint is forgotten",
        updates,
        "        self.checkpoint.ended(unit)\n        self.retry(unit)\n        self.gradient_there(unit)",
        "        self.checkpoint.ended(unit)",
    ),
    Mutant(
        "what the reserve has kept stays there",
        checkpoints,
        "        if kept is not None and kept.count:\n",
        "        if False:\n",
    ),
    Mutant(
        "a guess takes the room of a checkpoint",
        updates,
        "stopped = self.checkpoint.under_way or self.draining",
        "stopped = self.draining",
    ),
    Mutant(
        "a checkpoint waits for an update that was refused",
        checkpoints,
        "if wanted is not None and wanted > version:",
        "if False:",
    ),
    Mutant(
        "the checkpoint outlives a restore",
        updates,
        "        self.checkpoint = Checkpoint(self._plan,",
        "        Checkpoint(self._plan,",
    ),
    # order
    Mutant(
        "an evaluation is expected of every step",
        order,
        "        if recorded:\n            self._recorder",
        "        if True:\n            self._recorder",
    ),
    Mutant(
        "steps that have become others are not followed",
        order,
        "        if replaced:\n            self._follow",
        "        if False:\n            self._follow",
    ),
    Mutant("a step that departs once is followed", order, "(not known and (persists or", "(not known and (True or"),
)


class _Patched:
    """The modules of the scheduler, one of them changed, apart from those that are imported."""

    def __init__(self, mutant: Mutant, source: str) -> None:
        names = [f"pagoda.schedule.{name}" for name in MODULES]
        before = {name: sys.modules.pop(name) for name in names}
        package = sys.modules["pagoda.schedule"]
        try:
            for name in names:
                module = ModuleType(name)
                sys.modules[name] = module
                text = inspect.getsource(before[name])
                if before[name] is mutant.module:
                    text = source.replace(mutant.old, mutant.new)
                exec(compile(text, f"<{name}>", "exec"), module.__dict__)
            self.make = sys.modules["pagoda.schedule.scheduler"].__dict__["Scheduler"]
        finally:
            sys.modules.update(before)
            for name, module in before.items():
                setattr(package, name.rpartition(".")[-1], module)


def _run_for_ever(*_: object) -> None:
    raise TimeoutError(f"a world takes more than {WORLD_S} s")


def noticed(mutant: Mutant, worlds_at_most: int) -> tuple[int, str] | None:
    """The first world that notices a mutant, and what it says."""
    source = inspect.getsource(mutant.module)
    assert source.count(mutant.old) == 1, f"{mutant.breaks}: the source has {source.count(mutant.old)} such places"
    make = _Patched(mutant, source).make
    signal.signal(signal.SIGALRM, _run_for_ever)
    for seed in range(worlds_at_most):
        signal.alarm(WORLD_S)
        try:
            found = worlds.run(seed, make)
        except TimeoutError as error:
            found = f"seed {seed}: {error}"
        finally:
            signal.alarm(0)
        if found is not None:
            return seed + 1, found.partition(": ")[2]
    return None


if __name__ == "__main__":
    survivors = 0
    for mutant in MUTANTS:
        started = time.perf_counter()
        found = noticed(mutant, 3000)
        survivors += found is None
        count, words = found or (3000, "SURVIVED")
        print(f"{mutant.breaks:62} {count:5} worlds  {time.perf_counter() - started:5.1f} s  {words}", flush=True)
    print(f"{len(MUTANTS)} mutants, {survivors} survived")
