"""The saver: writes one checkpoint at a time while training continues."""

from collections.abc import Callable

from pagoda.runtime.lanes import SSD_THREADS, Handle, Lane, wait_all


class Saver:
    """A thread that writes checkpoints, with more threads for their pieces. An error is kept until someone asks, and is
    raised once."""

    def __init__(self) -> None:
        self._lane = Lane("checkpoint")
        self._writers = Lane("checkpoint_pieces", SSD_THREADS)
        self._job: Handle | None = None

    @property
    def pending(self) -> bool:
        """Whether a checkpoint is being written."""
        return self._job is not None and not self._job.done

    def start(self, work: Callable[[], None]) -> None:
        """Write a checkpoint in the background. The previous one must have ended."""
        assert self._job is None
        self._job = self._lane.submit(work)

    def divide(self, work: Callable[[], None]) -> None:
        """Do `work` on every writer thread and wait for all of them, as part of writing a checkpoint. Raises the first
        error."""
        wait_all([self._writers.submit(work) for _ in range(SSD_THREADS)])

    def wait(self) -> None:
        """Wait for the checkpoint that is being written, if there is one. Raises the error of the last checkpoint."""
        job = self._job
        if job is None:
            return
        try:
            job.wait()
        finally:
            if job.done:
                self._job = None

    def check(self) -> None:
        """Raises the error of a checkpoint that has failed since the last check."""
        if not self.pending:
            self.wait()

    def settle(self) -> None:
        """Wait until no state is read any more. Errors are left for `check`."""
        if self._job is not None:
            self._job.wait_until_done()

    def close(self) -> None:
        """Finish the checkpoint that is being written, and join the threads. Raises its error."""
        self._lane.close()
        self._writers.close()
        self.wait()
