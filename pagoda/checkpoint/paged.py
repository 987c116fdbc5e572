"""States that a checkpoint keeps as pages on SSD: what its manifest says of them, and how they are read."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from pagoda.checkpoint.tensors import TensorSpec, dtype_name, dtype_named
from pagoda.errors import CheckpointError, StorageError
from pagoda.memory.arena import Arena
from pagoda.memory.committed import CommittedPages, open_commit
from pagoda.memory.page import Run, pages_for
from pagoda.plan.layout import WEIGHT

PAGED = "paged"
"""The manifest's key."""


@dataclass(frozen=True)
class PagedParameter:
    """Where a parameter lies in its unit's extents; or its tensor of a state that lies otherwise."""

    name: str
    offset: int
    """Elements before it."""
    shape: tuple[int, ...]
    trainable: bool


@dataclass(frozen=True)
class PagedUnit:
    """A unit of which some states are pages."""

    parameters: tuple[PagedParameter, ...]
    extents: Mapping[str, Run]
    """State -> the tier's pages it lay in."""
    packed: Mapping[str, tuple[PagedParameter, ...]]
    """State whose tensors have shapes of their own -> these."""

    def to_json(self) -> dict[str, Any]:
        return {
            "parameters": [[p.name, p.offset, list(p.shape), p.trainable] for p in self.parameters],
            "extents": {state: [run.start, run.count] for state, run in self.extents.items()},
            "packed": {state: [[p.name, p.offset, list(p.shape)] for p in of] for state, of in self.packed.items()},
        }

    @staticmethod
    def from_json(fields: Mapping[str, Any]) -> "PagedUnit":
        parameters = tuple(PagedParameter(n, o, tuple(shape), t) for n, o, shape, t in fields["parameters"])
        packed = {
            state: tuple(PagedParameter(name, offset, tuple(shape), True) for name, offset, shape in of)
            for state, of in fields["packed"].items()
        }
        return PagedUnit(parameters, {state: Run(*run) for state, run in fields["extents"].items()}, packed)

    def holds(self, state: str) -> tuple[PagedParameter, ...]:
        """The parameters that have a state: all have weights, those that train the others, unless it says itself."""
        if state in self.packed:
            return self.packed[state]
        return tuple(p for p in self.parameters if state == WEIGHT or p.trainable)


def describe_pages(
    units: Sequence[PagedUnit], dtypes: Mapping[str, torch.dtype], reference: Mapping[str, Any]
) -> dict[str, Any]:
    """What a manifest says of pages, for `Pages` to read."""
    return {
        "reference": reference,
        "dtypes": {state: dtype_name(dtype) for state, dtype in dtypes.items()},
        "units": [unit.to_json() for unit in units],
    }


class Pages:
    """The pages of a checkpoint, open for reading. Raises CheckpointError where they are missing or damaged."""

    def __init__(self, directory: Path, description: Mapping[str, Any], places: Sequence[str | Path]) -> None:
        """`description` is what `describe_pages` gave. Pages are looked for in `places`, and where they were."""
        try:
            self.units = [PagedUnit.from_json(unit) for unit in description["units"]]
            dtypes = {state: dtype_named(name) for state, name in description["dtypes"].items()}
            self.committed = open_commit(description["reference"], places)
        except StorageError as error:
            raise CheckpointError(f"{directory} cannot be read: {error}") from error
        except (LookupError, TypeError, ValueError) as error:
            raise CheckpointError(f"{directory} is damaged: its pages are not described: {error!r}") from error
        self.sources = {state: PagedTensors(directory, self, state, dtype) for state, dtype in dtypes.items()}
        self._known = {unit.parameters: unit for unit in self.units}

    def extent(self, like: PagedUnit, state: str) -> Run | None:
        """The committed pages with a state of a unit that has exactly the layout of `like`, or None."""
        unit = self._known.get(like.parameters)
        return None if unit is None or unit.holds(state) != like.holds(state) else unit.extents.get(state)

    def close(self) -> None:
        self.committed.close()


class PagedTensors:
    """The tensors of one state that are pages."""

    def __init__(self, directory: Path, pages: Pages, state: str, dtype: torch.dtype) -> None:
        self._directory = directory
        self._committed: CommittedPages = pages.committed
        self.specs: dict[str, TensorSpec] = {}
        self._at: dict[str, tuple[Run, int]] = {}
        """Name -> run of the unit's extent, elements before the parameter."""
        for unit in pages.units:
            if state in unit.extents:
                for parameter in unit.holds(state):
                    self.specs[parameter.name] = TensorSpec(parameter.name, dtype, parameter.shape)
                    self._at[parameter.name] = (unit.extents[state], parameter.offset)

    def read(self, name: str, start: int, count: int) -> torch.Tensor:
        """Elements [start, start + count) of a tensor, flat. Raises CheckpointError where they are damaged."""
        run, offset = self._at[name]
        spec, page = self.specs[name], self._committed.page_bytes
        if start + count > prod(spec.shape):
            raise ValueError(f"asked for elements {start} to {start + count} of {name!r}, which is {spec}")
        if count == 0:
            return torch.empty(0, dtype=spec.dtype)
        first = (offset + start) * spec.dtype.itemsize
        before = first % page
        nbytes = count * spec.dtype.itemsize
        window = Arena(pages_for(before + nbytes, page) * page)
        try:
            self._committed.load(run, first - before, window.view(0, window.nbytes))
        except StorageError as error:
            raise CheckpointError(f"{self._directory} is damaged: {name!r} cannot be read: {error}") from error
        return window.tensor(before, count, spec.dtype).clone()

    def close(self) -> None:
        """Nothing of its own to close."""
