"""The metrics of a step on all ranks, and the files that each rank writes."""

import math
from collections.abc import Callable
from dataclasses import replace

from pagoda.memory.files import storage_errors
from pagoda.mesh.mesh import Mesh
from pagoda.mesh.sharing import from_all
from pagoda.schedule.served import add_counts, hit_rate
from pagoda.train.metrics import Entry, MetricsFile, StepMetrics
from pagoda.train.run_dir import RunDir


def share_metrics(mesh: Mesh, mine: StepMetrics) -> StepMetrics:
    """The metrics of all ranks together.

    They are the mean of losses (of the last stage of a pipeline), the maximum of seconds, stalls and peaks, and the sum
    of bytes and counts. Seconds of accesses are the mean over ranks.
    """
    by_rank = from_all(mesh, "the metrics of a step", mine)
    if len(by_rank) == 1:
        return mine
    first, losses = by_rank[0], [metrics.loss for metrics in by_rank[-mesh.size :]]
    aux_losses = [metrics.aux_loss for metrics in by_rank if metrics.aux_loss is not None]
    accesses = add_counts((metrics.accesses for metrics in by_rank), ranks=len(by_rank))
    slowest = max(metrics.step_s for metrics in by_rank)
    return replace(
        first,
        loss=math.fsum(losses) / len(losses),
        aux_loss=math.fsum(aux_losses) / len(aux_losses) if aux_losses else None,
        step_s=slowest,
        tokens_per_s=first.tokens_per_s * first.step_s / slowest,
        stall_s={lane: max(metrics.stall_s[lane] for metrics in by_rank) for lane in first.stall_s},
        bytes_moved={lane: sum(metrics.bytes_moved[lane] for metrics in by_rank) for lane in first.bytes_moved},
        peak_bytes={tier: max(metrics.peak_bytes[tier] for metrics in by_rank) for tier in first.peak_bytes},
        accesses=accesses,
        hit_rate=hit_rate(accesses),
        faults=sum(metrics.faults for metrics in by_rank),
    )


class MetricsFiles:
    """The files that a rank writes. With several ranks, each writes its own metrics, and the first one also writes the
    merged metrics, the evaluations and the samples."""

    def __init__(
        self,
        run_dir: RunDir,
        mesh: Mesh,
        after_step: int,
        *,
        evals: bool,
        samples: bool,
        warn: Callable[[str], None],
    ) -> None:
        """`warn`: see `MetricsFile`. Raises StorageError."""
        with storage_errors(f"{run_dir.path} cannot be created"):
            run_dir.path.mkdir(parents=True, exist_ok=True)
        first, several = mesh.everyone.rank == 0, mesh.everyone.size > 1
        own = run_dir.path / f"metrics-rank-{mesh.everyone.rank}.jsonl"
        paths = {"together": run_dir.metrics, "evals": run_dir.evals, "samples": run_dir.samples, "own": own}
        wanted = {"together": first, "evals": first and evals, "samples": first and samples, "own": several}
        self._files = {name: MetricsFile(path, after_step, warn) for name, path in paths.items() if wanted[name]}

    def write(self, **entries: Entry) -> None:
        """Append an entry to each of the named files that this rank writes."""
        for name, entry in entries.items():
            if name in self._files:
                self._files[name].write(entry)

    def sync(self) -> None:
        """Make every line survive a power loss."""
        for file in self._files.values():
            file.sync()

    def close(self) -> None:
        for file in self._files.values():
            file.close()
