"""Regions: the frames that leases and staged gradients share, opened as the plan says."""

from collections.abc import Sequence

import torch

from pagoda.memory.region import Region
from pagoda.plan.layout import WEIGHT
from pagoda.plan.ops import HOST
from pagoda.plan.placement import LEASES, STAGING
from pagoda.runtime.device import Device
from pagoda.runtime.fetch import Fetcher
from pagoda.runtime.leases import Leases
from pagoda.runtime.reducing import Buffers
from pagoda.runtime.store import Store
from pagoda.runtime.unit import LiveUnit


def open_leases(store: Store, device: Device, units: Sequence[LiveUnit], fetcher: Fetcher) -> Leases:
    """Lease weights in place where compute can read their home, and open the frames for the others."""
    plan = store.plan
    region = None
    if plan.lease_tier is not None:
        region = Region(store.device or store.host, plan.placement.pages(plan.lease_tier, LEASES))

    leases = Leases(region, store.dtype(WEIGHT), device, fetcher.fill)
    pages = plan.leased_pages()
    for unit in units:
        if unit.index not in pages:
            leases.add_home(unit, store.in_place(unit.index, WEIGHT, unit.spec.numel))
    return leases


def open_buffers(store: Store, dtype: torch.dtype) -> Buffers:
    """What the gradients of several ranks, which have `dtype`, are added up in, where compute leaves them."""
    layout, tier = store.plan.layout, store.device or store.host
    whole, piece = layout.whole_gradient_pages, layout.reduced_elements
    widest = max(unit.trainable_numel for unit in layout.units)
    first, second = (tier.tensor(tier.alloc(whole), dtype, widest) for _ in range(2))
    rest = tier.alloc(layout.collective_pages - 2 * whole)
    landing = tier.tensor(rest, torch.uint8, layout.landing_bytes)
    rows = layout.reduced_sums
    sums = tier.tensor(rest, torch.float32, rows * piece, layout.landing_bytes).view(rows, piece)
    means = tier.tensor(rest, dtype, piece, layout.landing_bytes + sums.nbytes)
    return Buffers((first, second), landing, sums, means)


def open_staging(store: Store) -> Region | None:
    """Pages for gradients whose home is not host RAM."""
    pages = store.plan.placement.pages(HOST, STAGING)
    return Region(store.host, pages) if pages else None
