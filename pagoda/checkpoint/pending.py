"""The checkpoint that is being written in the background, and what follows when one cannot be written."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pagoda.errors import CheckpointError, PagodaError, StorageError
from pagoda.memory.sizes import format_bytes
from pagoda.mesh.mesh import Mesh
from pagoda.mesh.sharing import from_all

PATIENCE_S, RETRY_S = 30 * 60.0, 10.0
_SAY_S = 60.0
_LOOK_S = 0.1
"""Seconds in which a signal is noticed."""
OnError = Callable[[Exception], None]


@dataclass(frozen=True)
class _Writing:
    step: int
    begin: Callable[[OnError], None]
    ended: Callable[[Exception | None], None]


class PendingCheckpoint:
    """Writes one checkpoint at a time in the background. If a write fails, the run says so and continues, because the
    next checkpoint may succeed. The last one is retried for a while, because the state is still in memory."""

    def __init__(self, optimizer: Any, mesh: Mesh, say: Callable[[str], None]) -> None:
        """`optimizer`: a PagedOptimizer. `say` gets the messages of every rank."""
        self._optimizer, self._mesh, self._say = optimizer, mesh, say
        self.retrying: int | None = None
        """The step of the last checkpoint, once it could not be written."""
        self._writing: _Writing | None = None
        self._errors: list[Exception] = []
        """The error of the checkpoint that is being written, if any."""

    @property
    def step(self) -> int | None:
        """The step of the checkpoint that is being written, or was written and has not been ended."""
        return None if self._writing is None else self._writing.step

    @property
    def is_written(self) -> bool:
        """Whether a checkpoint was written, or could not be, and has not been ended."""
        return self._writing is not None and not self._optimizer.checkpoint_pending

    def start(self, step: int, begin: Callable[[OnError], None], ended: Callable[[Exception | None], None]) -> None:
        """Call `begin` to start writing the state after `step` steps. It passes its argument to `save_checkpoint` as
        `on_error`, or raises. `ended` gets its error, or None once the checkpoint is complete."""
        self.end()
        self._start(_Writing(step, begin, ended))

    def _start(self, writing: _Writing) -> None:
        self._writing = writing
        try:
            writing.begin(self._errors.append)
        except (PagodaError, OSError) as error:
            self._errors.append(error)

    def end(self, *, say_it: bool = True) -> Exception | None:
        """Wait for the checkpoint that is being written. Returns why it failed, or None."""
        if self._writing is None:
            return None
        self._optimizer.wait_for_checkpoint()
        writing, self._writing = self._writing, None
        error = self._errors.pop() if self._errors else None
        if error is not None and not isinstance(error, PagodaError | OSError):
            raise error
        writing.ended(error)
        if error is not None and say_it:
            why = str(error).rstrip(".")
            self._say(
                f"The checkpoint after step {writing.step} was not saved: {why}. The run continues to the next one"
            )
        return error

    def finish(self, received: Sequence[int]) -> None:
        """Wait until the last checkpoint is complete. If it cannot be written, try again for a while, and say so each
        minute. The first signal in `received` that arrives meanwhile ends the trying.

        Raises the error of the last try, and StorageError at once if the state itself is damaged.
        """
        until, before = time.monotonic() + PATIENCE_S, len(received)
        reported, next_report = "", 0.0
        while (writing := self._writing) is not None:
            error = self.end(say_it=False)
            problems = from_all(self._mesh, "the last checkpoint", None if error is None else str(error))
            problem = next((each for each in problems if each is not None), None)
            if problem is None:
                return
            self._optimizer.synchronize(show=False)
            stops = time.monotonic() > until or len(received) > before
            if any(from_all(self._mesh, "the end of a run", stops)):
                raise error or CheckpointError(f"the checkpoint after step {writing.step} was not saved: {problem}")
            if problem != reported or time.monotonic() >= next_report:
                why = problem.rstrip(".")
                self._say(
                    f"The checkpoint after step {writing.step} was not saved: {why}. The state is still in memory. "
                    f"Free space, or remove the cause: the run tries again every {RETRY_S:.0f} s for "
                    f"{PATIENCE_S / 60:.0f} minutes"
                )
                reported, next_report = problem, time.monotonic() + _SAY_S
            self.retrying = writing.step
            again = time.monotonic() + RETRY_S
            while time.monotonic() < again and len(received) == before:
                time.sleep(_LOOK_S)
            self._start(writing)


@dataclass(frozen=True, kw_only=True)
class DiskRoom:
    """What a run will write to the disk of its checkpoints, in bytes."""

    one: int
    """The next checkpoint."""
    copied: int
    """Each later one, if none of its state stays in its pages on SSD."""
    most: int
    """Number of checkpoints that the run adds."""
    required: bool = True
    """Whether the run is an error if there is no room for one."""

    def check(self, has: str, free: int, what: str, remedy: str, fewer: str) -> str | None:
        """What to say if there is no room for all checkpoints. `has`: names the disk. `what` and `remedy`: the end of
        the sentences of the error. `fewer`: the setting that keeps fewer checkpoints.

        Raises StorageError if there is no room for one.
        """
        has = f"{has} has {format_bytes(free)} free"
        if self.required and self.one > free:
            raise StorageError(f"{has}, and {what}: free space, or name a directory on another disk{remedy}")
        if self.one + (self.most - 1) * self.copied <= free:
            return None
        return (
            f"{has}. The run may add {self.most} checkpoints of up to {format_bytes(self.copied)} each: free space "
            f"before it needs it, or give a smaller {fewer}"
        )
