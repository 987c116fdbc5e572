"""The random number generators a training loop may draw from, as JSON."""

import base64
import random
from typing import Any

import numpy as np
import torch

from pagoda.errors import CheckpointError


def rng_state() -> dict[str, Any]:
    """State of torch's CPU generator, NumPy's legacy one, and Python's `random`."""
    version, internal, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "torch": base64.b64encode(torch.get_rng_state().numpy().tobytes()).decode(),
        "python": [version, list(internal), gauss],
        "numpy": [name, np.asarray(keys).tolist(), int(position), int(has_gauss), float(cached)],
    }


def check_rng(state: dict[str, Any]) -> None:
    """Raises CheckpointError, with every generator as it was, for a state that `restore_rng` could not restore."""
    try:
        for_torch, for_python, for_numpy = _states(state)
        torch.Generator().set_state(for_torch)
        random.Random().setstate(for_python)
        np.random.RandomState().set_state(for_numpy)
    except Exception as error:  # three libraries, each with errors of its own
        raise CheckpointError(f"the states of the random number generators cannot be restored: {error!r}") from error


def restore_rng(state: dict[str, Any]) -> None:
    """Put every generator back to a state `rng_state` gave."""
    for_torch, for_python, for_numpy = _states(state)
    torch.set_rng_state(for_torch)
    random.setstate(for_python)
    np.random.set_state(for_numpy)


def _states(state: dict[str, Any]) -> tuple[torch.Tensor, tuple[Any, ...], tuple[Any, ...]]:
    """What each of the three libraries takes."""
    data = bytearray(base64.b64decode(state["torch"]))
    version, internal, gauss = state["python"]
    name, keys, position, has_gauss, cached = state["numpy"]
    return (
        torch.frombuffer(data, dtype=torch.uint8),
        (version, tuple(internal), gauss),
        (name, np.array(keys, dtype=np.uint32), position, has_gauss, cached),
    )
