"""The contents of a checkpoint, by name, collected from all ranks."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from itertools import chain
from math import prod
from typing import Any

import torch

from pagoda.checkpoint.state import Position, all_states, gather_from_all_stages
from pagoda.checkpoint.tensors import TensorSpec
from pagoda.engine import Engine
from pagoda.optim.param_groups import NamedGroup
from pagoda.optim.rule import Shape, StateSpec
from pagoda.plan.layout import WEIGHT, WEIGHT_BACK


@dataclass(frozen=True)
class Stored:
    """A parameter whose tensors are in a checkpoint."""

    states: dict[str, Shape]
    """Name of each of its states -> shape of the state. WEIGHT_BACK is one of them while its weights lag."""
    weight: torch.dtype
    """Dtype of its weights."""
    position: Position
    """Where this part is in the whole parameter."""
    steps: int | None
    """Number of updates it has had. None if it is frozen."""

    def dtype(self, state: StateSpec) -> torch.dtype:
        """Dtype of one of its states, given that of most parameters."""
        return self.weight if state.name in (WEIGHT, WEIGHT_BACK) else state.dtype


@dataclass(frozen=True)
class Contents:
    """Parameters by name, in the order of the model."""

    stored: dict[str, Stored]
    """Every parameter, or each of its parts if it is cut into parts."""
    members: list[list[str]]
    """For each param group, the names in `stored` of its parameters."""

    @classmethod
    def of(cls, engine: Engine, groups: list[NamedGroup]) -> "Contents":
        """The contents of the units of all ranks. Every rank calls this at the same point of the program."""
        parameters = all_states(engine)
        names = {parameter.name: parameter.stored_name for parameter in parameters}
        here = {}
        for parameter in parameters:
            _, unit, slot = parameter
            states = {name: span.shape for name, span in parameter.spans().items()}
            steps = unit.steps[slot] if slot < unit.trainable else None
            if steps is not None and engine.scheduler.weights(unit.index).lag:
                states[WEIGHT_BACK] = states[WEIGHT]
            here[parameter.stored_name] = Stored(states, parameter.dtype, parameter.position, steps)
        mine = cls(here, [[names[name] for name in group["params"]] for group in groups])
        said: list[Contents] = gather_from_all_stages(engine, "the contents of a checkpoint", mine)
        stored: dict[str, Stored] = {}
        for each in said:
            for name, one in each.stored.items():
                stored.setdefault(name, one)
        by_group = zip(*(each.members for each in said), strict=True)
        return cls(stored, [list(dict.fromkeys(chain(*names))) for names in by_group])

    @property
    def trainable(self) -> set[str]:
        """Whole parameters that have optimizer states."""
        return {one.position.whole for one in self.stored.values() if one.steps is not None}

    @property
    def steps(self) -> dict[str, int]:
        """Trainable parameter -> number of updates it has had. If its parts have had different numbers, because some
        were frozen for a while, each part has an entry in its place."""
        parts: dict[str, dict[str, int]] = {}
        for name, one in self.stored.items():
            if one.steps is not None:
                parts.setdefault(one.position.whole, {})[name] = one.steps
        found: dict[str, int] = {}
        for whole, steps in parts.items():
            numbers = {*steps.values()}
            found |= {whole: numbers.pop()} if len(numbers) == 1 else steps
        return found

    @property
    def late(self) -> list[str]:
        """The parameters whose weights lag."""
        return [name for name, one in self.stored.items() if WEIGHT_BACK in one.states]

    def specs(self, state: StateSpec, but: Collection[str] = ()) -> list[TensorSpec]:
        """The tensors of one state, except those named in `but`."""
        return [
            TensorSpec(name, one.dtype(state), one.states[state.name])
            for name, one in self.stored.items()
            if state.name in one.states and name not in but
        ]

    def whole_specs(self, state: StateSpec, parts: Callable[[str], int]) -> list[TensorSpec]:
        """The tensors of one state for whole parameters.

        `parts` returns the number of equal parts into which ranks had divided a parameter when the state was saved. No
        element of a block-wise state (`StateSpec.per`) belongs to two parts.
        """
        specs: dict[str, TensorSpec] = {}
        for one in self.stored.values():
            if state.name in one.states:
                name, shape = one.position.whole, one.position.shape
                of_whole = state.shape(name, shape)
                if state.per > 1:
                    of_whole = (parts(name) * state.elements(prod(shape) // parts(name)),)
                assert of_whole is not None, "its parts have the state"
                specs[name] = TensorSpec(name, one.dtype(state), of_whole)
        return [*specs.values()]

    def cuts(self, shards: bool) -> dict[str, Any]:
        """Parameter that is stored in parts -> its shape and the names of its parts in order. The parts are tiles, or
        with `shards` those of tensor-parallel ranks; then the entry also has the dimension that is divided."""
        found: dict[str, list[str]] = {}
        for name, one in self.stored.items():
            if one.position.whole != name and (one.position.dim is not None) == shards:
                found.setdefault(one.position.whole, []).append(name)
        positions = {name: one.position for name, one in self.stored.items()}
        return {
            whole: {
                "shape": list(positions[names[0]].shape),
                **({"dim": positions[names[0]].dim} if shards else {}),
                "parts": sorted(names, key=lambda name: positions[name].start),
            }
            for whole, names in found.items()
        }

    def groups(self, mine: list[NamedGroup]) -> list[NamedGroup]:
        """Param groups with the whole parameters that are in them on any rank."""
        return [
            {**group, "params": list(dict.fromkeys(self.stored[name].position.whole for name in names))}
            for group, names in zip(mine, self.members, strict=True)
        ]
