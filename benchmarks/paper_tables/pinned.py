"""Pinned RAM for all states of a model: bytes asked for, and bytes wasted."""

from collections.abc import Iterator

from pagoda.models.papers import PAPER_SHAPES, PaperShape
from pagoda.plan.layout import GRAD, Layout
from pagoda.plan.options import Options
from pagoda.plan.planner import make_plan
from pagoda.plan.tiers import Budgets
from paper_tables.common import ROOM, STATES, UNIT_BYTES, gigabytes, tree
from paper_tables.experiments import TEN_CACHE_SHAPES


def sizes_of(layout: Layout) -> list[int]:
    """Bytes of each tensor of a model's states and gradients."""
    states = (*(state.name for state in layout.states), GRAD)
    sizes = [(unit, layout.itemsize(unit, state)) for unit in layout.units for state in states]
    return [slot.param.numel * size for unit, size in sizes for slot in unit.slots]


def wasted_by_powers_of_two(sizes: list[int]) -> int:
    """Bytes that torch's allocator of pinned memory adds (pytorch issue 95823)."""
    return sum((1 << (size - 1).bit_length()) - size for size in sizes)


def wasted_by_pages(layout: Layout) -> int:
    """Bytes that Pagoda's pages add: the alignment of parameters, and the rest of each extent's last page."""
    pages = sum(layout.total_pages(state) for state in (*(state.name for state in layout.states), GRAD))
    return pages * layout.page_bytes - sum(sizes_of(layout))


def layout_of(shape: PaperShape) -> Layout:
    """The layout of a plan with all states in RAM."""
    return make_plan(tree(shape), STATES, Budgets(ROOM), Options(unit_limit=UNIT_BYTES)).layout


def pinned_table() -> Iterator[str]:
    yield "| model | tensors | asked | wasted by powers of two | by Pagoda |"
    yield "|---|---:|---:|---:|---:|"
    for shape in (*TEN_CACHE_SHAPES[::2], PAPER_SHAPES["gpt3-175b"]):
        layout = layout_of(shape)
        sizes = sizes_of(layout)
        asked, torch, pages = sum(sizes), wasted_by_powers_of_two(sizes), wasted_by_pages(layout)
        wasted = (f"{gigabytes(nbytes)} ({nbytes / asked:.1%})" for nbytes in (torch, pages))
        yield f"| {' | '.join((shape.name, f'{len(sizes):,}', gigabytes(asked), *wasted))} |"
