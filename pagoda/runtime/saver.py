"""The saver: one checkpoint at a time is written while training goes on."""

from collections.abc import Callable

from pagoda.runtime.lanes import SSD_THREADS, Handle, Lane, wait_all


class Saver:
    """A thread that writes checkpoints, with others for their pieces. An error of it waits until somebody asks, and is
    raised once.
    """

    def __init__(self) -> None:
        self._lane = Lane("checkpoint")
        self._writers = Lane("checkpoint_pieces", SSD_THREADS)
        self._job: Handle | None = None

    @property
    def pending(self) -> bool:
        """Whether a checkpoint is being written."""
        return self._job is not None and not self._job.done

    def start(self, work: Callable[[], None]) -> None:
        """Write a checkpoint in the background; the one before has ended."""
        assert self._job is None
        self._job = self._lane.submit(work)

    def divide(self, work: Callable[[], None]) -> None:
        """Do `work` on every writer at once and wait for all, as part of a checkpoint's job; raises the first error."""
        wait_all([self._writers.submit(work) for _ in range(SSD_THREADS)])

    def wait(self) -> None:
        """Wait for the checkpoint that is being written, if there is one; raises the error of the last."""
        job = self._job
        if job is None:
            return
        try:
            job.wait()
        finally:
            if job.done:
                self._job = None

    def check(self) -> None:
        """Raises the error of a checkpoint that has failed meanwhile."""
        if not self.pending:
            self.wait()

    def settle(self) -> None:
        """Wait until no state is read any more; an error stays for `check` to raise."""
        if self._job is not None:
            self._job.wait_until_done()

    def close(self) -> None:
        """Finish the checkpoint that is being written, and join the threads. Raises its error."""
        self._lane.close()
        self._writers.close()
        self.wait()
