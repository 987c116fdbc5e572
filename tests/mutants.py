"""Mutants of the package: each breaks one line, and some test must fail. They measure how sharp the tests are.

    python tests/mutants.py [--only PATTERN] [--whole]

Each mutant is tried in a copy of the checkout, by the tests named with it; with --whole, by all that `make test` runs.
It prints which test noticed it first, or that none did. The mutants of the scheduler and the runtime are in
tests/worlds, whose random worlds must notice them.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

import tyro

ROOT = Path(__file__).parents[1]
TIMEOUT_S, TIMEOUT_OF_ALL_S = 300.0, 1800.0


@dataclass(frozen=True)
class Mutant:
    """One change of the source."""

    breaks: str
    file: str
    """Below `pagoda`."""
    old: str
    """Occurs once."""
    new: str
    tests: str
    """Below `tests`, separated by spaces: what should notice."""


_CHANGES: dict[str, dict[str, tuple[str, str, str]]] = {
    "prepare/sequence_tiles.py": {
        "the pieces of an MLP that backward computes again are those of another order": (
            "return self._left.pop(index)",
            "return self._left.pop(min(self._left))",
            "prepare/test_sequence_tiles.py",
        ),
        "an MLP runs before its input is saved": (
            "    kept = _KeptWhole(hidden, sizes, axis, frozen)\n",
            "    torch.cat([forward(piece) for piece in pieces], axis)\n"
            "    kept = _KeptWhole(hidden, sizes, axis, frozen)\n",
            "prepare/test_sequence_tiles.py",
        ),
        "pieces do not refer to a frozen norm": (
            "_Save.apply(start, *also).grad_fn",
            "_Save.apply(start).grad_fn",
            "test_matrix.py",
        ),
    },
    "prepare/documents.py": {
        "short documents that attend together see each other": (
            "(document[:, None] == document).tril()",
            "(document[:, None] >= document).tril()",
            "prepare/test_documents.py",
        ),
    },
    "prepare/sequence_parallel.py": {
        "the last token of a rank's part has no target": (
            "return SequencePart({",
            "targets[:, mine.stop - 1] = IGNORED\n        return SequencePart({",
            "ranks/test_sequence_parallel.py",
        ),
    },
    "plan/second_placement.py": {
        "pages get what other things have needed": (
            "return max(0, whole - max(int(needed * (1 + _MARGIN)), needed + int(whole * _LEAST_FREE)))",
            "return whole",
            "runtime/test_second_placement.py",
        ),
    },
    "memory/pool.py": {
        "freed pages do not join the free ones before them": (
            "        if before is not None:",
            "        if before is not None and False:",
            "memory/test_pool.py",
        ),
        "the costliest window makes room": (
            "if frames >= self._count and freed < least:",
            "if frames >= self._count and freed >= 0:",
            "memory/test_pool.py",
        ),
    },
    "memory/ssd/slots.py": {
        "a slot that a checkpoint keeps is overwritten": (
            "(self._references[old] != 1)",
            "(self._references[old] < 1)",
            "memory/test_slots.py",
        ),
        "a page's old hash stays": (
            "        live.slots[:] = targets\n        live.hashes[:] = hashes",
            "        live.slots[:] = targets",
            "memory/test_ssd_tier.py memory/test_slots.py",
        ),
        "a load does not wait for the store of its page": (
            "        if self.storing_to(run):\n            return None\n        self._loading",
            "        self._loading",
            "memory/test_slots.py memory/test_ssd_tier.py",
        ),
        "a store does not wait for the load of its page": (
            "        return self.storing_to(run) or bool(self._loading[run.start : run.stop].any())",
            "        return self.storing_to(run)",
            "memory/test_slots.py memory/test_ssd_tier.py",
        ),
        "slots of an adopted page leak": (
            "        self._dereference(live.written)\n",
            "",
            "memory/test_slots.py memory/test_ssd_tier.py",
        ),
    },
    "memory/ssd/commits.py": {
        "a page table's checksum is not looked at": (
            'if xxhash.xxh3_64_intdigest(body).to_bytes(8, "little") != checksum:',
            "if False:",
            "memory/test_page_store.py memory/test_store_trust.py",
        ),
    },
    "memory/ssd/tier.py": {
        "pages that are added take spare slots": (
            "self._grow_to(self._pages + stop - self._numbers + spare)",
            "self._grow_to(self._pages + stop - self._numbers)",
            "memory/test_ssd_tier.py",
        ),
        "pages that are added take the slots that checkpoints leave to states": (
            "max(self._spare, self._store.beside - self._kept_by_others)",
            "self._spare",
            "memory/test_page_store.py",
        ),
        "pages that were added lose their content when others move": (
            "in {**kept, PageRun(numbers, added.count): added}.items()",
            "in kept.items()",
            "memory/test_ssd_tier.py autograd/test_places.py",
        ),
        "a failed store leaves its pages busy": (
            "                self._table.abandon_store(pages, targets)\n",
            "",
            "memory/test_ssd_tier.py",
        ),
    },
    "optim/adamw.py": {
        "AdamW's weight decay has the wrong sign": (
            "return 1.0 - self.lr * self.weight_decay",
            "return 1.0 + self.lr * self.weight_decay",
            "optim/test_settings.py optim/test_kernels.py",
        ),
    },
    "optim/adam.py": {
        "AdamW corrects the second moment's bias by the first's": (
            "corrected = math.sqrt(1.0 - beta2**step)",
            "corrected = math.sqrt(1.0 - beta1**step)",
            "optim/test_settings.py optim/test_kernels.py",
        ),
        "an eps that fp32 rounds to zero is taken": (
            "is_number(self.eps) and fp32(self.eps) > 0",
            "is_number(self.eps) and self.eps > 0",
            "optim/test_settings.py",
        ),
    },
    "optim/factors.py": {
        "Adafactor's blocks have another number of rows": (
            "ROWS, COLUMNS, LANES = 64, 1024, 128",
            "ROWS, COLUMNS, LANES = 32, 1024, 128",
            "optim/test_adafactor.py",
        ),
        "Adafactor folds sums of blocks by halves, not by powers of two": (
            "half = 1 << (n - 1).bit_length() - 1",
            "half = (n + 1) // 2",
            "optim/test_adafactor.py",
        ),
    },
    "optim/adafactor_kernels.py": {
        "Adafactor folds lanes by halves, not by powers of two": (
            "            half *= 2\n        count",
            "            half *= 2\n        half = (n + 1) // 2\n        count",
            "optim/test_adafactor.py",
        ),
    },
    "optim/gradient_kernels.py": {
        "the tail of a gradient is in no square sum": (
            "lanes[i % LANES] += _take(kept, arriving, adding, to, source, i)",
            "lanes[i % LANES] += 0 * _take(kept, arriving, adding, to, source, i)",
            "optim/test_formats.py",
        ),
    },
    "optim/rule.py": {
        "settings of a param group are those of the rule": (
            "key: plain_setting(group[key], old)",
            "key: old",
            "optim/test_settings.py runtime/test_groups.py",
        ),
    },
    "plan/slices.py": {
        "the last equal slice runs over the end": (
            "return min(start + index * each, stop), min(start + (index + 1) * each, stop)",
            "return min(start + index * each, stop), start + (index + 1) * each",
            "plan/test_slices.py ranks/test_pages_of_ranks.py",
        ),
    },
    "plan/layout.py": {
        "what updates read and write counts states once": (
            "return 2 * sum(self.bytes_per_parameter.values()) + self.itemsize(unit, GRAD)",
            "return sum(self.bytes_per_parameter.values()) + self.itemsize(unit, GRAD)",
            "plan simulate",
        ),
    },
    "plan/trace.py": {
        "a gradient of one pass counts as the step's last": (
            "last[unit] == tick) for tick, unit in found",
            "True) for tick, unit in found",
            "plan/test_trace.py simulate",
        ),
    },
    "plan/activations.py": {
        "activations that do not fit are kept": (
            "return peak.kept <= room.kept and peak.ssd <= room.ssd and not late",
            "return peak.ssd <= room.ssd and not late",
            "plan/test_activations.py",
        ),
    },
    "runtime/leases.py": {
        "views that outlive a lease do not keep its frames": (
            "        if not self.is_free(operation, unit):\n            return False\n",
            "",
            "test_matrix.py runtime/test_same_bits.py autograd/test_uses_of_parameters.py",
        ),
    },
    "optimizer.py": {
        "two checkpoints are begun at once": (
            "        with self._saving:\n",
            "        if True:\n",
            "checkpoint/test_background.py",
        ),
    },
    "autograd/accesses.py": {
        "signals interrupt events": (
            "without_signals(self._run, looks, event, *arguments)",
            "self._run(looks, event, *arguments)",
            "runtime/test_interrupts.py",
        ),
        "nested uses end with the first": (
            "        if not self._uses[phase][unit.index]:\n            self._driver.tell",
            "        if True:\n            self._driver.tell",
            "test_matrix.py runtime/test_same_bits.py autograd/test_uses_of_parameters.py",
        ),
        "compute reads before its wait has ended": (
            "            if not self._scheduler.ready(unit.index):\n                self._wait(unit)\n",
            "",
            "test_matrix.py runtime/test_same_bits.py",
        ),
    },
    "autograd/activations/packing.py": {
        "a graph may read weights of another step": (
            "        if edition != self._edition:",
            "        if False:",
            "autograd/test_uses_of_parameters.py runtime/test_optimizer.py autograd/test_model_access.py",
        ),
        "what a checkpoint recomputes holds the weights themselves": (
            "        held = pack(reference or tensor)",
            "        held = pack(tensor)",
            "runtime/test_same_bits.py test_matrix.py",
        ),
    },
    "autograd/activations/saved.py": {
        "a saved tensor that was changed in place is used": (
            "        if counter._version == version:",
            "        if True:",
            "autograd/test_uses_of_parameters.py autograd/test_activations.py autograd/test_model_access.py",
        ),
    },
    "autograd/activations/offload.py": {
        "a tensor moves while others than graphs may write to it": (
            "            if storage_use_count(offloaded.source) <= FRESH_USE_COUNT:",
            "            if True:",
            "autograd/test_changes_in_place.py",
        ),
    },
    "interrupts.py": {
        "a signal that comes in an event is lost": (
            "        signal.raise_signal(_pending.pop())",
            "        _pending.pop()",
            "runtime/test_interrupts.py",
        ),
        "signals are not held back": (
            "        _set(number, _note)",
            "        pass",
            "runtime/test_interrupts.py",
        ),
        "signals are held back after an event": (
            "            _set(*handlers[-1])  # may raise what the handler raises",
            "            pass",
            "runtime/test_interrupts.py",
        ),
    },
    "schedule/activations.py": {
        "an activation leaves that backward has asked for": (
            "        if not activation.wanted:\n            self._leaving",
            "        if True:\n            self._leaving",
            "schedule/test_activations.py",
        ),
        "an activation is brought back twice": (
            "            activation.wanted = True",
            "            pass",
            "schedule/test_activations.py",
        ),
        "all that a graph has saved is read ahead": (
            "                room -= activation.nbytes",
            "                pass",
            "schedule/test_activations.py",
        ),
        "what backward does not use any more is read ahead": (
            "            if not activation.over:",
            "            if True:",
            "schedule/test_activations.py",
        ),
        "nothing is read ahead while backward goes on": (
            "        activation.over = True\n        self.begin_backward()",
            "        activation.over = True",
            "schedule/test_activations.py",
        ),
    },
    "schedule/waits.py": {
        "bytes on their way are not bounded": (
            "or self._added - self._taken > most):",
            "or False):",
            "runtime/test_meter.py",
        ),
    },
    "autograd/clipping.py": {
        "clipping leaves a clipped norm a thousandth too large": (
            "clipped = min(largest, limit / (norm + 1e-6))",
            "clipped = min(largest, limit / (norm + 1e-6) * 1.001)",
            "autograd/test_clipping.py test_matrix.py runtime/test_same_bits.py",
        ),
        "gradients that are not finite are applied": (
            "        if first is not None:\n            raise non_finite_error",
            "        if False:\n            raise non_finite_error",
            "runtime/test_optimizer.py runtime/test_updates.py",
        ),
    },
    "autograd/stepper.py": {
        "hyperparameters of speculative updates are not compared": (
            "            if clipped or segments != gradient.segments:\n                changed.append(unit.index)",
            "            if clipped:\n                changed.append(unit.index)",
            "runtime/test_speculation.py",
        ),
    },
    "runtime/executor.py": {
        "ranks share what a guess has written before it has": (
            "        updated.then(gradient.updated.finish)",
            "        gradient.updated.finish()",
            "ranks/test_speculation_on_ranks.py",
        ),
    },
    "ranks/gathering.py": {
        "what ranks have updated behind one's own slice is not written": (
            "[range(begin), range(end, self._pages(unit))]",
            "[range(begin)]",
            "ranks/test_same_bits_on_ranks.py",
        ),
    },
    "plan/blocks.py": {
        "a block is read while its page is being written": (
            "if end > offset]",
            "if False]",
            "plan/test_blocks.py",
        ),
        "a block waits for the last one with its page only, which an update may leave out": (
            "= [*shared, (offset",
            "= [(offset",
            "plan/test_blocks.py",
        ),
    },
    "schedule/leases.py": {
        "weights that another rank reads are updated": (
            "or self._others_read[unit] > 0",
            "or False",
            "schedule/test_ranks.py",
        ),
        "a unit in use may be evicted": (
            "settled and not self._users[lease.unit] and",
            "settled and",
            "schedule/test_schedule.py",
        ),
        "what makes room depends on when a rank issues": (
            "        if self._plan.ranks_fetch_alike:\n            return\n        if lease.",
            "        if lease.ended_by and self._plan.ranks_fetch_alike:\n            return\n        if lease.",
            "schedule/test_ranks.py",
        ),
    },
    "schedule/records.py": {
        "a prefetch calls a speculative update off": (
            "return self.speculative is not None or",
            "return",
            "schedule/test_schedule.py",
        ),
        "a gradient that compute reads loses its buffer": (
            " or self.in_use or self.lent",
            " or self.in_use",
            "schedule/test_schedule.py",
        ),
        "weights are read before all ranks' parts are there": (
            "self.newest < self.version or bool(self.sharing)",
            "self.newest < self.version",
            "schedule/test_ranks.py",
        ),
    },
    "schedule/versions.py": {
        "a fetch does not wait for other ranks' parts": (
            "if missing == 0 and weights.sharing:",
            "if False:",
            "schedule/test_ranks.py",
        ),
        "what a refused update was to write stays taken": (
            "            if run != self.of[update.unit].runs[state]:\n",
            "            if False:\n",
            "schedule/test_schedule.py",
        ),
        "what is still fetched is free": (
            "readers = [each for each in self._readers[unit] if not",
            "readers = [each for each in () if not",
            "schedule/test_schedule.py",
        ),
    },
    "schedule/gradients.py": {
        "a gradient to which nothing has come is used": (
            "                self.drop(record)\n        return",
            "                pass\n        return",
            "schedule/test_schedule.py",
        ),
        "a gradient takes the place on SSD of one that an update needs": (
            "self._earlier.get(record.unit, record) is not record",
            "False",
            "schedule/test_schedule.py",
        ),
        "a spill that failed counts": (
            "record.clean = record.clean and not failed",
            "pass",
            "schedule/test_schedule.py",
        ),
        "a spill that failed is never tried again": (
            'told that a SPILL or RELOAD has failed."""\n        self.spilling_fails = False',
            'told that a SPILL or RELOAD has failed."""',
            "schedule/test_schedule.py",
        ),
        "a gradient that could not be read back is never read back": (
            "        for record in unread:",
            "        for record in ():",
            "schedule/test_schedule.py",
        ),
        "a gradient that cannot be read back is tried again without end": (
            "        if record not in self._unread:\n            self._waiting",
            "        if True:\n            self._waiting",
            "schedule/test_schedule.py",
        ),
        "gradients are spilled where they cannot be": (
            "is not None and self._plan.spills",
            "is not None",
            "schedule/test_schedule.py",
        ),
        "gradients arrive in a buffer that an update reads": (
            "or (record.made and (record.in_use or record.lent))",
            "",
            "schedule/test_schedule.py",
        ),
    },
    "autograd/gradient_values.py": {
        "what is not written loses its precision": (
            "flat = torch.where(unit.stored(slot, values == shown).reshape(-1), precise, flat)",
            "pass",
            "autograd/test_gradient_values.py",
        ),
        "a write leaves the factor of what was there": (
            "            self.factors.pop((unit.index, slot), None)  # before waits, which an exception may end\n",
            "",
            "autograd/test_gradient_values.py",
        ),
        "two factors are rounded at once": (
            "exact = is_power_of_two(factor) or",
            "exact = True or",
            "autograd/test_gradient_values.py",
        ),
        "no rank waits until all have read": (
            "        collectives.announce(what, None)  # no rank goes on before all have read or written\n",
            "",
            "ranks/test_gradients_on_ranks.py",
        ),
    },
    "autograd/markers.py": {
        "quotients are products": (
            "return asked_by not in _QUOTIENTS or is_power_of_two(float(by))",
            "return True",
            "autograd/test_gradient_values.py",
        ),
    },
    "schedule/updates.py": {
        "a failed update keeps its gradients for ever": (
            "self._gradients.used(update.gradient, last=True)",
            "self._gradients.drop(update.gradient)",
            "schedule/test_schedule.py",
        ),
        "a speculative update that failed is not undone": (
            "update.called_off, self._calm = True, 0",
            "self._calm = 0",
            "schedule/test_schedule.py",
        ),
        "updates that had been admitted stay so": (
            "self._admitted, self._pending, self._ahead = [0, 0], 0, -1\n",
            "self._pending, self._ahead = 0, -1\n",
            "schedule/test_schedule.py",
        ),
        "updates that wait for compute take the places of others": (
            "        if self._leases.blocks_update(unit):\n            return True\n",
            "",
            "schedule/test_schedule.py",
        ),
        "whether an update is early depends on a rank's fetches": (
            "if not free or self._leases.uses(",
            "if not free or self._leases.blocks_update(",
            "schedule/test_ranks.py",
        ),
        "updaters wait for each other": (
            "while self._admitted[updater] <",
            "while sum(self._admitted) <",
            "schedule/test_schedule.py",
        ),
        "drained updates may still be undone": (
            "            self.call_off_all()\n            self._wake_all()",
            "            self._wake_all()",
            "schedule/test_schedule.py",
        ),
        "an update that was refused stands": (
            "            self._calm = 0\n            self._give_up(update)\n            return",
            "            self._calm = 0\n            self._finish(update)\n            return",
            "schedule/test_schedule.py",
        ),
        "an update that was refused stays admitted": (
            "        self._release(update)\n        self.gradient_used(update)",
            "        self.gradient_used(update)",
            "schedule/test_schedule.py",
        ),
        "updates that were held back stay so": (
            "        if self._checkpoint.wake(unit):\n            self._wake_all()\n",
            "        self._checkpoint.wake(unit)\n",
            "schedule/test_schedule.py",
        ),
        "an update takes room before its gradient is there": (
            "        if not self._versions.has_room(update):",
            "        if not self._versions.choose(update):",
            "schedule/test_schedule.py",
        ),
        "weights move though something refers to them": (
            "        if weights.update is update:\n            update.may_move = True",
            "        if True:\n            update.may_move = True",
            "schedule/test_schedule.py",
        ),
    },
    "schedule/scheduler.py": {
        "an access does not undo": (
            "        self.updates.call_off(unit)\n        self.leases.access(unit)",
            "        self.leases.access(unit)",
            "schedule/test_schedule.py",
        ),
        "a speculative update stands though gradients are clipped": (
            "        if clipped:\n            self.updates.call_off_all()\n",
            "",
            "schedule/test_schedule.py",
        ),
        "a fetch does not undo a guess": (
            "            self.updates.call_off(lease.unit)\n",
            "",
            "schedule/test_ranks.py",
        ),
        "what another rank reads is not undone": (
            "        self.updates.call_off(unit)\n        self.leases.others_read",
            "        self.leases.others_read",
            "schedule/test_ranks.py",
        ),
        "another rank's gradient is taken for one of backward": (
            "here, payload, delivery)\n        self._pump(ranks_agree=False)",
            "here, payload, delivery)\n        self._pump()",
            "schedule/test_schedule.py",
        ),
        "a gradient does not undo": (
            "        self.updates.call_off(unit)\n        if reduced",
            "        if reduced",
            "schedule/test_schedule.py",
        ),
        "old leases outlive what has been restored": (
            "            weights.edition += 1\n            self.leases.outdate(unit)\n",
            "            weights.edition += 1\n",
            "schedule/test_schedule.py",
        ),
    },
    "schedule/checkpoints.py": {
        "states of which SSD has room for one version are updated": (
            "if unit in self._one_version and self._units[unit].runs is not None:",
            "if False:",
            "schedule/test_schedule.py",
        ),
        "a checkpoint waits for an update that was refused": (
            "if saving.version is not None and saving.version > version:",
            "if False:",
            "schedule/test_schedule.py",
        ),
    },
    "runtime/moving.py": {
        "what moves from SSD to memory is left behind": (
            "        store.load(move.run, 0, tensor_bytes(landing))\n",
            "",
            "runtime/test_second_placement.py",
        ),
        "pages that stay on SSD lose their content when others move": (
            "store.place_on_ssd({move.new_run: move.run for move in on_ssd if move.run is not None})",
            "store.place_on_ssd({})",
            "runtime/test_second_placement.py",
        ),
    },
    "schedule/stream.py": {
        "a block is read while its page is being written in the stream": (
            "return all(index in self.written or index not in self.order for index in earlier)",
            "return True",
            "schedule/test_stream.py",
        ),
        "an update that waits for a drive goes on with its next block": (
            " and flow.suspended_by is None",
            "",
            "schedule/test_stream.py",
        ),
        "an update is tried again before its blocks that are under way have ended": (
            "== len(flow.begun) > 0",
            "> 0",
            "schedule/test_stream.py",
        ),
        "reading ahead takes the slots of the other updater": (
            "if len(self._free) > self._plan.kept_free:",
            "if self._free:",
            "schedule/test_stream.py",
        ),
        "reading ahead takes slots that an update needs": (
            " and updater.first(streamed=True) is None:",
            ":",
            "schedule/test_stream.py",
        ),
        "what was read ahead is read again": (
            "flow.next = bisect_left(flow.order, ahead.next)",
            "flow.next = 0",
            "schedule/test_stream.py",
        ),
        "one updater takes every slot": (
            "key=lambda updater: updater.held)",
            "key=lambda updater: -updater.held)",
            "schedule/test_stream.py",
        ),
        "after an error, the next blocks begin": (
            "flow.next, flow.not_updated = len(flow.order), flow.updating",
            "flow.not_updated = len(flow.order) - flow.next",
            "schedule/test_stream.py",
        ),
        "blocks that wait for a place outlive their update's error": (
            "if block.flow is flow]:",
            "if False]:",
            "schedule/test_stream.py",
        ),
        "a place is lost with an error": (
            "        if block.place is not None:",
            "        if block.place is not None and error is None:",
            "schedule/test_stream.py",
        ),
        "a long ring is read all at once": (
            " and self._reading < _MOST_READING",
            "",
            "schedule/test_stream.py",
        ),
        "a block that others come after is not noted": (
            "        if flow.blocks.after:",
            "        if False:",
            "schedule/test_stream.py",
        ),
        "an update that was read ahead altogether stays in the queue": (
            "        if not flow.has_more:\n            self._unlist(flow)\n\n    def _drop_ahead",
            "\n    def _drop_ahead",
            "schedule/test_stream.py",
        ),
        "a read that failed ahead is used": (
            "flow.update is None and error is not None:",
            "False:",
            "schedule/test_stream.py",
        ),
        "an update that has begun is refused": (
            "if not flow.begun and not flow.next:",
            "if True:",
            "schedule/test_stream.py",
        ),
        "the gradient is given back while a block is updated": (
            "flow.next, flow.not_updated = len(flow.order), flow.updating",
            "flow.next, flow.not_updated = len(flow.order), 0",
            "schedule/test_stream.py",
        ),
    },
    "runtime/updates.py": {
        "whoever drops what is read ahead does not wait for the reads": (
            "                if self._stream.idle:\n",
            "                if True:\n",
            "runtime/test_updates.py",
        ),
        "of pages that blocks share, the last block's part alone moves": (
            "is None else update.extents.write\n        return self._transfers(",
            "is None else update.extents.read\n        return self._transfers(",
            "autograd/test_gradient_values.py",
        ),
        "work that lanes do at once is done inside each other": (
            "        if me in self._starting:",
            "        if False:",
            "runtime/test_updates.py",
        ),
    },
    "runtime/next_update.py": {
        "a piece of a block runs over the block's end": (
            "max(start, self.start), stop=min(stop, self.stop)",
            "max(start, self.start), stop=stop",
            "runtime/test_updates.py test_matrix.py runtime/test_same_bits.py runtime/test_groups.py",
        ),
    },
    "runtime/updaters.py": {
        "what an update does not change is missing in the new run": (
            "                copy_bytes(new[state.name][gap], old[state.name][gap])",
            "                pass",
            "runtime/test_speculation.py",
        ),
    },
    "autograd/activations/recompute.py": {
        "backward repeats a block with other random numbers": (
            "        if self._generators is not None:\n            _set_generators(self._generators)\n        try:",
            "        try:",
            "runtime/test_repeats.py autograd/test_activations.py",
        ),
    },
    "checkpoint/snapshot.py": {
        "a run without asynchronous updates reads weights that lag": (
            "if late and not self._engine.plan.options.asynchronous:",
            "if False:",
            "runtime/test_async_updates.py",
        ),
    },
    "checkpoint/tensors.py": {
        "a tensor's damaged piece is read": (
            "if piece_hash(tensor_bytes(values)) != digest:",
            "if not digest:",
            "checkpoint/test_damage.py checkpoint/test_tensors.py",
        ),
    },
    "memory/files.py": {
        "a new file is not synced before it takes its name": (
            "            os.fsync(file.fileno())\n        os.replace",
            "            pass\n        os.replace",
            "crash memory/test_page_store.py",
        ),
    },
    "engine.py": {
        "state dicts may be of two steps": (
            "        if self.stepper.updates_have_begun():\n            raise UsageError(",
            "        if False:\n            raise UsageError(",
            "autograd/test_model_access.py checkpoint/test_stateful.py",
        ),
    },
    "train/resume.py": {
        "a checkpoint of another step is resumed": (
            'if extra.get("step") == step else',
            "if True else",
            "train/test_resuming.py",
        ),
    },
    "train/data.py": {
        "all epochs have the same order": ("self.seed, int(epoch))", "self.seed, 0)", "train/test_data.py"),
    },
    "simulate/rates.py": {
        "two directions of an SSD never share": (
            "            if lanes.issuperset(pair):",
            "            if False:",
            "simulate",
        ),
    },
    "ranks/stages.py": {
        "a stage clips by its own norm": (
            "zip_longest(*(terms.square_sums for terms in said)",
            "zip_longest(*(terms.square_sums for terms in (mine,))",
            "ranks/test_pipelines.py",
        ),
        "a gradient that is not finite stops its own stage alone": (
            "(terms.non_finite for terms in said if",
            "(terms.non_finite for terms in (mine,) if",
            "ranks/test_pipelines.py",
        ),
    },
}
"""File -> what a mutant breaks -> the rest of it."""
MUTANTS = tuple(Mutant(breaks, file, *change) for file, of in _CHANGES.items() for breaks, change in of.items())


def noticed_by(mutant: Mutant, checkout: Path, whole: bool) -> str | None:
    """Change one line of a copy, and run tests until one fails; returns that one, and None where none does. Raises
    ValueError where the line is not there once."""
    path = checkout / "pagoda" / mutant.file
    source = path.read_text()
    if source.count(mutant.old) != 1:
        raise ValueError(f"{mutant.file} has {source.count(mutant.old)} places like this: {mutant.old!r}")
    path.write_text(source.replace(mutant.old, mutant.new))
    tests = ["tests"] if whole else [f"tests/{name}" for name in mutant.tests.split()]
    options = ["-q", "-x", "-m", "not slow and not gpu", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *options, *tests]
    environment = {**os.environ, "PYTHONPATH": str(checkout), "HYPOTHESIS_PROFILE": "unshrunk"}
    limit = TIMEOUT_OF_ALL_S if whole else TIMEOUT_S
    try:
        done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, timeout=limit)
        failed = [line.split(" ")[1] for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
        return None if done.returncode == 0 else (failed or [f"exit code {done.returncode}"])[0]
    except subprocess.TimeoutExpired:
        return "it hangs"
    finally:
        path.write_text(source)


def main(only: str = "*", whole: bool = False) -> None:
    """Try every mutant that matches a pattern, and print which test notices each."""
    chosen = [mutant for mutant in MUTANTS if fnmatch(f"{mutant.file} {mutant.breaks}", f"*{only}*")]
    survivors = 0
    with tempfile.TemporaryDirectory() as directory:
        checkout = Path(directory) / "checkout"
        kept_out = shutil.ignore_patterns(".git", ".venv", "build", "runs", "__pycache__", ".*_cache")
        shutil.copytree(ROOT, checkout, ignore=kept_out)
        for mutant in chosen:
            start = time.perf_counter()
            noticed = noticed_by(mutant, checkout, whole)
            survivors += noticed is None
            seconds = time.perf_counter() - start
            print(f"{mutant.file}, {mutant.breaks}: {noticed or 'NOT NOTICED'}, {seconds:.0f} s", flush=True)
    print(f"{len(chosen) - survivors} of {len(chosen)} noticed")


if __name__ == "__main__":
    tyro.cli(main)
