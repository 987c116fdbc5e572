"""What compute waits for: transfers that it has started, and the lanes that a wait is charged to."""

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Generic, NamedTuple, Protocol, TypeVar


class Transfer(Protocol):
    """What moves bytes."""

    @property
    def done(self) -> bool:
        """Whether it has ended."""


AnyTransfer = TypeVar("AnyTransfer", bound=Transfer)


class InFlight(Generic[AnyTransfer]):
    """Transfers that compute has not waited for. One thread at a time adds some, and compute alone takes them out."""

    def __init__(self) -> None:
        self._transfers: deque[tuple[AnyTransfer, int]] = deque()
        self._added = self._taken = 0
        """Bytes of all transfers so far."""

    def add(self, transfer: AnyTransfer, nbytes: int) -> None:
        """A transfer of `nbytes` was started."""
        self._transfers.append((transfer, nbytes))
        self._added += nbytes

    def above(self, most: int) -> Iterator[AnyTransfer]:
        """The oldest transfers, one after another, while they have ended or more than `most` bytes are on their way.
        Compute waits for each."""
        while self._transfers and (self._transfers[0][0].done or self._added - self._taken > most):
            transfer, nbytes = self._transfers.popleft()
            self._taken += nbytes
            yield transfer


class Ended(NamedTuple):
    """Work that has ended."""

    lane: str
    start_s: float
    end_s: float
    beside: str = ""
    """A lane that has slowed it, as the two directions of a drive do."""
    lost: float = 0.0
    """Share of its time that it has lost to that lane."""


def charged(latest_first: Iterable[Ended], start_s: float, end_s: float, otherwise: str) -> Iterator[tuple[str, float]]:
    """The lanes that a wait of compute is charged to, and the seconds of each, which add up to those of the wait.

    A lane that itself waits passes the charge on. The work that ends last ends the wait, so its lane is charged with
    the time since its start. It started when other work had ended, of its own lane or of another one that it waited
    for, and so on. What work has lost to another lane is charged to that one. `latest_first`: work that ended during
    the wait, or before. If none did, all of it is charged to the lane `otherwise`.
    """
    lane = otherwise
    for work in latest_first:
        if work.end_s <= start_s:
            break
        if work.end_s <= end_s:  # else it ran beside what was waited for
            lane, begun = work.lane, max(start_s, work.start_s)
            yield lane, (end_s - begun) * (1 - work.lost)
            if work.lost:
                yield work.beside, (end_s - begun) * work.lost
            end_s = begun
    if end_s > start_s:
        yield lane, end_s - start_s
