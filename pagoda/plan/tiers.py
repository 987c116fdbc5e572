"""Tiers, and the lanes between them."""

DEVICE, HOST, SSD = "device", "host", "ssd"
RANKS = "ranks"
"""Where weights come from that ranks divide."""
LANES = ("h2d", "d2h", "ssd_read", "ssd_write", "update", "device_update")
"""All lanes except `compute`, the thread that runs the model."""
COLLECTIVE = "collective"
"""An additional lane if there are several ranks."""
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
