"""Mutants of the scheduler: each breaks one rule that random worlds meet. `tests/mutants.py` has the rarer ones."""

from types import ModuleType

from pagoda.schedule import checkpoints, gradients, leases, order, records, scheduler, staleness, updates, versions

CHANGES: dict[ModuleType, dict[str, tuple[str, str]]] = {
    leases: {
        "frames that something refers to are free": (
            "        if freed:\n            self.free(lease)",
            "        self.free(lease)",
        ),
        "frames are free before they are filled": (
            "        if lease.filled or self._plan.ranks_fetch_alike:\n            self._reclaim(lease)",
            "        self._reclaim(lease)",
        ),
        "a lease stays when the weights change": (
            "        if lease is not None and lease.run.count:\n            self._end(lease)",
            "        return",
        ),
        "what compute waits for is not fetched first": (
            "for unit in [*self._waiting]:\n            if self._may",
            "for unit in ():\n            if self._may",
        ),
        "a fetch that ends is ready, though the weights have changed": (
            "if lease.ended_by is not None:\n            self._reclaim",
            "if False:\n            self._reclaim",
        ),
        "a fetch that fails is ready": (
            "if failed and lease.ended_by is None",
            "if False",
        ),
        "compute reads before the fetch is issued": (
            "if lease is not None and lease.filled and",
            "if lease is not None and",
        ),
        "weights are read no more once they are issued": (
            "        lease.filled = True\n        if self",
            "        lease.filled = True\n        self._fetching[lease.unit] = []\n        if self",
        ),
        "an update waits for a fetch that waits for it": (
            "any(version <= self._versions.of[unit].newest for version in self._fetching[unit])",
            "bool(self._fetching[unit])",
        ),
        "ranks prefetch by how many fetches are under way": (
            "while self._plan.ranks_fetch_alike or self._filling <",
            "while self._filling <",
        ),
    },
    records: {
        "weights are read while their update is due": (
            "self.speculative is not None or self.newest < self.version or",
            "self.speculative is not None or",
        ),
    },
    versions: {
        "after a load, steps read the newest weights": (
            "lag = lags[unit] if lags else 0",
            "lag = 0",
        ),
        "a fetch ahead of its update names none": (
            "if not self._plan.ranks_fetch_alike or missing <= 0",
            "if True or missing <= 0",
        ),
        "a fetch does not wait for the update": (
            "if self._plan.ranks_fetch_alike else self.readable(unit)",
            "if True else self.readable(unit)",
        ),
        "ranks fetch when their own update has ended": (
            "self.of[unit].version if self._plan.ranks_fetch_alike else",
            "self.of[unit].version if False else",
        ),
        "what has failed stays so": (
            "        self.failed = False\n\n    # --- where",
            "\n    # --- where",
        ),
        "a checkpoint reads what is being written": (
            "return None if changes or",
            "return None if",
        ),
        "a guess writes over the old values": (
            "return update.speculative or self._is_needed",
            "return self._is_needed",
        ),
        "what a checkpoint needs is overwritten": (
            "        return self._pool(unit, state).is_shared(self.of[unit].runs[state])",
            "        return False",
        ),
        "an asynchronous update writes what is read": (
            "            self._pin(unit, 0, run)\n            self._retire(unit, 0, before)",
            "            self._retire(unit, 0, before)",
        ),
        "accesses go on to read the old weights": (
            "        self.show(unit)\n        for",
            "        for",
        ),
        "what was called off stays taken": (
            "            if run != self.of[update.unit].runs[state]:\n",
            "            if False:\n",
        ),
        "the old states go while the update reads them": (
            "readers = [each for each in self._readers[unit] if not",
            "readers = [each for each in () if not",
        ),
        "late weights are loaded over the newest": (
            "            if lags and lags[unit]:",
            "            if False:",
        ),
    },
    gradients: {
        "two gradients of a step begin for one unit": (
            "        if record is None:\n            record = self._records[unit]",
            "        if True:\n            record = self._records[unit]",
        ),
        "a gradient of the step before stays": (
            "record = self._records.pop(unit)",
            "record = self._records[unit]",
        ),
        "a gradient buffer is taken while it moves": (
            "        if record.dropped and not record.busy:\n"
            "            self._free(record)\n"
            "        elif record.run is not None:\n"
            "            here, there = (self._busy, self._idle) if record.busy else",
            "        if record.dropped and not record.in_use:\n"
            "            self._free(record)\n"
            "        elif record.run is not None:\n"
            "            here, there = (self._busy, self._idle) if record.in_use else",
        ),
        "a gradient buffer is taken while an update reads it": (
            "        if record.dropped and not record.busy:\n"
            "            self._free(record)\n"
            "        elif record.run is not None:\n"
            "            here, there = (self._busy, self._idle) if record.busy else",
            "        if record.dropped and not (record.arriving or record.transferring):\n"
            "            self._free(record)\n"
            "        elif record.run is not None:\n"
            "            here, there = (self._busy, self._idle) if record.arriving or record.transferring else",
        ),
        "a gradient that could not be read back is never read back": (
            "        for record in unread:",
            "        for record in ():",
        ),
        "a buffer into which nothing could be read has a gradient": (
            "            self._unread[record] = None\n            self._free(record)\n",
            "            self._unread[record] = None\n",
        ),
        "a gradient that could not be spilled is on SSD": (
            "record.clean = record.clean and not failed",
            "pass",
        ),
        "what SSD holds counts though more has arrived": (
            "record.clean = record.clean and not record.made",
            "pass",
        ),
        "an update does not wait for its gradient to be read back": (
            "return not (record.lacks_buffer or record.transferring)",
            "return True",
        ),
        "a dirty buffer is given away": (
            "            if record.clean:\n                self._free(record)",
            "            if True:\n                self._free(record)",
        ),
        "a buffer is never spilled to make room": (
            "if self._idle and not self._busy and",
            "if False and",
        ),
        "a dropped gradient keeps its buffer": (
            "if record.dropped and not record.busy:\n            self._free(record)",
            "if record.dropped and not record.busy:\n            pass",
        ),
        "a gradient's home has no end": (
            "own.pop(0) if own else None",
            "own[0] if own else 0",
        ),
        "two gradients share a home": (
            "record.own_buffer = own.pop(0)",
            "record.own_buffer = own[0]",
        ),
        "a gradient's home is not given back": (
            "            insort(self._own_buffers",
            "            0 and insort(self._own_buffers",
        ),
    },
    staleness: {
        "what is drained in the middle of a step is shown too late": (
            "            if weights.lag:\n                weights.lag",
            "            if weights.unannounced is not None:\n                weights.lag",
        ),
        "a drain in the middle of a step shows what it applies": (
            "        if self.step_begun:",
            "        if False:",
        ),
        "a step shows its own update": (
            "        self.step_begun = False\n        self.show_all()",
            "        self.step_begun = False",
        ),
        "leases outlive weights that lag": (
            "                weights.edition += 1\n                self._leases.outdate(unit)",
            "                weights.edition += 1",
        ),
    },
    updates: {
        "a lease outlives a guess that stands": (
            "        weights.edition += 1\n        self._leases.outdate(update.unit)\n",
            "        weights.edition += 1\n",
        ),
        "updates are not shared": (
            "if self._plan.units[unit].shared:",
            "if False:",
        ),
        "a guess that has ended is not adopted": (
            "        if update.has_written:\n            self._versions.adopt(update)\n",
            "",
        ),
        "drained updates are not shared": (
            "            self._pending += 1\n            self._issue",
            "            self._issue",
        ),
        "an early update does not wait until nothing refers to the weights": (
            "if not free or self._leases.uses(asked.unit) or",
            "if self._leases.uses(asked.unit) or",
        ),
        "what is due early is not said": (
            "            self._issue(Request(asked.unit, update.gradient))\n",
            "",
        ),
        "an update begins before its gradients have arrived": (
            "        if not update.gradient.arrived:\n            return True\n",
            "",
        ),
        "a second update of a unit is lost": (
            "        if weights.later:",
            "        if False:",
        ),
        "more updates than two are under way": (
            "while self._admitted[updater] < MOST_ADMITTED and",
            "while",
        ),
        "the gradient of an undone update is lost": (
            "self._gradients.used(update.gradient, last=not update.speculative)",
            "self._gradients.used(update.gradient, last=True)",
        ),
        "a failed update that stands is undone": (
            "        if not update.speculative:\n            self._versions.failed = True\n",
            "        if False:\n            self._versions.failed = True\n",
        ),
        "training goes on after a failed update": (
            "        if not update.speculative:\n            self._versions.failed = True\n",
            "        if not update.speculative:\n",
        ),
        "a unit whose update is queued is read ahead": (
            "weights.update is None and weights.speculative is None:\n            self._ahead",
            "weights.speculative is None:\n            self._ahead",
        ),
        "what may be undone is read ahead": (
            "weights.update is None and weights.speculative is None:\n            self._ahead",
            "weights.update is None:\n            self._ahead",
        ),
        "states are read ahead while the program may write them": (
            "or self._plan.asynchronous or not self._may_read_ahead or self._versions.failed:",
            "or self._plan.asynchronous or self._versions.failed:",
        ),
        "a refused gradient counts as applied": (
            "        self._versions.of[unit].due -= 1\n",
            "",
        ),
        "a lost gradient is applied": (
            "if update.gradient.lost:",
            "if False:",
        ),
        "a save is forgotten while an update runs": (
            "        if self._checkpoint.wake(unit):\n            self._wake_all()\n",
            "",
        ),
        "a guess takes the room of a checkpoint": (
            "stopped = self._checkpoint.under_way or self._draining",
            "stopped = self._draining",
        ),
    },
    scheduler: {
        "an update that stood is done again": (
            "if not self.updates.confirm(record.unit):",
            "if not self.updates.confirm(record.unit) or True:",
        ),
        "a speculative update stands though it was another": (
            "        for unit in (*changed, *unused):\n            self.updates.call_off(unit)\n",
            "",
        ),
        "the checkpoint outlives a restore": (
            "        self.checkpoint.restored()\n",
            "",
        ),
        "a drain shows no asynchronous update": (
            "            self.staleness.show_all()\n",
            "            pass\n",
        ),
        "old leases outlive what has been overwritten": (
            "        self.versions.of[unit].edition += 1\n        self.leases.outdate(unit)",
            "        self.versions.of[unit].edition += 1",
        ),
        "what waits for the checkpoint is forgotten": (
            "        self.updates.wake(operation.unit)\n",
            "        if not isinstance(operation, Save):\n            self.updates.wake(operation.unit)\n",
        ),
    },
    checkpoints: {
        "a checkpoint reads states of another step": (
            "self._versions.settled(unit) == saving.version",
            "self._versions.settled(unit) is not None",
        ),
    },
    order: {
        "an evaluation is expected of every step": (
            "        if recorded and self._accesses",
            "        if self._accesses",
        ),
        "steps that have become others are not followed": (
            "        if replaced:\n            self._follow",
            "        if False:\n            self._follow",
        ),
        "a step that departs once is followed": (
            "(not known and (persists or",
            "(not known and (True or",
        ),
    },
}
"""Module -> what a mutant breaks -> the text that it changes, and what that becomes."""
