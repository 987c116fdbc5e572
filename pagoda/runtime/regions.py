"""Regions: the frames that leases and staged gradients share, opened as the plan says."""

from collections.abc import Sequence

import torch

from pagoda.distributed.reduction import Buffers
from pagoda.memory.region import Region
from pagoda.plan.collective import reduce_buffers
from pagoda.plan.layout import WEIGHT
from pagoda.plan.ops import HOST
from pagoda.plan.placement import LEASES, STAGING
from pagoda.runtime.device import Device
from pagoda.runtime.fetch import Fetcher
from pagoda.runtime.leases import Leases
from pagoda.runtime.store import Store
from pagoda.runtime.unit import LiveUnit


def open_leases(store: Store, device: Device, units: Sequence[LiveUnit], fetcher: Fetcher) -> Leases:
    """Lease weights in place where compute can read their home, and open the frames for the others."""
    plan = store.plan
    region = None
    if plan.lease_tier is not None:
        region = (store.device or store.host).take(plan.placement.pages(plan.lease_tier, LEASES))

    leases = Leases(region, store.dtype(WEIGHT), device, fetcher.fill)
    pages = plan.leased_pages()
    for unit in units:
        if unit.index not in pages:
            leases.add_home(unit, store.in_place(unit.index, WEIGHT, unit.spec.numel))
    return leases


def open_buffers(store: Store, dtype: torch.dtype) -> Buffers:
    """What the gradients of several ranks, which have `dtype`, are added up in, where compute leaves them."""
    tier, planned = store.device or store.host, reduce_buffers(store.plan.layout)
    assert planned is not None
    sizes, page = (planned.whole_pages, planned.whole_pages, planned.landing_pages), store.plan.page_bytes
    first, second, landing = (tier.take(pages).tensor(torch.uint8, pages * page) for pages in sizes)
    rest, shape = tier.take(planned.pages - sum(sizes)), (planned.rows, planned.piece)
    sums = rest.tensor(torch.float32, planned.rows * planned.piece).view(shape)
    return Buffers(dtype, planned.header_bytes, (first, second), landing, sums)


def open_staging(store: Store) -> Region | None:
    """Pages for gradients whose home is not host RAM."""
    pages = store.plan.placement.pages(HOST, STAGING)
    return store.host.take(pages) if pages else None
