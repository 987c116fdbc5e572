"""Builds a model's units, with their states in their tiers, from an `nn.Module`."""

import hashlib
import os
import sys
import warnings
from collections import Counter, deque
from collections.abc import Callable, Container, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode

from pagoda.autograd.reads import has_forward, join, params_read_in
from pagoda.checkpoint.lazy import Deferred, LazyTensor
from pagoda.checkpoint.pretrained import listed
from pagoda.checkpoint.sources import ValueSource
from pagoda.checkpoint.state import ParameterState
from pagoda.checkpoint.tensors import chunks
from pagoda.checkpoint.waiting import WaitingTensor, is_waiting, source_of, waiting_for_initialiser
from pagoda.engine import Engine
from pagoda.errors import ConfigError
from pagoda.mesh.dtensors import as_dtensor, local, shard_of
from pagoda.optim.param_groups import made_anew
from pagoda.parameters.quantized import QuantizedForm, packed
from pagoda.parameters.unit import LiveUnit, retire_node, successor
from pagoda.plan.units import ModuleSpec, ParamSpec, Part, UnitSpec
from pagoda.prepare.experts import RoutedExperts
from pagoda.prepare.lookups import lookups_in
from pagoda.prepare.operator_tiles import Tiling
from pagoda.prepare.tiles import Tiled
from pagoda.process import callers_gpu

_LARGE_ELEMENTS = 1 << 20
"""Parameters of transformers modules with at least this many elements wait."""
Owner = tuple[nn.Module, str]
"""A module and the name under which it holds a parameter."""
_WAITING = "_pagoda_waiting"
"""Attribute of a module: the parameters that waited when they were registered, by name. torch's `parallelize_module`
puts DTensors in their place."""


@contextmanager
def deferred_init() -> Iterator[None]:
    """Build a model without holding it in RAM. `wrap` then initialises it unit by unit, straight into its tier.

    Parameters take no memory if their modules have `reset_parameters()`, or if they are large and in transformers'
    modules. What constructors and initialisers write to them is recorded, and `wrap` repeats it. Random numbers are
    seeded by the names of module and parameter and by torch's generator at `wrap`. Buffers and all other parameters are
    in RAM. So are values that are copied or loaded into parameters (`from_pretrained`, `load_state_dict`, `copy_`), and
    those that an operation gives which cannot be repeated. Copies of parameters have the same values.

    `pagoda.load` leaves the values of a Hugging Face directory in its files. `wrap` raises ConfigError for a parameter
    that nothing has set.
    """
    empty = _Empty()

    def wait(module: nn.Module, name: str, param: Any) -> nn.Parameter | None:
        if type(param) is not nn.Parameter or param.is_meta or not _can_wait(module, param):
            return None
        if module._parameters.get(name) is not None:  # this replaces what the constructor made, so it has loaded values
            return None
        values = None if empty.is_untouched(param) else param
        waiting = successor(param, waiting_for_initialiser(values, param), name)
        module.__dict__.setdefault(_WAITING, {})[name] = waiting
        return waiting

    handle = register_module_parameter_registration_hook(wait)  # type: ignore[arg-type]  # torch's says None
    try:
        with empty:
            yield
    finally:
        handle.remove()


class _Empty(TorchFunctionMode):
    """Context that knows which tensors of `torch.empty` nothing has been written to."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, StorageWeakRef] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.empty and result.device.type == "cpu":
            storage = StorageWeakRef(result.untyped_storage())  # type: ignore[no-untyped-call]
            self._storages[storage.cdata] = storage
        elif func == _GET_DATA and not is_waiting(args[0]):  # writes to it are not counted
            self._storages.pop(args[0].untyped_storage()._cdata, None)
        return result

    def is_untouched(self, tensor: torch.Tensor) -> bool:
        storage = self._storages.get(tensor.untyped_storage()._cdata)
        is_of_empty = storage is not None and not storage.expired()  # type: ignore[no-untyped-call]
        return is_of_empty and tensor._version == 0


_GET_DATA = torch.Tensor.data.__get__  # type: ignore[attr-defined]


def describe(
    model: nn.Module,
    trained: Container[str] | None = None,
    weight: torch.dtype = torch.float32,
    dtype_of: Callable[[torch.Tensor], torch.dtype] | None = None,
    stored_whole: Callable[[str, tuple[int, ...]], bool] | None = None,
) -> ModuleSpec:
    """Describe the model for the planner: every floating-point or quantized parameter once, under the first module that
    reads it. A quantized parameter counts as many elements of its dtype as its bytes hold. `dtype_of` returns the dtype
    of a parameter's weight, by default `weight`.

    `trained` names the parameters with optimizer state, by default those that require a gradient. If tensor-parallel
    ranks divide a parameter, the result has this rank's part, or the whole parameter if `stored_whole` says so (see
    `shard_of`). Raises ConfigError for a parameter that they divide unequally.
    """
    anew = made_anew(model)
    first_names = {id(param): name for name, param in model.named_parameters()}

    def visit(module: nn.Module, name: str, read_above: bool = False) -> ModuleSpec:
        params, tied = [], []
        for full, param in () if read_above else params_read_in(module, name):
            dtype = weight if dtype_of is None else dtype_of(param)
            quantized = QuantizedForm.of(param, dtype)
            if full in anew or (quantized is None and not param.is_floating_point()):
                continue
            if first_names[id(param)] != full:
                tied.append(first_names[id(param)])
                continue
            if full in placed:  # in the unit of a module around this one, which reads it too
                continue
            placed.add(full)
            has_state = param.requires_grad if trained is None else full in trained
            shape, shard = shard_of(full, param, stored_whole) if quantized is None else ((quantized.elements,), None)
            other = None if dtype is weight else dtype
            params.append(ParamSpec(full, shape, has_state, parts.get(id(param)), shard, other))
        visited.add(module)
        if isinstance(module, Tiled):
            for short, shape in module.shapes.items():
                whole = join(name, short), shape
                parts.update({id(param): Part(*whole, start) for param, start in module.parts(short)})
            tiles.update(module.tiles.values())
        if isinstance(module, RoutedExperts):
            rows.add(module.tiles if isinstance(module, Tiled) else module)
        children = tuple(
            visit(child, join(name, short), read_above=not has_forward(child))
            for short, child in module.named_children()
            if child not in visited
        )
        return ModuleSpec(
            name,
            tuple(params),
            children,
            tuple(dict.fromkeys(tied)),
            apart=module in tiles,
            routed=module in rows,
            lookup=lookups.get(module),
        )

    placed: set[str] = set()
    parts: dict[int, Part] = {}
    tiles: set[nn.Module] = set()
    rows: set[nn.Module] = set()
    visited: set[nn.Module] = set()
    lookups = lookups_in(model)
    return visit(model, "")


def live_units(
    model: nn.Module, specs: tuple[UnitSpec, ...], dtype: torch.dtype, device: torch.device
) -> list[LiveUnit]:
    """Make a model's units, which hold the model's own parameters. Those that wait are built later. `dtype`: that of
    most units."""
    params = dict(model.named_parameters(remove_duplicate=False))
    ram = torch.device("cpu")
    return [
        LiveUnit(
            spec,
            [params[slot.param.name] for slot in spec.slots],
            spec.dtype or dtype,
            ram if spec.on_host else device,
        )
        for spec in specs
    ]


def owners_of(model: nn.Module) -> dict[int, list[Owner]]:
    """Identity of a parameter -> all modules that hold it, with its names there."""
    owners: dict[int, list[Owner]] = {}
    for module in model.modules():
        for short, param in module._parameters.items():
            if param is not None:
                owners.setdefault(id(param), []).append((module, short))
    return owners


def move_buffers(model: nn.Module, device: torch.device, in_ram: Container[str]) -> None:
    """Move every buffer, and every parameter that is not in pages, to the compute device. Shared ones stay shared. The
    buffers of the modules `in_ram` stay there.

    Floating-point and quantized parameters are in pages.
    """
    moved: dict[int, torch.Tensor] = {}
    for param in model.parameters():
        if not param.is_floating_point() and param.device != device:
            param.data = param.data.to(device)
    for of, module in model.named_modules():
        for name, buffer in module._buffers.items() if of not in in_ram else ():
            if buffer is not None and buffer.device != device:
                module._buffers[name] = moved.setdefault(id(buffer), buffer.to(device))


def hold_made_anew(
    model: nn.Module, dtype: torch.dtype, device: torch.device, from_first: Callable[..., torch.Tensor]
) -> None:
    """Give the frozen parameters that are `made_anew` values of `dtype` in the memory of the compute device. Warns of
    them."""
    names = sorted(made_anew(model))
    for name in names:
        holder, _, short = name.rpartition(".")
        param = model.get_parameter(name)
        source = source_of(param)
        values = from_first(param.detach() if source is None else source.values.whole())
        model.get_submodule(holder)._parameters[short] = nn.Parameter(values.to(device, dtype), requires_grad=False)
    if names:
        warnings.warn(
            f"{listed(names)} cannot be in pages, because peft replaces such weights in each forward: they stay in "
            f"{device.type} memory, outside the plan.",
            stacklevel=5,
        )


class Builder:
    """Brings a model's parameters into pages: real ones, and those whose values wait to be read or drawn.

    Values in files are read in pieces. Others are written on all cores, and take at most the RAM of the largest
    parameter.

    Random numbers are seeded for each parameter and initialiser, by their names and one draw from torch's default
    generator. So values depend only on the seed, not on units, budgets, tiers or order.
    """

    def __init__(
        self,
        model: nn.Module,
        engine: Engine,
        tiling: Tiling,
        holders: dict[int, list[Owner]],
        from_first: Callable[..., torch.Tensor] | None = None,
    ) -> None:
        """`tiling`: the replacements in `model`, undone until everything is built. `holders`: `owners_of` the model
        with them. `from_first`: gives every rank the first rank's values of a tensor, or the values of the first rank
        that has it. Each rank keeps its slices of them."""
        self._engine = engine
        self._tiling = tiling
        self._holders = holders
        self._from_first = from_first or (lambda mine, having=None: mine)
        self._model = model

    def build(self, units: list[LiveUnit]) -> None:
        """Write every unit's master weights to their home. The unit's parameters are placeholders afterwards."""
        holders = [self._holders[id(param)] for unit in units for param in unit.params]
        self._sources = self._seeded_sources()
        largest = max((slot.param.numel for unit in units for slot in unit.spec.slots), default=0)
        with Writers(4 * largest) as self._writers:
            for unit in units:
                for slot, param in enumerate(unit.params):
                    unit.replace(slot, self._build(unit, slot, param))
        Deferred.forget()
        for param, of_param in zip((param for unit in units for param in unit.params), holders, strict=True):
            for module, short in of_param:
                module._parameters[short] = param
        for module in self._model.modules():
            module.__dict__.pop(_WAITING, None)

    def _seeded_sources(self) -> dict[int, ValueSource]:
        """Identity of a parameter that waits -> what its values come from. Gives a seed to every draw."""
        names = {module: name for name, module in self._model.named_modules()}
        owners = owners_of(self._model)
        sources: dict[int, tuple[str, ValueSource]] = {}
        for name, param in self._model.named_parameters():
            source = source_of(param)
            if source is None and isinstance(local(param), WaitingTensor):  # a DTensor
                module, short = owners[id(param)][0]
                source = source_of(module.__dict__[_WAITING][short])
            if source is not None:
                sources[id(param)] = name, source
        if any(draw.seed is None for _, source in sources.values() for draw in source.draws):
            seed = int(self._from_first(torch.randint(2**62, (1,))).item())
            for key, (name, source) in sources.items():
                drawn: Counter[str] = Counter()
                for draw in source.draws:
                    holders = [names[holder] for holder, _ in owners[key]]
                    module = names.get(draw.module, holders[0])
                    if draw.of_model and module in holders:  # the model initialises each module that holds it
                        module = holders[-1]
                    before = f":{drawn[module]}" if drawn[module] else ""
                    drawn[module] += 1
                    if draw.seed is None:
                        draw.seed = _seed_of(f"{seed}:{module}:{name}{before}")
        return {key: source for key, (_, source) in sources.items()}

    def _build(self, unit: LiveUnit, slot: int, param: nn.Parameter) -> nn.Parameter:
        """Write one parameter's master. Returns the parameter as a placeholder, or a new one if it waited or is a
        DTensor, whose dtype cannot be changed."""
        whole, first = self._tiling.whole(param)
        state = ParameterState(self._engine, unit, slot)
        spec, source = state.spec, self._sources.get(id(whole))
        if source is not None and source.unset:
            _check_set(spec.name if spec.part is None else spec.part.whole, source.values)
        if source is not None and not source.draws and not source.of_rank:  # in files, or computed from them
            state.copy_master_in(source.values)
        else:
            mine = self._values(unit, slot, whole, source, first)
            self._writers.submit(mine.nbytes, partial(state.write_master, mine))
        if source is not None or as_dtensor(param) is not None:
            return unit.new_param(slot, unit.placeholders[slot])
        if (param.dtype, param.device) != (unit.placeholders[slot].dtype, unit.placeholders[slot].device):
            retire_node(param, spec.name)
        unit.set_part(slot, unit.placeholders[slot])
        return param

    def _values(
        self, unit: LiveUnit, slot: int, whole: nn.Parameter, source: ValueSource | None, first: int
    ) -> torch.Tensor:
        """The flat values of a parameter, or of a tile that begins at element `first` of `whole`: real or drawn."""
        count = unit.spec.slots[slot].param.numel
        if source is not None and as_dtensor(whole) is None:
            mine = source.values.read(first, count)
        else:
            values = packed(whole) if source is None else source.values.whole()
            mine = unit.stored(slot, values).detach().reshape(-1)[first : first + count].cpu()
        if source is not None and not source.of_rank:
            return mine
        return self._from_first(mine, self._engine.store.shards.having(unit.spec, slot))


def _check_set(name: str, values: LazyTensor) -> None:
    """Raises ConfigError if nothing has set some of a parameter's values."""
    if any(values.read(start, count).isnan().any() for start, count in chunks(values.numel())):
        raise ConfigError(
            f"Parameter {name!r} was left uninitialised: neither its module's constructor and reset_parameters() nor "
            "the model's _init_weights(module) set all of its values. Set them there, or build the model outside "
            "pagoda.deferred_init()."
        )


def _seed_of(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def _can_wait(module: nn.Module, param: nn.Parameter) -> bool:
    """Whether an initialiser is likely to set the parameter later. Small parameters take next to no memory."""
    if not param.is_floating_point() or param.device.type != "cpu":
        return False
    known = sys.modules.get("transformers.pytorch_utils")
    if any(callable(getattr(module, name, None)) for name in ("reset_parameters", "_reset_parameters")):
        return True
    if known is not None and isinstance(module, known.Conv1D):
        return True
    return type(module).__module__.startswith("transformers.") and param.numel() >= _LARGE_ELEMENTS


class Writers:
    """Threads that write values to their homes, while the caller goes on to the next parameter.

    At most `most_bytes` of values wait or are being written, or one parameter if it has more.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most = most_bytes
        self._pool = ThreadPoolExecutor(len(os.sched_getaffinity(0)), "pagoda-writer", callers_gpu())
        self._running: deque[tuple[Future[None], int]] = deque()
        self._bytes = 0

    def submit(self, nbytes: int, write: Callable[[], None]) -> None:
        """Call `write()`, which holds `nbytes` of values, on one of the threads. Waits until they fit. Raises the error
        of an earlier call."""
        while self._running and self._bytes + nbytes > self._most:
            self._wait()
        self._running.append((self._pool.submit(write), nbytes))
        self._bytes += nbytes

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Wait for all calls, and raise the first error of theirs. After an error of the caller, cancel those that have
        not begun."""
        with self._pool:
            while self._running and error is None:
                self._wait()
            for running in self._running:
                running[0].cancel()

    def _wait(self) -> None:
        future, nbytes = self._running.popleft()
        self._bytes -= nbytes
        future.result()
