"""Mutants of the scheduler: each breaks one rule, and random worlds must notice.

python -m tests.schedule.mutants              # the table: mutant, worlds until it was noticed, what they said
"""

import inspect
import sys
import time
from dataclasses import dataclass
from types import ModuleType

from pagoda.schedule import gradients, leases, scheduler, updates

from . import worlds


@dataclass(frozen=True)
class Mutant:
    """One change of the source."""

    breaks: str
    module: ModuleType
    old: str
    new: str


MUTANTS = (
    Mutant("a unit in use may be evicted", leases, "or self.users[lease.unit] or useful", "or useful"),
    Mutant(
        "a fetch under way may be evicted",
        leases,
        "lease.state is not State.READY or self.users[lease",
        "self.users[lease",
    ),
    Mutant(
        "frames that something refers to are free",
        leases,
        "        if freed:\n            self._free(lease)",
        "        self._free(lease)",
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
    Mutant("what compute waits for is not fetched first", leases, "for wanted in [*self._wanted]", "for wanted in ()"),
    Mutant(
        "a fetch that ends is ready, though the weights have changed",
        leases,
        "if lease.state is State.FILLING and not failed",
        "if True",
    ),
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
        "return self.arriving > 0 or self.transfer",
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
    Mutant("a buffer is never spilled to make room", gradients, "if self._idle and not self._busy:", "if False:"),
    Mutant("gradients arrive in a buffer that an update reads", gradients, "or (record.in_use and record.made)", ""),
    Mutant(
        "a dropped gradient keeps its buffer",
        gradients,
        "        if record.dropped and not record.busy:\n            self._free(record)",
        "        pass",
    ),
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
        "an update does not wait for who reads the weights",
        updates,
        "            if self._in_use(unit):\n                return\n",
        "",
    ),
    Mutant(
        "an update does not ask who refers to the weights",
        updates,
        "if not of_unit.lease_frames and not update.unreferenced",
        "if False",
    ),
    Mutant(
        "an update does not wait for the checkpoint",
        updates,
        "for_checkpoint = weights.newest == weights.to_save and not weights.kept_for_checkpoint",
        "for_checkpoint = False",
    ),
    Mutant(
        "the reserve has no end",
        updates,
        "(for_checkpoint and weights.saving) or self._reserve < pages",
        "(for_checkpoint and weights.saving)",
    ),
    Mutant(
        "states that are being saved are overwritten",
        updates,
        "(for_checkpoint and weights.saving) or self._reserve < pages",
        "self._reserve < pages",
    ),
    Mutant("a checkpoint reads states of another step", updates, "or busy or not there:", "or busy:"),
    Mutant("a checkpoint reads what is being written", updates, "or busy or not there:", "or not there:"),
    Mutant(
        "what waits for the checkpoint is forgotten",
        updates,
        "weights.kept_for_checkpoint = None, False, False\n        self.retry(unit)",
        "weights.kept_for_checkpoint = None, False, False",
    ),
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
        "an update that stood is done again",
        scheduler,
        "elif not updates.stands(unit):",
        "elif not updates.stands(unit) or True:",
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
        "an update begins before its last gradient",
        scheduler,
        "if not (record.last and record.settled) or",
        "if not record.last or",
    ),
    Mutant(
        "a skipped step is applied",
        scheduler,
        "            if skipped:\n                gradients.drop(record)\n            elif not",
        "            if not",
    ),
    Mutant(
        "an update that has just begun to move is not waited for",
        updates,
        "weights.version = weights.newest\n            if self.readable",
        "weights.version = weights.due\n            if self.readable",
    ),
    Mutant("a second update of a unit is lost", updates, "        if weights.later:", "        if False:"),
    Mutant(
        "the norm is known before gradients have arrived",
        scheduler,
        "return self._gradients.unsettled == 0",
        "return True",
    ),
    Mutant(
        "compute reads before the fetch has ended",
        leases,
        "(lease is not None and lease.state is State.READY)",
        "(lease is not None)",
    ),
)


class _Patched:
    """The modules of the scheduler, one of them changed, apart from those that are imported."""

    def __init__(self, mutant: Mutant, source: str) -> None:
        names = [f"pagoda.schedule.{name}" for name in ("gradients", "leases", "updates", "scheduler")]
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


def noticed(mutant: Mutant, worlds_at_most: int) -> tuple[int, str] | None:
    """The first world that notices a mutant, and what it says."""
    source = inspect.getsource(mutant.module)
    assert source.count(mutant.old) == 1, f"{mutant.breaks}: the source has {source.count(mutant.old)} such places"
    make = _Patched(mutant, source).make
    for seed in range(worlds_at_most):
        found = worlds.run(seed, make)
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
