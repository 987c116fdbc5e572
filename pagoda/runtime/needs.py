"""Measures the memory that steps need in addition to pages."""

from pagoda.memory.ram import resident_bytes, restart_peak
from pagoda.plan.second_placement import Needs, SecondPlacement
from pagoda.runtime.device import Device
from pagoda.runtime.store import Store


class NeedsMeter:
    """Measures the most memory that steps have needed for everything except pages: on a separate device, and in RAM.

    RAM that the process held when the meter was created, before the pages, does not count.
    """

    def __init__(self, device: Device, second: SecondPlacement) -> None:
        self._device = device
        self._whole = second.device or 0
        self._before = None if second.host is None else resident_bytes()
        self.needs = Needs()

    def begin(self) -> None:
        """Steps begin now. Earlier peaks do not count."""
        self._device.restart_peak()
        if self._before is None or not restart_peak():
            self.needs = Needs(host=None)

    def end_step(self, store: Store, kept: int) -> None:
        """A step has ended. Graphs kept `kept` bytes in it."""
        tiers = [store.host] if store.device is None else [store.host, store.device]
        device = 0
        if store.device is not None:
            device = self._device.peak_without_pages(store.device.arena, self._whole, kept)
        host, resident = None, None if self._before is None else resident_bytes(peak=True)
        if resident is not None and self._before is not None:
            host = max(0, resident - sum(tier.arena.resident_bytes for tier in tiers) - self._before)
        self.needs = self.needs.or_more(Needs(device, host))
