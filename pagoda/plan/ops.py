"""Tiers, and the lanes between them."""

DEVICE, HOST, SSD = "device", "host", "ssd"
LANES = ("h2d", "d2h", "ssd_read", "ssd_write", "update", "device_update")
"""The lanes besides `compute`, which is the thread that runs the model."""
COLLECTIVE = "collective"
"""The lane that several ranks have in addition."""
GRADIENTS_IN_FLIGHT_BYTES = 32 << 20
"""Gradients on their way to an extent at once, unless a plan says more: bounds what autograd's own copies add to peak
memory."""
LARGE_TRANSFER_BYTES = 4 << 20
"""What a drive's own figures are for: a block of moments, or a piece of weights on its way to a device."""
