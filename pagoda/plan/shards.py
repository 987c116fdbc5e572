"""Slices: which elements of a unit each of its ranks holds."""

from dataclasses import dataclass

from pagoda.plan.units import UnitSpec, align


@dataclass(frozen=True, slots=True)
class Span:
    """Elements [start, stop) of a unit, which lie from element `at` on in an extent."""

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


def slice_spans(unit: UnitSpec, group: int, index: int, frozen: bool) -> tuple[Span, ...]:
    """What slice number `index` of `group` holds of a unit: of its trainable elements, then, with `frozen`, of others.

    Both are sliced apart, so that whoever updates an element has its weight. The last slices may be short or empty.
    """
    spans = [_slice(0, unit.trainable_numel, group, index, at=0)]
    if frozen:
        behind = slice_elements(unit.trainable_numel, group)
        spans.append(_slice(unit.trainable_numel, unit.numel, group, index, at=behind))
    return tuple(span for span in spans if len(span))


def _slice(start: int, stop: int, group: int, index: int, at: int) -> Span:
    each = slice_elements(stop - start, group)
    return Span(min(start + index * each, stop), min(start + (index + 1) * each, stop), at)
