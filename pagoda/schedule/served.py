"""What compute finds when it accesses the weights of units, and how long it waits for them."""

from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import NamedTuple


class Found(StrEnum):
    """What an access finds, before anything is done for it."""

    HIT = "hit"
    """The weights are in compute's memory, and can be read."""
    LATE = "late"
    """The weights are on their way. Compute waits for the rest of a fetch, or for an update."""
    FAULT = "fault"
    """The weights are neither there nor on their way. Compute waits for a fetch that begins now."""


class Served(NamedTuple):
    """One access of compute to a unit. Uses of one unit in a row, in the same phase, are one access."""

    source: str
    """Where the weights come from: see `Plan.source`."""
    found: Found
    waited_s: float
    """Seconds until compute could read the weights."""
    at_s: float = 0.0
    """When the access began. In a simulation, since the start of the step."""


AccessCounts = Mapping[str, Mapping[str, float]]
"""Source of weights -> how many accesses were a `hit`, `late` and a `fault`, and how many seconds compute waited in
those that were no hit (`late_s`, `fault_s`)."""


_FIGURES = (*(found.value for found in Found), "late_s", "fault_s")


def count_accesses(accesses: Iterable[Served]) -> AccessCounts:
    """The counts of some accesses."""
    counts: dict[str, dict[str, float]] = {}
    for access in accesses:
        count_access(counts, access)
    return counts


def count_access(counts: dict[str, dict[str, float]], access: Served) -> None:
    """Add one access to counts."""
    figures = counts.setdefault(access.source, dict.fromkeys(_FIGURES, 0))
    figures[access.found] += 1
    if access.found is not Found.HIT:
        figures[f"{access.found}_s"] += access.waited_s


def add_counts(several: Iterable[AccessCounts], ranks: int = 1) -> AccessCounts:
    """The sums of several counts. If they are those of `ranks` ranks, which wait at the same time, seconds are the mean
    over the ranks."""
    sums: dict[str, dict[str, float]] = {}
    for counts in several:
        for source, figures in counts.items():
            of_source = sums.setdefault(source, dict.fromkeys(_FIGURES, 0))
            for name, figure in figures.items():
                of_source[name] += figure / ranks if name.endswith("_s") else figure
    return sums


def hit_rate(counts: AccessCounts) -> float:
    """The share of accesses that were hits. 1.0 if there are no accesses."""
    accesses = _total(counts, *Found)
    return _total(counts, Found.HIT) / accesses if accesses else 1.0


def summary(counts: AccessCounts) -> str:
    """The hit rate, by source if there are several, and what compute waited for, in words."""
    rates = [f"{source} {hit_rate({source: figures}):.0%}" for source, figures in sorted(counts.items())]
    sources = f" ({', '.join(rates)})" if rates else ""
    waited = [
        f"{number:,.0f} {name}, {_total(counts, f'{found}_s'):,.3g} s"
        for found, name in ((Found.LATE, "late"), (Found.FAULT, "on demand"))
        if (number := _total(counts, found))
    ]
    there = f"there at {hit_rate(counts):.0%} of {_total(counts, *Found):,.0f} accesses{sources}"
    return "; ".join([there, *waited])


def _total(counts: AccessCounts, *names: str) -> float:
    return sum(figures[name] for figures in counts.values() for name in names)
