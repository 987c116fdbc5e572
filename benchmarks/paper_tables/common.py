"""What the tables share: Pagoda's plans for the papers' shapes, and how sizes are written."""

from functools import cache

from pagoda.forecast.describe import module_spec
from pagoda.models.papers import PaperShape
from pagoda.optim import AdamW
from pagoda.plan.units import ModuleSpec

GB = 1e9
ROOM = 1 << 60
STATES = AdamW().states("bf16")
UNIT_BYTES = 512 << 20


@cache
def tree(shape: PaperShape, tiles: int = 1, experts: int = 1) -> ModuleSpec:
    """`module_spec`, which takes seconds for the largest shapes."""
    return module_spec(shape, tiles, experts)


def gigabytes(nbytes: float) -> str:
    return f"{nbytes / GB:.3g}" if nbytes < 999.5 * GB else f"{nbytes / GB:,.0f}"


def count(params: float) -> str:
    return f"{params / 1e12:.3g}T" if params >= 1e12 else f"{params / 1e9:.3g}B"
