"""A paper's shape as the planner's input: its tree of modules, and the arithmetic of each.

The tree is in the order of the forward pass, and ends in modules that hold parameters and have no children (a norm, a
matrix, one expert's matrix), so that units may be cut anywhere. FLOPs are counted per such module.
"""

from collections.abc import Mapping
from dataclasses import replace

from pagoda.models.papers import RELATIVE_BUCKETS, PaperShape
from pagoda.models.tiles import row_blocks
from pagoda.plan.units import ModuleSpec, ParamSpec, Part

EMBEDDING = "embedding"
"""The module that holds the token embedding; the head, and the decoder of an encoder-decoder, use it again."""
HEAD = "head"
"""The output projection: multiplies by the embedding's weight and holds no parameters."""


_MATRICES = ("qkv", "out", "up", "down", "router")
"""Last words of the modules that tokens are multiplied by; other tables are looked up."""


def module_spec(shape: PaperShape, expert_parallel: int = 1) -> ModuleSpec:
    """The module tree of `shape`, whose parameters are exactly `shape.params`; or, with `expert_parallel` ranks that
    divide the experts of every block, what one of them has: its part of the experts, and all else.

    Children of the root are `embedding`, `blocks.N` (of T5 `encoder.N` and `decoder.N`), the final norms and the
    head; a block has `attention`, in a decoder `cross`, and `mlp`; with experts, `mlp` has `router` and
    `experts.N`.
    """
    experts = _experts_here(shape, expert_parallel)
    token = _table(f"{EMBEDDING}.token", shape.vocab, shape.hidden)
    head = ModuleSpec(HEAD, (), tied=(token.params[0].name,))
    if shape.family == "gpt":
        position = _table(f"{EMBEDDING}.position", shape.seq_len, shape.hidden)
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
    """FLOPs of one forward pass by module without children, in forward order; backward is twice that, and
    recomputing adds it once more.

    A matrix costs 2 FLOPs per element and token; norms, activations and look-ups cost none. Attention costs
    4 * seq_len * hidden per token, and is booked on the `out` projection that takes its result: the full square,
    causal or not, as Megatron-LM (arXiv 2104.04473) and most papers count it. Of experts, a token meets `top_k`, which
    is spread evenly over all; a rank that has a part of them computes for the tokens of other ranks as much as others
    do for its own. In an encoder-decoder, `tokens` pass the encoder and as many the decoder.
    """
    share = shape.top_k / max(1, _experts_here(shape, expert_parallel))
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
    """Elements of tokens that a rank sends in one forward pass to the experts that the other ranks have, by the module
    that holds a block's experts; empty where no expert is elsewhere. They come back, and go both ways in backward.

    `chosen`: the elements of a rank's tokens, once for each expert that a token meets.
    """
    elsewhere = chosen * (ranks - 1) // ranks
    return {module.name: elsewhere for module in root.modules() if module.routed} if elsewhere else {}


def tiled(root: ModuleSpec, flops: Mapping[str, float], most_elements: int) -> tuple[ModuleSpec, dict[str, float]]:
    """The tree and the FLOPs by module with every matrix of more than `most_elements` in tiles of rows, as
    `transforms.operator_tiles` cuts the matrices of models that are built.

    A layer that uses another's matrix uses its tiles.
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
    """Rows [start, stop) of the parameters of a module."""
    name, rows = f"{module.name}.tiles.{index}", module.params[0].shape[0]

    def cut(param: ParamSpec) -> ParamSpec:
        part = Part(param.name, param.shape, start * (param.numel // rows))
        short = param.name.rpartition(".")[2]
        return ParamSpec(f"{name}.{short}", (stop - start, *param.shape[1:]), param.trainable, part)

    return ModuleSpec(name, tuple(map(cut, module.params)), apart=True)


def _experts_here(shape: PaperShape, expert_parallel: int) -> int:
    """Experts of a block that one rank has."""
    if expert_parallel > 1 and (not shape.experts or shape.experts % expert_parallel):
        raise ValueError(f"{expert_parallel} ranks do not divide the {shape.experts} experts of {shape.name}")
    return shape.experts // expert_parallel


def _block(shape: PaperShape, name: str, experts: int, cross: bool = False) -> ModuleSpec:
    """`experts`: those that are here, of all that the router chooses from."""
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
    """A matrix or a norm, in a GPT with a bias."""
    bias = (ParamSpec(f"{name}.bias", weight[:1]),) if shape.family == "gpt" else ()
    return ModuleSpec(name, (ParamSpec(f"{name}.weight", weight), *bias))


def _table(name: str, rows: int, columns: int) -> ModuleSpec:
    return ModuleSpec(name, (ParamSpec(f"{name}.weight", (rows, columns)),))
