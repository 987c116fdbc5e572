"""Updaters: of the units that the CPU updates, and of those that pass the device; and how a plan's are opened."""

from collections.abc import Sequence

from pagoda.optim.formats import update_kernel
from pagoda.optim.rule import ElementwiseRule, Precision, Rule
from pagoda.runtime.async_updates import AsyncUpdater
from pagoda.runtime.device import Device
from pagoda.runtime.device_updates import DeviceBlockStream, DeviceRing
from pagoda.runtime.gradients import Gradients, UnitGradient
from pagoda.runtime.lanes import Handle, Lane
from pagoda.runtime.segments import Segment
from pagoda.runtime.store import Store
from pagoda.runtime.tensor_stream import TensorStream
from pagoda.runtime.unit import LiveUnit
from pagoda.runtime.updates import BlockStream, Updater


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


def open_updater(
    store: Store,
    gradients: Gradients,
    lanes: dict[str, Lane],
    rule: Rule,
    precision: Precision,
    device: Device,
    units: list[LiveUnit],
) -> tuple[Updaters | AsyncUpdater, list[BlockStream]]:
    """What carries out the updates of the store's plan, and the streams it feeds: the CPU's first."""
    plan = store.plan
    stream: BlockStream
    if isinstance(rule, ElementwiseRule):
        stream = BlockStream(
            store, update_kernel(rule, precision, plan.layout.gradient_dtype), lanes, gradients.release
        )
    else:
        stream = TensorStream(store, lanes, gradients.release)
    on_device = plan.placement.updated_on_device | plan.placement.resident
    if on_device:
        assert isinstance(rule, ElementwiseRule)
        kernel, ring = device.update_kernel(rule, precision), DeviceRing(store)
        passing = DeviceBlockStream(store, kernel, lanes, stream.finished, device, ring)
        passing.damage = stream.damage
        both = Updaters(Updater(store, gradients, stream), Updater(store, gradients, passing), on_device)
        return both, [stream, passing]
    if plan.options.max_staleness is not None:
        return AsyncUpdater(store, units, stream), [stream]
    return Updaters(Updater(store, gradients, stream)), [stream]
