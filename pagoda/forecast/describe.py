"""A paper's shape as the planner's input: its tree of modules, and the arithmetic of each.

Both come from one list of layers in the order of the forward pass. The tree ends in modules that hold parameters and
have no children (a norm, a matrix, one expert's matrix), so that units may be cut anywhere; FLOPs are counted per such
module, and a unit's are the sum over the modules it holds.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from pagoda.models.papers import RELATIVE_BUCKETS, PaperShape
from pagoda.plan.units import ModuleSpec, ParamSpec

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


def module_spec(shape: PaperShape, tiles: int = 1, expert_parallel: int = 1) -> ModuleSpec:
    """The module tree of `shape`, whose parameters are exactly `shape.params`; or, with `expert_parallel` ranks that
    divide the experts of every block, what one of them has: its part of the experts, and all else.

    Children of the root are `embedding`, `blocks.N` (of T5 `encoder.N` and `decoder.N`), the final norms and the
    head; a block has `attention`, in a decoder `cross`, and `mlp`; with experts, `mlp` has `router` and
    `experts.N`. `tiles` cuts every matrix, the embedding too, in that many modules by rows (memory-centric tiling of
    ZeRO-Infinity, arXiv 2104.07857), and must divide the shape's widths and vocabulary, else ValueError.
    """
    return _tree("", list(_layers(shape, tiles, expert_parallel)))


def forward_flops(
    shape: PaperShape, tokens: int, seq_len: int, tiles: int = 1, expert_parallel: int = 1
) -> dict[str, float]:
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
        for layer in _layers(shape, tiles, expert_parallel)
    }


def exchanged_elements(shape: PaperShape, tokens: int, expert_parallel: int) -> dict[str, int]:
    """Elements of tokens that a rank sends in one forward pass to the experts that the other ranks have, by the module
    that holds a block's experts; empty where no expert is elsewhere. They come back, and go both ways in backward."""
    if expert_parallel == 1:
        return {}
    elsewhere = tokens * shape.top_k * shape.hidden * (expert_parallel - 1) // expert_parallel
    routers = (layer.name for layer in _layers(shape, 1, expert_parallel) if layer.name.endswith(".router"))
    return {router.removesuffix("router") + "experts": elsewhere for router in routers}


def _layers(shape: PaperShape, tiles: int, expert_parallel: int) -> Iterator[_Layer]:
    """Every layer in the order of the forward pass."""
    gpt = shape.family == "gpt"
    if expert_parallel > 1 and (not shape.experts or shape.experts % expert_parallel):
        raise ValueError(f"{expert_parallel} ranks do not divide the {shape.experts} experts of {shape.name}")
    experts = shape.experts // expert_parallel
    if tiles < 1 or shape.vocab % tiles:
        raise ValueError(f"{tiles} tiles do not divide the {shape.vocab} entries of the vocabulary")
    parts = [f"{EMBEDDING}.token" if tiles == 1 else f"{EMBEDDING}.token.{index}" for index in range(tiles)]
    embedding = [ParamSpec(f"{part}.weight", (shape.vocab // tiles, shape.hidden)) for part in parts]
    for part, rows in zip(parts, embedding, strict=True):
        yield _Layer(part, (rows,))
    if gpt:
        yield _Layer(
            f"{EMBEDDING}.position", (ParamSpec(f"{EMBEDDING}.position.weight", (shape.seq_len, shape.hidden)),)
        )
        for index in range(shape.layers):
            yield from _block(shape, f"blocks.{index}", tiles, experts)
        yield _norm(shape, "norm")
    else:
        for stack, blocks in (("encoder", shape.layers), ("decoder", shape.decoder_layers)):
            table = f"{stack}.relative"
            yield _Layer(table, (ParamSpec(f"{table}.weight", (RELATIVE_BUCKETS, shape.heads)),))
            for index in range(blocks):
                yield from _block(shape, f"{stack}.{index}", tiles, experts, cross=stack == "decoder")
            yield _norm(shape, f"{stack}.norm")
    multiplied = float(shape.vocab * shape.hidden)
    yield _Layer(HEAD, multiplied=multiplied, tied=tuple(rows.name for rows in embedding))


def _block(shape: PaperShape, name: str, tiles: int, experts: int, cross: bool = False) -> Iterator[_Layer]:
    """`experts`: those that are here, of all that the router chooses from."""
    yield from _attention(shape, f"{name}.attention", tiles)
    if cross:
        yield from _attention(shape, f"{name}.cross", tiles)
    yield _norm(shape, f"{name}.mlp.norm")
    if not shape.experts:
        yield from _mlp(shape, f"{name}.mlp", tiles, 1.0)
        return
    router = ParamSpec(f"{name}.mlp.router.weight", (shape.experts, shape.hidden))
    yield _Layer(f"{name}.mlp.router", (router,), float(router.numel))
    for expert in range(experts):
        yield from _mlp(shape, f"{name}.mlp.experts.{expert}", tiles, shape.top_k / experts)


def _attention(shape: PaperShape, name: str, tiles: int) -> Iterator[_Layer]:
    hidden = shape.hidden
    yield _norm(shape, f"{name}.norm")
    yield from _matrix(shape, f"{name}.qkv", 3 * hidden, hidden, tiles)
    yield from _matrix(shape, f"{name}.out", hidden, hidden, tiles, attended=hidden)


def _mlp(shape: PaperShape, name: str, tiles: int, share: float) -> Iterator[_Layer]:
    yield from _matrix(shape, f"{name}.up", shape.ffn, shape.hidden, tiles, share)
    yield from _matrix(shape, f"{name}.down", shape.hidden, shape.ffn, tiles, share)


def _norm(shape: PaperShape, name: str) -> _Layer:
    scale = ParamSpec(f"{name}.weight", (shape.hidden,))
    return _Layer(name, (scale, ParamSpec(f"{name}.bias", scale.shape)) if shape.family == "gpt" else (scale,))


def _matrix(
    shape: PaperShape, name: str, rows: int, columns: int, tiles: int, share: float = 1.0, attended: int = 0
) -> Iterator[_Layer]:
    """A matrix, met by `share` of the tokens, in `tiles` layers of equal rows."""
    if tiles < 1 or rows % tiles or attended % tiles:
        raise ValueError(f"{tiles} tiles do not divide the {rows} rows of {name}")
    rows //= tiles
    for index in range(tiles):
        part = name if tiles == 1 else f"{name}.{index}"
        weight = ParamSpec(f"{part}.weight", (rows, columns))
        params = (weight, ParamSpec(f"{part}.bias", (rows,))) if shape.family == "gpt" else (weight,)
        yield _Layer(part, params, share * weight.numel, attended=attended // tiles)


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
