"""The machine that a run is on, for `pagoda report`."""

import os
import platform

import torch

from pagoda.memory.ram import ram_bytes


def machine() -> dict[str, str]:
    """System, cores, RAM, torch, and the GPU if there is one."""
    found = {
        "system": platform.platform(),
        "CPU": f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores, {torch.get_num_threads()} threads",
        "RAM": f"{ram_bytes() / 2**30:.1f} GiB",
        "torch": torch.__version__,
    }
    if torch.cuda.is_available():
        found["GPU"] = torch.cuda.get_device_name()
    return found
