"""Lanes: queues of work, one for each resource that moves states or computes.

`runtime/lanes.py` has their threads, and `simulate/clock.py` the time that their work takes in a simulation.
"""

from enum import StrEnum


class LaneName(StrEnum):
    """A queue of work that one resource does, in the order of reports."""

    COMPUTE = "compute"
    """The thread that runs the model."""
    H2D = "h2d"
    """From RAM to leases on the device. Updates there copy in streams of their own, and only count their bytes here."""
    D2H = "d2h"
    SSD_READ = "ssd_read"
    SSD_WRITE = "ssd_write"
    UPDATE = "update"
    """Updates on the CPU."""
    DEVICE_UPDATE = "device_update"
    COLLECTIVE = "collective"
    """Between ranks, if there are several."""


ALL_LANES = tuple(map(str, LaneName))
LANES = tuple(lane for lane in ALL_LANES if lane not in (LaneName.COMPUTE, LaneName.COLLECTIVE))
"""All lanes but those of compute and of collectives."""
INLINE_BYTES = 128 << 10
"""Work in RAM on this many bytes takes about 10 microseconds. Handing it to another thread takes up to 100."""
LARGE_TRANSFER_BYTES = 4 << 20
"""The transfer size for which a drive's main figures hold: a block of moments, or a piece of weights on its way to a
device."""
_MANY_CORES, _LEFT_FREE = 8, 2


def update_threads(cores: int) -> int:
    """Number of threads of `update`. Of many cores, two are left to Python, because fewer threads take all of RAM's
    bandwidth."""
    return cores - _LEFT_FREE if cores >= _MANY_CORES else cores
