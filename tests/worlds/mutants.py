"""Mutants of what carries out a step: each breaks one line of the runtime, the stream of updates or the ranks.

A wait is left out, a slot is given back too early, an error is lost: random worlds must notice each. The scheduler's
own mutants are in `mutants_of_schedule.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

from pagoda import engine
from pagoda.autograd import accesses, loss_scale, stepper
from pagoda.autograd.activations import offload
from pagoda.ranks import collective, gathering, giving, order, reducing
from pagoda.runtime import capture, driver, executor, gradients, lanes, leases, store, updaters, updates
from pagoda.schedule import stream

from . import mutants_of_schedule
from .rules import Rules


@dataclass(frozen=True)
class Mutant:
    """One change of the source."""

    module: ModuleType
    breaks: str
    old: str
    new: str
    rules: Callable[[Rules], Rules] = Rules.as_drawn
    """The worlds that may notice it."""


_KINDS = {
    "training goes on after a failed update": Rules.failing_kernels,
    "an activation that could not leave is an error in the middle of a step": Rules.offloading,
    "an activation that could not leave is lost": Rules.offloading,
    "an activation is used before it is back": Rules.offloading,
    "the scale grows however many steps are skipped": Rules.scaling,
    "the scale of a checkpoint is not loaded": Rules.scaling,
    "a gradient that was not finite in an earlier pass is forgotten": Rules.scaling,
}
"""What a mutant breaks -> the kind of worlds that may notice it, if it is not the usual one."""
_CHANGES: dict[ModuleType, dict[str, tuple[str, str]]] = {
    driver: {
        "an event of the thread that has the lock is processed at once": (
            "if not (self._holder == threading.get_ident() and self._lock.locked()):",
            "if True:",
        ),
        "who waits is not told of what has changed": (
            "            self._holder = None\n            self._changed.wake()\n",
            "            self._holder = None\n",
        ),
        "a wait that nothing can end is not noticed": (
            "wait = None if self.scheduler.idle else self._changed.add()",
            "wait = self._changed.add()",
        ),
        "of the events that come meanwhile, one is processed": (
            "while self._events and not self.stopped:",
            "if self._events and not self.stopped:",
        ),
        "the last event comes first": (
            "self._events.popleft()",
            "self._events.pop()",
        ),
        "an event between its check and its wait is missed": (
            "                wait = None if self.scheduler.idle else self._changed.add()\n"
            "            (wait or stuck)()\n",
            "                idle = self.scheduler.idle\n            (stuck if idle else self._changed.add())()\n",
        ),
    },
    executor: {
        "who reads weights in place does not see a guess that stands": (
            "        if self._leases.in_place(unit):\n            self._leases.lease_in_place(unit)\n",
            "        del unit\n",
        ),
        "the parts of a gradient's update that others make are not waited for": (
            "after, source = (gradient.shown,), ",
            "source = ",
        ),
        "compute does not try again what a drive has failed to do": (
            "            self.updates.try_again()\n",
            "            pass\n",
        ),
        "who waits is not told that a gradient cannot be read back": (
            "        elif isinstance(operation, Reload):\n            self._suspend(error)\n",
            "",
        ),
        "a checkpoint waits for an update that waits for a drive": (
            "            self.capture.end(error)  # it may wait for this update",
            "            pass",
        ),
        "a gradient that cannot be read back is not tried again": (
            "            self.driver.tell(self._scheduler.try_again)\n            self.updates.try_again()",
            "            self.updates.try_again()",
        ),
    },
    accesses: {
        "an event that a signal has ended in a wait stops the driver": (
            "            self._wait_failed = True\n",
            "            pass\n",
        ),
        "a use that a signal has ended before it began never ends": (
            "            self.tell(self._scheduler.release, unit.index)\n            raise",
            "            raise",
        ),
        "compute waits for a drive that fails": (
            " or self._executor.suspended_by is not None",
            "",
        ),
    },
    engine: {
        "an activation that could not leave is an error in the middle of a step": (
            "            self.graphs.offloader.settle()  # its errors leave the whole step to be taken\n"
            "            self.accesses.compute_lock.run(self._take_step, ended, late)\n",
            "            self.accesses.compute_lock.run(self._take_step, ended, late)\n"
            "            self.graphs.offloader.settle()\n",
        ),
        "a signal tears a write": (
            "            with holding_signals():\n                writes = ",
            "            with nullcontext():\n                writes = ",
        ),
        "a signal tears a close": (
            "            without_signals(self._close)",
            "            self._close()",
        ),
        "updates fail for good after a load": (
            "            self._executor.updates.gives_up = False",
            "            pass",
        ),
    },
    leases: {
        "frames are refilled while compute's queue reads them": (
            "self._freed = self._device.fence()",
            "pass",
        ),
        "frames are free while a view of them lives": (
            "> FRESH_USE_COUNT",
            "> FRESH_USE_COUNT + 1",
        ),
        "frames are refilled while they are being filled": (
            "(*after, *earlier)",
            "after",
        ),
        "a copy to the device does not wait for the read": (
            "(read_handle,), nbytes, label",
            "(), nbytes, label",
        ),
        "a fetch ends when its copy is queued": (
            "event = self._device.copy_in(",
            "self._device.copy_in(",
        ),
        "weights that backward needs are free to change": (
            "unit.packed or ",
            "",
        ),
        "the weights in place are leased where they were": (
            "            if before.base.data_ptr() == base.data_ptr():\n                return\n",
            "            return\n",
        ),
    },
    gradients: {
        "a gradient that was made in RAM is taken from the device": (
            "in_ram = unit.spec.on_host",
            "in_ram = False",
        ),
        "a gradient is copied before compute has made it": (
            "grad, self._device.fence(), accumulate",
            "grad, PAST, accumulate",
        ),
        "an OFFLOAD ends before its gradient has arrived": (
            "                return event\n",
            "                return PAST\n",
        ),
        "a second backward replaces the gradient": (
            "kernel = kernels.add_gradient if accumulate else",
            "kernel = kernels.add_gradient if False else",
        ),
        "a landing buffer is read before the copy has ended": (
            "piece, issued).synchronize()",
            "piece, issued)",
        ),
        "a gradient that was read back is looked for where it was": (
            "            self._place(operation.gradient)\n",
            "            pass\n",
        ),
        "norms are read before gradients have arrived": (
            "        wait_all(list(self.pending))",
            "        pass",
        ),
    },
    updates: {
        "a block's work ends with its last part": (
            "all_of(handles).then(partial",
            "handles[-1].then(partial",
        ),
        "gradients are free before they are read": (
            "        self._store.begin_version(unit, *update.extents)\n",
            "        update.used()\n        self._store.begin_version(unit, *update.extents)\n",
        ),
    },
    stream: {
        "a slot is free while its block is updated": (
            "        if flow.blocks.streamed and flow.error is None:\n            self._act(Do.WRITE, block)",
            "        if flow.blocks.streamed and flow.error is None:\n"
            "            self._free.append(block.slot)\n"
            "            self._act(Do.WRITE, block)",
        ),
        "a slot that a read fills is free": (
            "        if block.is_read:\n            self._free.append(_slot_of(block))",
            "        self._free.append(_slot_of(block))",
        ),
        "gradients are read before the last block": (
            "if not flow.not_updated and not flow.is_used:",
            "if not flow.updating and not flow.is_used:",
        ),
        "an update ends before its last block is written": (
            "if not flow.begun and not flow.has_more and not flow.is_over:",
            "if not flow.has_more and not flow.is_over:",
        ),
        "a transfer that has failed is not tried again": (
            "                self._reading += do is Do.READ\n                self._act(do, block)",
            "                pass",
        ),
        "reads that are tried again are not counted": (
            "                self._reading += do is Do.READ\n",
            "",
        ),
        "an update whose transfers are given up is not over": (
            "                self._fail(flow, flow.suspended_by)",
            "                pass",
        ),
        "a block that could not be read is updated": (
            "            self._suspend(Do.READ, block, error)",
            "            self._may_update(block, flow)",
        ),
        "a block that could not be written is over": (
            "        if error is not None and block.flow.error is None:\n",
            "        if False:\n",
        ),
        "nobody hears of an update that waits for a drive": (
            "            self._act(Do.SUSPEND, flow.update, flow.suspended_by)",
            "            pass",
        ),
        "what was read ahead for another unit is kept": (
            "if ahead is None or ahead.unit != flow.unit:",
            "if ahead is None:",
        ),
    },
    updaters: {
        "an update on the device ends when it is queued": (
            "queued = partial(device.pipe, pipe, work, read)",
            "queued = lambda: device.pipe(pipe, work, read) and None",
        ),
    },
    lanes: {
        "work begins before what it waits for": (
            "pending = [other for other in after if not other.succeeded]",
            "pending = []",
        ),
        "several handles end with the one before the last": (
            "last = left == 0",
            "last = left == min(1, len(handles) - 1)",
        ),
        "work in a device's queue ends at once": (
            "                event.synchronize()\n",
            "                pass\n",
        ),
        "who comes after the end hears nothing": (
            "                return\n        callback(self._error)",
            "                return",
        ),
        "who waits is not woken": (
            "            self._waiters.wake()\n",
            "            pass\n",
        ),
        "an error of work is lost": (
            "            return None, error\n",
            "            return None, None\n",
        ),
        "a wait ends though work has failed": (
            "        self._wait_for(_DONE)\n        if self._error is not None:",
            "        self._wait_for(_DONE)\n        if False:",
        ),
    },
    store: {
        "what nobody needs is not poisoned, and stays on SSD": (
            "            self.ssd.drop(run)\n",
            "            pass\n",
        ),
        "what lies around on a page is not read": (
            "                if frozen or elements.nbytes != window.nbytes:\n",
            "                if False:\n",
        ),
    },
    capture: {
        "pages are not kept when they are read": (
            "        self._add_to_snapshot(unit, named)\n",
            "",
        ),
        "a checkpoint reads what compute reads": (
            "store, run = self._store, reading.runs[piece.state]",
            "store, run = self._store, self._store.newest(piece.unit, piece.state)",
        ),
        "two threads land in one buffer": (
            "self._bounce = BufferPool([store.spare])",
            "self._bounce = BufferPool([store.spare] * 2)",
        ),
    },
    offload: {
        "an activation that could not leave is lost": (
            "                wanted.place.write(wanted.pieces, wanted.source, issued)\n"
            "                wanted.source = None\n",
            "                source, wanted.source = wanted.source, None\n"
            "                wanted.place.write(wanted.pieces, source, issued)\n",
        ),
        "an activation is used before it is back": (
            "            allowed(self._meter.wait_for, offloaded.reading)",
            "            pass",
        ),
    },
    stepper: {
        "a step that a drive has held up can never be taken": (
            "        return failed or ",
            "        return True or ",
        ),
        "a step does not wait until gradients have arrived": (
            "                self.accesses.compute_lock.waiting(gradient.settle)\n",
            "                pass\n",
        ),
        "a step leaves gradients with autograd": (
            "            if gradient.made:\n                self._offload(gradient, last=False)",
            "            pass",
        ),
    },
    gathering: {
        "a lease is gathered before this rank's slice is there": (
            "work, (own,), weights.nbytes",
            "work, (), weights.nbytes",
        ),
        "a slice is shared before it is updated": (
            "(updated,), nbytes, alike",
            "(), nbytes, alike",
        ),
        "frozen weights are not gathered": (
            "for spans in (self._shards.frozen_slices(spec), self._shards.trained_slices(spec)):",
            "for spans in (self._shards.trained_slices(spec),):",
        ),
    },
    giving: {
        "weights are lent for ever": (
            "            driver.tell(others_read, unit.index, False)\n",
            "            pass\n",
        ),
    },
    collective: {
        "ranks do not say where a forward ends": (
            "            self._begin_section(section._replace(ends=section.ends + 1, evaluations=0))\n        elif",
            "            pass\n        elif",
        ),
        "ranks do not say where an evaluation ends": (
            "elif self.mesh.ranks.shards_weights:",
            "elif False:",
        ),
        "ranks do not say where a backward ends": (
            "            self._begin_section(self._section._replace(ends",
            "            (self._section._replace(ends",
        ),
        "a forward begins no section": (
            "Section(self._section.drops, self._section.forwards + 1), None",
            "self._section, None",
        ),
    },
    order: {
        "ranks begin different sections together": (
            "            return alike and self.section == other.section\n",
            "            return alike\n",
        ),
        "the last section is first": (
            "default=calls[0])\n        if chosen.kind in (*_SERVED, CollectiveKind.BEGIN):",
            "default=calls[0])\n        if chosen.kind is CollectiveKind.BEGIN:\n"
            "            chosen = max((c for c in calls if c.kind is chosen.kind), key=lambda call: call.turn)\n"
            "        if chosen.kind in (*_SERVED, CollectiveKind.BEGIN):",
        ),
        "gradients of all numbers of drops are added up together": (
            "return self.section.drops, _IN_STEP[self.kind], section",
            "return _IN_STEP[self.kind], self.section.drops, section",
        ),
    },
    loss_scale: {
        "the scale grows however many steps are skipped": (
            "self._calm_steps = 0 if skipped else self._calm_steps + 1",
            "self._calm_steps = self._calm_steps + (not skipped)",
        ),
        "the scale of a checkpoint is not loaded": (
            "        if state and self._dynamic is not None:\n",
            "        if False:\n",
        ),
    },
    reducing: {
        "a gradient that was not finite in an earlier pass is forgotten": (
            "            gradient.bad_elsewhere.update(bad)\n",
            "            gradient.bad_elsewhere = {*bad}\n",
        ),
        "what other ranks have dropped stays": (
            "            gradient.present.clear()\n",
            "            pass\n",
        ),
        "a gradient is reduced before it is copied": (
            "(*filling.copies, announced), nbytes",
            "(announced,), nbytes",
        ),
        "a gradient is reduced before it has a buffer": (
            "            self._await_buffer(unit, opened)\n",
            "",
        ),
        "a buffer is filled while it is reduced": (
            "            self._gradients.meter.wait_for(use)\n",
            "            pass\n",
        ),
        "what others add replaces what is there": (
            "begun = slot in gradient.present and not everyone[slot] & DROPPED",
            "begun = False",
        ),
        "another rank's gradient goes to no buffer": (
            "            opened.set()\n            return ended",
            "            return ended",
        ),
    },
}
"""Module -> what a mutant breaks -> the text that it changes, and what that becomes."""
MUTANTS = tuple(
    Mutant(module, breaks, *text, rules=_KINDS.get(breaks, Rules.as_drawn))
    for module, of in (*mutants_of_schedule.CHANGES.items(), *_CHANGES.items())
    for breaks, text in of.items()
)
