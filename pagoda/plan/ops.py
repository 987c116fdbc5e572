"""Tiers, lanes, and what accesses move besides weights and gradients."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from pagoda.plan.trace import Phase, Trace
from pagoda.plan.units import UnitSpec, is_within

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


class OpKind(StrEnum):
    """What an access moves."""

    SAVE = "save"
    """Activations to where they are offloaded."""
    RETURN = "return"
    """Offloaded activations back to where compute is."""
    ALL_TO_ALL = "all_to_all"
    """Tokens to the ranks that have their experts, or back."""


@dataclass(frozen=True, slots=True)
class Op:
    """What the access at `tick` moves on `lane`: of a collective, `nbytes` are what this rank sends."""

    kind: OpKind
    unit: int
    lane: str
    nbytes: int
    tick: int


def exchange_ops(
    units: Sequence[UnitSpec], exchanges: Mapping[str, int], trace: Trace, recomputes: bool
) -> Iterator[Op]:
    """Tokens go to the ranks that have their experts, and come back, at the first access of a row of experts in each
    pass; with `recomputes`, twice in backward. `exchanges` are the plan's."""
    before = None
    for tick, access in enumerate(trace.accesses[:-1]) if exchanges else ():
        module = units[access.unit].module
        experts = next((row for row in exchanges if is_within(module, (row,))), None)
        if experts is not None and (experts, access.phase) != before:
            for _ in range(4 if recomputes and access.phase is Phase.BACKWARD else 2):
                yield Op(OpKind.ALL_TO_ALL, access.unit, COLLECTIVE, exchanges[experts], tick)
        before = (experts, access.phase)
