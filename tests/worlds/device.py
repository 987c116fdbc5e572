"""A device whose copies and kernels take their time: other threads run before, between and after their parts."""

from collections.abc import Callable
from random import Random
from typing import Any

import torch

from pagoda.memory.arena import copy_bytes
from pagoda.runtime.device import Arrival, Device, Event, StoreGradient

from .threads import Threads


class DeviceError(RuntimeError):
    """A copy has failed."""


class SlowDevice(Device):
    """The CPU as a device, with pauses. A copy moves its bytes in parts, and fails at random."""

    def __init__(self, threads: Threads, rng: Random, failures: float) -> None:
        self._threads = threads
        self._rng = rng
        self.failures = failures
        """How likely a copy fails."""
        self.failed = 0
        self.healthy = False

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        fails = not self.healthy and self.failures > 0 and self._rng.random() < self.failures
        half = target.numel() // 2
        self._threads.pause()
        for part in (slice(0, half), slice(half, None)):
            if target[part].numel():
                copy_bytes(target[part], source[part])
            self._threads.pause()
            if fails:
                self.failed += 1
                raise DeviceError("a copy of this world's device failed")

    def store_gradient(
        self, kernel: StoreGradient, target: torch.Tensor, gradient: torch.Tensor, after: Event
    ) -> Arrival:
        if not self.healthy and self.failures > 0 and self._rng.random() < self.failures:
            self.failed += 1
            raise DeviceError("the copy of a gradient failed")
        self._threads.pause()
        arrival = super().store_gradient(kernel, target, gradient, after)
        self._threads.pause()
        return arrival


def slow_kernel(threads: Threads, make: Callable[..., Any]) -> Callable[..., Any]:
    """Kernels before and after which other threads may run."""

    def made(*settings: Any, **more: Any) -> Any:
        kernel = make(*settings, **more)

        def run(*arguments: Any) -> Any:
            threads.pause()
            result = kernel(*arguments)
            threads.pause()
            return result

        return run

    return made


def slow_copy(threads: Threads) -> Callable[[torch.Tensor, torch.Tensor], None]:
    """`copy_bytes`, before and after which other threads may run."""

    def copy(target: torch.Tensor, source: torch.Tensor) -> None:
        threads.pause()
        copy_bytes(target, source)
        threads.pause()

    return copy


