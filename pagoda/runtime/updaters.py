"""Both updaters: of the units that the CPU updates, and of those that pass the device."""

from collections.abc import Sequence

from pagoda.runtime.gradients import UnitGradient
from pagoda.runtime.lanes import Handle
from pagoda.runtime.segments import Segment
from pagoda.runtime.updates import Updater


class Updaters:
    """Gives every unit's update to the updater that the plan has for it. The two do not wait for each other."""

    def __init__(self, cpu: Updater, device: Updater | None = None, on_device: frozenset[int] = frozenset()) -> None:
        """`on_device`: the units of the `device`'s updater."""
        self.cpu = cpu
        self._device = device
        self._on_device = on_device

    def submit(self, record: UnitGradient, segments: Sequence[Segment], urgency: float) -> Handle:
        """Queue a unit's update; the handle ends when its new weights can be used."""
        if self._device is not None and record.unit.index in self._on_device:
            return self._device.submit(record, segments, urgency)
        return self.cpu.submit(record, segments, urgency)

    def pending(self) -> dict[int, Handle]:
        """unit -> what ends when its latest update has been written home, for updates that have not been."""
        return {unit: handle for updater in self._both for unit, handle in updater.pending().items()}

    def drain(self) -> None:
        """Wait until every queued update has been written home; raises the first error, once."""
        errors = []
        for updater in self._both:
            try:
                updater.drain()
            except BaseException as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def close(self) -> None:
        """Finish what is queued and join the threads."""
        for updater in self._both:
            updater.close()

    @property
    def _both(self) -> list[Updater]:
        return [self.cpu] if self._device is None else [self.cpu, self._device]
