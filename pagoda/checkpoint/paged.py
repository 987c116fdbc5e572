"""States that a checkpoint keeps as pages on SSD: what its manifest says of them, and how they are read."""

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
from pagoda.memory.page import Run, pages_for
from pagoda.memory.ssd.committed import CommittedPages, open_commit
from pagoda.plan.layout import WEIGHT
from pagoda.plan.slices import Span

PAGED = "paged"
"""The manifest's key."""
_EXTENTS = {"layout": int, "extents": {str: (int, int)}, "spans": {str: [(int, int, int)]}}
PAGED_FORM = {
    "dtypes": {str: str},
    "layouts": [{"parameters": [(str, int, [int], bool)], "packed": {str: [(str, int, [int])]}}],
    "ranks": [{"reference": dict, "units": [_EXTENTS]}],
}
"""What `joined_pages` gives."""
_OF_RANK = re.compile(r"rank-\d+")
"""Name of the directory that one of several ranks has below the one given for all."""


@dataclass(frozen=True)
class PagedUnit:
    """A unit of which some states are pages of one rank, as a manifest has it; see `PAGED_FORM`."""

    layout: Mapping[str, Any]
    """`parameters`: name, elements before it, shape, whether it trains. `packed`: name, elements before it and shape of
    each tensor of a state whose tensors have shapes of their own."""
    extents: Mapping[str, Sequence[int]]
    """State -> first page and number of the tier's pages it lay in."""
    spans: Mapping[str, Sequence[Sequence[int]]]
    """State -> which of the unit's elements of it lie in the extent, and where: the fields of `Span`."""

    def tensors(self, state: str) -> list[Sequence[Any]]:
        """(name, elements before it, shape) of the tensors of a state: all parameters have weights, those that train
        the others, unless the state says itself."""
        if state in self.layout["packed"]:
            return list(self.layout["packed"][state])
        return [(*where,) for *where, trains in self.layout["parameters"] if state == WEIGHT or trains]


def joined_pages(
    dtypes: Mapping[str, torch.dtype], by_rank: Sequence[tuple[Mapping[str, Any], Sequence[PagedUnit]]]
) -> dict[str, Any]:
    """What a manifest says of the pages of ranks, each with the reference to its commit, for `Pages` to read; each
    layout is there once."""
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


class PagesOfRank:
    """The units of which one rank has kept pages, and these, open for reading if they are to be found."""

    def __init__(self, units: Sequence[PagedUnit], committed: CommittedPages | None, missing: str) -> None:
        self.units = units
        self.committed = committed
        self.missing = missing
        """Why there are none."""
        self._by_first = {unit.layout["parameters"][0][0]: unit for unit in units}

    def extent(self, like: PagedUnit, state: str) -> Run | None:
        """The pages with a state of a unit that has exactly the layout of `like`, and the same of its elements."""
        unit = self._by_first.get(like.layout["parameters"][0][0])
        if unit is None or state not in unit.extents:
            return None
        alike = unit.layout == like.layout and unit.spans.get(state) == like.spans.get(state)
        return Run(*unit.extents[state]) if alike else None

    def read(self, run: Run, first: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Elements [first, first + count) of an extent, shape [count]. Raises StorageError where they are damaged."""
        if self.committed is None:
            raise StorageError(self.missing)
        page = self.committed.page_bytes
        before = first * dtype.itemsize % page
        window = Arena(pages_for(before + count * dtype.itemsize, page) * page)
        self.committed.load(run, first * dtype.itemsize - before, window.view(0, window.nbytes))
        return window.tensor(before, count, dtype).clone()


class Pages:
    """The pages of a checkpoint, of every rank that has kept some; to be closed."""

    def __init__(self, directory: Path, description: Mapping[str, Any], places: Sequence[str | Path]) -> None:
        """`description` has the form of what `joined_pages` gives. Pages are looked for in `places`, then where they
        were.

        Raises CheckpointError where the description is damaged; pages that are not to be found are for `check`.
        """
        self._directory = directory
        self.ranks: list[PagesOfRank] = []
        with ExitStack() as opened:
            try:
                dtypes = {state: DTYPES[name] for state, name in description["dtypes"].items()}
                for said in description["ranks"]:
                    units = [
                        PagedUnit(**{**unit, "layout": description["layouts"][unit["layout"]]})
                        for unit in said["units"]
                    ]
                    committed, missing = None, ""
                    try:
                        committed = opened.enter_context(closing(open_commit(said["reference"], with_ranks(places))))
                    except StorageError as error:
                        missing = str(error)
                    self.ranks.append(PagesOfRank(units, committed, missing))
                self.tensors = {state: self._tensors(state, dtype) for state, dtype in dtypes.items()}
                """State -> those of its tensors that are pages, by name; ranks may have a part of a tensor each."""
            except (LookupError, TypeError, ValueError) as error:
                raise CheckpointError(f"{directory} is damaged, in the description of its pages: {error!r}") from error
            self._opened = opened.pop_all()

    def check(self) -> None:
        """Raises CheckpointError where some rank's pages are not to be found, or their page table is damaged."""
        for rank in self.ranks:
            if rank.committed is None:
                raise CheckpointError(f"{self._directory} cannot be read: {rank.missing}")

    def like(self, unit: PagedUnit, state: str) -> Iterator[tuple[CommittedPages, Run]]:
        """Where pages have a state of exactly that unit, laid out alike, with the same of its elements."""
        for rank in self.ranks:
            run = rank.extent(unit, state)
            if run is not None and rank.committed is not None:
                yield rank.committed, run

    def close(self) -> None:
        self._opened.close()

    def _tensors(self, state: str, dtype: torch.dtype) -> dict[str, LazyTensor]:
        shapes: dict[str, Sequence[int]] = {}
        held: dict[str, list[tuple[int, int, Read]]] = {}
        for rank in self.ranks:
            for unit in rank.units:
                for name, before, shape in unit.tensors(state) if state in unit.extents else ():
                    shapes[name] = shape
                    for span in (Span(*span) for span in unit.spans[state]):
                        part = span.within(before, before + prod(shape))
                        if part is not None:
                            read = partial(self._read, name, dtype, rank, Run(*unit.extents[state]), part.at)
                            held.setdefault(name, []).append((part.start - before, part.stop - before, read))
        return {name: self._joined(name, dtype, shape, held.get(name, ())) for name, shape in shapes.items()}

    def _joined(
        self, name: str, dtype: torch.dtype, shape: Sequence[int], held: Iterable[tuple[int, int, Read]]
    ) -> LazyTensor:
        """A tensor out of what ranks have of it: first element, end, and what reads from there on."""
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
        self, name: str, dtype: torch.dtype, rank: PagesOfRank, run: Run, at: int, start: int, count: int
    ) -> torch.Tensor:
        """Elements from `start` on of what lies from element `at` on in an extent."""
        try:
            return rank.read(run, at + start, count, dtype)
        except (StorageError, ValueError) as error:  # ValueError: the manifest names pages that there are not
            raise CheckpointError(f"{self._directory} is damaged: {name!r} cannot be read: {error}") from error


def with_ranks(places: Sequence[str | Path]) -> list[Path]:
    """Directories, and those of ranks below them, or beside those that are a rank's themselves; not symbolic links."""
    found: dict[Path, None] = {}
    for place in map(Path, places):
        top = place.parent if _OF_RANK.fullmatch(place.name) else place
        ranks = sorted(p for p in top.glob("rank-*") if _OF_RANK.fullmatch(p.name))
        found |= dict.fromkeys([place, *(p for p in ranks if p.is_dir() and not p.is_symlink())])
    return list(found)
