"""The line of metrics.jsonl for a step, on one rank and on all together."""

import math
from dataclasses import asdict
from typing import Any

from pagoda.mesh.mesh import Mesh
from pagoda.mesh.sharing import from_all
from pagoda.runtime.stats import StepStats
from pagoda.schedule.served import add_counts, hit_rate
from pagoda.train.metrics import Line

DATA = "data"
"""Key in `stall_s`, in addition to the lanes: seconds in which the next sequences were read."""
_OF_STATS = (
    *("grad_norm", "bytes_moved", "peak_bytes", "tier_use", "accesses", "hit_rate", "faults"),
    *("activation_bytes", "loss_scale", "skipped", "updates_kept", "updates_called_off", "staleness"),
)
"""Figures of a step that are those of `optimizer.stats`, under the same names."""


def of_step(stats: StepStats, data_s: float, **own: Any) -> Line:
    """The line of the step that has ended: the loop's `own` figures, and those of the optimizer's last step. `data_s`:
    seconds in which its data were read."""
    known = {**asdict(stats), "hit_rate": stats.hit_rate, "faults": stats.faults}
    return {**own, "stall_s": {**stats.stall_s, DATA: data_s}, **{name: known[name] for name in _OF_STATS}}


def of_all_ranks(mesh: Mesh, mine: Line) -> Line:
    """The line of a step of all ranks together.

    It has the mean of losses (of the last stage of a pipeline), the maximum of seconds, stalls and peaks, and the sum
    of bytes and counts. Seconds of accesses are the mean over ranks.
    """
    by_rank = from_all(mesh, "the metrics of a step", mine)
    if len(by_rank) == 1:
        return mine
    losses = [line["loss"] for line in by_rank[-mesh.size :]]
    balances = [line["aux_loss"] for line in by_rank if line["aux_loss"] is not None]
    accesses = add_counts((line["accesses"] for line in by_rank), ranks=len(by_rank))
    slowest = max(line["step_s"] for line in by_rank)
    first = by_rank[0]
    return {
        **first,
        "loss": math.fsum(losses) / len(losses),
        "aux_loss": math.fsum(balances) / len(balances) if balances else None,
        "step_s": slowest,
        "tokens_per_s": first["tokens_per_s"] * first["step_s"] / slowest,
        **{
            name: {at: max(line[name][at] for line in by_rank) for at in first[name]}
            for name in ("stall_s", "peak_bytes")
        },
        "bytes_moved": {lane: sum(line["bytes_moved"][lane] for line in by_rank) for lane in first["bytes_moved"]},
        "accesses": accesses,
        "hit_rate": hit_rate(accesses),
        "faults": sum(line["faults"] for line in by_rank),
    }
