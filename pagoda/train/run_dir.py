"""The run directory: configuration, metrics and checkpoints of one run, and which checkpoint is the last."""

import os
import re
from dataclasses import dataclass
from pathlib import Path

from pagoda.errors import CheckpointError, ConfigError
from pagoda.train.config import TrainConfig

_CHECKPOINT = re.compile(r"step-(\d{6,})")


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint: the state after `step` steps."""

    step: int
    path: Path


@dataclass(frozen=True)
class RunDir:
    """Paths of a run. Nothing is written before `create`."""

    path: Path

    @property
    def config(self) -> Path:
        return self.path / "config.json"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    def metrics_of(self, rank: int) -> Path:
        """Figures of one of several ranks."""
        return self.path / f"metrics-rank-{rank}.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def checkpoint(self, step: int) -> Path:
        """Directory of the checkpoint after `step` steps."""
        return self.checkpoints / f"step-{step:06d}"

    def check_free(self) -> None:
        """Checks that a new run can start here, writing nothing.

        Raises:
            ConfigError: the path is a file, cannot be written, or holds a run already.
        """
        existing = next(path for path in (self.path, *self.path.absolute().parents) if path.exists())
        if not existing.is_dir():
            raise ConfigError(f"--out {self.path}: {existing} is a file, not a directory")
        if not os.access(existing, os.W_OK | os.X_OK):
            raise ConfigError(f"--out {self.path} cannot be made: {existing} is not writable")
        taken = [p.name for p in (self.config, self.metrics, self.checkpoints) if p.exists()]
        if taken:
            raise ConfigError(
                f"--out {self.path} already holds a run ({', '.join(taken)}): continue it with --resume,"
                " or give another directory"
            )

    def started_config(self) -> TrainConfig:
        """The configuration the run was started with.

        Raises:
            ConfigError: there is no run here, or its configuration cannot be read.
        """
        try:
            text = self.config.read_text(encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"no run to resume in {self.path}: {self.config.name} cannot be read"
                f" ({error.strerror or type(error).__name__}). Check --out, or start a run without --resume"
            ) from error
        try:
            return TrainConfig.from_json(text)
        except ConfigError as error:
            raise ConfigError(f"{self.config}: {error}") from error

    def all_checkpoints(self) -> list[Checkpoint]:
        """Every complete checkpoint, by steps. A checkpoint has its name only while it is complete."""
        names = os.listdir(self.checkpoints) if self.checkpoints.is_dir() else []
        steps = sorted(int(match[1]) for name in names if (match := _CHECKPOINT.fullmatch(name)))
        return [Checkpoint(step, self.checkpoint(step)) for step in steps if self.checkpoint(step).is_dir()]

    def latest(self) -> Checkpoint:
        """The complete checkpoint with the most steps.

        Raises:
            CheckpointError: there is none.
        """
        complete = self.all_checkpoints()
        if not complete:
            raise CheckpointError(
                f"no complete checkpoint in {self.checkpoints}: the run stopped before its first."
                " Start again with another --out, and a smaller --checkpoint-every"
            )
        return complete[-1]

    def create(self, config: TrainConfig) -> None:
        """Makes the directory and writes the configuration, atomically.

        Raises:
            ConfigError: the directory cannot be written.
        """
        temporary = self.config.with_suffix(".json.tmp")
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            temporary.write_text(config.to_json(), encoding="utf-8")
            os.replace(temporary, self.config)
        except OSError as error:
            raise ConfigError(f"--out {self.path} cannot be written: {error.strerror}") from error
