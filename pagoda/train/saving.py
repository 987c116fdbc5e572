"""The checkpoints of a run: when one is due, and what follows when one cannot be written."""

import logging
import shutil
import time
from collections.abc import Sequence
from contextlib import suppress
from math import ceil
from pathlib import Path

from rich.console import Console

from pagoda.errors import CheckpointError, PagodaError, StorageError
from pagoda.memory.sizes import format_bytes
from pagoda.mesh.mesh import Mesh
from pagoda.train.metrics import LINE_BYTES, StepMetrics
from pagoda.train.progress import say
from pagoda.train.ranks import from_all, from_first
from pagoda.train.resume import CHAT, CONFIG, SAMPLES_PER_STEP
from pagoda.train.run_dir import RunDir
from pagoda.train.session import Session

_PATIENCE_S = 30 * 60.0
_RETRY_S, _SAY_S = 10.0, 60.0
_LOOK_S = 0.1
"""Seconds in which a signal is noticed."""
_log = logging.getLogger("pagoda")


class Saving:
    """Saves checkpoints in the background. If a write fails, the run says so and continues, because the next checkpoint
    may succeed. The last one is retried for a while, because the state is still in memory."""

    def __init__(self, session: Session, run_dir: RunDir, tokenizer: Sequence[Path], mesh: Mesh, console: Console):
        """`tokenizer`: its files in the run's directory."""
        self._session, self._config = session, session.config
        self._run_dir, self._tokenizer = run_dir, tokenizer
        self._mesh, self._console = mesh, console
        self.saved: Path | None = None
        """The last checkpoint that is complete."""
        self.retrying: int | None = None
        """The step of the last checkpoint, once it could not be written."""
        self._writing: tuple[int, int | None] | None = None
        """The step of the checkpoint that is being written, and that of the best one."""
        self._errors: list[Exception] = []
        """The error of the checkpoint that is being written, if any."""
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
            due = ceil(steps / config.checkpoint_every) if config.checkpoint_every else 1 + bool(config.saves_by_time)
            # A checkpoint is deleted when the one that replaces it is complete.
            kept = config.keep_checkpoints + 1 + (config.evaluates and config.keep_best)
            most = max(1, (min(due, kept) if config.keep_checkpoints else due) - existing)
            lines = steps * LINE_BYTES * (1 + ranks * (ranks > 1))
            checkpoints = self._run_dir.checkpoints
            free = shutil.disk_usage(checkpoints if checkpoints.is_dir() else self._run_dir.path).free
            has = f"The disk of --out {self._run_dir.path} has {format_bytes(free)} free"
            if one + lines > free and (config.save_at_end or config.checkpoint_every):
                raise StorageError(
                    f"{has}, and a checkpoint takes {format_bytes(one)}, metrics {format_bytes(lines)}: free space, or "
                    "name a directory on another disk (--no-save-at-end trains without keeping the weights)"
                )
            if one + (most - 1) * copied + lines > free:
                say(
                    self._console,
                    f"{has}. The run may add {most} checkpoints of up to {format_bytes(copied)} each: free space "
                    "before it needs it, or give a smaller --keep-checkpoints",
                )

        from_first(self._mesh, "the room for checkpoints", look)

    def due(self, metrics: StepMetrics) -> bool:
        """Whether it is time for a checkpoint after this step of all ranks."""
        self._unsaved_s += metrics.step_s
        if not self._session.optimizer.checkpoint_pending:
            self._end(say_it=True)
        config = self._config
        if config.checkpoint_every:
            return metrics.step % config.checkpoint_every == 0
        return config.saves_by_time and self._unsaved_s >= 60 * config.checkpoint_minutes

    def save(self, step: int, best: int | None) -> None:
        """Start to save the state after `step` steps.

        Older checkpoints are deleted once it is complete, except the last ones, and the one after `best` steps, which
        may be one of them.
        """
        self._end(say_it=True)
        self._unsaved_s = 0.0
        self._writing = step, best
        config, batches, optimizer = self._config, self._session.batches, self._session.optimizer
        extra = {
            "step": step,
            CONFIG: config.settings(),
            CHAT: batches.rows.tokens.about.chats,
            "text": batches.rows.tokens.about.fingerprint,
            "samples": batches.samples_before(step),
            SAMPLES_PER_STEP: batches.samples_per_step,
        }
        replaced = self._prepare(step, best) if self._mesh.everyone.rank == 0 else []
        path = self._run_dir.checkpoint(step)
        try:
            optimizer.save_checkpoint(path, extra, wait=False, replaces=replaced, on_error=self._errors.append)
        except (PagodaError, OSError) as error:
            self._errors.append(error)

    def _prepare(self, step: int, best: int | None) -> list[Path]:
        """The checkpoints that the one after `step` steps replaces. Creates the run's directory again if it is gone."""
        if not self._run_dir.config.exists():
            say(self._console, f"{self._run_dir.path} was moved or deleted: the run creates it again")
            with suppress(PagodaError, OSError):  # saving fails, too, and says why
                self._run_dir.create(self._config, self._tokenizer)
        if not (keep := self._config.keep_checkpoints):
            return []
        old = self._run_dir.all_checkpoints()
        last = sorted({*(checkpoint.step for checkpoint in old), step})[-keep:]
        return [checkpoint.path for checkpoint in old if checkpoint.step not in (*last, best)]

    def finish(self, received: Sequence[int]) -> None:
        """Wait until the last checkpoint is complete. If it cannot be written, try again for a while, and say so each
        minute. The first signal in `received` that arrives meanwhile ends the trying.

        Raises the error of the last try, and StorageError at once if the state itself is damaged.
        """
        until, before = time.monotonic() + _PATIENCE_S, len(received)
        reported, next_report = "", 0.0
        while self._writing is not None:
            step, best = self._writing
            error = self._end(say_it=False)
            problems = from_all(self._mesh, "the last checkpoint", None if error is None else str(error))
            problem = next((each for each in problems if each is not None), None)
            if problem is None:
                return
            self._session.optimizer.drain(show=False)
            stops = time.monotonic() > until or len(received) > before
            if any(from_all(self._mesh, "the end of a run", stops)):
                raise error or CheckpointError(f"the checkpoint after step {step} was not saved: {problem}")
            if problem != reported or time.monotonic() >= next_report:
                why = problem.rstrip(".")
                say(
                    self._console,
                    f"The checkpoint after step {step} was not saved: {why}. The state is still in memory. "
                    f"Free space, or remove the cause: the run tries again every {_RETRY_S:.0f} s for "
                    f"{_PATIENCE_S / 60:.0f} minutes",
                )
                reported, next_report = problem, time.monotonic() + _SAY_S
            self.retrying = step
            again = time.monotonic() + _RETRY_S
            while time.monotonic() < again and len(received) == before:
                time.sleep(_LOOK_S)
            self.save(step, best)

    def _end(self, *, say_it: bool) -> Exception | None:
        """Wait for the checkpoint that is being written. Returns why it failed, or None."""
        if self._writing is None:
            return None
        self._session.optimizer.wait_for_checkpoint()
        (step, _), self._writing = self._writing, None
        if not self._errors:
            self.saved = self._run_dir.checkpoint(step)
            return None
        error = self._errors.pop()
        if not isinstance(error, PagodaError | OSError):
            raise error
        if say_it:
            why = str(error).rstrip(".")
            message = f"The checkpoint after step {step} was not saved: {why}. The run continues to the next one"
            say(self._console, message) if self._mesh.everyone.rank == 0 else _log.warning("%s", message)
        return error
