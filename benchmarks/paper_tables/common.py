"""What the tables share: Pagoda's plans for the papers' shapes, and how sizes are written."""

from dataclasses import replace
from functools import cache

from pagoda.forecast.describe import forward_flops, module_spec
from pagoda.models.papers import PaperShape
from pagoda.optim import AdamW
from pagoda.plan.units import ModuleSpec, ParamSpec

GB = 1e9
ROOM = 1 << 60
STATES = AdamW().states("bf16")
UNIT_BYTES = 512 << 20


_CUT = ("token", "qkv", "out", "up", "down")
"""Modules with a matrix, the embedding too."""


@cache
def tree(shape: PaperShape, tiles: int = 1, experts: int = 1) -> ModuleSpec:
    """The tree of a shape with every matrix in that many modules of equal rows (memory-centric tiling of ZeRO-Infinity,
    arXiv 2104.07857). It takes seconds for the largest shapes."""

    def tile(module: ModuleSpec, name: str) -> ModuleSpec:
        params = (
            ParamSpec(f"{name}.{param.name.rpartition('.')[2]}", (param.shape[0] // tiles, *param.shape[1:]))
            for param in module.params
        )
        return ModuleSpec(name, tuple(params))

    def visit(module: ModuleSpec) -> ModuleSpec:
        if module.params and module.name.rpartition(".")[2] in _CUT:
            parts = tuple(tile(module, name) for name in _parts(module.name, tiles))
            return replace(module, params=(), children=parts)
        tied = tuple(f"{part}.weight" for name in module.tied for part in _parts(name.removesuffix(".weight"), tiles))
        return replace(module, children=tuple(map(visit, module.children)), tied=tied)

    whole = module_spec(shape, experts)
    return whole if tiles == 1 else visit(whole)


def flops(shape: PaperShape, tokens: int, seq_len: int, tiles: int, experts: int) -> dict[str, float]:
    """FLOPs of one forward pass by the modules of `tree`."""
    counted: dict[str, float] = {}
    for name, number in forward_flops(shape, tokens, seq_len, experts).items():
        parts = _parts(name, tiles) if name.rpartition(".")[2] in _CUT else [name]
        counted.update(dict.fromkeys(parts, number / len(parts)))
    return counted


def _parts(name: str, tiles: int) -> list[str]:
    return [f"{name}.{index}" for index in range(tiles)] if tiles > 1 else [name]


def gigabytes(nbytes: float) -> str:
    return f"{nbytes / GB:.3g}" if nbytes < 999.5 * GB else f"{nbytes / GB:,.0f}"


def count(params: float) -> str:
    return f"{params / 1e12:.3g}T" if params >= 1e12 else f"{params / 1e9:.3g}B"
