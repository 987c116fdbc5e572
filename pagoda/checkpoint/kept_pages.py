"""The parts of a checkpoint that stay in their pages on SSD, for one process or for all ranks."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from pagoda.checkpoint.directory import removables
from pagoda.checkpoint.paged import PagedUnit
from pagoda.checkpoint.state import ParameterState, gather_from_all_stages
from pagoda.checkpoint.tensors import DTYPE_NAMES
from pagoda.engine import Engine
from pagoda.errors import BudgetError, StorageError
from pagoda.memory.page import PageRun
from pagoda.memory.sizes import format_bytes
from pagoda.parameters.unit import LiveUnit
from pagoda.plan.layout import WEIGHT, WEIGHT_BACK
from pagoda.plan.placement import VERSIONS
from pagoda.plan.tiers import SSD

_log = logging.getLogger("pagoda")
_MORE_ROOM = "Delete checkpoints, or make room for more (memory.ssd_checkpoints, --save-total-limit)."


@dataclass(frozen=True)
class KeptPages:
    """States of units that a checkpoint keeps as pages."""

    units: Mapping[int, PagedUnit]
    """unit -> its states that this process keeps as pages, for units with at least one such state."""
    names: Mapping[str, frozenset[str]]
    """State -> parameters whose state no rank writes into a file."""

    @classmethod
    def of(cls, engine: Engine, replaces: Sequence[Path]) -> "KeptPages":
        """What the next checkpoint can keep as pages. It will replace the checkpoints in `replaces`. All ranks call
        this at the same point.

        A state of a unit is kept if every rank that has elements of it has them on SSD, and has room to keep one more
        checkpoint's pages. So a tensor is either in pages or in a file, even if its homes differ between ranks.
        """
        if engine.store.ssd is None and engine.links.stages is None:
            return cls({}, {})
        paged = {unit.index: paged_unit(engine, unit) for unit in engine.units}
        stage, room = engine.links.mesh.pipeline_stage, _has_room(engine, replaces)
        lags = [engine.scheduler.weights(unit.index).lag for unit in engine.units]
        mine = [
            (
                (stage, unit.index),
                state.name,
                [name for name, _, _ in paged[unit.index].tensors(state.name)],
                room and state.name in paged[unit.index].extents,
                any(map(len, engine.store.shards.held(unit.spec, state.name))),
            )
            for unit in engine.units
            for state in engine.plan.saved_states
            if state.name != WEIGHT_BACK or lags[unit.index]
        ]
        said = gather_from_all_stages(engine, "what a checkpoint keeps on SSD", mine)
        of_all = [*chain.from_iterable(said)]
        copied = {(at, state) for at, state, _, can_stay, has_elements in of_all if has_elements and not can_stay}
        stay = {(at, state) for at, state, _, can_stay, _ in of_all if can_stay} - copied
        names: dict[str, set[str]] = {}
        for at, state, held, _, _ in of_all:
            if (at, state) in stay:
                names.setdefault(state, set()).update(held)
        kept = {}
        for index, unit in paged.items():
            extents = {state: run for state, run in unit.extents.items() if ((stage, index), state) in stay}
            if extents:
                spans = {state: unit.spans[state] for state in extents}
                kept[index] = PagedUnit(unit.layout, extents, spans)
        return cls(kept, {state: frozenset(held) for state, held in names.items()})


def paged_unit(engine: Engine, unit: LiveUnit) -> PagedUnit:
    """A unit's layout, and its states whose home is SSD."""
    store, states = engine.store, engine.plan.saved_states
    held = [(ParameterState(engine, unit, slot), placed.offset) for slot, placed in enumerate(unit.spec.slots)]
    layout: dict[str, Any] = {
        "parameters": [[p.stored_name, offset, list(p.spec.shape), p.spec.trainable] for p, offset in held],
        "packed": {
            state.name: [
                [parameter.stored_name, span.first, list(span.shape)]
                for parameter, _ in held
                if (span := parameter.span(state)) is not None
            ]
            for state in states
            if state.shape_of is not None
        },
    }
    if unit.spec.dtype is not None:
        layout[WEIGHT] = DTYPE_NAMES[unit.spec.dtype]
    extents, spans = {}, {}
    for state in states:
        run = store.run_on_ssd(unit.index, state.name)
        if run is not None:
            extents[state.name] = [run.start, run.count]
            spans[state.name] = [[s.start, s.stop, s.at] for s in store.shards.held(unit.spec, state.name)]
    return PagedUnit(layout, extents, spans)


def _has_room(engine: Engine, replaces: Sequence[Path]) -> bool:
    """Whether the pages of one more checkpoint can be kept, once the replaced ones are deleted. If the user asked for
    room and it is taken, a warning says so.

    The slots for speculative updates must stay free. Other slots may be occupied, by pages that a deleted run has left.
    """
    ssd, plan = engine.store.ssd, engine.plan
    if ssd is None:
        return False
    pages, spare = plan.placement.changing_on_ssd, plan.placement.spare_on_ssd
    if plan.options.keep_checkpoints == 0 or spare < pages:
        return False
    gone = {reference["commit"] for old in removables(replaces) for reference in old.references}
    frozen = [
        PageRun(run.stop - plan.layout.frozen_pages(unit, WEIGHT), plan.layout.frozen_pages(unit, WEIGHT))
        for unit in plan.units
        if (run := engine.store.run_on_ssd(unit.index, WEIGHT)) is not None
    ]
    try:
        room, why = ssd.room_beside(gone, frozen), "checkpoints that are kept have taken the room for its pages"
    except (BudgetError, StorageError) as error:
        room, why = 0, str(error)
    if room + spare - plan.placement.pages(SSD, VERSIONS) >= pages:
        return True
    _log.log(
        logging.INFO if plan.options.keep_checkpoints is None else logging.WARNING,
        "this checkpoint copies %s of state on SSD: %s. %s",
        format_bytes(pages * plan.page_bytes),
        why,
        _MORE_ROOM,
    )
    return False
