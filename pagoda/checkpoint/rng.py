"""The states of the random number generators that a training loop may use, as JSON."""

import base64
import random
from typing import Any

import numpy as np
import torch

from pagoda.errors import CheckpointError


def rng_state() -> dict[str, Any]:
    """The states of torch's generators (of the CPU and of all GPUs), of NumPy's legacy generator and of Python's."""
    version, internal, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "torch": _text(torch.get_rng_state()),
        "cuda": [_text(state) for state in torch.cuda.get_rng_state_all()] if torch.cuda.is_available() else [],
        "python": [version, list(internal), gauss],
        "numpy": [name, np.asarray(keys).tolist(), int(position), int(has_gauss), float(cached)],
    }


def check_rng(state: dict[str, Any]) -> None:
    """Raises CheckpointError if `restore_rng` could not restore the state. Changes no generator."""
    try:
        for_torch, _, for_python, for_numpy = _states(state)
        torch.Generator().set_state(for_torch)
        random.Random().setstate(for_python)
        np.random.RandomState().set_state(for_numpy)
    except Exception as error:  # three libraries, each with its own exceptions
        raise CheckpointError(f"the states of the random number generators cannot be restored: {error!r}") from error


def restore_rng(state: dict[str, Any]) -> None:
    """Restore every generator to a state from `rng_state`. States of GPUs that this machine lacks are ignored."""
    for_torch, for_cuda, for_python, for_numpy = _states(state)
    torch.set_rng_state(for_torch)
    for device, for_gpu in zip(range(torch.cuda.device_count()), for_cuda, strict=False):
        torch.cuda.set_rng_state(for_gpu, device)
    random.setstate(for_python)
    np.random.set_state(for_numpy)


def _states(state: dict[str, Any]) -> tuple[torch.Tensor, list[torch.Tensor], tuple[Any, ...], tuple[Any, ...]]:
    """The arguments for the three libraries."""
    version, internal, gauss = state["python"]
    name, keys, position, has_gauss, cached = state["numpy"]
    return (
        _tensor(state["torch"]),
        [_tensor(text) for text in state["cuda"]],
        (version, tuple(internal), gauss),
        (name, np.array(keys, dtype=np.uint32), position, has_gauss, cached),
    )


def _text(state: torch.Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
