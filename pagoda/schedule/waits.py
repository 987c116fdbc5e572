"""What compute waits for when it makes gradients and activations: transfers, and lanes that free buffers."""

from collections import deque
from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar

from pagoda.plan.planner import Plan
from pagoda.schedule.operations import Kind
from pagoda.schedule.scheduler import Scheduler


class Transfer(Protocol):
    """What moves bytes."""

    @property
    def done(self) -> bool:
        """Whether it has ended."""


AnyTransfer = TypeVar("AnyTransfer", bound=Transfer)


class InFlight(Generic[AnyTransfer]):
    """Transfers that compute has started and has not waited for. Only compute uses it."""

    def __init__(self) -> None:
        self._transfers: deque[tuple[AnyTransfer, int]] = deque()
        self._nbytes = 0

    def add(self, transfer: AnyTransfer, nbytes: int) -> None:
        """A transfer of `nbytes` was started."""
        self._transfers.append((transfer, nbytes))
        self._nbytes += nbytes

    def over(self, most: int) -> Iterator[AnyTransfer]:
        """The transfers that compute waits for, one after another, until at most `most` bytes are on their way, and
        those before them that have ended."""
        while self._transfers and (self._transfers[0][0].done or self._nbytes > most):
            transfer, nbytes = self._transfers.popleft()
            self._nbytes -= nbytes
            yield transfer


def lane_of_buffers(plan: Plan, scheduler: Scheduler) -> str:
    """The lane for which compute waits when it waits for a gradient buffer."""
    kind, unit = scheduler.held_back or (Kind.OFFLOAD, -1)
    if kind is Kind.UPDATE:
        return plan.placement.update_lane(unit, plan.layout.states)
    return "ssd_write" if kind is Kind.SPILL else "d2h"
