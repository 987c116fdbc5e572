"""Contents: what a checkpoint holds, by name: of one rank all, of several that divide experts what any of them has."""

import json
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pagoda.checkpoint.groups import NamedGroup
from pagoda.checkpoint.tensors import TensorSpec
from pagoda.optim.rule import Shape, StateSpec
from pagoda.plan.layout import Layout
from pagoda.runtime.together import Together
from pagoda.runtime.unit import LiveUnit


@dataclass(frozen=True)
class Stored:
    """A parameter that a checkpoint has tensors of."""

    states: dict[str, Shape]
    """State that it has -> the shape of that."""
    whole: str
    """Name of the parameter that it was cut from, or its own."""
    start: int
    """Its first element there; or which of the equal parts it is, where tensor-parallel ranks have one each."""
    dim: int | None
    """The dimension along which those have divided it."""
    whole_shape: Shape
    whole_states: dict[str, Shape]
    """`states` of the parameter that it was cut from."""
    steps: int | None
    """Updates that it has had; None where it is frozen."""

    @classmethod
    def of(cls, unit: LiveUnit, slot: int, layout: Layout) -> "Stored":
        """A parameter of a unit."""
        spec = unit.spec.slots[slot].param
        part, shard = spec.part, spec.shard
        having = [(state, span) for state in layout.states if (span := layout.span(unit.spec, slot, state)) is not None]
        states = {state.name: span.shape for state, span in having}
        steps = unit.steps[slot] if slot < unit.trainable else None
        if shard is not None:
            of_whole = {state.name: state.shape(spec.name, shard.shape) or shard.shape for state, _ in having}
            return cls(states, spec.name, unit.part_index(slot), shard.dim, shard.shape, of_whole, steps)
        if part is None:
            return cls(states, spec.name, 0, None, spec.shape, states, steps)
        of_whole = {state.name: state.shape(part.whole, part.shape) or part.shape for state, _ in having}
        return cls(states, part.whole, part.start, None, part.shape, of_whole, steps)

    @classmethod
    def said(cls, fields: dict[str, Any]) -> "Stored":
        """One of which JSON made lists of shapes."""
        by_state = {
            key: {state: tuple(shape) for state, shape in fields[key].items()} for key in ("states", "whole_states")
        }
        return cls(**{**fields, **by_state, "whole_shape": tuple(fields["whole_shape"])})


@dataclass(frozen=True)
class Contents:
    """Parameters by name, in the order of the model."""

    stored: dict[str, Stored]
    """Every parameter, in the parts that it was cut into."""
    members: list[list[str]]
    """Of each param group, its parameters as they are in `stored`."""

    @classmethod
    def of(
        cls, units: Sequence[LiveUnit], layout: Layout, groups: list[NamedGroup], together: Together | None
    ) -> "Contents":
        """What the units of all ranks hold; every rank asks for it at the same point of its program."""
        slots = [(unit, slot) for unit in units for slot in range(len(unit.params))]
        names = {unit.name(slot): unit.stored_name(slot) for unit, slot in slots}
        mine = cls(
            {unit.stored_name(slot): Stored.of(unit, slot, layout) for unit, slot in slots},
            [[names[name] for name in group["params"]] for group in groups],
        )
        if together is None:
            return mine
        said = together.announce("the contents of a checkpoint", json.dumps(asdict(mine)).encode())
        return _merged([json.loads(each) for each in said])

    @property
    def steps(self) -> dict[str, int]:
        """Whole trainable parameter -> updates that it has had."""
        return {one.whole: one.steps for one in self.stored.values() if one.steps is not None}

    def specs(self, state: StateSpec, but: Collection[str] = ()) -> list[TensorSpec]:
        """The tensors of one state, without those of `but`."""
        return [
            TensorSpec(name, state.dtype, one.states[state.name])
            for name, one in self.stored.items()
            if state.name in one.states and name not in but
        ]

    def whole_specs(self, state: StateSpec) -> list[TensorSpec]:
        """The tensors of one state, of parameters as they were before they were cut into tiles."""
        having = [one for one in self.stored.values() if state.name in one.states]
        shapes = {one.whole: one.whole_states[state.name] for one in having}
        return [TensorSpec(name, state.dtype, shape) for name, shape in shapes.items()]

    def tiles(self) -> dict[str, Any]:
        """Parameter that was cut into tiles -> shape, and names of its parts in order."""
        return {
            whole: {"shape": list(first.whole_shape), "parts": names}
            for whole, (first, names) in self._parts().items()
            if first.dim is None
        }

    def shards(self) -> dict[str, Any]:
        """Parameter that tensor-parallel ranks divide -> shape, dimension, and names of its parts in order."""
        return {
            whole: {"shape": list(first.whole_shape), "dim": first.dim, "parts": names}
            for whole, (first, names) in self._parts().items()
            if first.dim is not None
        }

    def _parts(self) -> dict[str, tuple[Stored, list[str]]]:
        """Parameter that is stored in parts -> one of them, and the names of all, in order."""
        found: dict[str, list[str]] = {}
        for name, one in self.stored.items():
            if one.whole != name:
                found.setdefault(one.whole, []).append(name)
        return {
            whole: (self.stored[names[0]], sorted(names, key=lambda name: self.stored[name].start))
            for whole, names in found.items()
        }

    def groups(self, mine: list[NamedGroup]) -> list[NamedGroup]:
        """Param groups with the whole parameters that any rank has in them."""
        return [
            {**group, "params": list(dict.fromkeys(self.stored[name].whole for name in names))}
            for group, names in zip(mine, self.members, strict=True)
        ]


def _merged(said: Sequence[dict[str, Any]]) -> Contents:
    """Of what ranks say, what any of them does, the first one's first."""
    stored: dict[str, Stored] = {}
    members: list[dict[str, None]] = [{} for _ in said[0]["members"]]
    for each in said:
        for name, fields in each["stored"].items():
            stored.setdefault(name, Stored.said(fields))
        for group, names in zip(members, each["members"], strict=True):
            group.update(dict.fromkeys(names))
    return Contents(stored, [list(group) for group in members])
