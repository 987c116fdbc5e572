"""Describes a paper's model shape as input for the planner: its module tree and the FLOPs of each module.

Modules are in forward order. Each leaf (a norm, a matrix, one matrix of an expert) holds its own parameters, so units
may begin and end at any leaf. FLOPs are counted per leaf.
"""

from collections.abc import Mapping
from dataclasses import replace

from pagoda.models.papers import RELATIVE_BUCKETS, PaperShape
from pagoda.plan.lookups import check_lookup
from pagoda.plan.units import ModuleSpec, ParamSpec, Part
from pagoda.prepare.tiles import row_blocks

EMBEDDING = "embedding"
"""Name of the module that holds the token embedding. The head and the decoder of an encoder-decoder use it again."""
HEAD = "head"
"""Name of the output projection. It multiplies by the embedding's weight and has no parameters of its own."""


_MATRICES = ("qkv", "out", "up", "down", "router")
"""Last words of the names of modules that multiply by their matrix. Other tables are looked up."""


def module_spec(shape: PaperShape, expert_parallel: int = 1) -> ModuleSpec:
    """The module tree of `shape`, with exactly `shape.params` parameters. With `expert_parallel` ranks, the tree of one
    rank: its share of each block's experts, and everything else.

    The root's children are `embedding`, `blocks.N` (in a T5 `encoder.N` and `decoder.N`), the final norms and the head.
    A block has `attention`, `mlp` and, in a decoder, `cross`. With experts, `mlp` has `router` and `experts.N`.
    """
    experts = shape.experts // expert_parallel
    token = _table(f"{EMBEDDING}.token", shape.vocab, shape.hidden, lookup=f"{HEAD!r} computes with its weights too")
    head = ModuleSpec(HEAD, (), tied=(token.params[0].name,))
    if shape.family == "gpt":
        position = _table(f"{EMBEDDING}.position", shape.seq_len, shape.hidden, lookup="")
        blocks = _of_parts("blocks", *(_block(shape, f"blocks.{index}", experts) for index in range(shape.layers)))
        return _of_parts("", _of_parts(EMBEDDING, token, position), blocks, _held(shape, "norm", shape.hidden), head)
    stacks = [
        _of_parts(
            stack,
            _table(f"{stack}.relative", RELATIVE_BUCKETS, shape.heads),
            *(_block(shape, f"{stack}.{index}", experts, cross=stack == "decoder") for index in range(blocks)),
            _held(shape, f"{stack}.norm", shape.hidden),
        )
        for stack, blocks in (("encoder", shape.layers), ("decoder", shape.decoder_layers))
    ]
    return _of_parts("", _of_parts(EMBEDDING, token), *stacks, head)


def forward_flops(shape: PaperShape, tokens: int, seq_len: int, expert_parallel: int = 1) -> dict[str, float]:
    """FLOPs of one forward pass per leaf module, in forward order. Backward takes twice as many, and recomputation as
    many again.

    A matrix costs 2 FLOPs per element and token. Norms, activations and look-ups cost nothing. Attention costs 4 *
    seq_len * hidden per token, and is counted at the `out` projection, which takes its result. The full square is
    counted even if attention is causal, as in Megatron-LM (arXiv 2104.04473) and most papers. Each token is sent to
    `top_k` experts, spread evenly. With expert parallelism, a rank computes for as many tokens of other ranks as others
    compute for its own. In an encoder-decoder, `tokens` tokens pass the encoder and as many pass the decoder.
    """
    share = shape.top_k / max(1, shape.experts // expert_parallel)
    flops = {}
    for module in module_spec(shape, expert_parallel).modules():
        if module.children:
            continue
        multiplied, kind = 0.0, module.name.rpartition(".")[2]
        if kind in _MATRICES:
            multiplied = (share if ".experts." in module.name else 1.0) * module.params[0].numel
        elif kind == HEAD:
            multiplied = float(shape.vocab * shape.hidden)
        flops[module.name] = tokens * (2.0 * multiplied + 4.0 * seq_len * (shape.hidden if kind == "out" else 0))
    return flops


def exchanged_elements(root: ModuleSpec, chosen: int, ranks: int) -> dict[str, int]:
    """Token elements that a rank sends to experts on other ranks in one forward pass, by the module that holds a
    block's experts. Empty if no expert is on another rank. The results return, and both directions repeat in backward.

    `chosen`: elements of a rank's tokens, counted once per expert that a token is sent to.
    """
    elsewhere = chosen * (ranks - 1) // ranks
    return {module.name: elsewhere for module in root.modules() if module.routed} if elsewhere else {}


def tiled(
    root: ModuleSpec, flops: Mapping[str, float], most_elements: int, most_looked_up: int | None = None
) -> tuple[ModuleSpec, dict[str, float]]:
    """Cut every matrix of more than `most_elements` elements into tiles of rows. Embeddings of more than
    `most_looked_up` stay whole. Returns the new tree and the new FLOPs per module.

    Real models are cut in the same way by `transforms.operator_tiles`. A layer that uses another layer's matrix uses
    its tiles.
    """
    tiles: dict[str, tuple[ModuleSpec, ...]] = {}
    """module -> its tiles"""
    parts: dict[str, tuple[str, ...]] = {}
    """parameter -> its parts"""

    def visit(module: ModuleSpec) -> ModuleSpec:
        tied = tuple(part for name in module.tied for part in parts.get(name, (name,)))
        matrix = module.params[0] if module.params and not module.children else None
        if matrix is None or len(matrix.shape) != 2 or matrix.numel <= most_elements:
            return replace(module, children=tuple(map(visit, module.children)), tied=tied)
        if module.lookup is not None and most_looked_up is not None and matrix.numel > most_looked_up:
            check_lookup(module.name, module.lookup)
            return module
        blocks = row_blocks(matrix.shape[0], [matrix.shape[1]], most_elements)
        made = tuple(_tile(module, index, *block) for index, block in enumerate(blocks))
        tiles[module.name] = made
        for index, param in enumerate(module.params):
            parts[param.name] = tuple(tile.params[index].name for tile in made)
        return replace(module, params=(), children=made)

    tree = visit(root)
    counted: dict[str, float] = {}
    for name, number in flops.items():
        rows = {tile.name: tile.params[0].shape[0] for tile in tiles.get(name, ())}
        counted.update({tile: number * n / sum(rows.values()) for tile, n in rows.items()} or {name: number})
    return tree, counted


def _tile(module: ModuleSpec, index: int, start: int, stop: int) -> ModuleSpec:
    """A tile: rows [start, stop) of each parameter of a module."""
    name, rows = f"{module.name}.tiles.{index}", module.params[0].shape[0]

    def cut(param: ParamSpec) -> ParamSpec:
        part = Part(param.name, param.shape, start * (param.numel // rows))
        short = param.name.rpartition(".")[2]
        return ParamSpec(f"{name}.{short}", (stop - start, *param.shape[1:]), param.trainable, part)

    return ModuleSpec(name, tuple(map(cut, module.params)), apart=True)


def _block(shape: PaperShape, name: str, experts: int, cross: bool = False) -> ModuleSpec:
    """One block. `experts` is the number of its experts on this rank; the router chooses from all of them."""
    parts = [
        _of_parts(
            attention,
            _held(shape, f"{attention}.norm", shape.hidden),
            _held(shape, f"{attention}.qkv", 3 * shape.hidden, shape.hidden),
            _held(shape, f"{attention}.out", shape.hidden, shape.hidden),
        )
        for attention in (f"{name}.attention", *([f"{name}.cross"] if cross else []))
    ]
    mlp = f"{name}.mlp"
    inside = _mlp(shape, mlp)
    if shape.experts:
        rows = (_of_parts(row, *_mlp(shape, row)) for row in (f"{mlp}.experts.{index}" for index in range(experts)))
        every = ModuleSpec(f"{mlp}.experts", (), tuple(rows), routed=True)
        inside = (_table(f"{mlp}.router", shape.experts, shape.hidden), every)
    return _of_parts(name, *parts, _of_parts(mlp, _held(shape, f"{mlp}.norm", shape.hidden), *inside))


def _of_parts(name: str, *children: ModuleSpec) -> ModuleSpec:
    return ModuleSpec(name, (), children)


def _mlp(shape: PaperShape, name: str) -> tuple[ModuleSpec, ...]:
    hidden, ffn = shape.hidden, shape.ffn
    return _held(shape, f"{name}.up", ffn, hidden), _held(shape, f"{name}.down", hidden, ffn)


def _held(shape: PaperShape, name: str, *weight: int) -> ModuleSpec:
    """A matrix or a norm. In a GPT it also has a bias."""
    bias = (ParamSpec(f"{name}.bias", weight[:1]),) if shape.family == "gpt" else ()
    return ModuleSpec(name, (ParamSpec(f"{name}.weight", weight), *bias))


def _table(name: str, rows: int, columns: int, lookup: str | None = None) -> ModuleSpec:
    return ModuleSpec(name, (ParamSpec(f"{name}.weight", (rows, columns)),), lookup=lookup)
