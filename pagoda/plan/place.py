"""Decides which tier is home to each state of each unit, from everything in RAM to everything on SSD."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import NoReturn

from pagoda.errors import BudgetError
from pagoda.memory.page import pages_for
from pagoda.memory.sizes import format_at_least, format_bytes
from pagoda.plan.buffers import ACTIVATION_BUFFERS, FETCH_SLOTS, STAGED
from pagoda.plan.collective import reduce_buffers, serving_pages
from pagoda.plan.device_homes import DeviceHomes, choose_device_homes, first_that_fit
from pagoda.plan.device_updates import UPDATE_RING, WORK, on_device, slot_count, slot_pages
from pagoda.plan.layout import GRAD, GRAD_QUEUE, WEIGHT, WEIGHT_BACK, Layout
from pagoda.plan.options import DEFAULT_SPLIT, Options
from pagoda.plan.placement import (
    ACTIVATIONS,
    BOUNCE,
    CHECKPOINT,
    COLLECTIVE_BUFFERS,
    FETCH_RING,
    LEASES,
    RING,
    SERVING,
    STAGING,
    VERSIONS,
    Placement,
)
from pagoda.plan.tiers import DEVICE, HOST, SSD, Budgets
from pagoda.plan.units import UnitSpec

MOVED_SHARE = 4
"""New versions of states in RAM during a checkpoint get at most one page for this many pages of states. Most states are
written before their next update."""


def place(layout: Layout, budgets: Budgets, options: Options, staging_buffers: int = 2) -> Placement:
    """Fill RAM with the states of which each byte saves the most traffic. The rest goes to SSD.

    A byte of weights on SSD costs up to four transfers per step (forward, backward, update in and out), a byte of
    gradients at least two, and a byte of moments two. So weights get RAM first, then gradients, then moments. Within
    each, units come in forward order, because the first units of the next forward have the least slack. If units are
    updated during backward, gradients need only a few buffers. `staging_buffers` is the least number of gradients of
    the largest unit that fit the staging region. With one, backward waits until each is written. Without SSD, RAM keeps
    every gradient of a step of several passes from the first pass to the last.

    Units with moments on SSD are updated speculatively if `options` allow it and there is room for a second version of
    their states: on SSD after checkpoints, in RAM after moments. The remaining RAM serves units with all states in RAM,
    if there is a separate device.

    If the split makes the device a home of states, the device is filled first, with whole units. If the device updates
    some units, and RAM holds the rest of their states, it takes states in the order of RAM instead, because weights and
    gradients move most often. Their other states pass the device. If they are updated speculatively, it has room for
    other versions of their weights.

    Raises BudgetError with the tier, the shortfall and the setting that would help.
    """
    page, split, by_state = layout.page_bytes, options.split or DEFAULT_SPLIT, None
    in_pages = (None if nbytes is None else nbytes // page for nbytes in (budgets.device, budgets.ssd))
    placer = partial(_Placer, layout, Budgets(budgets.host // page, *in_pages), budgets, options)
    if layout.shares_experts:  # while two wait for their turn to be added up, others come before them
        staging_buffers = max(staging_buffers, 3)
    if split.device_update_share and split.device_home_share and budgets.device is not None:
        by_state = _place_by_state(partial(placer, staging_buffers, by_state=True), layout, options)
    return by_state or placer(staging_buffers).place()


def _place_by_state(make: Callable[..., "_Placer"], layout: Layout, options: Options) -> Placement | None:
    """The placement in which the device is home to what moves most of the units that it updates. None if RAM does not
    hold the rest. The device has room for other versions of weights only where RAM has room for the other states."""
    trained = [unit for unit in layout.units if unit.trainable_numel]
    split, speculated = options.split or DEFAULT_SPLIT, frozenset[int]()
    if options.may_speculate:
        updated = on_device(trained, split.device_update_share)
        speculated = on_device([unit for unit in trained if unit.index in updated], split.device_speculated_share)
    while True:
        placer = make(two_versions=speculated)
        if placer.needed_in_memory() <= placer.host:
            placement = placer.place()
            if placer.device_homes.second_weights.keys() <= placement.speculated:
                return placement
            speculated &= placement.speculated
        elif speculated:
            speculated = frozenset()
        else:
            return None


@dataclass(frozen=True, slots=True)
class _InRam:
    """Units whose weights, gradients and moments need no SSD, and the pages of the buffers for the others."""

    weights: frozenset[int]
    grads: frozenset[int]
    moments: frozenset[int]
    staging: int
    leases: int = 0
    """Pages that RAM has only because some weights live on SSD: for leases, or with a separate device for the fetch
    ring."""


@dataclass(frozen=True)
class _Placer:
    """Makes one placement, as `place` says. All sizes are in pages, except `given`."""

    layout: Layout
    budgets: Budgets
    given: Budgets
    """The budgets in bytes, for messages."""
    options: Options
    staging_buffers: int
    by_state: bool = False
    """Whether single states live on the device, or whole units."""
    two_versions: Collection[int] = ()
    """Units for whose weights the device then has room for another version."""

    def place(self) -> Placement:
        """Choose homes, then the buffers between them, then the use of the remaining pages."""
        layout = self.layout
        device = self._device_lines()
        kept = self._divided()
        homes = self._homes(kept)
        on_device = self._updated_on_device()
        passing = any(home != DEVICE for (unit, _), home in homes.items() if unit in on_device)
        if not passing and not layout.weight.copied:
            device.pop(UPDATE_RING, None)
        host, ssd = self._home_lines(homes, kept)
        if kept.grads != self.all:
            host[STAGING] = kept.staging
        gathered = layout.sharing_pages if kept.weights != self.all else 0
        host |= with_pages({LEASES if self.budgets.device is None else FETCH_RING: kept.leases, SERVING: gathered})
        changing, spare = self._checkpoint_room_on_ssd(homes, ssd)
        slot = 0 if kept.weights == kept.moments == self.all else self._slot(kept.weights != self.all)
        left, left_on_ssd = self.host - sum(host.values()), (self.budgets.ssd or 0) - sum(ssd.values()) - spare
        speculated, in_ram, on_ssd = self._speculated(kept, left - layout.least_ring_slots * slot, left_on_ssd)
        slots = self._ring_slots(slot, left - in_ram) if slot else 0
        versions = max(in_ram, min(self._checkpoint_room_in_ram(host), left - slots * slot))
        second = sum(pages for unit, pages in self.device_homes.second_weights.items() if unit in speculated)
        lines = {
            HOST: host | with_pages({RING: slots * slot, VERSIONS: versions}) | self.fixed,
            SSD: ssd | with_pages({VERSIONS: on_ssd + spare}),
            DEVICE: device | with_pages({VERSIONS: second}),
        }
        lines = {tier: of for tier, of in lines.items() if of}
        return Placement(homes, lines, slots, speculated, on_device, changing, spare)

    # --- what is given ------------------------------------------------------------------------------------

    @cached_property
    def host(self) -> int:
        """Pages of RAM without the fixed lines."""
        return self.budgets.host - sum(self.fixed.values())

    @cached_property
    def all(self) -> frozenset[int]:
        return frozenset(unit.index for unit in self.layout.units)

    @cached_property
    def update_ring(self) -> int:
        """Pages of the device for slots through which states pass for their update."""
        updates = self.budgets.device is not None and (self.options.split or DEFAULT_SPLIT).device_update_share
        return slot_count(self.layout) * slot_pages(self.layout) if updates else 0

    @cached_property
    def device_homes(self) -> DeviceHomes:
        if self.budgets.device is None:
            return DeviceHomes(self.layout, self.options)
        sizes = self.budgets.device, self.update_ring
        return choose_device_homes(self.layout, self.options, *sizes, self.by_state, self.two_versions)

    @cached_property
    def weight(self) -> dict[int, int]:
        """unit -> pages of its weights that do not live on the device. Units whose weights must be in RAM come
        first."""
        weight = self._by_unit(WEIGHT, *[WEIGHT_BACK] * self.options.asynchronous)
        return {unit: weight[unit] for unit in sorted(weight, key=lambda unit: not self.layout.units[unit].on_host)}

    @cached_property
    def grad(self) -> dict[int, int]:
        """The same for gradients that wait for a synchronous update."""
        return self._by_unit(*[GRAD] * (not self.options.asynchronous))

    @cached_property
    def moment(self) -> dict[int, int]:
        """The same for states that may live on SSD."""
        return self._by_unit(*(state.name for state in self.layout.moments))

    def _by_unit(self, *states: str) -> dict[int, int]:
        """unit -> pages of some states, without those that live on the device."""
        layout, homes = self.layout, self.device_homes
        whole = {unit.index: sum(layout.pages(unit, state) for state in states) for unit in layout.sizes}
        pages = {index: whole[first] for index, first in enumerate(layout.alike)}
        for index in homes.units:
            unit = layout.units[index]
            pages[index] = sum(layout.pages(unit, state) for state in states if (index, state) not in homes.at_home)
        return pages

    # --- host RAM -----------------------------------------------------------------------------------------

    def _divided(self) -> _InRam:
        """The states that need no SSD: everything if it fits, otherwise weights, gradients and moments in this
        order."""
        needed = self.needed_in_memory()
        if needed <= self.host:
            grads = sum(self.grad.values())
            staging = min(grads, self.host - sum(self.weight.values()) - sum(self.moment.values()))
            grads_in = self.all if staging == grads else frozenset()
            return _InRam(self.all, grads_in, self.all, staging)
        if self.budgets.ssd is None:
            self._refuse(HOST, needed, "memory.host, or add memory.ssd='DIR'")
        weights_in, leases, left = self._divided_weights(needed)
        grads_in, staging = self._divided_grads(left)
        left -= staging + sum(self.grad[unit] for unit in grads_in)
        moments_in = first_that_fit(self.moment, left)
        return _InRam(weights_in, grads_in, moments_in, staging, leases)

    def needed_in_memory(self) -> int:
        """Pages of RAM for everything that does not live on the device."""
        accumulates = (self.options.gradient_accumulation_steps or 1) > 1
        few = self.options.update_during_backward and not (accumulates and self.budgets.ssd is None)
        gradients = self._staging(STAGED) if few else sum(self.grad.values())
        return sum(self.weight.values()) + sum(self.moment.values()) + gradients

    def _staging(self, buffers: int) -> int:
        """Pages for this many gradients of the largest unit, or for all gradients."""
        return min(sum(self.grad.values()), buffers * max(self.grad.values()))

    def _divided_weights(self, everything: int) -> tuple[frozenset[int], int, int]:
        """Units whose weights need no SSD, pages of leases or of the fetch ring, and pages left for gradients and
        moments. `everything` is the number of pages that would be needed without SSD."""
        layout, weights, least_staging = self.layout, sum(self.weight.values()), self._staging(self.staging_buffers)
        taken = least_staging + layout.least_ring_slots * self._slot(weights_on_ssd=False)
        leased_anyway = LEASES in self.fixed
        if not leased_anyway:
            kept = first_that_fit(self.weight, self.host - taken)
            if kept == self.all:
                return kept, 0, self.host - taken - weights + least_staging
        slots = layout.least_ring_slots * self._slot(weights_on_ssd=True)
        taken_if_streamed = least_staging + slots + layout.sharing_pages
        left = self.host - taken_if_streamed
        leases = least = 0
        if self.budgets.device is not None:
            leases = least = FETCH_SLOTS * layout.fetch_piece_pages
        elif not leased_anyway:
            leases, least = layout.lease_pages(), layout.lease_pages(ahead=1)
        used = sum(self.weight[unit.index] for unit in layout.units if unit.on_host)
        if left < least + used:
            needed = taken_if_streamed + least + used
            if not leased_anyway:
                needed = min(needed, taken + weights, everything)
            raised = ", or raise memory.embedding_limit" * (used > 0 and self.options.embedding_limit is not None)
            self._refuse(HOST, needed, f"memory.host{self._or_smaller_units}{raised}")
        leases = min(leases, left - used)
        kept = first_that_fit(self.weight, left - leases)
        return kept, leases, left - leases - sum(self.weight[unit] for unit in kept) + least_staging

    def _divided_grads(self, left: int) -> tuple[frozenset[int], int]:
        """Units whose gradients need no SSD, and pages of the staging region."""
        if self.options.update_during_backward:
            return frozenset(), min(self._staging(STAGED), left)
        if sum(self.grad.values()) <= left:
            return self.all, 0
        staging = self._staging(self.staging_buffers)
        return first_that_fit(self.grad, left - staging), staging

    @cached_property
    def fixed(self) -> dict[str, int]:
        """Lines of RAM that do not depend on where other states live."""
        layout = self.layout
        lines = {state.name: sum(self._by_unit(state.name).values()) for state in layout.small}
        lines |= {CHECKPOINT: layout.piece_pages, WORK: layout.work_pages}
        if self.options.asynchronous:
            lines[GRAD] = lines[GRAD_QUEUE] = sum(self._by_unit(GRAD).values())
        if self.budgets.device is not None:
            buffers, elements = layout.bounce
            widest = max(map(layout.offloaded_itemsize, layout.sizes))
            lines[BOUNCE] = buffers * pages_for(elements * widest, layout.page_bytes)
        else:
            lines[COLLECTIVE_BUFFERS] = reduce_buffers(layout).pages
        if self.budgets.ssd is not None:
            lines[SERVING] = serving_pages(layout)
            if self.options.may_offload:
                lines[ACTIVATIONS] = ACTIVATION_BUFFERS * layout.activation_buffer_pages
        if self.budgets.device is None and layout.ranks.shards_weights:
            lines[LEASES] = layout.lease_pages(ahead=1)
            if self.budgets.ssd is not None:  # a slice does not begin where a page of its lease does
                lines[FETCH_RING] = FETCH_SLOTS * layout.fetch_piece_pages
        return with_pages(lines)

    # --- between host RAM and SSD -------------------------------------------------------------------------

    def _homes(self, kept: _InRam) -> dict[tuple[int, str], str]:
        """The tier of every state of every unit."""
        in_ram = {WEIGHT: kept.weights, GRAD: kept.grads} | {s.name: kept.moments for s in self.layout.moments}
        if self.options.asynchronous:
            in_ram |= {WEIGHT_BACK: kept.weights, GRAD: self.all}
        elif self.budgets.ssd is None:  # there is nowhere to spill to
            in_ram[GRAD] = self.all
        in_ram |= {state.name: self.all for state in self.layout.small}
        homes = {
            (unit.index, state): HOST if unit.index in units else SSD
            for unit in self.layout.units
            for state, units in in_ram.items()
            if self.layout.has(unit, state)
        }
        return homes | dict.fromkeys(self.device_homes.at_home & homes.keys(), DEVICE)

    def _home_lines(self, homes: Mapping[tuple[int, str], str], kept: _InRam) -> tuple[dict[str, int], dict[str, int]]:
        """State -> pages of which RAM is the home, and of which SSD is, without fixed lines and buffers."""
        elsewhere = {state.name for state in self.layout.small}
        if self.options.asynchronous or (self.budgets.ssd is None and kept.grads != self.all):
            elsewhere.add(GRAD)
        lines: dict[str, dict[str, int]] = {HOST: {}, SSD: {}}
        for (unit, state), home in homes.items():
            if home != DEVICE and state not in elsewhere:
                lines[home][state] = lines[home].get(state, 0) + self.layout.pages(self.layout.units[unit], state)
        return lines[HOST], lines[SSD]

    def _slot(self, weights_on_ssd: bool) -> int:
        """Pages of a block of the states that stream through RAM."""
        layout = self.layout
        return sum(layout.block_pages(s.name) for s in (*[layout.weight] * weights_on_ssd, *layout.moments))

    def _ring_slots(self, slot: int, left: int) -> int:
        """Number of slots: at least the minimum, and as many more as fit `left` pages, up to the blocks of the largest
        unit. A rule that takes whole parameters gets at most one more, for the first parameter of the next unit."""
        layout, least = self.layout, self.layout.least_ring_slots
        if layout.weight.whole is not None:
            most = least + 1
        else:
            most = max(-(-unit.trainable_numel // layout.block_elements) for unit in layout.units)
        return max(least, min(most, left // slot))

    def _second_version(self, unit: UnitSpec, kept: _InRam) -> tuple[int, int]:
        """Pages in RAM and on SSD for another version of a unit's states. (0, 0) if it has no second version: if most
        of its weights are frozen, these would take the room, and its update is short. A unit with weights on the device
        has none either, unless other states of it pass the device.
        """
        layout, at_home = self.layout, self.device_homes.at_home
        weight_in, moments_in = unit.index in kept.weights, unit.index in kept.moments
        if not unit.trainable_numel or (weight_in and unit.is_mostly_frozen):
            return 0, 0
        if (unit.index, WEIGHT) in at_home and unit.index not in self.device_homes.second_weights:
            return 0, 0
        if layout.shares_experts and unit.index in layout.expert_units:
            return 0, 0  # other ranks use them in their own order, and add to their gradients late
        in_ram = [*[layout.weight] * weight_in, *(layout.states[1:] if moments_in else layout.small)]
        on_ssd = self.weight[unit.index] * (not weight_in) + self.moment[unit.index] * (not moments_in)
        return sum(layout.pages(unit, s.name) for s in in_ram if (unit.index, s.name) not in at_home), on_ssd

    def _speculated(self, kept: _InRam, ram: int, ssd: int) -> tuple[frozenset[int], int, int]:
        """Units of which second versions fit `ram` pages in RAM and `ssd` on SSD, and the pages that these take.

        Units with moments on SSD come first, because their updates take longest. The others are chosen only with a
        separate device: if the CPU computes, they gain nothing.
        """
        chosen, taken_ram, taken_ssd = set[int](), 0, 0
        units = self.all - kept.moments if self.budgets.device is None else self.all
        if not self.options.may_speculate:
            units = frozenset()
        # Of both, the last units come first, because backward has their gradients first.
        for unit in sorted(units, key=lambda unit: (unit in kept.moments, -unit)):
            in_ram, on_ssd = self._second_version(self.layout.units[unit], kept)
            if (in_ram or on_ssd) and taken_ram + in_ram <= ram and taken_ssd + on_ssd <= ssd:
                taken_ram, taken_ssd = taken_ram + in_ram, taken_ssd + on_ssd
                chosen.add(unit)
        return frozenset(chosen), taken_ram, taken_ssd

    def _checkpoint_room_in_ram(self, host: Mapping[str, int]) -> int:
        """Pages for new versions of states in RAM that a checkpoint has not written when their next update comes, if
        they fit. 0 if activations may go to RAM, which they do in every step."""
        if self.options.may_offload and self.budgets.device is not None:
            return 0
        return sum(host.get(state.name, 0) for state in self.layout.states) // MOVED_SHARE

    def _checkpoint_room_on_ssd(self, homes: Mapping[tuple[int, str], str], ssd: Mapping[str, int]) -> tuple[int, int]:
        """Pages on SSD that change, and pages for changes while checkpoints keep their own: as many checkpoints as
        requested, or as fit. Frozen weights do not change. Refuses a budget that is too small for these and the lines
        of SSD."""
        needed, available, units = sum(ssd.values()), self.budgets.ssd or 0, self.layout.units
        if needed > available:
            self._refuse(SSD, needed, "memory.ssd='DIR:SIZE'")
        on_ssd = [(units[unit], state) for (unit, state), home in homes.items() if home == SSD and state in ssd]
        changing = needed - ssd.get(GRAD, 0) - sum(self.layout.frozen_pages(*extent) for extent in on_ssd)
        if self.options.keep_checkpoints is None:
            return changing, changing if needed + changing <= available else 0
        spare = self.options.keep_checkpoints * changing
        if needed + spare > available:
            setting = "memory.ssd='DIR:SIZE', or lower memory.ssd_checkpoints (--save-total-limit; 0: copy)"
            self._refuse(SSD, needed + spare, setting)
        return changing, spare

    # --- a device of its own ------------------------------------------------------------------------------

    def _device_lines(self) -> dict[str, int]:
        if self.budgets.device is None:
            return {}
        layout = self.layout
        leased = [
            u for u in layout.units if (u.index, WEIGHT) not in self.device_homes.at_home or layout.is_sliced(u, WEIGHT)
        ]
        total = sum(map(layout.lease_of, leased))
        lines = {COLLECTIVE_BUFFERS: reduce_buffers(layout).pages, UPDATE_RING: self.update_ring}
        beside = sum(lines.values()) + sum(self.device_homes.second_weights.values())
        for unit in (layout.units[index] for index in sorted(self.device_homes.units)):
            states = self.device_homes.states(unit)
            beside += self.device_homes.most(unit, states)
            for line, pages in self.device_homes.lines(unit, states).items():
                lines[line] = lines.get(line, 0) + pages
        leases = min(self.budgets.device - beside, total)
        least = min(layout.lease_pages(ahead=1), total)
        if leases < least:
            setting = f"memory.device{self._or_smaller_units}"
            setting += ", or lower split.device_update_share" * (self.update_ring > 0)
            self._refuse(DEVICE, least + beside, setting)
        lines[LEASES] = leases
        return with_pages(lines)

    def _updated_on_device(self) -> frozenset[int]:
        """Units with states on the device, and the requested share of all."""
        trained = (unit for unit in self.layout.units if unit.trainable_numel)
        share = (self.options.split or DEFAULT_SPLIT).device_update_share if self.update_ring else 0.0
        return self.device_homes.units | on_device(trained, share)

    @property
    def _or_smaller_units(self) -> str:
        """What else may help, as the rest of a sentence. Without a limit of the user's, the planner tries smaller ones
        by itself."""
        return ", or lower memory.unit_limit" * (self.options.unit_limit is not None)

    def _refuse(self, tier: str, needed: int, setting: str) -> NoReturn:
        page = self.layout.page_bytes
        if tier == HOST:
            needed += sum(self.fixed.values())
            if self.options.asynchronous:
                grads = format_bytes(self.fixed.get(GRAD, 0) * page)
                setting += f", or set update='sync': async keeps the gradients of 2 steps in RAM, {grads} each"
        needed, has = needed * page, getattr(self.given, tier) or 0
        raise BudgetError(
            f"The training state does not fit: {tier} needs at least {format_at_least(needed)} and has "
            f"{format_bytes(has)}, {format_at_least(needed - has)} short. Raise {setting}.",
            tier=tier,
            needed_bytes=needed,
        )


def with_pages(lines: Mapping[str, int]) -> dict[str, int]:
    """The lines that have pages."""
    return {line: pages for line, pages in lines.items() if pages}
