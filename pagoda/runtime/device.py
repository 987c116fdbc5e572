"""The device: the memory in which compute reads weights and leaves gradients, and the copies to and from it.

`CudaDevice` contains all of CUDA that the runtime uses: streams, events, pinned copies and kernels. `Device` fulfils
the same contract on the CPU. So everything above it runs, and is tested, without a GPU.
"""

import math
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch

from pagoda.config.training import Precision
from pagoda.memory.arena import Arena, copy_bytes
from pagoda.memory.cuda import CudaArena, PinnedArena, copy_async
from pagoda.optim.gradient_kernels import LANES
from pagoda.optim.kernels import update_kernel
from pagoda.optim.rule import ElementwiseRule, Rule
from pagoda.optim.warm import warm_up_gpu
from pagoda.plan.buffers import BOUNCE_ELEMENTS, DEVICE_SLOTS as PIPES

_ARRIVING = 4
"""Number of gradients whose squares a GPU sums at the same time."""

StoreGradient = Callable[[int, int, int], float]
"""The CPU's kernel: (target address, source address, elements) -> sum of squares."""
UpdateKernel = Callable[[Sequence[torch.Tensor], torch.Tensor, Sequence[float]], None]
"""An update in place on the device. Its arguments are the flat states in the order of the StateSpecs, the gradient, and
the arguments that a CPU kernel takes after its number of elements."""


class Event(Protocol):
    """A point in a queue of work."""

    def synchronize(self) -> None:
        """Block, without the GIL, until all work before this point has ended."""


class _Past:
    """The event of work that has already ended."""

    def synchronize(self) -> None:
        pass


PAST: Event = _Past()


@dataclass(eq=False, repr=False)
class Arrival:
    """The event of a gradient on its way to its home. After it, the sum of the gradient's squares is known."""

    _events: Sequence[Event]
    _sums: Callable[[], Sequence[float]]
    """Returns one sum per BOUNCE_ELEMENTS elements. It may be called once `_events` have passed."""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _square_sum: float | None = None

    @property
    def is_there(self) -> bool:
        """Whether there is nothing to wait for."""
        return not self._events

    def synchronize(self) -> None:
        self.square_sum()

    def square_sum(self) -> float:
        """The sum of squares. Waits until it is known. Any thread may call this."""
        with self._lock:
            if self._square_sum is None:
                for event in self._events:
                    event.synchronize()
                self._square_sum = math.fsum(self._sums())
            return self._square_sum


def store_in_ram(kernel: StoreGradient, target: torch.Tensor, gradient: torch.Tensor) -> list[float]:
    """Store or add a flat gradient in RAM. Returns one sum of squares per BOUNCE_ELEMENTS elements."""
    n = gradient.numel()
    return [
        kernel(target[start:].data_ptr(), gradient[start:].data_ptr(), min(BOUNCE_ELEMENTS, n - start))
        for start in range(0, n, BOUNCE_ELEMENTS)
    ]


class Device:
    """The CPU. Every call has done its work when it returns, so nothing waits for an event."""

    torch_device = torch.device("cpu")

    def arena(self, nbytes: int) -> Arena:
        """`nbytes` of the device's memory, for pages."""
        return Arena(nbytes)

    def restart_peak(self) -> None:
        """Count the peak of `peak_without_pages` from now on."""

    def peak_without_pages(self, pages: Arena, whole: int, kept: int) -> int:
        """Most bytes of the device that something other than `pages` has held since `restart_peak`. Pagoda may use
        `whole` bytes of it, and graphs have kept `kept`."""
        return kept

    def settle(self) -> None:
        """Wait until all work in all queues has ended."""

    def free(self, arena: Arena) -> None:
        """Return an arena's memory, so that another one can take it. Nothing will use it any more."""
        arena.close()

    def host_arena(self, nbytes: int, locked: bool = True) -> Arena:
        """RAM that `copy_in` reads and `copy_out` writes. It must be locked by then."""
        return Arena(nbytes)

    def warm_up(self, rule: Rule, precision: Precision, gradient: torch.dtype) -> None:
        """Compile the device's own kernels, for gradients kept in `gradient`, so that no step waits for that."""

    def computing(self) -> None:
        """The compute thread uses weights or saves activations, on what is its current stream now."""

    def fence(self) -> Event:
        """The point that compute's queue has reached, on every stream on which `computing` was called."""
        return PAST

    def wait_for(self, event: Event) -> None:
        """Let later work of compute wait for `event`. Called by the compute thread."""

    def as_compute(self) -> AbstractContextManager[object]:
        """For any thread. Work queued inside goes into compute's queue, on the stream of the latest call of
        `computing`, behind what its other streams have reached."""
        return nullcontext()

    def beside_compute(self) -> AbstractContextManager[object]:
        """For a thread that communicates with other ranks. Work queued inside waits for compute only where it says
        so."""
        return nullcontext()

    def copy_in(self, target: torch.Tensor, source: torch.Tensor, after: Event) -> Event:
        """Copy RAM to the device once compute has passed `after`. Returns the event of the copy's end."""
        self.copy(target, source)
        return PAST

    def copy_out(self, target: torch.Tensor, source: torch.Tensor, after: Event) -> Event:
        """Copy the device to RAM once compute has passed `after`. Returns the event of the copy's end."""
        self.copy(target, source)
        return PAST

    def store_gradient(
        self, kernel: StoreGradient, target: torch.Tensor, gradient: torch.Tensor, after: Event
    ) -> Arrival:
        """Copy a flat gradient to its home, on the device or in RAM, once compute has passed `after`. In RAM it keeps
        its dtype. The sum of squares has the bits of the CPU's `kernel`. Called by one thread only."""
        sums = store_in_ram(kernel, target, gradient)
        return Arrival((), lambda: sums)

    def update_kernel(
        self, rule: ElementwiseRule, precision: Precision, gradient: torch.dtype | None = None
    ) -> UpdateKernel:
        """The kernel that updates states on the device. Call it inside `pipe`. `gradient` is the dtype of gradients."""
        kernel = update_kernel(rule, precision, gradient)

        def update(states: Sequence[torch.Tensor], grad: torch.Tensor, arguments: Sequence[float]) -> None:
            kernel(*(state.data_ptr() for state in states), grad.data_ptr(), grad.numel(), *arguments)

        return update

    def add_gradient(
        self, kernel: StoreGradient, target: torch.Tensor, gradient: torch.Tensor, after: Event
    ) -> Arrival:
        """Add a flat gradient to one on the device once compute has passed `after`. The sum of squares is that of the
        result, with the bits of the CPU's `kernel`. Called by the thread that calls `store_gradient`."""
        return self.store_gradient(kernel, target, gradient, after)

    def pipe(self, number: int, work: Callable[[], None], after: Event = PAST) -> Event:
        """Start `work`, a sequence of `copy` calls and kernels, once compute has passed `after`. Returns the event of
        its end.

        Compute and pipes with other numbers (below PIPES) run at the same time.
        """
        work()
        return PAST

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy in either direction, inside `pipe`, between contiguous tensors of the same bytes."""
        copy_bytes(target, source)


class CudaDevice(Device):
    """A GPU. There is one stream for copies in each direction, one for sums over gradients, one for each pipe of
    updates, and one for communication between ranks. They wait for events of compute's stream. A copy that waits for
    compute delays the copies behind it, but no update.

    Lanes queue their work and wait for its events (`Event.synchronize`, without the GIL). So once a handle has ended,
    its bytes have arrived for every thread and stream. Nothing uses `record_stream`: the lane keeps a tensor alive
    while it is copied, and frames are overwritten behind the fence that was taken when they were freed.

    torch's streams, including the default one, do not wait for compute's stream unless told to.
    """

    def __init__(self, device: torch.device) -> None:
        self.torch_device = device
        self._in, self._out, self._squares, self._ranks, *self._pipes = (
            torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            for _ in range(4 + PIPES)
        )
        self._compute = torch.cuda.current_stream(device)
        """The stream that compute used last, as far as is known."""
        self._used: tuple[torch.cuda.Stream, ...] = (self._compute,)
        """All streams that compute has used."""
        self._noting = threading.Lock()
        self._joined = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        """If there are several, this one only waits for all of them."""
        self._arriving = [Arrival((), tuple)] * _ARRIVING
        """Gradients on their way, by the row of `_sums` and `_landed_sums` that they use."""
        self._turn = 0
        self._sums = torch.empty(_ARRIVING, 0, LANES, dtype=torch.float64, device=device)
        self._landed_sums = torch.empty(_ARRIVING, 0, LANES, dtype=torch.float64)

    def arena(self, nbytes: int) -> Arena:
        return CudaArena(nbytes, self.torch_device)

    def restart_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.torch_device)

    def peak_without_pages(self, pages: Arena, whole: int, kept: int) -> int:
        free, _ = torch.cuda.mem_get_info(self.torch_device)
        by_others = max(0, whole - free - torch.cuda.memory_reserved(self.torch_device))
        return torch.cuda.max_memory_reserved(self.torch_device) - pages.nbytes + by_others

    def settle(self) -> None:
        torch.cuda.synchronize(self.torch_device)

    def free(self, arena: Arena) -> None:
        self.settle()
        arena.close()
        torch.cuda.empty_cache()

    def host_arena(self, nbytes: int, locked: bool = True) -> Arena:
        return PinnedArena(nbytes, locked)

    def warm_up(self, rule: Rule, precision: Precision, gradient: torch.dtype) -> None:
        warm_up_gpu(rule, precision, gradient, self.torch_device, BOUNCE_ELEMENTS)

    def computing(self) -> None:
        self._compute = compute = torch.cuda.current_stream(self.torch_device)
        if compute not in self._used:
            with self._noting:  # autograd's threads call this too
                self._used = (*self._used, compute)

    def fence(self) -> Event:
        used, event = self._used, torch.cuda.Event()  # type: ignore[no-untyped-call]
        for stream in used if len(used) > 1 else ():
            self._joined.wait_stream(stream)
        event.record(self._joined if len(used) > 1 else used[0])
        return event

    def wait_for(self, event: Event) -> None:
        self._behind(torch.cuda.current_stream(self.torch_device), event)

    def as_compute(self) -> AbstractContextManager[object]:
        compute = self._compute  # another thread may change it
        if len(self._used) > 1:
            self._behind(compute, self.fence())
        return torch.cuda.stream(compute)

    def beside_compute(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._ranks)

    def copy_in(self, target: torch.Tensor, source: torch.Tensor, after: Event) -> Event:
        return self._copy(self._in, target, source, after)

    def copy_out(self, target: torch.Tensor, source: torch.Tensor, after: Event) -> Event:
        return self._copy(self._out, target, source, after)

    def store_gradient(
        self, kernel: StoreGradient, target: torch.Tensor, gradient: torch.Tensor, after: Event
    ) -> Arrival:
        # The gradient goes straight to its extent at the link's rate, without another copy or sum on the CPU. A
        # gradient that is widened has its home on the device, and the copy there widens it.
        return self._square(gradient, after, self.copy_out(target, gradient, after))

    def add_gradient(
        self, kernel: StoreGradient, target: torch.Tensor, gradient: torch.Tensor, after: Event
    ) -> Arrival:
        with torch.cuda.stream(self._squares):
            self._behind(self._squares, after)
            target.add_(gradient)  # torch rounds as the CPU's kernel does
        return self._square(target, PAST, PAST)

    def _square(self, gradient: torch.Tensor, after: Event, copied: Event) -> Arrival:
        """Start to sum the squares of a flat gradient, which arrives with `copied`."""
        from pagoda.optim import triton_kernels

        pieces = -(-gradient.numel() // BOUNCE_ELEMENTS)
        self._turn = (self._turn + 1) % _ARRIVING
        self._arriving[self._turn].synchronize()
        with torch.cuda.stream(self._squares):
            self._behind(self._squares, after)
            if pieces > self._sums.shape[1]:  # only until the largest gradient has come once
                for arrival in self._arriving:
                    arrival.synchronize()
                # Allocated in this stream's memory. Compute may still work in memory that it has freed.
                shape = (_ARRIVING, pieces, LANES)
                self._sums = torch.empty(shape, dtype=torch.float64, device=self.torch_device)
                self._landed_sums = torch.empty(shape, dtype=torch.float64, pin_memory=True)
            sums, landed = self._sums[self._turn, :pieces], self._landed_sums[self._turn, :pieces]
            triton_kernels.square_sums(gradient, sums, BOUNCE_ELEMENTS)
        summed = self._copy(self._squares, landed, sums, PAST)
        # Add the lanes from the first to the last, as the CPU does.
        arrival = Arrival((copied, summed), lambda: np.cumsum(landed.numpy(), axis=1)[:, -1].tolist())
        self._arriving[self._turn] = arrival
        return arrival

    def update_kernel(
        self, rule: ElementwiseRule, precision: Precision, gradient: torch.dtype | None = None
    ) -> UpdateKernel:
        from pagoda.optim import triton_kernels

        return triton_kernels.update_kernel(rule, precision, gradient)

    def pipe(self, number: int, work: Callable[[], None], after: Event = PAST) -> Event:
        stream = self._pipes[number]
        with torch.cuda.stream(stream):
            self._behind(stream, after)
            work()
            return self._event(stream)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        copy_async(target, source)

    def _copy(self, stream: torch.cuda.Stream, target: torch.Tensor, source: torch.Tensor, after: Event) -> Event:
        with torch.cuda.stream(stream):
            self._behind(stream, after)
            copy_async(target, source)
            return self._event(stream)

    def _behind(self, stream: torch.cuda.Stream, after: Event) -> None:
        if isinstance(after, torch.cuda.Event):
            stream.wait_event(after)

    def _event(self, stream: torch.cuda.Stream) -> Event:
        """An event on which a waiting thread sleeps."""
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(stream)
        return event


def open_device(device: torch.device) -> Device:
    """Open the device of this kind."""
    return CudaDevice(device) if device.type == "cuda" else Device()
