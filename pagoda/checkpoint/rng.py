"""The random number generators a training loop may draw from, as JSON."""

import base64
import random
from typing import Any

import numpy as np
import torch


def rng_state() -> dict[str, Any]:
    """State of torch's CPU generator, NumPy's legacy one, and Python's `random`."""
    version, internal, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "torch": base64.b64encode(torch.get_rng_state().numpy().tobytes()).decode(),
        "python": [version, list(internal), gauss],
        "numpy": [name, np.asarray(keys).tolist(), int(position), int(has_gauss), float(cached)],
    }


def restore_rng(state: dict[str, Any]) -> None:
    """Put every generator back to a state `rng_state` gave."""
    data = bytearray(base64.b64decode(state["torch"]))
    torch.set_rng_state(torch.frombuffer(data, dtype=torch.uint8))
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
