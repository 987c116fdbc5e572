"""Builds a model's units, with their states in their tiers, from an `nn.Module` in RAM or on meta."""

import hashlib
import sys
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from pagoda.checkpoint.pretrained import forget_values, values_by_name, values_of
from pagoda.checkpoint.state import ParameterState
from pagoda.construction.loaded_values import KeepCopiedValues, keep_loaded_values, remember_versions
from pagoda.construction.writers import Writers
from pagoda.distributed.tensors import as_dtensor, shard_of
from pagoda.errors import ConfigError
from pagoda.experts.modules import RoutedExperts
from pagoda.models.tiles import Tiled
from pagoda.plan.units import ModuleSpec, ParamSpec, Part, UnitSpec, around_of
from pagoda.runtime.engine import Engine
from pagoda.runtime.quantized import QuantizedForm
from pagoda.runtime.reads import has_forward, join, params_read_in
from pagoda.runtime.unit import LiveUnit, successor
from pagoda.transforms.adapters import adapter_initialiser
from pagoda.transforms.operator_tiles import Tiling

_LARGE_ELEMENTS = 1 << 20
"""Parameters of transformers modules with at least this many elements wait on meta."""
Owner = tuple[nn.Module, str]
"""A module and the name under which it holds a parameter."""
_MADE = "_pagoda_made"
"""Attribute of a module: names of its parameters that wait on meta and that its own constructor made."""


@contextmanager
def init() -> Iterator[None]:
    """Build a model without holding it in RAM. `wrap` then initialises it unit by unit, straight into its tier.

    Parameters go to the meta device if their modules can initialise themselves later, or if they are large and in
    transformers' modules. Buffers and all other parameters stay real. `wrap` runs the model's own
    `_init_weights(module)` (which transformers' models and many others have), or the modules' `reset_parameters()`. If
    a module has one of these, what other constructors write into its parameters is not repeated: write it in
    `_init_weights`, or build the model outside `init()`.

    Loaded values are kept in RAM: those from `from_pretrained`, `load_state_dict`, `copy_` and assignment to a
    parameter. `pagoda.load` leaves the values of a Hugging Face directory in its files. Raises UsageError for a `copy_`
    into a view of a waiting parameter. `wrap` raises ConfigError for a waiting parameter that was written to after the
    block.
    """
    waiting: list[nn.Parameter] = []

    def to_meta(module: nn.Module, name: str, param: Any) -> nn.Parameter | None:
        made = module.__dict__.setdefault(_MADE, set())
        made.discard(name)  # this may be another module's parameter, which is not made here
        if not isinstance(param, nn.Parameter) or param.is_meta or not _can_wait(module, param):
            return None
        if module._parameters.get(name) is not None:  # this replaces what the constructor made, so it has loaded values
            return None
        meta = successor(param, torch.empty_like(param, device="meta"), name)
        keep_loaded_values(module)
        waiting.append(meta)
        made.add(name)
        return meta

    handle = register_module_parameter_registration_hook(to_meta)  # type: ignore[arg-type]  # torch's says None
    try:
        with KeepCopiedValues():
            yield
    finally:
        handle.remove()
        remember_versions(waiting)


def describe(
    model: nn.Module,
    trained: Container[str] | None = None,
    weight: torch.dtype = torch.float32,
    stored_whole: Callable[[str, tuple[int, ...]], bool] | None = None,
) -> ModuleSpec:
    """Describe the model for the planner: every floating-point or quantized parameter once, under the first module that
    reads it. A quantized parameter counts as many elements of the dtype `weight` as its bytes hold.

    `trained` names the parameters with optimizer state, by default those that require a gradient. If tensor-parallel
    ranks divide a parameter, the result has this rank's part, or the whole parameter if `stored_whole` says so (see
    `shard_of`). Raises ConfigError for a parameter that they divide unequally.
    """
    first_names = {id(param): name for name, param in model.named_parameters()}

    def visit(module: nn.Module, name: str, read_above: bool = False) -> ModuleSpec:
        params, tied = [], []
        for full, param in () if read_above else params_read_in(module, name):
            quantized = QuantizedForm.of(param, weight)
            if quantized is None and not param.is_floating_point():
                continue
            if first_names[id(param)] != full:
                tied.append(first_names[id(param)])
                continue
            if full in placed:  # in the unit of a module around this one, which reads it too
                continue
            placed.add(full)
            has_state = param.requires_grad if trained is None else full in trained
            shape, shard = shard_of(full, param, stored_whole) if quantized is None else ((quantized.elements,), None)
            params.append(ParamSpec(full, shape, has_state, parts.get(id(param)), shard))
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
        )

    placed: set[str] = set()
    parts: dict[int, Part] = {}
    tiles: set[nn.Module] = set()
    rows: set[nn.Module] = set()
    visited: set[nn.Module] = set()
    return visit(model, "")


def live_units(
    model: nn.Module, specs: tuple[UnitSpec, ...], dtype: torch.dtype, device: torch.device
) -> list[LiveUnit]:
    """Make a model's units, which hold the model's own parameters. Those on meta are built later."""
    params = dict(model.named_parameters(remove_duplicate=False))
    return [LiveUnit(spec, [params[slot.param.name] for slot in spec.slots], dtype, device) for spec in specs]


def owners_of(model: nn.Module) -> dict[int, list[Owner]]:
    """Identity of a parameter -> all modules that hold it, with its names there."""
    owners: dict[int, list[Owner]] = {}
    for module in model.modules():
        for short, param in module._parameters.items():
            if param is not None:
                owners.setdefault(id(param), []).append((module, short))
    return owners


def move_buffers(model: nn.Module, device: torch.device) -> None:
    """Move every buffer, and every parameter that is not in pages, to the compute device. Shared ones stay shared.

    Floating-point and quantized parameters are in pages.
    """
    moved: dict[int, torch.Tensor] = {}
    for param in model.parameters():
        if not param.is_floating_point() and param.device != device:
            param.data = param.data.to(device)
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device != device:
                module._buffers[name] = moved.setdefault(id(buffer), buffer.to(device))


_CHECKED_AT_ONCE = 1 << 24
"""Elements to check for NaN at once: the check makes a copy of them."""


class Builder:
    """Brings a model's parameters into pages: real ones, those still in files, and those to initialise.

    Values in files are read in pieces. Others are written on all cores, and take at most the RAM of the largest
    parameter.

    Random initialisation is seeded for each parameter and initialiser, by their names and one draw from torch's default
    generator. Every initialiser runs with one real parameter and all others on meta, which it neither changes nor draws
    values for. So values depend only on the seed, not on units, budgets, tiers or order.
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
        self._modules = dict(model.named_modules())
        self._names = {module: name for name, module in self._modules.items()}
        self._owners = owners_of(model)
        self._values = values_by_name(model)
        self._seed: int | None = None
        self._initial: dict[int, nn.Parameter] = {}
        """Identity of a meta parameter that is being built in tiles -> its values."""

    def build(self, units: list[LiveUnit]) -> None:
        """Write every unit's master weights to their home. The unit's parameters are placeholders afterwards."""
        wholes = [[self._tiling.whole(param)[0] for param in unit.params] for unit in units]
        holders = [self._holders[id(param)] for unit in units for param in unit.params]
        if any(whole.is_meta and values_of(whole) is None for of_unit in wholes for whole in of_unit):
            self._seed = int(self._from_first(torch.randint(2**62, (1,))).item())
            for whole in {id(whole): whole for of_unit in wholes for whole in of_unit}.values():
                self._install(whole, _on_meta(whole))
        largest = max((slot.param.numel for unit in units for slot in unit.spec.slots), default=0)
        with Writers(4 * largest) as self._writers:
            for unit in units:
                for slot, param in enumerate(unit.params):
                    unit.params[slot] = self._build(unit, slot, param)
        for param, of_param in zip((param for unit in units for param in unit.params), holders, strict=True):
            for module, short in of_param:
                module._parameters[short] = param

    def _build(self, unit: LiveUnit, slot: int, param: nn.Parameter) -> nn.Parameter:
        """Write one parameter's master. Returns the parameter as a placeholder, or a new one if it was on meta or is a
        DTensor, whose dtype cannot be changed."""
        whole, first = self._tiling.whole(param)
        state = ParameterState(self._engine, unit, slot)
        spec = state.spec
        values = values_of(whole)
        if as_dtensor(param) is not None and param.is_meta:
            values = self._values.get(spec.name)
        if values is not None:
            state.copy_master_in(values)
            made = unit.new_param(slot, unit.placeholders[slot])
            forget_values(made)
            return made
        source = unit.stored(slot, self._initialised(whole, spec) if whole.is_meta else whole)
        mine = source.detach().reshape(-1)[first : first + spec.numel]
        if not whole.is_meta:
            mine = self._from_first(mine.cpu(), self._engine.store.shards.having(unit.spec, slot))
        self._writers.submit(mine.nbytes, partial(state.write_master, mine))
        if param.is_meta or as_dtensor(param) is not None:
            return unit.new_param(slot, unit.placeholders[slot])
        unit.set_part(slot, unit.placeholders[slot])
        return param

    def _initialised(self, meta: nn.Parameter, spec: ParamSpec) -> nn.Parameter:
        """Make a real parameter from one on meta. The values of a parameter in tiles stay until its last tile is
        built."""
        if spec.part is None:
            return self._initialise(meta, spec.name)
        real = self._initial.pop(id(meta), None)
        if real is None:
            real = self._initialise(meta, spec.part.whole)
        if spec.part.start + spec.numel < meta.numel():
            self._initial[id(meta)] = real
        return real

    def _install(self, param: nn.Parameter, shown: nn.Parameter) -> None:
        """Replace `param` by another parameter in all modules that hold it."""
        for module, short in self._owners[id(param)]:
            module._parameters[short] = shown

    @torch.no_grad()
    def _initialise(self, meta: nn.Parameter, name: str) -> nn.Parameter:
        """Make a real parameter from one on meta, with the initialisers that eager construction would run.

        The model's own `_init_weights` decides the values, so it runs first, and mostly alone. If it leaves values
        unset, the modules' `reset_parameters` run before it. Ancestors run after their children, as in
        `nn.Module.apply`, because some of them (T5's attention, MultiheadAttention) initialise their children's
        parameters.
        """
        real = nn.Parameter(torch.full(meta.shape, torch.nan, dtype=meta.dtype, device="cpu"), meta.requires_grad)
        real.__dict__.update(meta.__dict__)
        self._install(meta, real)
        owners = [owner for owner, _ in self._owners[id(meta)]]
        chain = [module for owner in owners for module in self._upwards(owner)]
        by_model = [(m, partial(f, m)) for m in chain if (f := self._model_initialiser(m)) is not None]
        # A module that was given the parameter of another one has initialised its own, which is gone.
        makers = [owner for owner, short in self._owners[id(meta)] if short in owner.__dict__.get(_MADE, ())] or owners
        chain = [module for owner in makers for module in self._upwards(owner)]
        own = [(m, g) for m in chain if (g := _own_initialiser(m)) is not None]
        attempts: tuple[list[tuple[nn.Module, Callable[[], Any]]], ...] = ([*by_model], [*own, *by_model])
        around = [(self._names[module], module) for module in self._upwards(self._owners[id(meta)][0][0])]
        if (adapter := adapter_initialiser(name, around)) is not None:
            attempts = ([adapter],)
        for attempt in attempts:
            for module, initialise in attempt:
                with torch.random.fork_rng(devices=[]):
                    torch.manual_seed(self._seed_of(self._names[module], name))
                    initialise()
            if not any(part.isnan().any() for part in torch.split(real.flatten(), _CHECKED_AT_ONCE)):
                break
        else:
            raise ConfigError(
                f"Parameter {name!r} was left uninitialised: neither its module's reset_parameters() nor the model's "
                "_init_weights(module) fills it. Define one, or build the model outside pagoda.init()."
            )
        self._install(meta, _on_meta(meta))
        return real

    def _upwards(self, module: nn.Module) -> Iterator[nn.Module]:
        """A module and its ancestors, up to the model."""
        name = self._names[module]
        return (self._modules[around] for around in (name, *around_of(name)))

    def _model_initialiser(self, module: nn.Module) -> Callable[[nn.Module], Any] | None:
        """`_init_weights` of the nearest enclosing module that has it."""
        candidates = (getattr(ancestor, "_init_weights", None) for ancestor in self._upwards(module))
        return next((initialiser for initialiser in candidates if callable(initialiser)), None)

    def _seed_of(self, module: str, param: str) -> int:
        text = f"{self._seed}:{module}:{param}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def _on_meta(param: nn.Parameter) -> nn.Parameter:
    """The parameter itself if it is a plain one on meta, otherwise a new meta parameter of the same shape."""
    if param.is_meta and as_dtensor(param) is None:
        return param
    return nn.Parameter(torch.empty(param.shape, device="meta"))


def _can_wait(module: nn.Module, param: nn.Parameter) -> bool:
    """Whether an initialiser will set the parameter later.

    Transformers' models must initialise all parameters of their modules in `_init_weights`. Some leave out small
    parameters that only a constructor sets (CLIP's logit scale), so small ones stay real: they take next to no memory.
    """
    if not param.is_floating_point():
        return False
    if _own_initialiser(module) is not None:
        return True
    return type(module).__module__.startswith("transformers.") and param.numel() >= _LARGE_ELEMENTS


def _own_initialiser(module: nn.Module) -> Callable[[], Any] | None:
    for name in ("reset_parameters", "_reset_parameters"):
        initialiser = getattr(module, name, None)
        if callable(initialiser):
            return initialiser  # type: ignore[no-any-return]
    # transformers' Conv1D, the linear layer of GPT-2, has no `reset_parameters`, unlike torch's layers.
    known = sys.modules.get("transformers.pytorch_utils")
    return partial(_reset_conv1d, module) if known is not None and isinstance(module, known.Conv1D) else None


def _reset_conv1d(module: nn.Module) -> None:
    """Initialise a Conv1D as its constructor does. Not all models that use it do this in `_init_weights`."""
    nn.init.normal_(module.get_parameter("weight"), std=0.02)
    nn.init.zeros_(module.get_parameter("bias"))
