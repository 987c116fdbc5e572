"""A paper's shape as the planner's input: its tree of modules, and the arithmetic of each.

Both come from one list of layers in the order of the forward pass. The tree ends in modules that hold parameters and
have no children (a norm, a matrix, one expert's matrix), so that units may be cut anywhere; FLOPs are counted per such
module, and a unit's are the sum over the modules it holds.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from pagoda.models.papers import RELATIVE_BUCKETS, PaperShape
from pagoda.models.tiles import row_blocks
from pagoda.plan.units import ModuleSpec, ParamSpec, Part

EMBEDDING = "embedding"
"""The module that holds the token embedding; the head, and the decoder of an encoder-decoder, use it again."""
HEAD = "head"
"""The output projection: multiplies by the embedding's weight and holds no parameters."""


@dataclass(frozen=True, slots=True)
class _Layer:
    """A module without children."""

    name: str
    params: tuple[ParamSpec, ...] = ()
    multiplied: float = 0.0
    """Matrix elements that a token is multiplied by, on average."""
    tied: tuple[str, ...] = ()
    """Parameters of another layer that it uses."""
    attended: int = 0
    """Width of queries whose attention runs right before this layer, which takes its result."""


def module_spec(shape: PaperShape, expert_parallel: int = 1) -> ModuleSpec:
    """The module tree of `shape`, whose parameters are exactly `shape.params`; or, with `expert_parallel` ranks that
    divide the experts of every block, what one of them has: its part of the experts, and all else.

    Children of the root are `embedding`, `blocks.N` (of T5 `encoder.N` and `decoder.N`), the final norms and the
    head; a block has `attention`, in a decoder `cross`, and `mlp`; with experts, `mlp` has `router` and
    `experts.N`.
    """
    return _tree("", list(_layers(shape, expert_parallel)))


def forward_flops(shape: PaperShape, tokens: int, seq_len: int, expert_parallel: int = 1) -> dict[str, float]:
    """FLOPs of one forward pass by module without children, in forward order; backward is twice that, and
    recomputing adds it once more.

    A matrix costs 2 FLOPs per element and token; norms, activations and look-ups cost none. Attention costs
    4 * seq_len * hidden per token, and is booked on the `out` projection that takes its result: the full square,
    causal or not, as Megatron-LM (arXiv 2104.04473) and most papers count it. Of experts, a token meets `top_k`, which
    is spread evenly over all; a rank that has a part of them computes for the tokens of other ranks as much as others
    do for its own. In an encoder-decoder, `tokens` pass the encoder and as many the decoder.
    """
    return {
        layer.name: tokens * (2.0 * layer.multiplied + 4.0 * seq_len * layer.attended)
        for layer in _layers(shape, expert_parallel)
    }


def exchanged_elements(shape: PaperShape, tokens: int, expert_parallel: int) -> dict[str, int]:
    """Elements of tokens that a rank sends in one forward pass to the experts that the other ranks have, by the module
    that holds a block's experts; empty where no expert is elsewhere. They come back, and go both ways in backward."""
    if expert_parallel == 1:
        return {}
    elsewhere = tokens * shape.top_k * shape.hidden * (expert_parallel - 1) // expert_parallel
    routers = (layer.name for layer in _layers(shape, expert_parallel) if layer.name.endswith(".router"))
    return {router.removesuffix("router") + "experts": elsewhere for router in routers}


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


def _layers(shape: PaperShape, expert_parallel: int) -> Iterator[_Layer]:
    """Every layer in the order of the forward pass."""
    if expert_parallel > 1 and (not shape.experts or shape.experts % expert_parallel):
        raise ValueError(f"{expert_parallel} ranks do not divide the {shape.experts} experts of {shape.name}")
    experts = shape.experts // expert_parallel
    embedding = ParamSpec(f"{EMBEDDING}.token.weight", (shape.vocab, shape.hidden))
    yield _Layer(f"{EMBEDDING}.token", (embedding,))
    if shape.family == "gpt":
        yield _table(f"{EMBEDDING}.position", shape.seq_len, shape.hidden)
        for index in range(shape.layers):
            yield from _block(shape, f"blocks.{index}", experts)
        yield _norm(shape, "norm")
    else:
        for stack, blocks in (("encoder", shape.layers), ("decoder", shape.decoder_layers)):
            yield _table(f"{stack}.relative", RELATIVE_BUCKETS, shape.heads)
            for index in range(blocks):
                yield from _block(shape, f"{stack}.{index}", experts, cross=stack == "decoder")
            yield _norm(shape, f"{stack}.norm")
    yield _Layer(HEAD, multiplied=float(embedding.numel), tied=(embedding.name,))


def _block(shape: PaperShape, name: str, experts: int, cross: bool = False) -> Iterator[_Layer]:
    """`experts`: those that are here, of all that the router chooses from."""
    for attention in ("attention", "cross") if cross else ("attention",):
        yield _norm(shape, f"{name}.{attention}.norm")
        yield _matrix(shape, f"{name}.{attention}.qkv", 3 * shape.hidden, shape.hidden)
        yield _matrix(shape, f"{name}.{attention}.out", shape.hidden, shape.hidden, attended=shape.hidden)
    yield _norm(shape, f"{name}.mlp.norm")
    if not shape.experts:
        yield from _mlp(shape, f"{name}.mlp", 1.0)
        return
    router = _table(f"{name}.mlp.router", shape.experts, shape.hidden)
    yield replace(router, multiplied=float(router.params[0].numel))
    for expert in range(experts):
        yield from _mlp(shape, f"{name}.mlp.experts.{expert}", shape.top_k / experts)


def _mlp(shape: PaperShape, name: str, share: float) -> Iterator[_Layer]:
    yield _matrix(shape, f"{name}.up", shape.ffn, shape.hidden, share)
    yield _matrix(shape, f"{name}.down", shape.hidden, shape.ffn, share)


def _norm(shape: PaperShape, name: str) -> _Layer:
    scale = ParamSpec(f"{name}.weight", (shape.hidden,))
    return _Layer(name, (scale, ParamSpec(f"{name}.bias", scale.shape)) if shape.family == "gpt" else (scale,))


def _table(name: str, rows: int, columns: int) -> _Layer:
    return _Layer(name, (ParamSpec(f"{name}.weight", (rows, columns)),))


def _matrix(shape: PaperShape, name: str, rows: int, columns: int, share: float = 1.0, attended: int = 0) -> _Layer:
    """A matrix, met by `share` of the tokens."""
    weight = ParamSpec(f"{name}.weight", (rows, columns))
    params = (weight, ParamSpec(f"{name}.bias", (rows,))) if shape.family == "gpt" else (weight,)
    return _Layer(name, params, share * weight.numel, attended=attended)


def _tree(name: str, layers: list[_Layer]) -> ModuleSpec:
    """The module `name`, of which `layers` are all layers in it; each child's are consecutive."""
    if len(layers) == 1 and layers[0].name == name:
        return ModuleSpec(name, layers[0].params, tied=layers[0].tied)
    prefix = f"{name}." if name else ""
    groups: dict[str, list[_Layer]] = {}
    for layer in layers:
        child = prefix + layer.name[len(prefix) :].partition(".")[0]
        groups.setdefault(child, []).append(layer)
    children = tuple(_tree(child, inside) for child, inside in groups.items())
    return ModuleSpec(name, (), children, routed=name.endswith(".experts"))
