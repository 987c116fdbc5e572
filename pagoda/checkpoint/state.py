"""State: reads and writes the weights and optimizer states of parameters, for everything except training."""

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import nn

from pagoda.checkpoint.lazy import LazyTensor, Read
from pagoda.checkpoint.tensors import chunks
from pagoda.engine import Engine
from pagoda.errors import ConfigError, UsageError
from pagoda.mesh.dtensors import as_dtensor
from pagoda.mesh.mesh import Mesh
from pagoda.optim.flat import join, split, weights_of
from pagoda.optim.param_groups import NamedGroup
from pagoda.optim.rule import LOW, MASTER, Shape, StateSpec
from pagoda.parameters.hidden import HOME
from pagoda.parameters.quantized import QuantizedForm
from pagoda.parameters.unit import LiveUnit
from pagoda.plan.buffers import BLOCK_ELEMENTS
from pagoda.plan.layout import WEIGHT
from pagoda.plan.packed import ShapedSpan
from pagoda.plan.units import ParamSpec

OF_WEIGHTS = (WEIGHT, LOW, MASTER)
"""The states that store weights and their masters."""


class Position(NamedTuple):
    """Where a tile, or a rank's part of a parameter, is in the parameter of the user's model."""

    whole: str
    """Name of the parameter in the user's model."""
    start: int
    """Index of the first element in that parameter. If tensor-parallel ranks divide the parameter, the index of this
    rank's part among equal parts."""
    dim: int | None
    """The dimension along which tensor-parallel ranks divide the parameter. None if they do not."""
    shape: Shape
    """Shape of the whole parameter."""


class ParameterState(NamedTuple):
    """The states of one parameter on this rank: of the whole parameter, of a tile, or of this rank's part of a DTensor.

    Construction, state dicts, `gathered`, `torch.distributed.checkpoint` and the loading of checkpoints read and write
    states here. Read inside `Engine.settled`, and write inside `Engine.overwriting` or `Engine.replacing`. A
    read gathers the slices of data-parallel ranks, so all of them must read the same state at the same time. A write
    keeps only the rank's own slice.
    """

    engine: Engine
    unit: LiveUnit
    slot: int

    @property
    def name(self) -> str:
        return self.unit.name(self.slot)

    @property
    def stored_name(self) -> str:
        """Name of this rank's part in a checkpoint. The parameter's name if this rank has all of it."""
        shard = self.spec.shard
        return self.name if shard is None else shard.name_of_part(self.name, self.unit.part_index(self.slot))

    @property
    def spec(self) -> ParamSpec:
        """Name and shape of this rank's part."""
        return self.unit.spec.slots[self.slot].param

    @property
    def whole(self) -> str:
        """Name of the parameter that it is a tile of. Its own name if it is not a tile."""
        return self.spec.name if self.spec.part is None else self.spec.part.whole

    @property
    def division(self) -> tuple[int, int]:
        """The dimension along which tensor-parallel ranks divide the parameter, and their number. 0 and 1 if
        undivided."""
        shard = self.spec.shard
        return (0, 1) if shard is None else (shard.dim, shard.ranks)

    @property
    def position(self) -> Position:
        part, shard = self.spec.part, self.spec.shard
        if shard is not None:
            return Position(self.whole, self.unit.part_index(self.slot), shard.dim, shard.shape)
        return (
            Position(self.whole, 0, None, self.spec.shape)
            if part is None
            else Position(self.whole, part.start, None, part.shape)
        )

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights."""
        return self.engine.store.dtype(self.unit.index, WEIGHT)

    @property
    def is_quantized(self) -> bool:
        """Whether its weights are bytes, which must not be cast."""
        return isinstance(self.unit.forms[self.slot], QuantizedForm)

    def span(self, state: StateSpec) -> ShapedSpan | None:
        """The elements of a state within its unit. None if the parameter does not have this state."""
        return self.engine.store.plan.layout.span(self.unit.spec, self.slot, state)

    def spans(self) -> dict[str, ShapedSpan]:
        """State name -> its elements within the unit, for each state that the parameter has."""
        found = {state.name: self.span(state) for state in self.engine.store.plan.layout.states}
        return {name: span for name, span in found.items() if span is not None}

    def moments(self) -> dict[str, ShapedSpan]:
        """Like `spans`, but only the states of the optimizer's rule, without the weights."""
        return {name: span for name, span in self.spans().items() if name not in OF_WEIGHTS}

    def read(self, state: str) -> torch.Tensor:
        """A copy of a state on the CPU, in the state's shape. Weights are never predicted ones."""
        return self.lazy(state).whole()

    def lazy(self, state: str) -> LazyTensor:
        """Like `read`, but piece by piece."""
        if state == WEIGHT and MASTER in self.spans():
            master, dtype = self.lazy(MASTER), self.dtype
            return LazyTensor(dtype, master.shape, lambda start, count: weights_of(master.read(start, count), dtype))
        span, dtype = self.spans()[state], self.engine.store.dtype(self.unit.index, state)
        store, collectives, unit = self.engine.store, self.engine.collectives, self.unit.spec  # not the engine

        def read(start: int, count: int) -> torch.Tensor:
            first = span.first + start
            return collectives.completed(unit, state, first, store.read(unit.index, state, first, count))

        return LazyTensor(dtype, span.shape, read)

    def master(self) -> torch.Tensor:
        """A copy of the fp32 master. Without a master, the weights in fp32, or the bytes of quantized weights."""
        if MASTER in self.spans():
            return self.read(MASTER)
        weight = self.read(WEIGHT)
        if self.is_quantized:
            return weight
        if LOW not in self.spans():
            return weight.float()
        master = torch.empty(weight.shape)
        join(weight, self.read(LOW), master)
        return master

    def write(self, state: str, values: torch.Tensor) -> None:
        """Overwrite a state with `values` of any shape, in the state's dtype."""
        self.engine.store.write(self.unit.index, state, self.spans()[state].first, values.reshape(-1))

    def write_master(self, values: torch.Tensor, first: int = 0) -> None:
        """Set the master weight from flat `values` of any float dtype, starting at element `first` of the parameter.

        A frozen parameter keeps the values rounded to the compute dtype. Raises ConfigError if a value is too large for
        fp16.
        """
        store, index, spans = self.engine.store, self.unit.index, self.spans()
        if self.is_quantized:
            store.write(index, WEIGHT, spans[WEIGHT].first + first, values.reshape(-1))
            return
        for start in range(0, values.numel(), BLOCK_ELEMENTS):
            master = values[start : start + BLOCK_ELEMENTS].float().contiguous()
            at = first + start
            if MASTER in spans:
                store.write(index, MASTER, spans[MASTER].first + at, master)
            if self.dtype is torch.float32:
                store.write(index, WEIGHT, spans[WEIGHT].first + at, master)
                continue
            weight = torch.empty(master.shape, dtype=self.dtype)
            low = torch.empty(master.shape, dtype=torch.int16)
            split(master, weight, low)
            if weight.dtype is torch.float16 and bool((weight.isinf() & master.isfinite()).any()):
                raise ConfigError(
                    f"{self.name!r} has a value of {master.abs().max():.5g}, but the maximum of fp16 is 65504: use "
                    "precision='bf16' or 'fp32'."
                )
            store.write(index, WEIGHT, spans[WEIGHT].first + at, weight)
            if LOW in spans:
                store.write(index, LOW, spans[LOW].first + at, low)

    def overwrite(self, values: torch.Tensor) -> None:
        """Set the master weight from `values` of any float dtype, as `overwrite_all` does."""
        overwrite_all([(self, values)])

    def _overwrite(self, values: torch.Tensor) -> None:
        in_their_dtype = values.dtype is self.dtype
        if LOW in self.spans() and in_their_dtype:
            low = self.read(LOW)
            low.masked_fill_(self.read(WEIGHT).view(torch.int16) != values.view(torch.int16), 0)
            self.write(WEIGHT, values)
            self.write(LOW, low)
        elif MASTER in self.spans() and in_their_dtype:
            master, old = self.read(MASTER), self.read(WEIGHT)
            self.write_master(torch.where(old == values, master, values.float()).reshape(-1))
        else:
            self.write_master(values.reshape(-1))
        self.engine.accesses.overwritten(self.unit)

    def copy_in(self, state: StateSpec, whole: LazyTensor) -> None:
        """Overwrite a state, which the parameter must have, from that of the whole parameter, piece by piece. Reads
        only what this rank holds."""
        span, store = self.span(state), self.engine.store
        assert span is not None
        read = self._own(whole, state)
        for start, count in chunks(span.count):
            first = span.first + start
            if store.holds(self.unit.spec, state.name, first, first + count):
                store.write(self.unit.index, state.name, first, read(start, count))

    def copy_master_in(self, whole: LazyTensor) -> None:
        """Like `copy_in`, for the master weight in any float dtype."""
        store, layout = self.engine.store, self.engine.store.plan.layout
        read = self._own(whole, layout.weight)
        kept = [(name, span.first) for name, span in self.spans().items() if name in OF_WEIGHTS]
        for start, count in chunks(self.spec.numel):
            if any(store.holds(self.unit.spec, name, at + start, at + start + count) for name, at in kept):
                self.write_master(read(start, count), start)

    def _own(self, whole: LazyTensor, state: StateSpec) -> Read:
        """A function that reads this rank's part of a state from the whole parameter's state."""
        shard, part, index = self.spec.shard, self.spec.part, self.unit.part_index(self.slot)
        if shard is not None and state.per == 1:
            size = shard.part_shape[shard.dim]
            return whole.narrow(shard.dim, index * size, size).read
        first = index * state.elements(self.spec.numel) if part is None else state.elements(part.start)
        return lambda start, count: whole.read(first + start, count)

    def as_param(self, values: torch.Tensor) -> torch.Tensor:
        """Convert values as pages store them to the parameter's shape and type: a DTensor if the parameter is one."""
        return self.unit.as_param(self.slot, self.unit.shown(self.slot, values).contiguous())

    def stored(self, values: torch.Tensor) -> torch.Tensor:
        """The part of `values` that pages store on this rank. They have the shape of the whole parameter, and may be a
        DTensor."""
        return self.unit.stored(self.slot, values)

    def out_of(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of values in the shape of the user's parameter."""
        part = self.spec.part
        if part is None:
            return self.stored(whole)
        return whole.reshape(-1)[part.start : part.start + self.spec.numel].view(self.spec.shape)

    def write_entry(self, entry: Mapping[str, Any]) -> None:
        """Overwrite the optimizer's states from a torch `state_dict` entry for this rank's part of the parameter."""
        for name, value in self.engine.rule.kept_states(entry, self.name, self.spec.shape).items():
            self.write(name, value)


class WholeState:
    """The state of a parameter of the user's model, which is one parameter in pages or is cut into tiles."""

    def __init__(self, states: list[ParameterState]) -> None:
        """`states`: those of this rank's tiles, in order."""
        first = states[0]
        self.states = states
        self._part = first.spec.part
        self.shape: Shape = tuple(first.unit.params[first.slot].shape) if self._part is None else self._part.shape
        self._ranks = 1 if self._part is None else self.shape[0] // sum(state.spec.shape[0] for state in states)
        """Number of ranks that divide the parameter into equal parts along its first dimension."""

    def master(self) -> torch.Tensor:
        """A copy of the fp32 master."""
        return self.join([state.as_param(state.master()) for state in self.states])

    def overwrite(self, values: torch.Tensor) -> None:
        """Set the master from values of any float dtype."""
        for state, part in zip(self.states, self.cut(values), strict=True):
            state.overwrite(part if state.is_quantized else part.float())

    def join(self, parts: list[torch.Tensor]) -> torch.Tensor:
        """Join the tiles' parts into the whole. If ranks divide it, the result is a DTensor with this rank's part."""
        if self._part is None:
            return parts[0]
        joined = torch.cat(parts)
        if self._ranks == 1:
            return joined
        from torch.distributed.tensor import DTensor, Replicate, Shard  # slow to import, and needed only with ranks

        return DTensor.from_local(joined, self._mesh.experts, (Replicate(), Shard(0)), run_check=False)

    def cut(self, values: torch.Tensor) -> list[torch.Tensor]:
        """Cut a whole, or a DTensor from `join`, into the tiles' parts: rows of its first dimension."""
        values = values.detach()
        if self._part is None:
            return [self.states[0].stored(values)]
        if (divided := as_dtensor(values)) is not None:
            values = divided.to_local()
        elif self._ranks > 1:
            values = values.chunk(self._ranks)[self._mesh.expert_index]
        return list(torch.split(values, [state.spec.shape[0] for state in self.states]))

    @property
    def _mesh(self) -> Mesh:
        return self.states[0].engine.links.mesh


def whole_states(states: Mapping[str, ParameterState]) -> dict[str, WholeState]:
    """Name of a parameter in the user's model -> its state, which has those of its tiles."""
    found: dict[str, list[ParameterState]] = {}
    for name, state in states.items():
        found.setdefault(name if state.spec.part is None else state.whole, []).append(state)
    return {name: WholeState(of_name) for name, of_name in found.items()}


class _Home:
    """A parameter's reference to its state. It does not keep the engine alive; the model and the optimizer do."""

    def __init__(self, engine: Engine, unit: LiveUnit, slot: int) -> None:
        self._engine = weakref.ref(engine)
        self._unit = unit
        self._slot = slot

    def open(self) -> ParameterState:
        """The parameter's state. Raises UsageError if model and optimizer no longer exist."""
        engine = self._engine()
        if engine is None:
            raise UsageError(
                f"{self._unit.name(self._slot)!r} has no weights any more: its model and optimizer were dropped. Keep "
                "one of them for as long as the parameter is used."
            )
        return ParameterState(engine, self._unit, self._slot)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.open().engine.__reduce_ex__(protocol)


def mark_homes(engine: Engine) -> None:
    """Give every parameter in pages a reference to its state, and hide the parameter."""
    for unit in engine.units:
        unit.begin_hiding()
        for slot, param in enumerate(unit.params):
            setattr(param, HOME, _Home(engine, unit, slot))


def is_paged(param: torch.Tensor) -> bool:
    """Whether this is a parameter of a wrapped model."""
    return hasattr(param, HOME)


def state_of(param: nn.Parameter) -> ParameterState | None:
    """The state of a wrapped model's parameter. None for a parameter that Pagoda does not manage."""
    home: _Home | None = getattr(param, HOME, None)
    return None if home is None else home.open()


def all_states(engine: Engine) -> list[ParameterState]:
    """The state of every parameter in pages, in the order of units and slots."""
    return [ParameterState(engine, unit, slot) for unit in engine.units for slot in range(len(unit.params))]


def states_of(model: nn.Module) -> dict[str, ParameterState]:
    """First name -> state, for each parameter in pages. Raises UsageError if there is none."""
    found = {name: state for name, param in model.named_parameters() if (state := state_of(param)) is not None}
    if not found:
        raise UsageError("This model is not wrapped: call pagoda.wrap(model, ...) first.")
    return found


@contextmanager
def settled(states: Iterable[ParameterState]) -> Iterator[None]:
    """Inside, the states can be read, as in `Engine.settled`."""
    with ExitStack() as engines:
        for engine in {id(state.engine): state.engine for state in states}.values():
            engines.enter_context(engine.settled())
        yield


def overwrite_all(writes: Sequence[tuple[ParameterState, torch.Tensor]]) -> None:
    """Set master weights from values of any float dtype, once updates have ended. A signal comes before that or after
    it.

    Of values in the compute dtype, elements equal to the weight keep their master. Raises UsageError, with nothing
    written, if a shape differs.
    """
    for state, values in writes:
        if tuple(values.shape) != state.spec.shape:
            raise UsageError(
                f"{state.name!r} has shape {state.spec.shape}, but the values written to it have {tuple(values.shape)}."
            )
    with ExitStack() as engines:
        for engine in {id(state.engine): state.engine for state, _ in writes}.values():
            engines.enter_context(engine.overwriting())
        for state, values in writes:
            state._overwrite(values.detach().cpu())


def gather_from_all_stages(engine: Engine, what: str, mine: Any) -> list[Any]:
    """As `Engine.of_all_ranks`, from the ranks of all pipeline stages, in the order of stages."""
    of_stage, stages = engine.of_all_ranks(what, mine), engine.links.stages
    return of_stage if stages is None else [*chain(*stages.announce(what, of_stage))]


def unpaged(model: nn.Module, every_name: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a state dict that are in no unit, by name: persistent buffers, and parameters not in pages. Those
    of a module with several names have the first one, or `every_name`."""
    yield from ((name, held.detach()) for name, held in named_tensors(model, every_name) if not is_paged(held))


def named_tensors(module: nn.Module, every_name: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and persistent buffers of a module, each under its first name or `every_name`."""
    yield from module.named_parameters(remove_duplicate=not every_name)
    for prefix, child in module.named_modules(remove_duplicate=not every_name):
        for name, buffer in child._buffers.items():
            if buffer is not None and name not in child._non_persistent_buffers_set:
                yield f"{prefix}.{name}".lstrip("."), buffer


def named(groups: Iterable[dict[str, Any]]) -> list[NamedGroup]:
    """An optimizer's `param_groups`, with the names of their parameters."""
    return [{**group, "params": [getattr(param, HOME).open().name for param in group["params"]]} for group in groups]
