"""How many buffers of each kind a plan has, and how large they are."""

LEASES_AHEAD = 2
"""Leases, each of the size of the largest unit, in addition to those in use at once: how far weights are fetched ahead
of compute. Fewer if the budget is tight. On a separate device, this is only what homes leave free: leases take all that
is left of memory.device."""
FETCH_SLOTS, FETCH_PIECE_BYTES = 4, 4 << 20
"""Number and size of the pieces in which weights go from SSD through RAM to leases, at once."""

BLOCK_ELEMENTS = 1 << 20
"""Most elements of a block of states that streams through the ring. It then takes a few MiB of each."""
LEAST_RING_SLOTS = 4
"""Least number of blocks in flight on SSD: one is read, one updated, one written, and one is spare. There are more if
RAM is left (`plan/place.py`)."""
DEVICE_SLOTS, WHOLE_SLOTS = 4, 2
"""Number of blocks that pass the device at once: one comes, one is updated, one goes, and one is spare. The second
number is for blocks that are whole parameters."""
MOST_AT_HOME = 4 << 20
"""Most elements of a block whose states are all in RAM. Each block costs Python about a tenth of a millisecond."""
BLOCKS_OF_A_THREAD = 4
"""Least number of such blocks of a large unit for each thread, so that no thread waits long for the others."""
MOST_LAUNCHED = 1 << 30
"""Most elements of one launch of a GPU's kernel, whose indices have 32 bits."""

GRADIENTS_IN_FLIGHT_BYTES = 32 << 20
"""Most bytes of gradients on their way to their extents at once, unless a plan sets more. This bounds what autograd's
own copies add to peak memory."""
STAGED = 4
"""Most gradients of the widest unit in the staging region, if units are updated during backward."""
BOUNCE_ELEMENTS = 1 << 20
"""Elements of a part of a gradient. The squares of a part are summed together."""
MOST_BOUNCED, MOST_BOUNCE_BUFFERS = 4, 8
"""Most parts in a buffer in which gradients from a separate device are added, and most such buffers."""

ACTIVATION_BUFFERS = 4
"""Number of buffers between activations and SSD: two on their way out, two on their way back."""
ACTIVATION_BUFFER_PAGES, ACTIVATION_BUFFER_BYTES = 16, 4 << 20
"""The largest of these buffers."""

PIECE_ELEMENTS = 1 << 20
"""Number of elements of a state that a checkpoint writes and hashes at a time."""
