"""Ops: what each lane is asked to do, and when."""

from dataclasses import dataclass
from enum import StrEnum

DEVICE, HOST, SSD = "device", "host", "ssd"
LANES = ("h2d", "d2h", "ssd_read", "ssd_write", "update")
"""The lanes besides `compute`, which is the thread that runs the model."""
GRADIENTS_IN_FLIGHT_BYTES = 32 << 20
"""Gradients on their way to an extent at once: bounds what autograd's own copies add to peak memory."""


class Kind(StrEnum):
    """The verbs of a plan."""

    FETCH = "fetch"
    """Weights from their home to a lease."""
    EVICT = "evict"
    """Free a lease's frames; moves nothing."""
    OFFLOAD = "offload"
    """Gradients from where autograd left them to their extent."""
    SPILL = "spill"
    """A gradient extent from host frames to SSD."""
    READ = "read"
    """Optimizer state from SSD to the ring."""
    UPDATE = "update"
    """The optimizer's math."""
    WRITE = "write"
    """Optimizer state from the ring back to SSD."""


@dataclass(frozen=True, slots=True)
class Op:
    """One piece of work of one unit, legal from tick `tick` of the trace on; moves `nbytes` on `lane`."""

    kind: Kind
    unit: int
    lane: str
    nbytes: int
    tick: int
