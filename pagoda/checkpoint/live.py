"""The weights of a wrapped model as whole lazy tensors, which are read from their pages on any rank."""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from pagoda.checkpoint.lazy import LazyTensor, cat, constant
from pagoda.checkpoint.model_config import model_record
from pagoda.checkpoint.reader import BUFFERS
from pagoda.checkpoint.state import (
    OF_WEIGHTS,
    ParameterState,
    Position,
    all_states,
    states_of,
    unpaged,
)
from pagoda.engine import Engine
from pagoda.errors import UsageError
from pagoda.mesh.dtensors import DTensorForm
from pagoda.plan.layout import WEIGHT


class ModelTensors(NamedTuple):
    """The tensors of a model, in a checkpoint or in pages."""

    name: str
    """The model's name in messages."""
    record: dict[str, Any] | None
    """The model's `model_record`."""
    tensors: Mapping[str, Mapping[str, LazyTensor]]
    """State or `BUFFERS` -> name -> tensor."""
    trained: Collection[str]
    """Names of the parameters that have been updated."""
    is_first: bool = True
    """Whether this is the first rank, which writes what all ranks read."""

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of most weights that the model computes with."""
        counts: Counter[torch.dtype] = Counter()
        for tensor in self.tensors[WEIGHT].values():
            counts[tensor.dtype] += tensor.numel()
        return counts.most_common(1)[0][0]


@contextmanager
def live_weights(model: nn.Module, all_ranks: bool = False) -> Iterator[ModelTensors]:
    """The weights of a wrapped model. They are valid as long as nothing trains it.

    Every rank must read the same pieces in the same order. Only the first rank gets the values, or all ranks if
    `all_ranks`; other ranks read meaningless values. The block ends when all ranks have reached its end.

    Raises UsageError if the model is not wrapped, or between backward and `step()` if updates run during backward.
    """
    states = states_of(model)
    engine = next(iter(states.values())).engine
    with engine.settled():
        buffers = {name: constant(value) for name, value in unpaged(model)}
        mesh = engine.links.mesh
        whole = _whole_tensors(engine, range(mesh.size if all_ranks else 1))
        now = _names_in(model, engine, states)
        tensors = {
            state: {now.get(name, name): of[name] for name in of if name not in now or now[name]}
            for state, of in whole.items()
        }
        steps = [(state, state.unit.steps[: state.unit.trainable]) for state in all_states(engine)]
        trained = {state.whole for state, of_unit in steps if state.slot < len(of_unit) and of_unit[state.slot]}
        trained = {now.get(name, name) for name in trained}
        title, record = f"The {type(model).__name__}", model_record(model)
        yield ModelTensors(title, record, {**tensors, BUFFERS: buffers}, trained, mesh.rank == 0)
        engine.of_all_ranks("the end of reading all weights", None)


def _names_in(model: nn.Module, engine: Engine, states: Mapping[str, ParameterState]) -> dict[str, str]:
    """Name at `wrap` -> name in `model`, for parameters that have another name there; "" if they are not in it. `model`
    may be a part of the wrapped one, or changed since.

    Raises UsageError if that affects a parameter in tiles or on several ranks.
    """
    here = {(state.unit.index, state.slot): name for name, state in states.items()}
    other = {}
    for state in all_states(engine):
        name = here.get((state.unit.index, state.slot), "")
        if name == state.name:
            continue
        if state.spec.part is not None or engine.links.mesh.size > 1:
            raise UsageError(
                f"{state.name!r} is {name!r} in this model, or not in it: give the model that wrap() returned, as it "
                "was then."
            )
        other[state.whole] = name
    return other


def _whole_tensors(engine: Engine, receivers: Collection[int]) -> dict[str, dict[str, LazyTensor]]:
    """State -> name in the user's model -> tensor, for weights and what else of their masters is stored."""
    parameters = all_states(engine)
    mine = [parameter.position for parameter in parameters]
    by_part, ranks = [mine], engine.links.mesh.ranks
    if (parts := ranks.expert_parallel) > 1:
        of_all = engine.of_all_ranks("the positions of all weights", mine)
        by_part = of_all[:: ranks.tensor_parallel][:parts]
    found: dict[str, dict[str, LazyTensor]] = {}
    for state in [state.name for state in engine.plan.layout.states if state.name in OF_WEIGHTS]:
        tiles: dict[str, list[tuple[Position, LazyTensor]]] = {}
        for number, parameter in enumerate(parameters):
            if state not in parameter.spans():
                continue
            tensor, divided = _whole(parameter, state), parameter.unit.index in engine.plan.layout.expert_units
            for part, positions in enumerate(by_part if divided else [mine]):
                its = tensor if len(by_part) == 1 or not divided else _of_part(parameter, tensor, part, receivers)
                tiles.setdefault(positions[number].whole, []).append((positions[number], its))
        for name, of_name in tiles.items():
            joined = cat([tensor for _, tensor in sorted(of_name, key=lambda tile: tile[0].start)])
            shape = of_name[0][0].shape
            found.setdefault(state, {})[name] = joined if joined.shape == shape else joined.with_shape(shape)
    return found


def _whole(parameter: ParameterState, state: str) -> LazyTensor:
    """A state of a whole parameter, which tensor-parallel ranks may have divided."""
    mine, form = parameter.lazy(state), parameter.unit.forms[parameter.slot]
    if not isinstance(form, DTensorForm) or parameter.spec.shard is None:
        return mine
    latest: list[torch.Tensor] = []

    def read(start: int, count: int) -> torch.Tensor:
        if not latest:
            latest.append(form.around(mine.whole()).full_tensor().cpu().reshape(-1))
        values = latest[0][start : start + count].clone()
        if start + count == form.shape.numel():
            latest.clear()
        return values

    return LazyTensor(mine.dtype, form.shape, read)


def _of_part(parameter: ParameterState, mine: LazyTensor, part: int, receivers: Collection[int]) -> LazyTensor:
    """The same state of other experts: of the parameter in this unit and slot on rank `part` of those that divide
    experts. `mine` is this rank's."""

    def read(start: int, count: int) -> torch.Tensor:
        what = f"unit {parameter.unit.index}, {parameter.slot}, of part {part}, from element {start}"
        return parameter.engine.collectives.of_part(what, mine.read(start, count), part, receivers)

    return LazyTensor(mine.dtype, mine.shape, read)
