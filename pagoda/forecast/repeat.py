"""A model of many equal layers, from one of few: what is alike is described once."""

from collections.abc import Mapping
from dataclasses import replace

from pagoda.plan.units import ModuleSpec, ParamSpec, is_within, layers_of


def repeated(root: ModuleSpec, flops: Mapping[str, float], count: int) -> tuple[ModuleSpec, dict[str, float]]:
    """The tree and the FLOPs by module of a model with `count` layers, from those of a model that differs from it in
    the number of its layers alone. Each further layer is like the last one there is."""
    *_, last = layers_of(root)
    row = last.name.rpartition(".")[0]
    names = [f"{row}.{index}" for index in range(count)]

    def visit(module: ModuleSpec) -> ModuleSpec:
        if module.name == row:
            return replace(module, children=tuple(_renamed(last, last.name, name) for name in names))
        return replace(module, children=tuple(map(visit, module.children)))

    counted: dict[str, float] = {}
    once = {name: n for name, n in flops.items() if is_within(name, (last.name,))}
    for name, number in flops.items():
        if is_within(name, (row,)):
            counted.update({_moved(inside, last.name, layer): n for layer in names for inside, n in once.items()})
            once = {}
        else:
            counted[name] = number
    return visit(root), counted


def _renamed(module: ModuleSpec, before: str, after: str) -> ModuleSpec:
    def param(spec: ParamSpec) -> ParamSpec:
        part = spec.part and replace(spec.part, whole=_moved(spec.part.whole, before, after))
        return replace(spec, name=_moved(spec.name, before, after), part=part)

    return replace(
        module,
        name=_moved(module.name, before, after),
        params=tuple(map(param, module.params)),
        children=tuple(_renamed(child, before, after) for child in module.children),
        tied=tuple(_moved(name, before, after) for name in module.tied),
    )


def _moved(name: str, before: str, after: str) -> str:
    """A name inside one module as it is inside another."""
    return after + name.removeprefix(before) if is_within(name, (before,)) else name
