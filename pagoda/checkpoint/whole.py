"""Whole parameters: those of the user's model, which may have been cut into tiles, of which ranks may have some."""

from collections.abc import Mapping

import torch

from pagoda.checkpoint.state import ParameterState
from pagoda.distributed.mesh import Mesh
from pagoda.distributed.tensors import as_dtensor
from pagoda.optim.rule import Shape


class WholeState:
    """The state of a parameter of the user's model: of one in pages, or of the tiles that it was cut into."""

    def __init__(self, states: list[ParameterState]) -> None:
        """`states` are of its tiles in order, as far as this rank has them."""
        first = states[0]
        self.states = states
        self._part = first.spec.part
        self.shape: Shape = tuple(first.unit.params[first.slot].shape) if self._part is None else self._part.shape
        rows = [state.spec.shape[0] for state in states] if self._part is not None else []
        self._ranks = 1 if self._part is None else self.shape[0] // sum(rows)
        """Those that divide it, in parts of equal size along its first dimension."""

    @property
    def steps(self) -> int:
        """Updates that it has had. Its tiles get gradients together, so they have had as many."""
        state = self.states[0]
        return state.unit.steps[state.slot]

    @steps.setter
    def steps(self, count: int) -> None:
        for state in self.states:
            state.unit.steps[state.slot] = count

    @property
    def moments(self) -> list[str]:
        """What the optimizer's rule keeps of it."""
        return [*self.states[0].moments()]

    def master(self) -> torch.Tensor:
        """A copy of the fp32 master."""
        return self._join([state.as_param(state.master()) for state in self.states])

    def overwrite(self, values: torch.Tensor) -> None:
        """Make values of any float dtype the master."""
        rows = [state.spec.shape[0] if state.spec.shape else 1 for state in self.states]
        for state, part in zip(self.states, self._cut(values, rows), strict=True):
            state.overwrite(part if state.is_quantized else part.float())

    def read(self, moment: str) -> torch.Tensor:
        """A copy of a moment."""
        return self._join([state.as_param(state.read(moment)) for state in self.states])

    def write(self, moment: str, values: torch.Tensor) -> None:
        """Overwrite a moment."""
        shapes = [state.moments()[moment].shape for state in self.states]
        parts = self._cut(values, [shape[0] if shape else 1 for shape in shapes])
        for state, part in zip(self.states, parts, strict=True):
            state.write(moment, part.cpu().to(state.engine.store.dtype(moment)))

    def moment_shape(self, moment: str) -> Shape:
        """Shape of a moment of the whole parameter."""
        first, spans = self.states[0], [state.moments()[moment] for state in self.states]
        if first.unit.forms[first.slot] is not None:
            return self.shape
        if self._part is None:
            return spans[0].shape
        if spans[0].shape == first.spec.shape:
            return self.shape
        return (sum(span.count for span in spans) * self._ranks,)

    def _join(self, parts: list[torch.Tensor]) -> torch.Tensor:
        """The whole of which `parts` are what its tiles have; where ranks divide it, a DTensor with this rank's."""
        if self._part is None:
            return parts[0]
        joined = torch.cat(parts)
        if self._ranks == 1:
            return joined
        from torch.distributed.tensor import DTensor, Replicate, Shard  # slow to import, and only ranks need it

        return DTensor.from_local(joined, self._mesh.experts, (Replicate(), Shard(0)), run_check=False)

    def _cut(self, values: torch.Tensor, rows: list[int]) -> list[torch.Tensor]:
        """What its tiles have of a whole, or of a DTensor as `_join` gives one: `rows` of its first dimension each."""
        values = values.detach()
        if self._part is None:
            return [self.states[0].part_of(values)]
        if (divided := as_dtensor(values)) is not None:
            values = divided.to_local()
        elif self._ranks > 1:
            values = values.chunk(self._ranks)[self._mesh.expert_index]
        return list(torch.split(values, rows))

    @property
    def _mesh(self) -> Mesh:
        rank_group = self.states[0].engine.rank_group
        assert rank_group is not None, "one rank has all of a parameter"
        return rank_group.collectives.mesh


def whole_states(states: Mapping[str, ParameterState]) -> dict[str, WholeState]:
    """Parameters by name -> those of the user's model by name."""
    found: dict[str, list[ParameterState]] = {}
    for name, state in states.items():
        found.setdefault(name if state.spec.part is None else state.whole, []).append(state)
    return {name: WholeState(of_name) for name, of_name in found.items()}
