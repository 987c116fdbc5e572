"""Tiers: the memories that hold states."""

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
