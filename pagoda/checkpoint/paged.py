"""States that a checkpoint keeps as pages on SSD: their description in the manifest, and how they are read."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from functools import partial
from math import prod
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch

from pagoda.checkpoint.lazy import LazyTensor, Read, cat
from pagoda.checkpoint.tensors import DTYPE_NAMES, DTYPES
from pagoda.errors import CheckpointError, StorageError
from pagoda.memory.arena import Arena
from pagoda.memory.json_forms import check
from pagoda.memory.page import PageRun, pages_for
from pagoda.memory.ssd.committed import CommittedPages, open_commit
from pagoda.plan.layout import WEIGHT, WEIGHT_BACK
from pagoda.plan.slices import Span

PAGED = "paged"
"""Their key in the manifest."""
_EXTENTS = {"layout": int, "extents": {str: (int, int)}, "spans": {str: [(int, int, int)]}}
_LAYOUT = {"parameters": [(str, int, [int], bool)], "packed": {str: [(str, int, [int])]}}


def _is_layout(value: Any) -> bool:
    """a layout, which may name the dtype of its weights"""
    own = {**value} if isinstance(value, dict) else {}
    is_known = own.pop(WEIGHT, next(iter(DTYPES))) in DTYPES
    check(own, _LAYOUT, "layout")
    return is_known


PAGED_FORM = {
    "dtypes": {str: str},
    "layouts": [_is_layout],
    "ranks": [{"reference": dict, "units": [_EXTENTS]}],
}
"""Form of the result of `joined_pages`."""
_OF_RANK = re.compile(r"rank-\d+")
"""Name of each rank's directory below the SSD directory that was given for all ranks."""


@dataclass(frozen=True)
class PagedUnit:
    """A manifest's entry for a unit of which one rank keeps some states as pages; see `PAGED_FORM`."""

    layout: Mapping[str, Any]
    """`parameters`: name, elements before it, shape, whether it trains. `packed`: for a state whose tensors have other
    shapes than the parameters, name, elements before it and shape of each tensor. `weight`, if it is not that of the
    other units: the dtype of its weights."""
    extents: Mapping[str, Sequence[int]]
    """State -> first page and number of pages of its extent in the tier."""
    spans: Mapping[str, Sequence[Sequence[int]]]
    """State -> the unit's elements that are in the extent, and their positions there: the fields of `Span`."""

    def dtype(self, state: str, usual: torch.dtype) -> torch.dtype:
        """The dtype of a state, given that of most units."""
        own = self.layout.get(WEIGHT) if state in (WEIGHT, WEIGHT_BACK) else None
        return usual if own is None else DTYPES[own]

    def tensors(self, state: str) -> list[Sequence[Any]]:
        """(name, elements before it, shape) of the tensors of a state.

        By default, all parameters have weights, and those that train have the other states. A packed state lists its
        own tensors.
        """
        if state in self.layout["packed"]:
            return list(self.layout["packed"][state])
        return [(*where,) for *where, trains in self.layout["parameters"] if state == WEIGHT or trains]


def joined_pages(
    dtypes: Mapping[str, torch.dtype], by_rank: Sequence[tuple[Mapping[str, Any], Sequence[PagedUnit]]]
) -> dict[str, Any]:
    """The manifest's description of the pages of all ranks, given each rank's reference to its commit and its units.
    `Pages` reads it. Equal layouts are stored once."""
    layouts: dict[str, int] = {}
    ranks = [
        {
            "reference": reference,
            "units": [
                {**asdict(unit), "layout": layouts.setdefault(json.dumps(unit.layout), len(layouts))} for unit in units
            ],
        }
        for reference, units in by_rank
    ]
    named = {state: DTYPE_NAMES[dtype] for state, dtype in dtypes.items()}
    return {"dtypes": named, "layouts": [json.loads(layout) for layout in layouts], "ranks": ranks}


@dataclass(frozen=True)
class PagesOfRank:
    """The pages that one rank has kept."""

    units: Mapping[str, PagedUnit]
    """First parameter of a unit -> the unit."""
    committed: CommittedPages | None
    """The pages, open for reading. None if they are missing."""
    missing: str
    """Why they are missing."""


class Pages:
    """The pages of a checkpoint, of every rank that has kept any. Call `close` after use."""

    def __init__(self, directory: Path, description: Mapping[str, Any], places: Sequence[str | Path]) -> None:
        """`description` has the form of the result of `joined_pages`. Pages are looked for in `places`, then in their
        original directories.

        Raises CheckpointError if the description is damaged. `check` reports missing pages.
        """
        self._directory = directory
        self.ranks: list[PagesOfRank] = []
        with ExitStack() as opened:
            try:
                dtypes = {state: DTYPES[name] for state, name in description["dtypes"].items()}
                for said in description["ranks"]:
                    units = {}
                    for unit in said["units"]:
                        layout = description["layouts"][unit["layout"]]
                        units[layout["parameters"][0][0]] = PagedUnit(**{**unit, "layout": layout})
                    committed, missing = None, ""
                    try:
                        committed = opened.enter_context(closing(open_commit(said["reference"], with_ranks(places))))
                    except StorageError as error:
                        missing = str(error)
                    self.ranks.append(PagesOfRank(units, committed, missing))
                self.tensors = {state: self._tensors(state, usual) for state, usual in dtypes.items()}
                """State -> name -> tensor, for tensors in pages. Each rank may have a part of a tensor."""
            except (LookupError, TypeError, ValueError) as error:
                raise CheckpointError(f"{directory} is damaged, in the description of its pages: {error!r}") from error
            self._opened = opened.pop_all()

    def check(self) -> None:
        """Raises CheckpointError if pages of a rank are missing, or their page table is damaged."""
        for rank in self.ranks:
            if rank.committed is None:
                raise CheckpointError(f"{self._directory} cannot be read: {rank.missing}")

    def like(self, unit: PagedUnit, state: str) -> Iterator[tuple[CommittedPages, PageRun]]:
        """All pages with a state of a unit that has this same layout and these same elements of the state."""
        for rank in self.ranks:
            found = rank.units.get(unit.layout["parameters"][0][0])
            if found is None or rank.committed is None or state not in found.extents:
                continue
            if found.layout == unit.layout and found.spans.get(state) == unit.spans.get(state):
                yield rank.committed, PageRun(*found.extents[state])

    def close(self) -> None:
        self._opened.close()

    def _tensors(self, state: str, usual: torch.dtype) -> dict[str, LazyTensor]:
        forms: dict[str, tuple[torch.dtype, Sequence[int]]] = {}
        held: dict[str, list[tuple[int, int, Read]]] = {}
        for rank in self.ranks:
            for unit in rank.units.values():
                dtype = unit.dtype(state, usual)
                for name, before, shape in unit.tensors(state) if state in unit.extents else ():
                    forms[name] = dtype, shape
                    for span in (Span(*span) for span in unit.spans[state]):
                        part = span.within(before, before + prod(shape))
                        if part is not None:
                            read = partial(self._read, name, dtype, rank, PageRun(*unit.extents[state]), part.at)
                            held.setdefault(name, []).append((part.start - before, part.stop - before, read))
        return {name: self._joined(name, *form, held.get(name, ())) for name, form in forms.items()}

    def _joined(
        self, name: str, dtype: torch.dtype, shape: Sequence[int], held: Iterable[tuple[int, int, Read]]
    ) -> LazyTensor:
        """Join a tensor from the parts of ranks. `held`: each part's first element, end, and reader."""
        parts: list[LazyTensor] = []
        end = 0
        for start, stop, read in sorted(held, key=itemgetter(0)):
            if start <= end < stop:
                parts.append(LazyTensor(dtype, (stop - start,), read).narrow(0, end - start, stop - end))
                end = stop
        if end != prod(shape):
            raise CheckpointError(f"{self._directory} is damaged: no rank has element {end} of {name!r}")
        return cat(parts or [LazyTensor(dtype, (0,), torch.empty)]).with_shape(shape)

    def _read(
        self, name: str, dtype: torch.dtype, rank: PagesOfRank, run: PageRun, at: int, start: int, count: int
    ) -> torch.Tensor:
        """Read elements, counted from element `at` of an extent. Returns a tensor of shape [count]."""
        try:
            if rank.committed is None:
                raise StorageError(rank.missing)
            first, page = (at + start) * dtype.itemsize, rank.committed.page_bytes
            window = Arena(pages_for(first % page + count * dtype.itemsize, page) * page)
            rank.committed.load(run, first - first % page, window.view(0, window.nbytes))
            return window.tensor(first % page, count, dtype).clone()
        except (StorageError, ValueError) as error:  # ValueError: the manifest names pages that do not exist
            raise CheckpointError(f"{self._directory} is damaged: {name!r} cannot be read: {error}") from error


def with_ranks(places: Sequence[str | Path]) -> list[Path]:
    """The given directories, and the ranks' directories in them, or next to a given one that is a rank's. Ranks'
    directories that are symbolic links are left out."""
    found: dict[Path, None] = {}
    for place in map(Path, places):
        top = place.parent if _OF_RANK.fullmatch(place.name) else place
        ranks = sorted(p for p in top.glob("rank-*") if _OF_RANK.fullmatch(p.name))
        found |= dict.fromkeys([place, *(p for p in ranks if p.is_dir() and not p.is_symlink())])
    return list(found)
