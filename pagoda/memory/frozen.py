"""Pages of an SSD tier as they were: frozen for a checkpoint, or forked for an update that may have to be undone."""

from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from pagoda.memory.commits import Reference
from pagoda.memory.page import Run
from pagoda.memory.slots import PageTable


class Keeper(Protocol):
    """What the tier does for those who hold its pages."""

    def pages_of(self, run: Run, offset_bytes: int, nbytes: int) -> tuple[int, int]:
        """(first page, pages) of a part of a run."""

    def load_pinned(self, table: PageTable, into: memoryview) -> None:
        """Read pages of a pinned table."""

    def add_to_frozen(self, frozen: "FrozenPages", run: Run) -> None:
        """Keep one more run."""

    def commit_frozen(self, frozen: "FrozenPages", checkpoint: Path, checkpoint_id: str) -> Reference:
        """Make a freeze durable: the pages first, then their table."""

    def let_go(self, frozen: "FrozenPages") -> None:
        """Nobody need wait for this freeze any more; unless it was committed, its slots are free."""

    def forget(self, commit: str) -> None:
        """Delete a commit durably, then free its slots."""

    def end_fork(self, run: Run, old: PageTable, undo: bool) -> None:
        """Let go of what a fork keeps, after having it back where it is to be undone."""


class FrozenPages:
    """The pages of a tier as they were at one instant, each run at its own, whatever has been stored since.

    Stores that find no free slot wait as long as its holder may yet free some: until `close`, or until the object is
    dropped. So close it (or leave its `with`) only after older commits have been forgotten.
    """

    def __init__(self, tier: Keeper, table: PageTable) -> None:
        self._tier = tier
        self._table = table
        self._reference: Reference | None = None

    def add(self, run: Run) -> None:
        """Keep a run that is not kept yet as it is now; what is under way to it ends first. Not after `commit`."""
        self._tier.add_to_frozen(self, run)

    def load(self, run: Run, offset_bytes: int, into: memoryview) -> None:
        """Read whole pages as they were. Raises as `SSDTier.load` does."""
        first, count = self._tier.pages_of(run, offset_bytes, into.nbytes)
        self._tier.load_pinned(self._table.part(first, count), into)

    def commit(self, checkpoint: Path, checkpoint_id: str) -> dict[str, Any]:
        """Keep the pages beyond the end of the process, for the checkpoint that has, or will have, this id.

        Returns a reference to them, as JSON, for `open_commit`. A crash at any instant leaves the commit as a whole
        or nothing of it. The path is where the checkpoint is or will be: it may be moved later.

        Raises StorageError when that fails; then nothing is committed.
        """
        if self._reference is None:
            self._reference = self._tier.commit_frozen(self, checkpoint, checkpoint_id)
        return self._reference.to_json()

    def release(self) -> None:
        """Keep the pages no longer, in memory and, if they were committed, on disk. Idempotent."""
        if self._reference is not None:
            self._tier.forget(self._reference.commit)
        self.close()

    def close(self) -> None:
        """Have done with it: what was committed stays, what was not is released. Idempotent."""
        self._tier.let_go(self)

    def __enter__(self) -> "FrozenPages":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Fork:
    """What a run held before an update that may have to be undone. Ends with `keep` or `undo`, once."""

    def __init__(self, tier: Keeper, run: Run, table: PageTable) -> None:
        self._tier = tier
        self._run = run
        self._table: PageTable | None = table

    def keep(self) -> None:
        """Keep what has been stored since; the old pages' slots are free."""
        self._tier.end_fork(self._run, self._take(), undo=False)

    def undo(self) -> None:
        """Have the old pages back; the slots of what has been stored since are free. Without I/O."""
        self._tier.end_fork(self._run, self._take(), undo=True)

    def _take(self) -> PageTable:
        table, self._table = self._table, None
        if table is None:
            raise ValueError(f"the fork of {self._run} has ended")
        return table
