"""Few cases of many settings: every two settings meet in each of their values, or each value comes at least once."""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations, islice, product
from typing import Any

import pytest

Case = dict[str, Any]
Axes = Mapping[str, Sequence[Any]]
"""Name of a setting -> its values."""
Group = frozenset[tuple[str, int]]
"""Some settings, each with the number of its value."""
_MOST_TRIES = 200
"""Where the first tries have ended at settings for which the last one has no value."""


def covering(axes: Axes, possible: Callable[[Case], bool], strength: int = 2, tries: int = 12) -> Iterator[Case]:
    """Cases in which each `strength` of the settings take all their values together, always the same ones.

    `possible` says whether a case can be, which may lack settings: then whether it can be completed.
    """
    numbered = {name: range(len(values)) for name, values in axes.items()}
    chooser = random.Random(0)

    def case_of(numbers: Mapping[str, int]) -> Case:
        return {name: axes[name][number] for name, number in numbers.items()}

    def groups_of(numbers: Mapping[str, int]) -> set[Group]:
        return {frozenset(group) for group in combinations(numbers.items(), strength)}

    def complete(start: Group) -> dict[str, int] | None:
        """A case with these values and others at random; each is the possible one that adds most."""
        numbers = dict(start)
        for name in chooser.sample([*axes], len(axes)):
            if name in numbers:
                continue
            values = chooser.sample(numbered[name], len(numbered[name]))
            allowed = [value for value in values if possible(case_of({**numbers, name: value}))]
            if not allowed:
                return None
            others = [*numbers.items()]

            def added(value: int, name: str = name, others: Sequence[tuple[str, int]] = others) -> int:
                rests = combinations(others, strength - 1)
                return sum(frozenset((*rest, (name, value))) in missing for rest in rests)

            numbers[name] = max(allowed, key=added)
        return numbers

    missing = {
        frozenset(zip(names, numbers, strict=True))
        for names in combinations(axes, strength)
        for numbers in product(*(numbered[name] for name in names))
        if possible(case_of(dict(zip(names, numbers, strict=True))))
    }
    while missing:
        start = min(missing, key=sorted)
        found = [numbers for _ in range(tries) if (numbers := complete(start)) is not None]
        found = found or [*islice((numbers for _ in range(_MOST_TRIES) if (numbers := complete(start)) is not None), 1)]
        if not found:
            raise ValueError(f"no case has {case_of(dict(start))}")
        best = max(found, key=lambda numbers: len(groups_of(numbers) & missing))
        missing -= groups_of(best)
        yield {name: axes[name][best[name]] for name in axes}


def each_once(**axes: Sequence[Any]) -> Any:
    """Parametrizes a test with every value of these arguments at least once; `make test-all` takes all combinations."""
    rows = max(map(len, axes.values()))
    chosen = {tuple(row % len(values) for values in axes.values()) for row in range(rows)}
    cases = []
    for numbers in product(*(range(len(values)) for values in axes.values())):
        values = [values[number] for values, number in zip(axes.values(), numbers, strict=True)]
        cases.append(pytest.param(*values, marks=() if numbers in chosen else pytest.mark.slow))
    return pytest.mark.parametrize(",".join(axes), cases, ids=lambda value: getattr(value, "__name__", None))
