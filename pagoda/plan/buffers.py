"""How many buffers of each kind a plan has, and how large they are."""

LEASES_AHEAD = 2
"""Leases, each of the size of the largest unit, in addition to those in use at once: how far weights are fetched ahead
of compute. Fewer if the budget is tight."""
FETCH_SLOTS, FETCH_PIECE_BYTES = 4, 4 << 20
"""Number and size of pieces of weights between SSD and a separate device at once."""

BLOCK_ELEMENTS = 1 << 20
"""Number of elements that an update kernel takes at a time. Its streams then take a few MiB, and two threads share a
unit."""
RING_SLOTS = 4
"""Least number of blocks in flight on SSD: one is read, one updated, one written, and one is spare."""
DEVICE_SLOTS, WHOLE_SLOTS = 4, 2
"""Number of blocks that pass the device at once: one comes, one is updated, one goes, and one is spare. The second
number is for blocks that are whole parameters."""
MOST_AT_HOME = 4 << 20
"""Most elements of a block whose states are all in RAM. Each block costs Python about a tenth of a millisecond."""
BLOCKS_OF_A_THREAD = 4
"""Least number of such blocks of a large unit for each thread, so that no thread waits long for the others."""
MOST_LAUNCHED = 1 << 30
"""Most elements of one launch of a GPU's kernel, whose indices have 32 bits."""

STAGED = 4
"""Most gradients of the widest unit in the staging region, if units are updated during backward."""
BOUNCE_ELEMENTS = 1 << 20
"""Elements of a gradient whose squares are summed together."""
MOST_BOUNCED, MOST_BOUNCE_BUFFERS = 4, 8
"""Most such parts of a gradient that leave a separate device together, to be added, and most buffers for them."""

ACTIVATION_BUFFERS = 4
"""Number of buffers between activations and SSD: two on their way out, two on their way back."""
ACTIVATION_BUFFER_PAGES, ACTIVATION_BUFFER_BYTES = 16, 4 << 20
"""The largest of these buffers."""

PIECE_ELEMENTS = 1 << 20
"""Number of elements of a state that a checkpoint writes and hashes at a time."""
