"""Memory of a rank: ZeRO's formula, and Pagoda's plans."""

from collections.abc import Iterator

from pagoda.config.memory import Split
from pagoda.models.papers import PAPER_SHAPES
from pagoda.plan.options import Options
from pagoda.plan.placement import BOUNCE, CHECKPOINT, VERSIONS
from pagoda.plan.planner import make_plan
from pagoda.plan.ranks import Ranks
from pagoda.plan.tiers import Budgets
from paper_tables.common import ROOM, STATES, UNIT_BYTES, gigabytes, tree


def zero_bytes(params: float, ranks: int, stage: int, weight: int = 2, gradient: int = 2, other: int = 12) -> float:
    """Bytes of model state on each of `ranks` ranks: table 1 of ZeRO, arXiv 1910.02054."""
    divided = (ranks if stage >= 3 else 1, ranks if stage >= 2 else 1, ranks)
    return params * (weight / divided[0] + gradient / divided[1] + other / divided[2])


def pagoda_bytes(name: str, ranks: int, stage: int) -> int:
    """Bytes of model state, gradients included, that a real plan of one of `ranks` ranks has, in whole pages."""
    shape = PAPER_SHAPES[name]
    shared = Ranks(ranks, min(16, ranks), stage)  # type: ignore[arg-type]
    options = Options(unit_limit=UNIT_BYTES, split=Split())
    plan = make_plan(tree(shape), STATES, Budgets(ROOM, ROOM), options, shared)
    return sum(nbytes for line, nbytes in plan.bytes["host"].items() if line not in (BOUNCE, CHECKPOINT, VERSIONS))


def memory_table() -> Iterator[str]:
    yield "| N_d | stage | 7.5B: ZeRO | Pagoda | 1T: ZeRO | Pagoda |"
    yield "|---:|---:|---:|---:|---:|---:|"
    for ranks in (1, 64, 1024):
        for stage in (1, 2, 3) if ranks > 1 else (1,):
            row = [str(ranks), str(stage)]
            for params, name in ((7.5e9, "zero-7.5b"), (1e12, "gpt-1t")):
                nominal = PAPER_SHAPES[name].params
                mine = pagoda_bytes(name, ranks, stage) * params / nominal
                row += [gigabytes(zero_bytes(params, ranks, stage)), gigabytes(mine)]
            yield f"| {' | '.join(row)} |"
