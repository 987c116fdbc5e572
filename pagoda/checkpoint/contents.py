"""Contents: what a checkpoint holds, by name: of one rank all, of several what any of them has."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from itertools import chain
from math import prod
from typing import Any

from pagoda.checkpoint.state import ParameterState, Place, all_states, said_by_everyone
from pagoda.checkpoint.tensors import TensorSpec
from pagoda.optim.param_groups import NamedGroup
from pagoda.optim.rule import Shape, StateSpec
from pagoda.runtime.engine import Engine


@dataclass(frozen=True)
class Stored:
    """A parameter that a checkpoint has tensors of."""

    states: dict[str, Shape]
    """State that it has -> the shape of that."""
    place: Place
    whole_states: dict[str, Shape]
    """`states` of the parameter that it was cut from."""
    steps: int | None
    """Updates that it has had; None where it is frozen."""

    @classmethod
    def of(cls, parameter: ParameterState) -> "Stored":
        """What this rank has of a parameter."""
        engine, unit, slot = parameter
        place, states = parameter.place, {name: span.shape for name, span in parameter.spans().items()}
        wholes = {
            state.name: shape
            for state in engine.plan.layout.states
            if state.name in states and (shape := state.shape(place.whole, place.shape)) is not None
        }
        return cls(states, place, wholes, unit.steps[slot] if slot < unit.trainable else None)


@dataclass(frozen=True)
class Contents:
    """Parameters by name, in the order of the model."""

    stored: dict[str, Stored]
    """Every parameter, in the parts that it was cut into."""
    members: list[list[str]]
    """Of each param group, its parameters as they are in `stored`."""

    @classmethod
    def of(cls, engine: Engine, groups: list[NamedGroup]) -> "Contents":
        """What the units of all ranks hold; every rank asks for it at the same point of its program."""
        parameters = all_states(engine)
        names = {parameter.name: parameter.stored_name for parameter in parameters}
        mine = cls(
            {parameter.stored_name: Stored.of(parameter) for parameter in parameters},
            [[names[name] for name in group["params"]] for group in groups],
        )
        said: list[Contents] = said_by_everyone(engine, "the contents of a checkpoint", mine)
        stored: dict[str, Stored] = {}
        for each in said:
            for name, one in each.stored.items():
                stored.setdefault(name, one)
        by_group = zip(*(each.members for each in said), strict=True)
        return cls(stored, [list(dict.fromkeys(chain(*names))) for names in by_group])

    @property
    def steps(self) -> dict[str, int]:
        """Whole trainable parameter -> updates that it has had."""
        return {one.place.whole: one.steps for one in self.stored.values() if one.steps is not None}

    def specs(self, state: StateSpec, but: Collection[str] = ()) -> list[TensorSpec]:
        """The tensors of one state, without those of `but`."""
        return [
            TensorSpec(name, state.dtype, one.states[state.name])
            for name, one in self.stored.items()
            if state.name in one.states and name not in but
        ]

    def whole_specs(self, state: StateSpec, parts: Callable[[str], int]) -> list[TensorSpec]:
        """The tensors of one state, of parameters as they were before they were cut. Where a state has one element for
        many of a parameter's, `parts` says of how many equal parts each has elements of its own."""
        shapes: dict[str, Shape] = {}
        for one in self.stored.values():
            if state.name in one.states:
                name, of_whole = one.place.whole, one.whole_states[state.name]
                if state.per > 1:
                    of_whole = (parts(name) * state.elements(prod(one.place.shape) // parts(name)),)
                shapes[name] = of_whole
        return [TensorSpec(name, state.dtype, shape) for name, shape in shapes.items()]

    def cuts(self, shards: bool) -> dict[str, Any]:
        """Parameter in tiles, or of which tensor-parallel ranks have parts -> its shape, for these the dimension,
        and the names of its parts in order."""
        found: dict[str, list[str]] = {}
        for name, one in self.stored.items():
            if one.place.whole != name and (one.place.dim is not None) == shards:
                found.setdefault(one.place.whole, []).append(name)
        places = {name: one.place for name, one in self.stored.items()}
        return {
            whole: {
                "shape": list(places[names[0]].shape),
                **({"dim": places[names[0]].dim} if shards else {}),
                "parts": sorted(names, key=lambda name: places[name].start),
            }
            for whole, names in found.items()
        }

    def groups(self, mine: list[NamedGroup]) -> list[NamedGroup]:
        """Param groups with the whole parameters that any rank has in them."""
        return [
            {**group, "params": list(dict.fromkeys(self.stored[name].place.whole for name in names))}
            for group, names in zip(mine, self.members, strict=True)
        ]
