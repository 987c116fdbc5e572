"""Exact sums of floats."""

from collections.abc import Iterable


def exact_parts(values: Iterable[float]) -> list[float]:
    """Few floats whose exact sum is that of many finite ones, so that sums of sums lose nothing.

    Shewchuk, "Adaptive precision floating-point arithmetic and fast robust geometric predicates" (1997): what
    `math.fsum` does before it rounds.
    """
    parts: list[float] = []
    for value in values:
        kept = 0
        for part in parts:
            if abs(value) < abs(part):
                value, part = part, value
            total = value + part
            lost = part - (total - value)
            if lost:
                parts[kept] = lost
                kept += 1
            value = total
        parts[kept:] = [value]
    return parts
