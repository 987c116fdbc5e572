"""Slices: which elements of a unit each of its ranks holds."""

from collections.abc import Sequence
from dataclasses import dataclass

from pagoda.plan.units import align


@dataclass(frozen=True, slots=True)
class Span:
    """Elements [start, stop) of a unit, or of a state of it, which lie from element `at` on in an extent."""

    start: int
    stop: int
    at: int = 0

    def __len__(self) -> int:
        return self.stop - self.start

    def within(self, start: int, stop: int) -> "Span | None":
        """What of it lies in [start, stop) of the unit; None where nothing does."""
        first, last = max(start, self.start), min(stop, self.stop)
        return Span(first, last, self.at + first - self.start) if first < last else None


def slice_elements(elements: int, group: int) -> int:
    """Elements of each of `group` equal slices: whole blocks of those that are quantized together."""
    return align(-(-elements // group))


def equal_slice(start: int, stop: int, group: int, index: int) -> tuple[int, int]:
    """Slice number `index` of `group` equal ones of [start, stop). The last ones may be short or empty."""
    each = slice_elements(stop - start, group)
    return min(start + index * each, stop), min(start + (index + 1) * each, stop)


@dataclass(frozen=True, slots=True)
class Atom:
    """The elements of a parameter, up to where the next one starts."""

    start: int
    stop: int
    whole: bool
    """Whether it must not be cut; others are cut into whole blocks."""


def whole_slices(atoms: Sequence[Atom], group: int) -> list[tuple[int, int]]:
    """`group` slices of adjoining atoms, which leave those whole that must be, the largest slice as small as can be.

    Some may be empty.
    """
    total = atoms[-1].stop if atoms else 0
    least = max([slice_elements(total, group), *(atom.stop - atom.start for atom in atoms if atom.whole)])
    most = total
    while least < most:  # of a bisection: `most` is enough
        middle = (least + most) // 2 // align(1) * align(1)
        if len(_filled(atoms, middle)) <= group:
            most = middle
        else:
            least = middle + align(1)
    slices = _filled(atoms, max(least, 1))
    return [*slices, *[(total, total)] * (group - len(slices))]


def _filled(atoms: Sequence[Atom], most: int) -> list[tuple[int, int]]:
    """Slices of at most `most` elements, which no whole atom exceeds, each as full as can be."""
    slices: list[tuple[int, int]] = []
    start = at = 0
    for atom in atoms:
        while atom.stop - start > most:
            at = at if atom.whole else start + most
            slices.append((start, at))
            start = at
        at = atom.stop
    return [*slices, (start, at)] if at > start else slices


def balanced(sizes: Sequence[Sequence[int]], holders: int) -> tuple[list[list[int]], list[int]]:
    """Which of its slices each holder gets of one thing after another, so that all get about as much in all.

    sizes: of each thing, those of its slices, one a holder. The largest goes to who has least.
    Returns, of each thing, the number of the slice by holder; and what each holder has of all.
    """
    held = [0] * holders
    chosen: list[list[int]] = []
    for of_thing in sizes:
        poorest = sorted(range(holders), key=lambda holder: held[holder])
        largest = sorted(range(holders), key=lambda number: -of_thing[number])
        by_holder = dict(zip(poorest, largest, strict=True))
        chosen.append([by_holder[holder] for holder in range(holders)])
        held = [before + of_thing[number] for before, number in zip(held, chosen[-1], strict=True)]
    return chosen, held
