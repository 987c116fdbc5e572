"""Placement: which tier is home to each state of each unit, and how many pages each line of the plan takes."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from pagoda.plan.device_updates import UPDATE_RING, WORK
from pagoda.plan.layout import GRAD, GRAD_QUEUE, WEIGHT_BACK

LEASES, STAGING, RING, FETCH_RING, BOUNCE = "leases", "staging", "ring", "fetch_ring", "bounce"
COLLECTIVE_BUFFERS, SERVING = "collective", "serving"
CHECKPOINT = "checkpoint"
SPARE = "spare"
UNDO = "undo"
ACTIVATIONS = "activations"
LINES_AFTER_STATES = (
    *(WEIGHT_BACK, GRAD, SPARE, UNDO, GRAD_QUEUE, LEASES, UPDATE_RING, STAGING, RING, FETCH_RING, BOUNCE, CHECKPOINT),
    *(WORK, COLLECTIVE_BUFFERS, SERVING, ACTIVATIONS),
)
"""The lines of a tier that are not states of a home, in the order in which a table shows them."""

ACTIVATION_BUFFERS = 4
"""Between activations and SSD: two on their way out, two on their way back."""
FETCH_SLOTS = 4
"""Pieces of weights between SSD and a separate device at once."""
BOUNCE_ELEMENTS = 1 << 20
"""Elements of a gradient that leave a separate device at a time; two pieces are on their way at once."""


@dataclass(frozen=True, slots=True)
class Budgets:
    """Bytes each tier may use; `device` is None where device and host are the same RAM, `ssd` where there is none."""

    host: int
    device: int | None = None
    ssd: int | None = None


@dataclass(frozen=True)
class Placement:
    """Home of every extent, and the pages of every line of the plan.

    Lines named after states are homes; LEASES hold weights while they are used, STAGING holds gradients on their way to
    the update or to SSD, RING blocks of weights and moments that stream through RAM, FETCH_RING pieces of weights on
    their way from SSD to a device of its own, and BOUNCE pieces of gradients on their way back from it;
    COLLECTIVE_BUFFERS hold whole gradients that several ranks add up, and what that takes, SERVING weights on SSD that
    ranks send each other: a message, or the largest unit where every rank has all weights; both are of the same size
    for any number of ranks. CHECKPOINT holds states that a checkpoint has not written yet when their next update comes;
    SPARE pages on SSD are for what changes while checkpoints keep theirs. WORK holds what the update of a rule that
    takes parameters whole computes with, one parameter at a time. UNDO keeps the old states of speculated units
    beside the new: as pages on SSD, as copies in RAM. ACTIVATIONS has the buffers through which activations go to
    SSD; how much is offloaded, a step shows.
    """

    homes: Mapping[tuple[int, str], str]
    """(unit, state) -> tier. A gradient's home is HOST, or SSD when it may have to be spilled there."""
    lines: Mapping[str, Mapping[str, int]]
    """tier -> line -> pages."""
    ring_slots: int = 0
    """Blocks the ring holds: RING_SLOTS, and more where RAM is left over: reads run further ahead of updates."""
    speculated: frozenset[int] = frozenset()
    """Units that are updated during backward as if nothing would be clipped; their old states are kept until that is
    known."""
    updated_on_device: frozenset[int] = frozenset()
    """Units whose states pass the device for their update."""
    resident: frozenset[int] = frozenset()
    """Units whose states and gradients have their home on the device, where they are used and updated."""

    @property
    def on_device(self) -> frozenset[int]:
        """Units that the device updates."""
        return self.updated_on_device | self.resident

    def home(self, unit: int, state: str) -> str:
        return self.homes[unit, state]

    def pages(self, tier: str, line: str) -> int:
        return self.lines.get(tier, {}).get(line, 0)

    def units_with(self, tier: str, states: Collection[str]) -> frozenset[int]:
        """Units of which one of the states, or several, have their home on a tier."""
        return frozenset(unit for (unit, state), home in self.homes.items() if home == tier and state in states)
