"""Every rank's figures of a step, and what they are together."""

import math
from collections.abc import Sequence
from dataclasses import replace

from pagoda.distributed.mesh import Mesh
from pagoda.train.metrics import Entry, MetricsFile, StepMetrics
from pagoda.train.ranks import from_all
from pagoda.train.run_dir import RunDir


def share_metrics(mesh: Mesh, mine: StepMetrics, stopped_by: int | None) -> tuple[StepMetrics, int | None]:
    """The step's figures of all ranks together, and the signal that has reached any of them, which stops all."""
    said = from_all(mesh, "the metrics of a step", (mine, stopped_by))
    if mesh.size == 1:
        return mine, stopped_by
    return merged([metrics for metrics, _ in said]), next((s for _, s in said if s is not None), None)


def merged(by_rank: Sequence[StepMetrics]) -> StepMetrics:
    """Of losses the mean; of seconds, stalls and peaks the most; of bytes and counts the sum; of rates the least."""
    first = by_rank[0]
    aux_losses = [metrics.aux_loss for metrics in by_rank if metrics.aux_loss is not None]
    slowest = max(metrics.step_s for metrics in by_rank)
    return replace(
        first,
        loss=math.fsum(metrics.loss for metrics in by_rank) / len(by_rank),
        aux_loss=math.fsum(aux_losses) / len(aux_losses) if aux_losses else None,
        step_s=slowest,
        tokens_per_s=first.tokens_per_s * first.step_s / slowest,
        stall_s={lane: max(metrics.stall_s[lane] for metrics in by_rank) for lane in first.stall_s},
        bytes_moved={lane: sum(metrics.bytes_moved[lane] for metrics in by_rank) for lane in first.bytes_moved},
        peak_bytes={tier: max(metrics.peak_bytes[tier] for metrics in by_rank) for tier in first.peak_bytes},
        accesses={found: sum(metrics.accesses[found] for metrics in by_rank) for found in first.accesses},
        prefetch_hit_rate=min(metrics.prefetch_hit_rate for metrics in by_rank),
        faults=sum(metrics.faults for metrics in by_rank),
    )


class MetricsFiles:
    """The metrics of all ranks together and the evaluations, which the first writes, and of several ranks each one's
    own metrics."""

    def __init__(self, run_dir: RunDir, mesh: Mesh, after_step: int, evals: bool = False) -> None:
        run_dir.path.mkdir(parents=True, exist_ok=True)
        self._rank_group = MetricsFile(run_dir.metrics, after_step) if mesh.rank == 0 else None
        self._evals = MetricsFile(run_dir.evals, after_step) if evals and mesh.rank == 0 else None
        self._own = MetricsFile(run_dir.metrics_of(mesh.rank), after_step) if mesh.size > 1 else None

    def write(self, together: StepMetrics, mine: StepMetrics) -> None:
        """Append one step."""
        if self._rank_group is not None:
            self._rank_group.write(together)
        if self._own is not None:
            self._own.write(mine)

    def write_evaluation(self, found: Entry) -> None:
        """Append an evaluation."""
        if self._evals is not None:
            self._evals.write(found)

    def sync(self) -> None:
        """Returns once every line would survive a power loss."""
        for file in self._files():
            file.sync()

    def close(self) -> None:
        for file in self._files():
            file.close()

    def _files(self) -> list[MetricsFile]:
        return [file for file in (self._rank_group, self._evals, self._own) if file is not None]
