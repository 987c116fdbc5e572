"""Ops: what each lane is asked to do, and when."""

from dataclasses import dataclass
from enum import StrEnum

DEVICE, HOST, SSD = "device", "host", "ssd"
LANES = ("h2d", "d2h", "ssd_read", "ssd_write", "update", "device_update")
"""The lanes besides `compute`, which is the thread that runs the model."""
COLLECTIVE = "collective"
"""The lane that several ranks have beside those."""
GRADIENTS_IN_FLIGHT_BYTES = 32 << 20
"""Gradients on their way to an extent at once, unless a plan says more: bounds what autograd's own copies add to peak
memory."""
LARGE_TRANSFER_BYTES = 4 << 20
"""What a drive's own figures are for: a block of moments, or a piece of weights on its way to a device."""


class Kind(StrEnum):
    """The verbs of a plan."""

    FETCH = "fetch"
    """Weights, or a rank's slice of them, from their home to a lease; from SSD to a device of its own through RAM."""
    EVICT = "evict"
    """Free a lease's frames; moves nothing."""
    OFFLOAD = "offload"
    """Gradients from where autograd left them to their extent."""
    SPILL = "spill"
    """A gradient extent from host frames to SSD."""
    READ = "read"
    """Optimizer state from SSD to the ring; or, with the gradient, from RAM to that of the device."""
    UPDATE = "update"
    """The optimizer's math."""
    WRITE = "write"
    """Optimizer state from the ring back to SSD, or to RAM."""
    SAVE = "save"
    """Activations to where they are offloaded."""
    RETURN = "return"
    """Offloaded activations back to where compute is."""
    ALL_GATHER = "all_gather"
    """Every rank's slice of a unit's weights to every rank: into a lease, or (stages 1 and 2) after the update."""
    REDUCE_SCATTER = "reduce_scatter"
    """Every rank's gradient of a unit to slices of their sum, one a rank."""
    ALL_REDUCE = "all_reduce"
    """Every rank's gradient of a unit to their sum, on every rank (stage 1)."""
    ALL_TO_ALL = "all_to_all"
    """Tokens to the ranks that have their experts, or back."""


@dataclass(frozen=True, slots=True)
class Op:
    """One piece of work of one unit, legal from tick `tick` of the trace on; moves `nbytes` on `lane`: of a collective,
    what this rank sends."""

    kind: Kind
    unit: int
    lane: str
    nbytes: int
    tick: int
