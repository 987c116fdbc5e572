"""The device: where compute reads weights and leaves gradients, and how bytes get there and back.

All of CUDA that the runtime knows is `CudaDevice`: streams, events and pinned copies. `Device` is the same contract
where compute is the CPU, so everything above runs, and is tested, without a GPU.
"""

import ctypes
from typing import Protocol

import torch

from pagoda.memory.arena import Arena
from pagoda.memory.cuda import CudaArena, PinnedArena


class Event(Protocol):
    """A point in a queue of work."""

    def synchronize(self) -> None:
        """Block, without the GIL, until all work before it has ended."""


class _Past:
    """The event of work that ended before anybody could ask."""

    def synchronize(self) -> None:
        pass


PAST: Event = _Past()


class Device:
    """The CPU: what is called has been done when the call returns, so no event is ever waited for."""

    torch_device = torch.device("cpu")

    def arena(self, nbytes: int) -> Arena:
        """The memory that leases are taken from."""
        return Arena(nbytes)

    def host_arena(self, nbytes: int) -> Arena:
        """RAM that `copy_in` reads and `copy_out` writes."""
        return Arena(nbytes)

    def fence(self) -> Event:
        """The point that compute has been told to reach so far. Called by the compute thread."""
        return PAST

    def copy_in(self, target: torch.Tensor, source: torch.Tensor, after: Event) -> Event:
        """Start copying RAM to the device once compute has passed `after`; returns when that has ended."""
        _copy(target, source)
        return PAST

    def copy_out(self, target: torch.Tensor, source: torch.Tensor, after: Event) -> Event:
        """Start copying the device to RAM once compute has passed `after`; returns when that has ended."""
        _copy(target, source)
        return PAST


class CudaDevice(Device):
    """A GPU: copies run on a stream per direction, behind events of the stream that computes.

    Lanes wait for their copies (`Event.synchronize`, without the GIL), so a handle that has ended means bytes that
    have arrived, for every thread and stream. Nothing uses `record_stream`: a tensor being copied is kept alive by the
    lane, and frames are overwritten behind the fence that was taken when they were freed.
    """

    def __init__(self, device: torch.device) -> None:
        self.torch_device = device
        self._in = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._out = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def arena(self, nbytes: int) -> Arena:
        return CudaArena(nbytes, self.torch_device)

    def host_arena(self, nbytes: int) -> Arena:
        return PinnedArena(nbytes)

    def fence(self) -> Event:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.torch_device))
        return event

    def copy_in(self, target: torch.Tensor, source: torch.Tensor, after: Event) -> Event:
        return self._copy(self._in, target, source, after)

    def copy_out(self, target: torch.Tensor, source: torch.Tensor, after: Event) -> Event:
        return self._copy(self._out, target, source, after)

    def _copy(self, stream: torch.cuda.Stream, target: torch.Tensor, source: torch.Tensor, after: Event) -> Event:
        with torch.cuda.stream(stream):
            if isinstance(after, torch.cuda.Event):
                stream.wait_event(after)
            target.copy_(source, non_blocking=True)
            done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            done.record(stream)
        return done


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """One plain memcpy, without the GIL, of contiguous tensors of the same bytes.

    torch's copy_ would start a team of threads for the lane that calls it, and they would spin beside the computation.
    """
    assert target.nbytes == source.nbytes
    ctypes.memmove(target.data_ptr(), source.data_ptr(), source.nbytes)


def open_device(device: torch.device) -> Device:
    """The device of this kind."""
    return CudaDevice(device) if device.type == "cuda" else Device()
