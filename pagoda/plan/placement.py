"""Placement: which tier is home to each state of each unit, and how many pages each line of the ledger takes."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NoReturn

from pagoda.errors import BudgetError
from pagoda.memory.page import pages_for
from pagoda.memory.sizes import format_at_least, format_bytes
from pagoda.plan.device_updates import DEVICE_SLOTS, UPDATE_RING, on_device, slot_pages, why_no_device_updates
from pagoda.plan.fit import beside_copies, first_that_fit, last_that_fit
from pagoda.plan.layout import GRAD, GRAD_QUEUE, WEIGHT, WEIGHT_BACK, Layout
from pagoda.plan.ops import DEVICE, HOST, SSD
from pagoda.plan.split import USUAL_SPLIT, Split
from pagoda.plan.units import UnitSpec

LEASES, STAGING, RING, FETCH_RING, BOUNCE = "leases", "staging", "ring", "fetch_ring", "bounce"
COLLECTIVE_BUFFERS, SERVING = "collective", "serving"
CHECKPOINT = "checkpoint"
WORK = "work"
SPARE = "spare"
UNDO = "undo"
ACTIVATIONS = "activations"

ACTIVATION_BUFFERS = 4
"""Between activations and SSD: two on their way out, two on their way back."""
FETCH_SLOTS = 4
"""Pieces of weights between SSD and a separate device at once."""
BOUNCE_ELEMENTS = 1 << 20
"""Elements of a gradient that leave a separate device at a time; two pieces are on their way at once."""
COPIED_SHARE = 4
"""A checkpoint may hold copies of one in so many bytes of RAM's states: most is written before its next update."""


@dataclass(frozen=True, slots=True)
class Budgets:
    """Bytes each tier may use; `device` is None where device and host are the same RAM, `ssd` where there is none."""

    host: int
    device: int | None = None
    ssd: int | None = None


@dataclass(frozen=True)
class Placement:
    """Home of every extent, and the pages of every line of the ledger.

    Lines named after states are homes; LEASES hold weights while they are used, STAGING holds gradients on their way to
    the update or to SSD, RING blocks of weights and moments that stream through RAM, FETCH_RING pieces of weights on
    their way from SSD to a device of its own, and BOUNCE pieces of gradients on their way back from it;
    COLLECTIVE_BUFFERS hold whole gradients that several ranks add up, and what that takes, SERVING a message of weights
    that go from SSD to another rank; both are of the same size for any number of ranks. CHECKPOINT holds states that a
    checkpoint has not written yet when their next update comes; SPARE pages on SSD are for what changes while
    checkpoints keep theirs. WORK holds what the update of a rule that takes parameters whole computes with, one
    parameter at a time. UNDO keeps the old states of speculated units beside the new: as pages on SSD, as copies in
    RAM. ACTIVATIONS has the buffers through which activations go to SSD; how much is offloaded, a step shows.
    """

    homes: Mapping[tuple[int, str], str]
    """(unit, state) -> tier. A gradient's home is HOST, or SSD when it may have to be spilled there."""
    lines: Mapping[str, Mapping[str, int]]
    """tier -> line -> pages."""
    ring_slots: int = 0
    """Blocks the ring holds: RING_SLOTS, and more where RAM is left over, for reading ahead."""
    speculated: frozenset[int] = frozenset()
    """Units that are updated under backward as if nothing would be clipped; their old states are kept until that is
    known."""
    updated_on_device: frozenset[int] = frozenset()
    """Units whose states, all of them in RAM, pass the device for their update."""
    resident: frozenset[int] = frozenset()
    """Units whose states and gradients have their home on the device, where they are used and updated."""
    reasons: tuple[str, ...] = field(default=())

    def home(self, unit: int, state: str) -> str:
        return self.homes[unit, state]

    def pages(self, tier: str, line: str) -> int:
        return self.lines.get(tier, {}).get(line, 0)


def place(
    layout: Layout,
    budgets: Budgets,
    transient_gradients: bool,
    staging_buffers: int = 2,
    split: Split = USUAL_SPLIT,  # frozen
    keep_checkpoints: int | None = None,
    speculate: bool = False,
    accumulates: bool = False,
) -> Placement:
    """Fill host RAM with what saves the most traffic per byte; the rest goes to SSD.

    A byte of weights on SSD costs up to four transfers a step (forward, backward, update in and out), a byte of
    gradients at least two, a byte of moments two: so weights get RAM first, then gradients, then moments, each in
    the order of the forward pass, because the first units of the next forward have the least slack.
    `transient_gradients` says that units are updated under backward, so that gradients need only a few buffers;
    `staging_buffers` is how many gradients of the largest unit fit the staging region at least (with one, backward
    waits for each to be written). With `accumulates`, a step has several passes: without SSD, RAM then keeps every
    gradient from the first to the last.

    `keep_checkpoints` is for how many of them the weights and moments on SSD have spare pages, since a checkpoint
    keeps its pages as they are; None makes it one where that fits, else none.

    With `speculate`, units with moments on SSD are updated before it is known whether that will stand, where there is
    room to keep their old states: on SSD after checkpoints, in RAM after moments, or before them if `split` says so.
    Units with all their states in RAM are too, in what is left of it, if `split` says so.

    Raises BudgetError naming the tier, the shortfall and the setting that would help.
    """
    return _Filler(
        layout, budgets, transient_gradients, staging_buffers, split, keep_checkpoints, speculate, accumulates
    ).fill()


@dataclass(frozen=True, slots=True)
class _InRam:
    """Units whose weights, gradients and moments have room in RAM."""

    weights: frozenset[int]
    grads: frozenset[int]
    moments: frozenset[int]


class _Filler:
    """Works through the levels of `place`, from everything in RAM to everything on SSD."""

    def __init__(
        self,
        layout: Layout,
        budgets: Budgets,
        transient: bool,
        staging_buffers: int,
        split: Split,
        keep_checkpoints: int | None,
        speculate: bool,
        accumulates: bool,
    ) -> None:
        self.layout = layout
        self.speculate = speculate and layout.ranks is None
        self.keep_checkpoints = keep_checkpoints
        self.budgets = budgets
        self.transient = transient
        self.accumulates = accumulates
        self.staging_buffers = staging_buffers
        self.split = split
        self.separate = budgets.device is not None
        self.reasons: list[str] = []
        units = layout.units
        self.everything = frozenset(unit.index for unit in units)
        self.asynchronous = layout.max_staleness is not None
        self.resident = self._resident_units()
        elsewhere = dict.fromkeys(self.resident, 0)
        self.weight = {u.index: (1 + self.asynchronous) * layout.pages(u, WEIGHT) for u in units} | elsewhere
        self.grad = {u.index: 0 if self.asynchronous else layout.pages(u, GRAD) for u in units} | elsewhere
        self.moment = {u.index: sum(layout.pages(u, s.name) for s in layout.moments) for u in units} | elsewhere
        self.widest_grad = max(self.grad.values())
        self.buffers = self._fixed_buffers()
        self.reserved = sum(self.buffers.values())
        self.host = budgets.host // layout.page_bytes - self.reserved

    def fill(self) -> Placement:
        weights, grads, moments = (sum(m.values()) for m in (self.weight, self.grad, self.moment))
        device = self._device_lines()
        few = self.transient and not (self.accumulates and self.budgets.ssd is None)
        buffers = min(grads, 4 * self.widest_grad) if few else grads
        everything = weights + moments + buffers
        if everything <= self.host:
            room = min(grads, self.host - weights - moments)
            kept = _InRam(self.everything, self.everything if room == grads else frozenset(), self.everything)
            return self._placement(kept, room, device)
        if self.budgets.ssd is None:
            self._refuse(HOST, everything, self.host, "memory.host, or add memory.ssd='DIR'")
        return self._split(device, everything)

    def _split(self, device: dict[str, int], everything: int) -> Placement:
        """Weights, gradients and moments in RAM as far as they go; `everything` pages would do without SSD."""
        grads = sum(self.grad.values())
        least_staging = min(grads, self.staging_buffers * self.widest_grad)
        ring_states = self._ring_pages(weights_on_ssd=False)
        left = self.host - ring_states - least_staging
        most = int(self.split.weight_share * sum(self.weight.values()))
        weights_in = first_that_fit(self.weight, min(most, left))
        lease_pages = 0
        if LEASES in self.buffers:
            left -= self._ring_pages(weights_on_ssd=True) - ring_states
            if left < 0:
                self._refuse(HOST, self.host - left, self.host, "memory.host, or lower memory.unit_limit")
            weights_in = first_that_fit(self.weight, min(most, left))
        elif len(weights_in) < len(self.layout.units):
            lease_pages = self.layout.lease_pages(self.split.leases_ahead)
            least = self.layout.lease_pages(ahead=1)
            if self.separate:
                lease_pages = least = FETCH_SLOTS * self.layout.fetch_piece_pages
            left = self.host - self._ring_pages(weights_on_ssd=True) - least_staging
            if left < least:
                streamed = self.host - left + least
                resident = ring_states + least_staging + sum(self.weight.values())
                needed = min(streamed, resident, everything)
                self._refuse(HOST, needed, self.host, "memory.host, or lower memory.unit_limit")
            lease_pages = min(lease_pages, left)
            weights_in = first_that_fit(self.weight, min(most, left - lease_pages))
            left -= lease_pages
        left -= sum(self.weight[u] for u in weights_in)
        staging, left, grads_in = self._gradients(left + least_staging, least_staging)
        moments_in = first_that_fit(self.moment, left)
        if self.speculate and self.split.undo_first:
            copies = {u.index: self._undo_pages(u, u.index in weights_in, False)[0] for u in self.layout.units}
            moments_in = beside_copies(moments_in, self.moment, copies, left)
        return self._placement(_InRam(weights_in, grads_in, moments_in), staging, device, lease_pages)

    def _gradients(self, left: int, least: int) -> tuple[int, int, frozenset[int]]:
        """(staging pages, pages left for moments, units whose gradients live in RAM)."""
        grads = sum(self.grad.values())
        if grads <= left and self.split.grad_share >= 1:
            if not self.transient:
                return 0, left - grads, self.everything
            staging = min(grads, 4 * self.widest_grad)
            return staging, left - staging, frozenset()
        if self.transient:
            staging = min(left, 4 * self.widest_grad)
            return staging, left - staging, frozenset()
        kept = first_that_fit(self.grad, min(int(self.split.grad_share * grads), left - least))
        return least, left - least - sum(self.grad[u] for u in kept), kept

    def _undo_pages(self, unit: UnitSpec, weight_in: bool, moments_in: bool) -> tuple[int, int]:
        """Pages, in RAM and on SSD, that keep the old states of a unit beside the new. `weight_in` and `moments_in` say
        whether RAM is home to its weights, and to its moments."""
        if not unit.trainable_numel:
            return 0, 0
        layout = self.layout
        in_ram = {WEIGHT} if weight_in else set()
        in_ram |= {state.name for state in (layout.states[1:] if moments_in else layout.small)}
        on_ssd = self.weight[unit.index] * (not weight_in) + self.moment[unit.index] * (not moments_in)
        return sum(layout.undo_pages(unit, in_ram).values()), on_ssd

    def _fixed_buffers(self) -> dict[str, int]:
        """Lines of host RAM that do not depend on where the other states live."""
        lines = {
            state.name: sum(self.layout.pages(u, state.name) for u in self.layout.units if u.index not in self.resident)
            for state in self.layout.small
        }
        lines[CHECKPOINT] = self.layout.piece_pages
        lines[WORK] = self.layout.work_pages
        if self.layout.max_staleness is not None:
            grads = self.layout.total_pages(GRAD)
            lines |= {GRAD: grads, GRAD_QUEUE: self.layout.max_staleness * grads}
        if self.separate:
            lines[BOUNCE] = 2 * self._bounce_pages()
        else:
            lines[COLLECTIVE_BUFFERS] = self.layout.collective_pages
        if self.budgets.ssd is not None:
            lines[SERVING] = self.layout.serving_pages
        if self.layout.offloads and self.budgets.ssd is not None:
            lines[ACTIVATIONS] = ACTIVATION_BUFFERS * self.layout.activation_buffer_pages
        if not self.separate and self.layout.ranks is not None and self.layout.ranks.shards_weights:
            lines[LEASES] = self.layout.lease_pages(ahead=1)
            if self.budgets.ssd is not None:  # a slice does not begin where a page of its lease does
                lines[FETCH_RING] = FETCH_SLOTS * self.layout.fetch_piece_pages
        return {line: pages for line, pages in lines.items() if pages}

    def _bounce_pages(self) -> int:
        """Pages of one piece of a gradient on its way from a separate device."""
        widest = max(unit.trainable_numel for unit in self.layout.units)
        return pages_for(min(widest, BOUNCE_ELEMENTS) * self.layout.offloaded_itemsize, self.layout.page_bytes)

    def _slot_pages(self, weights_on_ssd: bool) -> int:
        weight = (self.layout.weight,) if weights_on_ssd else ()
        states = (*weight, *self.layout.moments)
        return sum(self.layout.block_pages(s.name) for s in states)

    def _ring_pages(self, weights_on_ssd: bool) -> int:
        return self.layout.least_ring_slots * self._slot_pages(weights_on_ssd)

    def _ring_slots(self, slot_pages: int, taken: int) -> int:
        """The least, and as many more as RAM is left for, up to the blocks of the largest unit; where parameters are
        taken whole one more, for the first of the next unit."""
        least = self.layout.least_ring_slots
        if self.layout.weight.whole is not None:
            most = least + 1
        else:
            most = max(-(-unit.trainable_numel // self.layout.block_elements) for unit in self.layout.units)
        return max(least, min(most, (self.host - taken) // slot_pages))

    def _device_lines(self) -> dict[str, int]:
        if self.budgets.device is None:
            return {}
        resident = [unit for unit in self.layout.units if unit.index in self.resident]
        total = sum(self.layout.lease_of(unit) for unit in self.layout.units if unit.index not in self.resident)
        homes = {
            state: sum(self.layout.pages(unit, state) for unit in resident)
            for state in (*(s.name for s in self.layout.states), GRAD)
        }
        collective = self.layout.collective_pages
        ring = self._update_ring_pages()
        beside = collective + ring + sum(homes.values())
        leases = min(self.budgets.device // self.layout.page_bytes - beside, total)
        least = min(self.layout.lease_pages(ahead=1), total)
        if leases < least:
            setting = "memory.device, or lower memory.unit_limit" + " or split.device_update_share" * (ring > 0)
            self._refuse(DEVICE, least + beside, leases + beside, setting)
        lines = {**homes, LEASES: leases, COLLECTIVE_BUFFERS: collective, UPDATE_RING: ring}
        return {line: pages for line, pages in lines.items() if pages}

    def _resident_units(self) -> frozenset[int]:
        """The first units of forward, as many as the share of the device's memory holds that nothing else needs; at
        least one unit is not among them, for which there are leases."""
        layout, share = self.layout, self.split.device_home_share
        if not share or self.budgets.device is None or why_no_device_updates(layout, self.budgets.device):
            return frozenset()
        needed = layout.lease_pages(self.split.leases_ahead) + self._update_ring_pages()
        room = int(share * (self.budgets.device // layout.page_bytes - needed))
        states = (*(state.name for state in layout.states), GRAD)
        pages = {unit.index: sum(layout.pages(unit, state) for state in states) for unit in layout.units[:-1]}
        return first_that_fit(pages, room)

    def _update_ring_pages(self) -> int:
        """Pages of the device through which the states of units pass that are updated there."""
        layout = self.layout
        if not self.split.device_update_share or why_no_device_updates(layout, self.budgets.device):
            return 0
        return DEVICE_SLOTS * slot_pages(layout.states, layout.block_elements, layout.page_bytes)

    def _placement(self, kept: _InRam, staging: int, device: dict[str, int], lease_pages: int = 0) -> Placement:
        """Write down homes, then the buffers between them, then what the rest is for."""
        layout = self.layout
        homes = self._homes(kept)
        host, ssd = (self._home_lines(kept, homes, tier) for tier in (HOST, SSD))
        passing, device = self._updated_on_device(kept, device)
        if kept.grads != self.everything:
            host[STAGING] = staging
        if lease_pages:
            host[FETCH_RING if self.separate else LEASES] = lease_pages
        speculated = self._speculated(kept, passing, host, ssd)
        ring_slots = self._stream(kept, host, ssd)
        if speculated:
            whole = len(speculated & kept.weights & kept.moments)
            self.reasons.append(
                f"{len(speculated)} of {len(layout.units)} units, {whole} of them with all their states in RAM, are "
                "updated under backward as if nothing would be clipped, and their old states kept until that is known."
            )
        copied = min(self._copied_pages(host), self.host - sum(host.values()))
        host.update(self.buffers)
        host[CHECKPOINT] += max(0, copied)
        if self.budgets.ssd is not None:
            self._add_checkpoints(ssd, self.budgets.ssd // layout.page_bytes)
        lines = {HOST: host, SSD: ssd, DEVICE: device}
        taken = {tier: pages for tier, pages in lines.items() if pages}
        return Placement(homes, taken, ring_slots, speculated, passing, self.resident, tuple(self.reasons))

    def _homes(self, kept: _InRam) -> dict[tuple[int, str], str]:
        """The tier of every state of every unit."""
        layout = self.layout
        in_ram = {WEIGHT: kept.weights, GRAD: kept.grads, **{state.name: kept.moments for state in layout.moments}}
        if self.asynchronous:
            in_ram |= {WEIGHT_BACK: kept.weights, GRAD: self.everything}
        elif self.budgets.ssd is None:  # transient buffers at most: there is nowhere to spill to
            in_ram[GRAD] = self.everything
        in_ram |= {state.name: self.everything for state in layout.small}
        return {
            (unit, state): DEVICE if unit in self.resident else HOST if unit in units else SSD
            for unit in sorted(self.everything)
            for state, units in in_ram.items()
        }

    def _home_lines(self, kept: _InRam, homes: Mapping[tuple[int, str], str], tier: str) -> dict[str, int]:
        """State -> pages of a tier that is home to it, those of fixed and of transient buffers left out."""
        layout = self.layout
        elsewhere = {state.name for state in layout.small}
        if self.asynchronous or (self.budgets.ssd is None and kept.grads != self.everything):
            elsewhere.add(GRAD)
        lines: dict[str, int] = {}
        for (unit, state), home in homes.items():
            if home == tier and state not in elsewhere:
                lines[state] = lines.get(state, 0) + layout.pages(layout.units[unit], state)
        return lines

    def _updated_on_device(self, kept: _InRam, device: dict[str, int]) -> tuple[frozenset[int], dict[str, int]]:
        """Units whose states pass the device, and its lines, without the ring where nothing passes it."""
        units = self.layout.units
        passing: frozenset[int] = frozenset()
        if UPDATE_RING in device:
            in_ram = (kept.weights & kept.moments) - self.resident
            able = [unit for unit in units if unit.trainable_numel and unit.index in in_ram]
            passing = on_device(able, self.split.device_update_share)
        if passing:
            self.reasons.append(
                f"{len(passing)} of {len(units)} units are updated on the device: their states pass it while the CPU "
                "updates the others."
            )
        elif UPDATE_RING in device:
            self.reasons.append("No unit is updated on the device: that takes all of its states in RAM.")
        if self.resident:
            self.reasons.append(
                f"{len(self.resident)} of {len(units)} units have all their states on the device, which has room for "
                "them beside leases: they need no transfers."
            )
        return passing, {line: pages for line, pages in device.items() if passing or line != UPDATE_RING}

    def _speculated(
        self, kept: _InRam, passing: frozenset[int], host: dict[str, int], ssd: dict[str, int]
    ) -> frozenset[int]:
        """Units whose old states there is room for beside the new: adds the lines of undoing.

        First those with moments on SSD, whose updates take longest; of the others what leaves room for a checkpoint.
        """
        if not self.speculate:
            return frozenset()
        layout = self.layout
        streamed = self.everything - kept.moments
        ring = 0
        if streamed or kept.weights != self.everything:
            ring = layout.least_ring_slots * self._slot_pages(weights_on_ssd=kept.weights != self.everything)
        left = self.host - sum(host.values()) - ring
        free = (self.budgets.ssd or 0) // layout.page_bytes - sum(ssd.values()) - self._spare_pages(ssd)
        needs = {u.index: self._undo_pages(u, u.index in kept.weights, u.index in kept.moments) for u in layout.units}
        chosen, (ram, pages) = last_that_fit({u: needs[u] for u in streamed}, (left, free))
        if self.split.undo_in_ram:
            resident = kept.moments - passing - self.resident
            room = left - ram - self._copied_pages(host), free - pages
            more, copies = last_that_fit({u: needs[u] for u in resident}, room)
            chosen, ram, pages = chosen | more, ram + copies[0], pages + copies[1]
        host.update({UNDO: ram} if ram else {})
        ssd.update({UNDO: pages} if pages else {})
        return chosen

    def _copied_pages(self, host: Mapping[str, int]) -> int:
        """Pages for what a checkpoint has not written of RAM's states when their next update comes, where they fit."""
        return sum(host.get(state.name, 0) for state in self.layout.states) // COPIED_SHARE

    def _stream(self, kept: _InRam, host: dict[str, int], ssd: dict[str, int]) -> int:
        """What states on SSD need besides: adds the line of the ring; returns its slots."""
        count = len(self.layout.units)
        weights, moments = (count - len(units) for units in (kept.weights, kept.moments))
        if not (weights or moments):
            self.reasons.append(
                "Weights and moments fit in host RAM; SSD keeps room for gradients that cannot be used at once."
                if ssd
                else "Every state fits in host RAM; SSD is not used."
            )
            return 0
        slot_pages = self._slot_pages(weights_on_ssd=weights > 0)
        ring_slots = self._ring_slots(slot_pages, taken=sum(host.values()))
        host[RING] = ring_slots * slot_pages
        self.reasons.append(
            f"SSD holds the weights of {weights} and the moments of {moments} of {count} units: RAM goes first to "
            "weights (most transfers per byte), then gradients, then moments, in forward order (least slack)."
        )
        return ring_slots

    def _add_checkpoints(self, ssd: dict[str, int], available: int) -> None:
        """Add the spare pages of checkpoints to the lines of SSD, which has `available` pages."""
        needed = sum(ssd.values()) - ssd.get(UNDO, 0)
        if needed > available:
            self._refuse(SSD, needed, available, "memory.ssd='DIR:SIZE'")
        state = needed - ssd.get(GRAD, 0)
        if state == 0:
            return
        spare = self._spare_pages(ssd)
        if needed + spare > available:
            setting = "memory.ssd='DIR:SIZE', or lower keep_checkpoints (--keep-checkpoints; 0 copies what is on SSD)"
            self._refuse(SSD, needed + spare, available, setting)
        if keep := spare // state:
            ssd[SPARE] = spare
            self.reasons.append(
                f"SSD has room to keep the pages of {keep} checkpoint{'s' * (keep > 1)} beside those in use, so that "
                "state on SSD is saved without copying it."
            )
        else:
            self.reasons.append("SSD has no room for the pages of a checkpoint: state on SSD is copied to save it.")

    def _spare_pages(self, ssd: dict[str, int]) -> int:
        """Pages on SSD for what changes while as many checkpoints as asked for, or as fit, keep theirs."""
        needed = sum(ssd.values()) - ssd.get(UNDO, 0)
        state = needed - ssd.get(GRAD, 0)
        if self.keep_checkpoints is not None:
            return self.keep_checkpoints * state
        return state if needed + state <= (self.budgets.ssd or 0) // self.layout.page_bytes else 0

    def _refuse(self, tier: str, needed: int, available: int, setting: str) -> NoReturn:
        page = self.layout.page_bytes
        if tier == HOST:
            needed, available = needed + self.reserved, available + self.reserved
            if self.asynchronous:
                grads = format_bytes(self.layout.total_pages(GRAD) * page)
                setting += f", or lower max_staleness: RAM keeps gradients of max_staleness + 1 steps, {grads} each"
        raise BudgetError(
            f"The training state does not fit: {tier} needs at least {format_at_least(needed * page)} and has "
            f"{format_bytes(available * page)}, {format_at_least((needed - available) * page)} short. "
            f"Raise {setting}.",
            tier=tier,
            needed_bytes=needed * page,
        )
