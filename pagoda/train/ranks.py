"""What the ranks of a run share: results, and the metrics of a step with their files."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import torch.distributed as dist

from pagoda.errors import ConfigError, PagodaError
from pagoda.memory.files import storage_errors
from pagoda.mesh.mesh import Mesh
from pagoda.schedule.served import add_counts, hit_rate
from pagoda.train.config import TrainConfig
from pagoda.train.metrics import Entry, MetricsFile, StepMetrics
from pagoda.train.run_dir import RunDir

_T = TypeVar("_T")


def from_first(mesh: Mesh, what: str, find: Callable[[], _T]) -> _T:
    """Returns the first rank's result on every rank, or raises its error there. `what` names the result in errors."""
    found: Any = None
    if mesh.everyone.rank == 0:
        try:
            found = find()
        except PagodaError as error:
            found = error
    found = from_all(mesh, what, found)[0]
    if isinstance(found, PagodaError):
        raise found
    result: _T = found
    return result


def from_all(mesh: Mesh, what: str, mine: _T) -> list[_T]:
    """Returns the results of all ranks, by rank, on every rank. `what` names them in errors. Those of the last stage of
    a pipeline come last."""
    found: list[Any] = [mine] * mesh.everyone.size
    if len(found) > 1:
        mesh.on_all_ranks(what, lambda: dist.all_gather_object(found, mine))
    return found


def ranks_with_batches(config: TrainConfig, mesh: Mesh) -> int:
    """Number of ranks, or of groups of ranks that divide sequences, that have batches of their own. Raises ConfigError
    if ranks are left over."""
    ranks, divided = mesh.ranks.data_parallel, config.sequence_parallel
    if ranks % divided:
        raise ConfigError(
            f"--sequence-parallel is {divided}, which does not divide the {ranks} ranks: start torchrun with "
            f"--nproc-per-node {divided}, or a multiple of it"
        )
    return ranks // divided


def share_metrics(mesh: Mesh, mine: StepMetrics, stopped_by: int | None) -> tuple[StepMetrics, int | None]:
    """The metrics of all ranks together, and the signal that any of them has received, which stops all ranks.

    They are the mean of losses (of the last stage of a pipeline), the maximum of seconds, stalls and peaks, and the sum
    of bytes and counts. Seconds of accesses are the mean over ranks.
    """
    said = from_all(mesh, "the metrics of a step", (mine, stopped_by))
    by_rank = [metrics for metrics, _ in said]
    if len(by_rank) == 1:
        return mine, stopped_by
    first, losses = by_rank[0], [metrics.loss for metrics in by_rank[-mesh.size :]]
    aux_losses = [metrics.aux_loss for metrics in by_rank if metrics.aux_loss is not None]
    accesses = add_counts((metrics.accesses for metrics in by_rank), ranks=len(by_rank))
    slowest = max(metrics.step_s for metrics in by_rank)
    together = replace(
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
    return together, next((signal for _, signal in said if signal is not None), None)


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
