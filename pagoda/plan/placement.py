"""Placement: the home tier of each state of each unit, and the pages of each line of the plan."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from pagoda.optim.rule import StateSpec
from pagoda.plan.device_updates import UPDATE_RING, WORK
from pagoda.plan.lanes import LaneName
from pagoda.plan.layout import GRAD_QUEUE, WEIGHT, WEIGHT_BACK
from pagoda.plan.tiers import DEVICE, HOST, SSD

LEASES, STAGING, RING, FETCH_RING, BOUNCE = "leases", "staging", "ring", "fetch_ring", "bounce"
COLLECTIVE_BUFFERS, SERVING = "collective", "serving"
CHECKPOINT = "checkpoint"
VERSIONS = "versions"
ACTIVATIONS = "activations"
MEANING: Mapping[str, str] = {
    WEIGHT_BACK: "room for new weights, while a step reads those without the last asynchronous updates",
    VERSIONS: "other versions of states, while a checkpoint or a step that may be clipped or dropped needs the old one",
    GRAD_QUEUE: "gradients that wait for their asynchronous update",
    LEASES: "weights while forward and backward use them",
    UPDATE_RING: "blocks of state that pass through the device for their update",
    STAGING: "gradients on their way to an update or to SSD",
    RING: "blocks of state from SSD that pass through RAM for their update",
    FETCH_RING: "pieces of weights on their way from SSD to leases",
    BOUNCE: "pieces of gradients from the device that are added in RAM",
    CHECKPOINT: "a piece of state on its way to a checkpoint",
    WORK: "fp32 copies of the parameter that is being updated",
    COLLECTIVE_BUFFERS: "gradients while ranks add them up",
    SERVING: "weights on SSD that ranks send each other",
    ACTIVATIONS: "offloaded activations, and buffers on their way to SSD",
}
"""What a line holds that is not the home of a state, in the order of tables."""


@dataclass(frozen=True)
class Placement:
    """The home of every extent, and the pages of every line of the plan.

    A line with the name of a state is the home of that state. `MEANING` explains the other lines.
    """

    homes: Mapping[tuple[int, str], str]
    """(unit, state) -> tier. A gradient's home is SSD if it may have to be spilled there."""
    lines: Mapping[str, Mapping[str, int]]
    """tier -> line -> pages."""
    ring_slots: int
    """Number of blocks in the ring: the least number, or more if RAM is left, so that reads run further ahead of
    updates. 0 without a ring."""
    speculated: frozenset[int]
    """Units that are updated during backward as if nothing will be clipped. The new states replace the old ones once
    that is known."""
    on_device: frozenset[int]
    """Units that the device updates. Their states that do not live there pass it."""
    changing_on_ssd: int
    """Pages on SSD of states that updates change: a checkpoint that keeps its pages needs as many more."""
    spare_on_ssd: int
    """Pages on SSD for such checkpoints. Other versions there are those of `speculated`."""

    @cached_property
    def resident(self) -> frozenset[int]:
        """Units whose states and gradients all live on the device."""
        return frozenset(unit for unit, _ in self.homes) - {
            unit for (unit, _), home in self.homes.items() if home != DEVICE
        }

    @property
    def passing(self) -> frozenset[int]:
        """Units with states or gradients that pass the device for their update."""
        return self.on_device - self.resident

    def home(self, unit: int, state: str) -> str:
        return self.homes[unit, state]

    def streamed(self, unit: int, states: Sequence[StateSpec]) -> list[StateSpec]:
        """The states that do not live where their unit is updated: on the device, or in RAM."""
        away = (HOST, SSD) if unit in self.on_device else (SSD,)
        return [state for state in states if self.homes.get((unit, state.name)) in away]

    def update_lane(self, unit: int, states: Sequence[StateSpec]) -> str:
        """The lane that most likely ends last before a unit's new weights can be used."""
        if self.home(unit, WEIGHT) == SSD:
            return LaneName.SSD_WRITE
        if unit in self.on_device:
            return LaneName.DEVICE_UPDATE
        return LaneName.SSD_READ if self.streamed(unit, states) else LaneName.UPDATE

    def pages(self, tier: str, line: str) -> int:
        return self.lines.get(tier, {}).get(line, 0)

    def units_with(self, tier: str, states: Collection[str]) -> frozenset[int]:
        """Units with at least one of the states on a tier."""
        return frozenset(unit for (unit, state), home in self.homes.items() if home == tier and state in states)
