"""Moves every state to its home in another plan of the same units."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

import torch

from pagoda.memory.arena import Arena, tensor_bytes
from pagoda.memory.page import PageRun
from pagoda.memory.ram import free_ram
from pagoda.memory.region import Region
from pagoda.plan.planner import Plan
from pagoda.plan.tiers import DEVICE, SSD
from pagoda.runtime.device import Device
from pagoda.runtime.lanes import SSD_THREADS
from pagoda.runtime.store import Store
from pagoda.schedule.operations import schedule_plan
from pagoda.schedule.versions import first_runs


class _Move(NamedTuple):
    """The newest values of a state of a unit, on their way to its home in another plan."""

    tensor: torch.Tensor | None
    """Where they are in memory, if they are there."""
    run: PageRun | None
    """Where they are on SSD, if they are there."""
    to: tuple[int, str]
    """The unit and the state."""
    new_run: PageRun
    """The run to which they go."""


def move_states(store: Store, plan: Plan, device: Device) -> None:
    """Move every state to its first run in another plan of the same units. Nothing may use states, leases or buffers
    meanwhile. Leases and buffers of before are invalid afterwards. `Scheduler.moved` must follow.

    RAM holds each state once, because what has moved returns its old pages to the system. States on a separate device
    pass through RAM.

    Raises BudgetError if a tier has no room. States are then as before, but on a separate device they, and leases, have
    no memory until they move to the plan of before. Raises StorageError if a drive fails. States are then lost.
    """
    store.make_room_on_ssd(plan)
    if store.device is not None:
        if not store.aside:  # else they are there already
            store.aside |= {key: _in_ram(tensor) for key, tensor in _on_device(store).items()}
        device.free(store.device.arena)
    old, first = store.host, first_runs(schedule_plan(plan))
    moves = [
        _Move(_newest(store, unit.index, state), store.run_on_ssd(unit.index, state), (unit.index, state), home)
        for unit in plan.units
        for state, home in store.named(unit.index, first[unit.index]).items()
        if home.count
    ]
    store.open(plan)
    old.arena.unlock()
    _discard_beside(old, [move.tensor for move in moves if move.tensor is not None])
    with ThreadPoolExecutor(SSD_THREADS) as pool:
        [*pool.map(partial(_fill, store, old), moves)]
    on_ssd = [move for move in moves if store.tier(*move.to) == SSD]
    store.place_on_ssd({move.new_run: move.run for move in on_ssd if move.run is not None})
    for move in on_ssd:
        if move.tensor is not None:
            store.save(move.new_run, 0, tensor_bytes(move.tensor))
    old.arena.close()
    store.aside.clear()
    store.host.arena.lock()
    device.settle()


def lose_states(store: Store, plan: Plan) -> None:
    """Take the memory of a plan after states could not move. No state has a value until all are replaced."""
    store.aside.clear()
    store.open(plan)
    store.place_on_ssd({})
    store.host.arena.lock()


def may_move(store: Store) -> bool:
    """Whether RAM has room for the states on a separate device, which pass through it."""
    return sum(tensor.nbytes for tensor in _on_device(store).values()) <= free_ram()


def _on_device(store: Store) -> dict[tuple[int, str], torch.Tensor]:
    """(unit, state) -> its newest version, for states on a separate device."""
    keys = ((unit, state) for unit, states in enumerate(store.numbers) for state in states)
    found = {key: store.tensor(*key) for key in keys if store.tier(*key) == DEVICE}
    return {key: tensor for key, tensor in found.items() if tensor is not None and len(tensor)}


def _newest(store: Store, unit: int, state: str) -> torch.Tensor | None:
    """The newest version of a state that is in memory."""
    aside = store.aside.get((unit, state))
    return store.tensor(unit, state) if aside is None else aside


def _in_ram(tensor: torch.Tensor) -> torch.Tensor:
    return Arena(tensor.nbytes).tensor(0, tensor.numel(), tensor.dtype).copy_(tensor)


def _fill(store: Store, old: Region, move: _Move) -> None:
    """Fill the run in memory to which a state moves, and return its old pages to the system, which nothing needs any
    more."""
    target = store.tensor(*move.to, move.new_run)
    if target is None:
        return
    target = target.view(torch.uint8)
    if move.tensor is not None:
        target.copy_(move.tensor.view(torch.uint8))
        if _is_in(old, move.tensor):
            old.arena.discard(move.tensor.data_ptr() - old.arena.address, move.tensor.nbytes)
    elif move.run is not None:
        landing = target if target.is_cpu else Arena(target.nbytes).tensor(0, target.nbytes, torch.uint8)
        store.load(move.run, 0, tensor_bytes(landing))
        if landing is not target:
            target.copy_(landing)


def _is_in(region: Region, tensor: torch.Tensor) -> bool:
    """Whether a tensor lies in the arena of a region."""
    return tensor.is_cpu and 0 <= tensor.data_ptr() - region.arena.address < region.arena.nbytes


def _discard_beside(region: Region, tensors: Sequence[torch.Tensor]) -> None:
    """Return those pages of an arena to the system in which no tensor lies."""
    arena, at = region.arena, 0
    used = sorted((each.data_ptr() - arena.address, each.nbytes) for each in tensors if _is_in(region, each))
    for start, nbytes in (*used, (arena.nbytes, 0)):
        if start > at:
            arena.discard(at, start - at)
        at = start + nbytes
