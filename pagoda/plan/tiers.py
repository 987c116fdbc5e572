"""Tiers, and the lanes between them."""

from enum import StrEnum


class Tier(StrEnum):
    """A memory in which states are, or from which weights come."""

    DEVICE = "device"
    HOST = "host"
    """The CPU's RAM."""
    SSD = "ssd"
    RANKS = "ranks"
    """Other ranks, from which weights come that ranks divide."""


DEVICE, HOST, SSD, RANKS = map(str, Tier)


class LaneName(StrEnum):
    """A queue of work that one resource does, in the order of reports."""

    COMPUTE = "compute"
    """The thread that runs the model."""
    H2D = "h2d"
    """From RAM to the device."""
    D2H = "d2h"
    SSD_READ = "ssd_read"
    SSD_WRITE = "ssd_write"
    UPDATE = "update"
    """Updates on the CPU."""
    DEVICE_UPDATE = "device_update"
    COLLECTIVE = "collective"
    """Between ranks, if there are several."""


LANES = tuple(str(lane) for lane in LaneName if lane not in (LaneName.COMPUTE, LaneName.COLLECTIVE))
"""All lanes but those of compute and of collectives."""
GRADIENTS_IN_FLIGHT_BYTES = 32 << 20
"""Most bytes of gradients on their way to their extents at once, unless a plan sets more. This bounds what autograd's
own copies add to peak memory."""
INLINE_BYTES = 128 << 10
"""Work in RAM on this many bytes takes about 10 microseconds. Handing it to another thread takes up to 100."""
_MANY_CORES, _LEFT_FREE = 8, 2
LARGE_TRANSFER_BYTES = 4 << 20
"""The transfer size for which a drive's main figures hold: a block of moments, or a piece of weights on its way to a
device."""


def update_threads(cores: int) -> int:
    """Number of threads of `update`. Of many cores, two are left to Python, because fewer threads take all of RAM's
    bandwidth."""
    return cores - _LEFT_FREE if cores >= _MANY_CORES else cores
