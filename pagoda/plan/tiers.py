"""Tiers: the memories that hold states, and their budgets."""

from dataclasses import dataclass
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
BUDGETED = (DEVICE, HOST, SSD)
"""Tiers with a budget, in the order in which tables show them and `place` checks them."""


@dataclass(frozen=True, slots=True)
class Budgets:
    """Bytes that each tier of `BUDGETED` may use, by its name. `device` is None if device and host are the same RAM,
    and `ssd` if there is none."""

    host: int
    device: int | None = None
    ssd: int | None = None
