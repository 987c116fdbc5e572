"""Decides where a run begins: at its first step, after its last checkpoint, or after a named one."""

import math
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from pagoda.checkpoint import reader
from pagoda.console import say
from pagoda.errors import CheckpointError, ConfigError, StorageError
from pagoda.integrations import seals
from pagoda.integrations.staging import name_complete
from pagoda.mesh.mesh import Mesh
from pagoda.mesh.sharing import from_all, from_first
from pagoda.train.config import TrainConfig
from pagoda.train.run_dir import GONE_BACK, LAST, PREFIX, RunCheckpoint, RunDir, locked, names_of, unused

CHAT = "chat"
"""Key in the same place: whether the data are conversations."""
CONFIG = "config"
"""Key of the configuration in what `pagoda train` adds to a checkpoint."""
EVALUATED = "evaluated"
"""Key of what identifies the sequences on which the run evaluates."""
SAMPLES_PER_STEP = "samples_per_step"
"""Key of the number of sequences a step on all ranks."""


@dataclass(frozen=True)
class Beginning:
    """Where a run continues."""

    checkpoint: RunCheckpoint | None = None
    """None if the run begins with its first step."""
    samples: int = 0
    """Sequences that it has read."""
    evaluated: str | None = None
    """Identifies the sequences on which it evaluated."""
    later: tuple[tuple[RunCheckpoint, Path], ...] = ()
    """Later checkpoints, which the user left behind, each with its new name. They are renamed when the run first
    writes."""

    @property
    def done(self) -> int:
        """Number of steps that do not run again."""
        return self.checkpoint.step if self.checkpoint else 0


def begin(
    config: TrainConfig, run_dir: RunDir, again: bool, mesh: Mesh, console: Console, held: ExitStack
) -> Beginning:
    """Lock the run's directory until `held` is closed, and find where the run continues. The result is the same on all
    ranks.

    Every bit of the checkpoint is read first. Otherwise damage in adopted pages would only appear in the middle of a
    step.

    Args:
      again: whether torchrun has restarted this run. It then resumes if it had written anything.

    Raises ConfigError if the directory is in use or cannot be used, if it contains a run although none is resumed, or
    none although one is, and if settings differ from those of the run. Raises CheckpointError if the checkpoint does
    not exist, is damaged or has lost its pages.
    """
    named = config.resume_from_checkpoint not in (None, LAST)

    def claim() -> tuple[list[RunCheckpoint], RunCheckpoint | None] | None:
        """All checkpoints, and the one to continue from. None for a new run."""
        run_dir.check_place()
        held.enter_context(locked(run_dir.path))
        if named and again:
            raise ConfigError(
                "--resume-from-checkpoint names the checkpoint to continue from: it was used already, so leave it out "
                "to continue"
            )
        if not (config.resume_from_checkpoint or (again and run_dir.config.exists())):
            run_dir.check_free()
            return None
        run_dir.started_config()  # there must be a run
        name_complete(run_dir.path, PREFIX)
        every = run_dir.all_checkpoints()
        return every, run_dir.named(config.resume_from_checkpoint or LAST) if named or every else None

    claimed = from_first(mesh, "the run's directory", claim)
    if claimed is None:
        return Beginning()
    every, checkpoint = claimed
    if checkpoint is None:
        say(console, f"{run_dir.path} has no checkpoint yet: the run starts from its first step")
        return Beginning()
    with console.status(f"Checking {checkpoint.path}"):
        problem, extra = _examined(config, checkpoint, mesh)
    if problem is not None:
        others = names_of([each for each in every if each != checkpoint])
        raise CheckpointError(
            f"{checkpoint.path} cannot be used: {problem}. Nothing was changed. Its other checkpoints: {others}. Name "
            "one with --resume-from-checkpoint"
        )
    _check_batch(config, extra, mesh, console)
    later = [(c, unused(c.path.with_name(c.path.name + GONE_BACK))) for c in every if c.step > checkpoint.step]
    if later:
        say(
            console,
            f"Going back to the checkpoint after step {checkpoint.step}: the {later[-1][0].step - checkpoint.step} "
            f"steps after it run again. Later ones are kept as {', '.join(str(name) for _, name in later)}.",
        )
    return Beginning(checkpoint, extra["samples"], extra.get(EVALUATED), tuple(later))


def _examined(config: TrainConfig, checkpoint: RunCheckpoint, mesh: Mesh) -> tuple[str | None, dict[str, Any]]:
    """Why a checkpoint cannot be used, or None; and what `pagoda train` added to it. The reading is divided over ranks.

    Raises ConfigError if it was saved with settings that give other bits.
    """
    problem, extra, everyone = None, {}, mesh.everyone
    try:
        if everyone.rank == 0:
            seals.check(checkpoint.path)
        with reader.SavedCheckpoint(checkpoint.state, list(config.memory.ssd_directories)) as opened:
            extra = opened.manifest["extra"]
            problem = _not_ours(extra, checkpoint.step)
            if problem is None:
                config.check_resumes(TrainConfig.from_settings(extra[CONFIG]), checkpoint.path)
                problem = next(opened.damage(everyone.rank, everyone.size), None)
    except (CheckpointError, StorageError) as error:
        problem = str(error)
    problems = from_all(mesh, "the check of a checkpoint", problem)
    return next((found for found in problems if found is not None), None), extra


def _not_ours(extra: object, step: int) -> str | None:
    """Why a checkpoint is not one that `pagoda train` saved under this name, or None."""
    if not isinstance(extra, dict) or not {CONFIG, "text", "samples", SAMPLES_PER_STEP} <= extra.keys():
        return "it is not one of `pagoda train`, or of another version"
    return None if extra.get("step") == step else f"it is the state after step {extra.get('step')}, under another name"


def _check_batch(config: TrainConfig, extra: dict[str, Any], mesh: Mesh, console: Console) -> None:
    """Say if a step has another number of sequences than before because the number of ranks changed. Raises ConfigError
    if other settings changed it."""
    names = ("per_device_train_batch_size", "gradient_accumulation_steps")
    ranks = config.ranks_with_batches(mesh.ranks.data_parallel)
    before, now = extra[SAMPLES_PER_STEP], ranks * math.prod(getattr(config, name) for name in names)
    if before == now:
        return
    if any(getattr(config, name) != extra[CONFIG][name] for name in names):
        raise ConfigError(
            f"cannot resume with {now} sequences a step, of which the run has {before}. Leave out "
            "--per-device-train-batch-size and --gradient-accumulation-steps to keep the run's own"
        )
    say(console, f"A step has {now} sequences now, and had {before}")
