"""Writes `vectors.npz`: states and gradients, and what one update makes of them by the CPU's compiled kernels.

    python -m tests.optim.make_vectors

Every kernel of a rule, on whatever device, must give the same. Half of the values are extremes. All arrays are bit
patterns, named `RULE/PRECISION/before|after/STATE`; `RULE/PRECISION/gradient` is the gradient.
"""

from pathlib import Path

import numpy as np
import torch

from pagoda.config.training import Precision
from pagoda.optim import ElementwiseRule, Key, gradient_dtype

from .blocks import RULES, States, random_states, update_part

CASES: tuple[tuple[str, Precision], ...] = (
    *((rule, "bf16" if half else "fp32") for rule in RULES for half in (True, False)),
    *((rule, "fp16") for rule in RULES),
)
PATH = Path(__file__).with_name("vectors.npz")
SIZE = 700
"""Elements: two blocks of quantization and a part of one."""
KEY, INDEX = Key(0x9E3779B9, 0x7F4A7C15), (1 << 32) - 300
"""The noise of bf16 moments; the element's number wraps."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def arguments(rule: ElementwiseRule) -> tuple[float, ...]:
    """What a kernel takes after its number of elements."""
    noise = () if rule.noise("", 1) is None else (INDEX, *KEY)
    return (*noise, *rule.scalars(3, 0.37))


def load(name: str, precision: Precision, when: str) -> States:
    """The states of a case, before or after its update, in the order of the kernels."""
    with np.load(PATH) as vectors:
        return {
            state.name: torch.from_numpy(vectors[f"{name}/{precision}/{when}/{state.name}"]).view(state.dtype)
            for state in RULES[name].states(precision)
        }


def load_gradient(name: str, precision: Precision) -> torch.Tensor:
    with np.load(PATH) as vectors:
        return torch.from_numpy(vectors[f"{name}/{precision}/gradient"]).view(gradient_dtype(precision))


def update(name: str, precision: Precision, states: States, gradient: torch.Tensor) -> None:
    """One update of the gradient's elements by the CPU's kernel."""
    rule = RULES[name]
    noise = None if rule.noise("", 1) is None else KEY
    update_part(rule, precision, states, gradient, rule.scalars(3, 0.37), noise, index=INDEX)


def main() -> None:
    arrays: dict[str, np.ndarray] = {}

    def put(name: str, tensor: torch.Tensor) -> None:
        arrays[name] = tensor.view(_INTEGERS[tensor.element_size()]).numpy().copy()

    for seed, (name, precision) in enumerate(CASES):
        states, gradient = random_states(RULES[name], precision, SIZE, seed=seed)
        put(f"{name}/{precision}/gradient", gradient)
        for state, values in states.items():
            put(f"{name}/{precision}/before/{state}", values)
        update(name, precision, states, gradient)
        for state, values in states.items():
            put(f"{name}/{precision}/after/{state}", values)
    np.savez_compressed(PATH, **arrays)


if __name__ == "__main__":
    main()
