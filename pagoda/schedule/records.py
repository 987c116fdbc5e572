"""The scheduler's records: of each lease, each gradient, each update, and the weights of each unit.

`payload` holds what the executor knows of the same thing, such as a tensor or a handle. The scheduler never reads a
payload, and nobody else changes any other field.
"""

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from pagoda.memory.page import PageRun
from pagoda.memory.versions import EMPTY


@dataclass(eq=False, slots=True)
class Lease:
    """Frames that hold, or are about to hold, one version of a unit's weights. If compute reads a unit's home, the unit
    has a lease without frames, which never ends."""

    unit: int
    run: PageRun
    version: int
    filled: bool = False
    """Whether compute need not wait for the fetch: it has ended, with or without an error, or its copy is in a device's
    queue."""
    ended_by: Any = None
    """Once the lease has ended, so that nothing new uses it: the class of the operation that frees its frames."""
    payload: Any = None
    """What the executor knows of the lease."""


@dataclass(eq=False, slots=True)
class GradientRecord:
    """The gradient of one unit for one step."""

    unit: int
    step: int
    run: PageRun | None = None
    """The record's buffer, if it is in shared pages and exists now."""
    own_buffer: int | None = None
    """Which of the unit's own buffers the record has, if the unit has any."""
    made: list[Any] = field(default_factory=list)
    """What autograd has made and what waits for the buffer. Each is given to an OFFLOAD of its own."""
    to_reduce: int = 0
    """The number of parts that autograd has made, and that ranks have not begun to add up. They need no buffer yet."""
    arriving: int = 0
    """The number of OFFLOAD operations under way."""
    transferring: bool = False
    """Whether a SPILL or RELOAD is under way. Until it ends, nothing arrives in the buffer, and no update reads it."""
    clean: bool = False
    """Whether SSD holds the same bytes, or will hold them once the transfer under way has ended."""
    complete: bool = False
    """Whether this backward adds nothing more to the gradient."""
    in_use: bool = False
    """Whether an update reads the buffer."""
    lent: bool = False
    """Whether compute reads the buffer, or waits to read it."""
    wanted: bool = False
    """Whether an update or compute waits for the gradient to be in RAM."""
    lost: bool = False
    """Whether a part of the gradient failed to arrive. A lost gradient cannot be used."""
    dropped: bool = False
    """Whether the gradient is no longer needed. Its buffer is free once nothing moves it."""
    payload: Any = None
    """What the executor knows of the gradient."""

    @property
    def busy(self) -> bool:
        """Whether something moves or reads the buffer, so that it must stay."""
        return self.arriving > 0 or self.transferring or self.in_use or self.lent

    @property
    def arrived(self) -> bool:
        """Whether everything that autograd has made so far has arrived."""
        return not (self.to_reduce or self.made or self.arriving)

    @property
    def lacks_buffer(self) -> bool:
        return self.run is None and self.own_buffer is None


class UpdateState(Enum):
    """How far an update is."""

    ASKING = auto()
    """The update is early. ASK asks whether anything refers to the weights, or the answer was that something
    does."""
    QUEUED = auto()
    LOADING = auto()
    """The gradient is being moved to RAM. From here on, the update counts as under way."""
    RUNNING = auto()


@dataclass(eq=False, slots=True)
class UpdateRecord:
    """One update of a unit."""

    unit: int
    gradient: GradientRecord
    """The gradient that it uses."""
    speculative: bool = False
    """True until `step()` confirms the update."""
    state: UpdateState = UpdateState.QUEUED
    query: object = None
    """The ASK under way."""
    urgent: bool = False
    """Whether compute waits for the update."""
    runs: tuple[PageRun, ...] = ()
    """Where the update writes each state, once it runs."""
    may_move: bool = False
    """Whether ASK was answered that nothing refers to the weights. Only then may the next version of weights that
    compute reads where they are be elsewhere."""
    has_read: bool = False
    """Whether the update has read its gradient for the last time."""
    has_written: bool = False
    """Whether the update has written the new weights."""
    called_off: bool = False
    """Whether the update was called off while it ran. What it writes is given up once it has ended."""
    payload: Any = None
    """What the executor knows of the update."""


@dataclass(eq=False, slots=True)
class Weights:
    """The versions of one unit's states, and its updates.

    An update is in one field of each of two rows at a time, and moves to the right:

        what it does:     [asking ->] [later ->] update
        who knows of it:  [speculative or unannounced ->] [sharing]

    It leaves the first row once it has written all states. In the second row, it stays until it is announced,
    and then until other ranks' parts are here. An update that is called off leaves both early.
    """

    newest: int = 0
    """The version that the latest final update has written."""
    due: int = 0
    """The version that the weights have once all requested updates have ended. An update that is refused does not
    count."""
    lag: int = 0
    """1 if accesses still read the version before `due`, as only asynchronous updates let them. Otherwise 0."""
    runs: tuple[PageRun, ...] = ()
    """Where the newest version of each state is. The first state is the weights."""
    read: PageRun = EMPTY
    """Where the weights are that accesses read."""
    asking: UpdateRecord | None = None
    """An early update that is not queued yet."""
    later: list[UpdateRecord] = field(default_factory=list)
    """Updates that wait for `update` to end."""
    update: UpdateRecord | None = None
    """The update that is queued or under way."""
    speculative: UpdateRecord | None = None
    """A speculative update, in any state, until it is confirmed or called off."""
    unannounced: UpdateRecord | None = None
    """An asynchronous update that neither accesses nor other ranks wait for yet."""
    sharing: list[UpdateRecord] = field(default_factory=list)
    """Announced updates of which other ranks' parts have not arrived, oldest first."""
    announced: GradientRecord | None = None
    """The gradient of the latest update that accesses see, or will see once it has ended."""
    edition: int = 0
    """How often the weights that accesses read were changed, by updates or otherwise."""

    @property
    def version(self) -> int:
        """The version that accesses read."""
        return self.due - self.lag

    @property
    def await_update(self) -> bool:
        """Whether the version that accesses read waits for an update, or for other ranks' parts. True also while a
        speculative update is neither confirmed nor called off."""
        return self.speculative is not None or self.newest < self.version or bool(self.sharing)
