"""The machine: what it has, and how long its RAM takes to be page-locked."""

import platform
import shutil
import subprocess
import time
from importlib.metadata import PackageNotFoundError, version

import torch

from gpu_suite.common import Machine, Named
from pagoda.calibrate.meter import cpu_cores, cpu_name
from pagoda.memory.ram import free_ram, ram_bytes
from pagoda.runtime.device import open_device

_PACKAGES = ("torch", "triton", "numpy", "numba", "transformers", "safetensors")
_LONGEST_S = 25.0
"""No more RAM is page-locked if that would take longer."""


def machine(machine: Machine) -> Named:
    """Names, sizes and versions."""
    yield "cpu", f"{cpu_name()}, {cpu_cores()} cores, torch has {torch.get_num_threads()} threads"
    yield "ram", {"bytes": ram_bytes(), "free": free_ram()}
    yield "kernel", platform.release()
    yield "versions", {name: found for name in _PACKAGES if (found := _version(name))}
    if machine.gpu:
        free, total = torch.cuda.mem_get_info(machine.device)
        yield "gpu", torch.cuda.get_device_name(machine.device)
        yield "gpu_bytes", {"bytes": total, "free": free}
        yield "cuda", {"runtime": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
        asked = "driver_version,pcie.link.gen.current,pcie.link.width.current"
        if (program := shutil.which("nvidia-smi")) is not None:
            command = [program, f"--query-gpu={asked}", "--format=csv,noheader"]
            said = subprocess.run(command, capture_output=True, text=True, check=False).stdout
            yield "driver, PCIe generation and width", said.strip()


def pinning(machine: Machine) -> Named:
    """Seconds in which RAM is touched and page-locked, more and more of it, as Pagoda does it."""
    device, each_s = open_device(machine.device), 0.0
    for gib in machine.sizes.pinned_gib:
        if each_s * gib > _LONGEST_S:
            yield f"{gib:g} GiB", {"left_out": f"it would take {each_s * gib:.0f} s"}
            return
        start = time.perf_counter()
        arena = device.host_arena(int(gib * (1 << 30)))
        locked = time.perf_counter()
        arena.close()
        each_s = (locked - start) / gib
        yield f"{gib:g} GiB", {"locked_s": locked - start, "closed_s": time.perf_counter() - locked}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
