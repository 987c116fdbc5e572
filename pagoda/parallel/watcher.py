"""The watcher: learns that another rank has failed or left, and ends what would wait for it for ever."""

import itertools
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch.distributed as dist

from pagoda.errors import RankError

_LOOK_S = 0.3
"""How often to look for news."""
_GRACE_S = 2.0
"""How long a collective may still take once a rank has left: it may have taken part in it."""
_STUCK_S = 1.0
"""How long a rank waits in a foreseen collective before it says so."""
_names = itertools.count()


class Watcher:
    """A thread that looks for news of other ranks in torch's store.

    A rank that fails, or closes its optimizer, says so there. The others then abort their process groups, which ends
    the collectives that they wait in; of a rank that has left, only if one is still waited for after a while.

    A rank that waits for long in a foreseen collective says so, too. One that is at something that all ranks must ask
    for, and so cannot come to the collective, then takes part in what is left of the list.
    """

    def __init__(self, rank: int, size: int) -> None:
        """Every rank makes one at the same point."""
        self.rank = rank
        self._size = size
        self.failed: int | None = None
        """The first rank that has said that it fails."""
        self.left: dict[int, float] = {}
        """rank -> when it was heard to have left."""
        self.when_stuck: Callable[[], None] | None = None
        """Called, again and again, while this rank is at something joint and another one is stuck; set meanwhile."""
        self._waiting: dict[int, tuple[float, bool]] = {}
        """thread -> since when it waits in a collective, and whether that is foreseen."""
        self._stuck = 0
        """What the store said last of ranks that are stuck."""
        self._said = 0.0
        """When this rank last said that it is."""
        self._heard = 0
        self._groups: list[Any] = []
        self._closed = threading.Event()
        self._looking = threading.Lock()
        name = f"pagoda-watch-{next(_names)}"
        store = dist.PrefixStore(name, dist.distributed_c10d._get_default_store())  # type: ignore[attr-defined]
        self._store, self._reader = store, store.clone()  # type: ignore[attr-defined]
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Watch from now on, until `close`."""
        self._thread = threading.Thread(target=self._watch, name="pagoda-watcher", daemon=True)
        self._thread.start()

    def guard(self, group: Any) -> None:
        """End what waits in this process group when there is news."""
        self._groups.append(group)

    def wait(self, collective: Callable[[], object], foreseen: bool = False) -> None:
        """Run a collective that may wait for others."""
        thread = threading.get_ident()
        self._waiting[thread] = time.monotonic(), foreseen
        try:
            collective()
        finally:
            del self._waiting[thread]

    def fail(self) -> None:
        """Tell the others that this rank has failed."""
        self._tell("failed")
        self._abort()

    def news(self) -> RankError | None:
        """Why a rank cannot be reached, if it has said so."""
        with suppress(RuntimeError):
            self._look()
        if self.failed not in (None, self.rank):
            return RankError(f"Rank {self.failed} has failed, so rank {self.rank} stops: see its own error.")
        return None

    def has_left(self) -> RankError | None:
        """The error of what needs a rank that has left, if one has."""
        if not self.left:
            return None
        return RankError(
            f"Rank {next(iter(self.left))} has closed its optimizer, but rank {self.rank} goes on: run the same number "
            "of steps on every rank."
        )

    def close(self) -> None:
        """Leave: tell the others, and stop watching."""
        self._closed.set()
        self._tell("left")
        deadline = time.monotonic() + _GRACE_S
        with suppress(RuntimeError):
            # The store may go with rank 0's process, so that one leaves last.
            while self.rank == 0 and len(self.left) < self._size - 1 and self.failed is None:
                if time.monotonic() > deadline:
                    break
                time.sleep(0.02)
                self._look()
        if self._thread is not None:
            self._thread.join()

    def _tell(self, what: str) -> None:
        with suppress(RuntimeError):  # the store is gone, as is who would read it
            number = self._store.add("events", 1)
            self._store.set(f"event-{number}", f"{what} {self.rank}")

    def _abort(self) -> None:
        groups, self._groups = self._groups, []
        for group in groups:
            with suppress(RuntimeError):
                group.abort()

    def _watch(self) -> None:
        while not self._closed.wait(_LOOK_S):
            if 0 not in self.left:  # else the store may be gone with it
                try:
                    self._look()
                    self._help()
                except RuntimeError:
                    return  # as is the rank that has the store, which the groups will find
            late = time.monotonic() - _GRACE_S
            left = min(self.left.values(), default=None)
            if self.failed is not None or (
                left is not None and any(max(since, left) < late for since, _ in [*self._waiting.values()])
            ):
                self._abort()

    def _look(self) -> None:
        """Read what has been said since."""
        with self._looking:
            while self._reader.check([key := f"event-{self._heard + 1}"]):
                self._heard += 1
                what, rank = self._reader.get(key).decode().split()
                if what == "left" and int(rank) != self.rank:
                    self.left.setdefault(int(rank), time.monotonic())
                elif what == "failed" and self.failed is None:
                    self.failed = int(rank)

    def _help(self) -> None:
        """Say that this rank is stuck, or help one that is."""
        now = time.monotonic()
        if now - self._said > _STUCK_S and any(
            foreseen and now - since > _STUCK_S for since, foreseen in [*self._waiting.values()]
        ):
            self._said = now
            self._reader.add("stuck", 1)
        if (help_them := self.when_stuck) is not None:
            before, self._stuck = self._stuck, self._reader.add("stuck", 0)
            if self._stuck != before:
                help_them()
