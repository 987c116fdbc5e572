"""Operator tiling of a model that is not built: a tree in which what is too large to be fetched at once is in tiles.

Models that are built are tiled by `transforms.operator_tiles`, and described then.
"""

from collections.abc import Mapping
from dataclasses import replace

from pagoda.models.tiles import row_blocks
from pagoda.plan.units import ModuleSpec, ParamSpec, Part


def tiled(root: ModuleSpec, flops: Mapping[str, float], most_elements: int) -> tuple[ModuleSpec, dict[str, float]]:
    """The tree and the FLOPs by module with every matrix of more than `most_elements` in tiles of rows.

    A layer that uses another's matrix uses its tiles.
    """
    tiles: dict[str, tuple[ModuleSpec, ...]] = {}
    """module -> its tiles"""
    parts: dict[str, tuple[str, ...]] = {}
    """parameter -> its parts"""

    def visit(module: ModuleSpec) -> ModuleSpec:
        tied = tuple(part for name in module.tied for part in parts.get(name, (name,)))
        if not _is_large(module, most_elements):
            return replace(module, children=tuple(map(visit, module.children)), tied=tied)
        made = tiles[module.name] = _tiles_of(module, most_elements)
        for index, param in enumerate(module.params):
            parts[param.name] = tuple(tile.params[index].name for tile in made)
        return replace(module, params=(), children=made)

    tree = visit(root)
    counted: dict[str, float] = {}
    for name, number in flops.items():
        rows = {tile.name: tile.params[0].shape[0] for tile in tiles.get(name, ())}
        counted.update({tile: number * n / sum(rows.values()) for tile, n in rows.items()} or {name: number})
    return tree, counted


def _is_large(module: ModuleSpec, most_elements: int) -> bool:
    matrix = module.params[0] if module.params and not module.children else None
    return matrix is not None and len(matrix.shape) == 2 and matrix.numel > most_elements


def _tiles_of(module: ModuleSpec, most_elements: int) -> tuple[ModuleSpec, ...]:
    rows, width = module.params[0].shape

    def cut(param: ParamSpec, tile: str, start: int, stop: int) -> ParamSpec:
        short = param.name.rpartition(".")[2]
        part = Part(param.name, param.shape, start * (param.numel // rows))
        return ParamSpec(f"{tile}.{short}", (stop - start, *param.shape[1:]), param.trainable, part)

    made = []
    for index, (start, stop) in enumerate(row_blocks(rows, [width], most_elements)):
        name = f"{module.name}.tiles.{index}"
        made.append(ModuleSpec(name, tuple(cut(p, name, start, stop) for p in module.params), apart=True))
    return tuple(made)
