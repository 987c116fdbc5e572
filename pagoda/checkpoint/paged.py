"""States that a checkpoint keeps as pages on SSD: what its manifest says of them, and how they are read."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from pagoda.checkpoint.tensors import TensorSpec, dtype_name, dtype_named
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
class PagedParameter:
    """Where a parameter lies in its unit's states; or its tensor of a state that lies otherwise."""

    name: str
    offset: int
    """Elements before it."""
    shape: tuple[int, ...]
    trainable: bool


@dataclass(frozen=True)
class PagedUnit:
    """A unit of which some states are pages of one rank."""

    parameters: tuple[PagedParameter, ...]
    packed: Mapping[str, tuple[PagedParameter, ...]]
    """State whose tensors have shapes of their own -> these."""
    extents: Mapping[str, Run]
    """State -> the tier's pages it lay in."""
    spans: Mapping[str, tuple[Span, ...]]
    """State -> which of the unit's elements of it lie in the extent, and where."""

    def to_json(self) -> dict[str, Any]:
        return {
            "layout": {
                "parameters": [[p.name, p.offset, list(p.shape), p.trainable] for p in self.parameters],
                "packed": {state: [[p.name, p.offset, list(p.shape)] for p in of] for state, of in self.packed.items()},
            },
            "extents": {state: [run.start, run.count] for state, run in self.extents.items()},
            "spans": {state: [[s.start, s.stop, s.at] for s in spans] for state, spans in self.spans.items()},
        }

    @staticmethod
    def from_json(layout: Mapping[str, Any], fields: Mapping[str, Any]) -> "PagedUnit":
        """Of fields that have their form. Raises ValueError where they do not fit together."""
        spans = fields["spans"]
        if fields["extents"].keys() != spans.keys():
            raise ValueError(f"extents {sorted(fields['extents'])} with the spans {sorted(spans)}")
        if any(start > stop for of_state in spans.values() for start, stop, _ in of_state):
            raise ValueError("a span that ends before it starts")
        packed = {
            state: tuple(PagedParameter(name, offset, tuple(shape), True) for name, offset, shape in of)
            for state, of in layout["packed"].items()
        }
        return PagedUnit(
            tuple(PagedParameter(n, o, tuple(shape), t) for n, o, shape, t in layout["parameters"]),
            packed,
            {state: Run(*run) for state, run in fields["extents"].items()},
            {state: tuple(Span(*span) for span in spans) for state, spans in fields["spans"].items()},
        )

    def holds(self, state: str) -> tuple[PagedParameter, ...]:
        """The parameters that have a state: all have weights, those that train the others, unless it says itself."""
        if state in self.packed:
            return self.packed[state]
        return tuple(p for p in self.parameters if state == WEIGHT or p.trainable)


def describe_pages(units: Sequence[PagedUnit], reference: Mapping[str, Any]) -> dict[str, Any]:
    """What one rank says of its pages, as JSON."""
    return {"reference": reference, "units": [unit.to_json() for unit in units]}


def joined_pages(dtypes: Mapping[str, torch.dtype], by_rank: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What a manifest says of the pages that ranks have described, for `Pages` to read; each layout is there once."""
    layouts: dict[str, int] = {}
    ranks = [
        {
            "reference": said["reference"],
            "units": [
                {**unit, "layout": layouts.setdefault(json.dumps(unit["layout"]), len(layouts))}
                for unit in said["units"]
            ],
        }
        for said in by_rank
    ]
    named = {state: dtype_name(dtype) for state, dtype in dtypes.items()}
    return {"dtypes": named, "layouts": [json.loads(layout) for layout in layouts], "ranks": ranks}


class PagesOfRank:
    """The units of which one rank has kept pages, and these, open for reading if they are to be found."""

    def __init__(self, units: Sequence[PagedUnit], committed: CommittedPages | None, missing: str) -> None:
        self.units = units
        self.committed = committed
        self.missing = missing
        """Why there are none."""
        self._known = {unit.parameters: unit for unit in units}

    def extent(self, like: PagedUnit, state: str) -> Run | None:
        """The pages with a state of a unit that has exactly the layout of `like`, and the same of its elements."""
        unit = self._known.get(like.parameters)
        if unit is None or unit.holds(state) != like.holds(state) or unit.spans.get(state) != like.spans.get(state):
            return None
        return unit.extents.get(state)

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
                dtypes = {state: dtype_named(name) for state, name in description["dtypes"].items()}
                for said in description["ranks"]:
                    units = [
                        PagedUnit.from_json(description["layouts"][unit["layout"]], unit) for unit in said["units"]
                    ]
                    committed, missing = None, ""
                    try:
                        committed = opened.enter_context(closing(open_commit(said["reference"], with_ranks(places))))
                    except StorageError as error:
                        missing = str(error)
                    self.ranks.append(PagesOfRank(units, committed, missing))
            except (LookupError, TypeError, ValueError) as error:
                raise CheckpointError(f"{directory} is damaged: its pages are not described: {error!r}") from error
            self.sources = {state: PagedTensors(directory, self.ranks, state, dtype) for state, dtype in dtypes.items()}
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


@dataclass(frozen=True, slots=True)
class _Stretch:
    """Elements [start, stop) of a tensor, which lie from element `at` on in an extent of a rank's."""

    start: int
    stop: int
    rank: PagesOfRank
    run: Run
    at: int


class PagedTensors:
    """The tensors of one state that are pages; ranks may have a part of a tensor each."""

    def __init__(self, directory: Path, ranks: Sequence[PagesOfRank], state: str, dtype: torch.dtype) -> None:
        self._directory = directory
        self.specs: dict[str, TensorSpec] = {}
        self._stretches: dict[str, list[_Stretch]] = {}
        for rank in ranks:
            for unit in rank.units:
                if state in unit.extents:
                    for parameter in unit.holds(state):
                        self.specs[parameter.name] = TensorSpec(parameter.name, dtype, parameter.shape)
                        found = self._stretches.setdefault(parameter.name, [])
                        found.extend(_stretches(rank, unit, state, parameter))

    def read(self, name: str, start: int, count: int) -> torch.Tensor:
        """Elements [start, start + count) of a tensor, flat. Raises CheckpointError where they are damaged."""
        spec, stop = self.specs[name], start + count
        if stop > prod(spec.shape):
            raise ValueError(f"asked for elements {start} to {stop} of {name!r}, which is {spec}")
        found = [torch.empty(0, dtype=spec.dtype)]
        while start < stop:
            part = next((s for s in self._stretches[name] if s.start <= start < s.stop), None)
            if part is None:
                raise CheckpointError(f"{self._directory} is damaged: no rank has element {start} of {name!r}")
            last = min(stop, part.stop)
            try:
                found.append(part.rank.read(part.run, part.at + start - part.start, last - start, spec.dtype))
            except (StorageError, ValueError) as error:  # ValueError: the manifest names pages that there are not
                raise CheckpointError(f"{self._directory} is damaged: {name!r} cannot be read: {error}") from error
            start = last
        return torch.cat(found)


def _stretches(rank: PagesOfRank, unit: PagedUnit, state: str, parameter: PagedParameter) -> Iterator[_Stretch]:
    """What a rank has of a parameter's state."""
    first = parameter.offset
    for span in unit.spans[state]:
        part = span.within(first, first + prod(parameter.shape))
        if part is not None:
            yield _Stretch(part.start - first, part.stop - first, rank, unit.extents[state], part.at)


def with_ranks(places: Sequence[str | Path]) -> list[Path]:
    """Directories, and those of ranks below them, or beside those that are a rank's themselves; not symbolic links."""
    found: dict[Path, None] = {}
    for place in map(Path, places):
        top = place.parent if _OF_RANK.fullmatch(place.name) else place
        ranks = sorted(p for p in top.glob("rank-*") if _OF_RANK.fullmatch(p.name))
        found |= dict.fromkeys([place, *(p for p in ranks if p.is_dir() and not p.is_symlink())])
    return list(found)
