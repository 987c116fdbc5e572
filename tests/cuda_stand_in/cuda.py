"""`torch.cuda` over the stand-in. `install()` comes before anything imports torch."""

import contextlib
import ctypes
import importlib.util
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

from cuda_stand_in.build import MODULE, build, torch_root

MOST_PROCESSES = 8
"""On a node, of which each believes to have its own GPU: what is cuda:0 in each is another memory."""
SEGMENT_BYTES = 2 << 20
"""How much torch's allocator asks CUDA for at a time, for small tensors."""


def install() -> ModuleType:
    """Make `torch.cuda` that of the stand-in, and return the native module. Raises CalledProcessError."""
    assert "torch" not in sys.modules, "torch asks once, when it is imported, whether there is CUDA"
    sys.modules["bitsandbytes"] = None  # type: ignore[assignment]  # not installed, as its own code calls CUDA
    library = build()
    for name in ("libc10.so", "libtorch_cpu.so", "libtorch_python.so"):
        ctypes.CDLL(str(torch_root() / "lib" / name), mode=ctypes.RTLD_GLOBAL)
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    import torch
    from triton_interpreter import round_fused_once

    spec = importlib.util.spec_from_file_location(MODULE, library)
    native = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(native)
    for name, value in _torch_cuda(native).items():
        setattr(torch.cuda, name, value)
        if hasattr(torch.cuda.random, name):
            setattr(torch.cuda.random, name, value)
    torch._C._cuda_clearCublasWorkspaces = lambda: None
    torch.backends.cuda.enable_flash_sdp(False)  # the CPU's attention is what the stand-in's is
    _use_kernels_of_the_cpu(native)
    round_fused_once()
    return native


def _torch_cuda(native: ModuleType) -> dict[str, Any]:
    """What `torch.cuda` has, by name, as far as Pagoda and its tests use it."""
    import torch

    chosen = threading.local()

    class Stream:
        def __init__(self, device: object = None, *, number: int | None = None) -> None:
            self.number = native.new_stream() if number is None else number

        def __eq__(self, other: object) -> bool:
            return isinstance(other, Stream) and other.number == self.number

        def __hash__(self) -> int:
            return self.number

        def wait_event(self, event: "Event") -> None:
            native.stream_waits(self.number, event.number)

        def wait_stream(self, other: "Stream") -> None:
            event = Event()
            event.record(other)
            self.wait_event(event)

        def synchronize(self) -> None:
            native.wait_for_stream(self.number)

    class Event:
        def __init__(self, enable_timing: bool = False, blocking: bool = False) -> None:
            self.number = 0
            self.recorded_s = 0.0

        def record(self, stream: Stream | None = None) -> None:
            self.number = native.record(self.number, (stream or current_stream()).number)
            self.recorded_s = time.perf_counter()

        def synchronize(self) -> None:
            own = threading.current_thread().name.startswith("pagoda-")
            assert not own or hasattr(chosen, "gpu"), "this thread would make a context on GPU 0"
            native.host_waits(self.number)

        def elapsed_time(self, later: "Event") -> float:
            return 1e3 * (later.recorded_s - self.recorded_s)

        def __del__(self) -> None:
            native.forget(self.number)

    def current_stream(device: object = None) -> Stream:
        return Stream(number=native.current_stream())

    @contextlib.contextmanager
    def stream(chosen: Stream) -> Iterator[None]:
        before = native.set_current_stream(chosen.number)
        try:
            yield
        finally:
            native.set_current_stream(before)

    def register(address: int, nbytes: int, flags: int) -> int:
        return int(native.pin(address, nbytes))

    def reserved() -> int:
        return -(-int(native.handed_out()) // SEGMENT_BYTES)

    # Each a function of its own: torch tells them apart by identity.
    def nothing() -> Callable[..., None]:
        return lambda *_args: None

    def of_device(value: Any) -> Callable[..., Any]:
        return lambda device=None: value() if callable(value) else value

    return {
        "Stream": Stream,
        "Event": Event,
        "current_stream": current_stream,
        "stream": stream,
        "synchronize": of_device(native.wait_for_device),
        "cudart": lambda: SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=native.unpin),
        "is_available": lambda: True,
        "device_count": lambda: MOST_PROCESSES,
        "current_device": lambda: 0,
        "set_device": lambda gpu: setattr(chosen, "gpu", gpu),
        "get_device_name": of_device("stand-in"),
        "get_device_properties": of_device(SimpleNamespace(name="stand-in", total_memory=native.DEVICE_BYTES)),
        "mem_get_info": of_device(lambda: (native.DEVICE_BYTES - native.allocated(), native.DEVICE_BYTES)),
        "memory_allocated": of_device(native.allocated),
        "memory_stats": of_device(
            lambda: {
                "allocated_bytes.all.current": native.allocated(),
                "reserved_bytes.all.peak": reserved() * SEGMENT_BYTES,
                "num_device_alloc": reserved(),
                "num_alloc_retries": 0,
            }
        ),
        "memory_reserved": of_device(lambda: reserved() * SEGMENT_BYTES),
        "max_memory_reserved": of_device(lambda: reserved() * SEGMENT_BYTES),
        "reset_peak_memory_stats": nothing(),
        "empty_cache": nothing(),
        "manual_seed_all": nothing(),
        "get_rng_state": of_device(torch.get_rng_state),
        "get_rng_state_all": lambda: [torch.get_rng_state()],
        "set_rng_state": nothing(),
        "_lazy_init": nothing(),
        "is_initialized": lambda: True,
        "_is_in_bad_fork": lambda: False,
    }


def _use_kernels_of_the_cpu(native: ModuleType) -> None:
    """Instead of Triton's, which have the same bits, on the bytes of the device."""
    import torch

    from pagoda.config.training import Precision
    from pagoda.optim import adafactor_kernels, kernels, triton_kernels
    from pagoda.optim.gradient_kernels import LANES, gradient_kernels
    from pagoda.optim.rule import ElementwiseRule

    def update_kernel(
        rule: ElementwiseRule, precision: Precision, gradient: torch.dtype | None = None
    ) -> triton_kernels.DeviceKernel:
        kernel = kernels.update_kernel(rule, precision, gradient)

        def update(states: Sequence[torch.Tensor], grad: torch.Tensor, arguments: Sequence[float]) -> None:
            native.kernel([grad], list(states), "update")
            addresses = [native.reach(tensor.data_ptr()) for tensor in (*states, grad)]
            kernel(*addresses, grad.numel(), *arguments)

        return update

    def update_adafactor(
        weight: torch.Tensor,
        weight_low: torch.Tensor | None,
        gradient: torch.Tensor,
        states: Mapping[str, torch.Tensor],
        *settings: Any,
    ) -> None:
        halves = [weight] if weight_low is None else [weight, weight_low]
        native.kernel([gradient], [*halves, *states.values()], "update_adafactor")
        high, low, grad = reached(weight), None if weight_low is None else reached(weight_low), reached(gradient)
        own = {name: reached(state) for name, state in states.items()}
        adafactor_kernels.update(high, low, grad, own, *settings)

    def reached(tensor: torch.Tensor) -> torch.Tensor:
        """The same bytes as a tensor of the CPU."""
        memory = (ctypes.c_char * tensor.nbytes).from_address(native.reach(tensor.data_ptr()))
        return torch.frombuffer(memory, dtype=tensor.dtype)

    def convert_halves(weight: torch.Tensor, weight_low: torch.Tensor, master: torch.Tensor, joining: bool) -> None:
        halves = [weight, weight_low]
        native.kernel(*((halves, [master]) if joining else ([master], halves)), "join" if joining else "split")
        addresses = (native.reach(each.data_ptr()) for each in (*halves, master))
        kernels.halves(weight.dtype, joining)(*addresses, weight.numel())

    def square_sums(gradient: torch.Tensor, into: torch.Tensor, piece: int) -> None:
        native.kernel([gradient], [into], "square_sums")
        store, _ = gradient_kernels(gradient.dtype)
        n, source = gradient.numel(), native.reach(gradient.data_ptr())
        copy = torch.empty(min(n, piece), dtype=gradient.dtype)
        lanes = torch.zeros(-(-n // piece), LANES, dtype=torch.float64)
        for row, start in enumerate(range(0, n, piece)):
            at = source + start * gradient.element_size()
            lanes[row, 0] = store(copy.data_ptr(), at, min(piece, n - start))
        ctypes.memmove(native.reach(into.data_ptr()), lanes.data_ptr(), lanes.nbytes)

    triton_kernels.update_kernel = update_kernel
    triton_kernels.convert_halves = convert_halves
    triton_kernels.square_sums = square_sums
    triton_kernels.update_adafactor = update_adafactor
