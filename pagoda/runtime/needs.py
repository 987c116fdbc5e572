"""Measures the memory that steps need in addition to pages."""

from pagoda.memory.ram import resident_bytes, restart_peak
from pagoda.plan.second_placement import Needs
from pagoda.runtime.device import Device
from pagoda.runtime.store import Store


class NeedsMeter:
    """Measures the most memory that steps have needed for everything except pages: on a separate device, and in RAM.

    RAM that the process held when the meter was created, before the pages, does not count.
    """

    def __init__(self, device: Device, whole: int) -> None:
        """`whole`: bytes of a separate device that Pagoda may use."""
        self._device = device
        self._whole = whole
        self._before = resident_bytes()
        self.needs = Needs()

    def begin(self) -> None:
        """Steps begin now. Earlier peaks do not count."""
        self._device.restart_peak()
        if self._before is None or not restart_peak():
            self.needs = Needs(host=None)

    def end_step(self, store: Store, kept: int) -> None:
        """A step has ended. Graphs kept `kept` bytes in it."""
        device, pages, resident = 0, store.host.arena.resident_bytes, resident_bytes(peak=True)
        if store.device is not None:
            device = self._device.needed_beside(store.device.arena, self._whole, kept)
            pages += store.device.arena.resident_bytes
        host = None if resident is None or self._before is None else max(0, resident - pages - self._before)
        self.needs = self.needs.or_more(Needs(device, host))
