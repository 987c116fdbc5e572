"""The checkpoints of a run: when one is due, and which older ones it replaces."""

import logging
import shutil
from collections.abc import Sequence
from contextlib import suppress
from math import ceil
from pathlib import Path

from rich.console import Console

from pagoda.errors import PagodaError
from pagoda.memory.sizes import format_bytes
from pagoda.mesh.mesh import Mesh
from pagoda.train.metrics import LINE_BYTES, StepMetrics
from pagoda.train.pending import DiskRoom, OnError, PendingCheckpoint
from pagoda.train.progress import say
from pagoda.train.ranks import from_first
from pagoda.train.resume import CHAT, CONFIG, SAMPLES_PER_STEP
from pagoda.train.run_dir import RunDir
from pagoda.train.session import Session

_log = logging.getLogger("pagoda")


class Saving:
    """Saves the checkpoints of a run in the background."""

    def __init__(self, session: Session, run_dir: RunDir, tokenizer: Sequence[Path], mesh: Mesh, console: Console):
        """`tokenizer`: its files in the run's directory."""
        self._session, self._config = session, session.config
        self._run_dir, self._tokenizer = run_dir, tokenizer
        self._mesh, self._console = mesh, console
        self.saved: Path | None = None
        """The last checkpoint that is complete."""
        self.pending = PendingCheckpoint(session.optimizer, mesh, self._say)
        self._unsaved_s = 0.0
        """Seconds of the steps since the last checkpoint, the same on all ranks."""

    def check_room(self, steps: int) -> None:
        """Check that the disk has room for what the run writes in `steps` steps. All ranks call this.

        Raises StorageError if there is no room for one checkpoint. Prints a message if there is none for all that the
        run keeps at a time.
        """
        config, optimizer = self._config, self._session.optimizer
        one, copied = optimizer.checkpoint_bytes(), optimizer.checkpoint_bytes(copied=True)
        ranks = self._mesh.everyone.size

        def look() -> None:
            existing = len(self._run_dir.all_checkpoints())
            due = ceil(steps / config.save_steps) if config.save_steps else 1 + bool(config.saves_by_time)
            # A checkpoint is deleted when the one that replaces it is complete.
            kept = config.save_total_limit + 1 + (config.evaluates and config.keep_best)
            most = max(1, (min(due, kept) if config.save_total_limit else due) - existing)
            lines = steps * LINE_BYTES * (1 + ranks * (ranks > 1))
            checkpoints = self._run_dir.checkpoints
            free = shutil.disk_usage(checkpoints if checkpoints.is_dir() else self._run_dir.path).free
            required = config.save_at_end or config.save_steps > 0
            message = DiskRoom(one=one, copied=copied, most=most, beside=lines, required=required).check(
                f"The disk of --output-dir {self._run_dir.path}",
                free,
                f"a checkpoint takes {format_bytes(one)}, metrics {format_bytes(lines)}",
                " (--no-save-at-end trains without keeping the weights)",
                "--save-total-limit",
            )
            if message is not None:
                say(self._console, message)

        from_first(self._mesh, "the room for checkpoints", look)

    def due(self, metrics: StepMetrics) -> bool:
        """Whether it is time for a checkpoint after this step of all ranks."""
        self._unsaved_s += metrics.step_s
        if self.pending.is_written:
            self.pending.end()
        config = self._config
        if config.save_steps:
            return metrics.step % config.save_steps == 0
        return config.saves_by_time and self._unsaved_s >= 60 * config.save_minutes

    def save(self, step: int, best: int | None) -> None:
        """Start to save the state after `step` steps.

        Older checkpoints are deleted once it is complete, except the last ones, and the one after `best` steps, which
        may be one of them.
        """
        self._unsaved_s = 0.0
        config, batches = self._config, self._session.batches
        extra = {
            "step": step,
            CONFIG: config.settings(),
            CHAT: batches.rows.tokens.about.chats,
            "text": batches.rows.tokens.about.fingerprint,
            "samples": batches.samples_before(step),
            SAMPLES_PER_STEP: batches.samples_per_step,
        }
        path = self._run_dir.checkpoint(step)

        def begin(on_error: OnError) -> None:
            replaced = self._prepare(step, best) if self._mesh.everyone.rank == 0 else []
            self._session.optimizer.save_checkpoint(path, extra, wait=False, replaces=replaced, on_error=on_error)

        def ended(error: Exception | None) -> None:
            self.saved = path if error is None else self.saved

        self.pending.start(step, begin, ended)

    def _prepare(self, step: int, best: int | None) -> list[Path]:
        """The checkpoints that the one after `step` steps replaces. Creates the run's directory again if it is gone."""
        if not self._run_dir.config.exists():
            say(self._console, f"{self._run_dir.path} was moved or deleted: the run creates it again")
            with suppress(PagodaError, OSError):  # saving fails, too, and says why
                self._run_dir.create(self._config, self._tokenizer)
        if not (keep := self._config.save_total_limit):
            return []
        old = self._run_dir.all_checkpoints()
        last = sorted({*(checkpoint.step for checkpoint in old), step})[-keep:]
        return [checkpoint.path for checkpoint in old if checkpoint.step not in (*last, best)]

    def _say(self, message: str) -> None:
        say(self._console, message) if self._mesh.everyone.rank == 0 else _log.warning("%s", message)
