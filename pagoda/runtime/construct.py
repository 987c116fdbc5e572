"""Construction: from an `nn.Module`, real or on meta, to units whose states are in their tiers."""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from pagoda.errors import ConfigError
from pagoda.plan.units import ModuleSpec, ParamSpec, UnitSpec
from pagoda.runtime.store import Store
from pagoda.runtime.unit import LiveUnit

Owner = tuple[nn.Module, str]
"""A module and the name under which it holds a parameter."""


@contextmanager
def init() -> Iterator[None]:
    """Build a model inside without holding it in RAM: `wrap` initialises it unit by unit, straight into its tier.

    Parameters of modules that can initialise themselves later go to the meta device; buffers and the parameters of
    all other modules stay real. `wrap` runs the model's own `_init_weights(module)` (as transformers' models and
    many others have), or the module's `reset_parameters()`. What a constructor writes into the parameters of a
    child that has one of these is not repeated: put it in `_init_weights`, or build the model outside `init()`.
    """

    def to_meta(module: nn.Module, _name: str, param: Any) -> nn.Parameter | None:
        if not isinstance(param, nn.Parameter) or param.is_meta or _own_initialiser(module) is None:
            return None
        meta = nn.Parameter(torch.empty_like(param, device="meta"), requires_grad=param.requires_grad)
        meta.__dict__.update(param.__dict__)
        return meta

    handle = register_module_parameter_registration_hook(to_meta)  # type: ignore[arg-type]  # torch's says None
    try:
        yield
    finally:
        handle.remove()


def describe(model: nn.Module) -> ModuleSpec:
    """The model as the planner sees it: every floating-point parameter once, under its first owner."""
    seen: set[int] = set()

    def visit(module: nn.Module, name: str) -> ModuleSpec:
        params = []
        for short, param in module.named_parameters(recurse=False):
            if param.is_floating_point() and id(param) not in seen:
                seen.add(id(param))
                params.append(ParamSpec(_join(name, short), tuple(param.shape), param.requires_grad))
        visited.add(module)
        children = tuple(
            visit(child, _join(name, short)) for short, child in module.named_children() if child not in visited
        )
        return ModuleSpec(name, tuple(params), children)

    visited: set[nn.Module] = set()
    return visit(model, "")


def live_units(model: nn.Module, specs: tuple[UnitSpec, ...], dtype: torch.dtype) -> list[LiveUnit]:
    """The units of a model, on its own parameters (meta ones are still to be built)."""
    params = dict(model.named_parameters(remove_duplicate=False))
    return [LiveUnit(spec, [params[slot.param.name] for slot in spec.slots], dtype) for spec in specs]


class Builder:
    """Brings the parameters of a model into a store, one unit at a time.

    Random initialisation is seeded per module, by one draw from torch's default generator and the module's name:
    it depends on the seed alone, not on units, budgets or tiers.
    """

    def __init__(self, model: nn.Module, store: Store) -> None:
        self._model = model
        self._store = store
        self._modules = dict(model.named_modules())
        self._names = {module: name for name, module in self._modules.items()}
        self._owners: dict[int, list[Owner]] = {}
        for module in model.modules():
            for short, param in module._parameters.items():
                if param is not None:
                    self._owners.setdefault(id(param), []).append((module, short))
        self._seed: int | None = None

    def build(self, unit: LiveUnit) -> None:
        """Write a unit's master weights to their home.

        Until `finish` the modules hold meta stand-ins for what is built, so that an initialiser of an ancestor,
        which may write to all that is below it, changes nothing that is already home.
        """
        if any(param.is_meta for param in unit.params):
            self._materialise(unit)
        for slot, param in enumerate(unit.params):
            self._store.write_master(unit.spec, slot, param.detach().reshape(-1))
            param.data = unit.placeholders[slot]
            stand_in = nn.Parameter(torch.empty(param.shape, device="meta"), requires_grad=param.requires_grad)
            self._install(param, stand_in)

    def finish(self, units: list[LiveUnit]) -> None:
        """Give the modules their parameters back, as placeholders."""
        for unit in units:
            for param in unit.params:
                self._install(param, param)

    def _install(self, key: nn.Parameter, param: nn.Parameter) -> None:
        for module, short in self._owners[id(key)]:
            module._parameters[short] = param

    @torch.no_grad()
    def _materialise(self, unit: LiveUnit) -> None:
        """Replace meta parameters by real ones and run the initialisers that fill them."""
        fresh: set[int] = set()
        for slot, meta in enumerate(unit.params):
            if not meta.is_meta:
                continue
            blank = torch.full(meta.shape, torch.nan, dtype=meta.dtype, device="cpu")
            real = nn.Parameter(blank, requires_grad=meta.requires_grad)
            real.__dict__.update(meta.__dict__)
            self._owners[id(real)] = self._owners.pop(id(meta))
            self._install(real, real)
            unit.params[slot] = real
            fresh.add(id(real))
        for module in self._initialisation_order(unit, fresh):
            self._initialise(module, unit)
        for slot, param in enumerate(unit.params):
            if id(param) in fresh and param.isnan().any():
                raise ConfigError(
                    f"Parameter {unit.name(slot)!r} was left uninitialised: neither its module's reset_parameters() "
                    "nor the model's _init_weights(module) fills it. Define one, or build it outside pagoda.init()."
                )

    def _initialisation_order(self, unit: LiveUnit, fresh: set[int]) -> list[nn.Module]:
        """Modules that may initialise the fresh parameters: those of the unit, children first, then its ancestors.

        An ancestor runs after its children, as in `nn.Module.apply`, because some (T5's attention) initialise what
        their children hold.
        """
        root = self._modules[unit.spec.module]
        path = unit.spec.module.split(".") if unit.spec.module else []
        ancestors = [self._modules[".".join(path[:length])] for length in reversed(range(len(path)))]
        return [m for m in _post_order(root) if any(id(p) in fresh for p in m.parameters())] + ancestors

    def _initialise(self, module: nn.Module, unit: LiveUnit) -> None:
        own = _own_initialiser(module)
        by_model = self._model_initialiser(module)
        if own is None and by_model is None:
            return
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self._module_seed(self._names[module], unit.spec.module))
            params = [p for p in module.parameters(recurse=False) if not p.is_meta]
            if by_model is not None:
                by_model(module)
            if own is not None and any(p.isnan().any() for p in params):
                own()
                if by_model is not None:
                    by_model(module)

    def _model_initialiser(self, module: nn.Module) -> Callable[[nn.Module], Any] | None:
        """`_init_weights` of the nearest enclosing module that has one."""
        path = self._names[module].split(".") if self._names[module] else []
        for length in range(len(path), -1, -1):
            initialiser = getattr(self._modules[".".join(path[:length])], "_init_weights", None)
            if callable(initialiser):
                return initialiser  # type: ignore[no-any-return]
        return None

    def _module_seed(self, name: str, unit: str) -> int:
        if self._seed is None:
            self._seed = int(torch.randint(2**62, ()).item())
        # An ancestor runs once per unit and must not draw the same numbers for each.
        inside = name == unit or name.startswith(f"{unit}.") or not unit
        text = f"{self._seed}:{name}" + ("" if inside else f":{unit}")
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def _own_initialiser(module: nn.Module) -> Callable[[], Any] | None:
    for name in ("reset_parameters", "_reset_parameters"):
        initialiser = getattr(module, name, None)
        if callable(initialiser):
            return initialiser  # type: ignore[no-any-return]
    return None


def _post_order(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        yield from _post_order(child)
    yield module


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name
