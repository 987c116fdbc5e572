"""Describes the model of a forecast: its module tree, its FLOPs and its widths, without its weights."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, NamedTuple

from pagoda.errors import ConfigError
from pagoda.forecast.config import PlanConfig
from pagoda.forecast.describe import exchanged_elements, forward_flops, module_spec, tiled
from pagoda.models.divisions import OF_PAPERS, Division, divisions_of, heads_of
from pagoda.models.papers import PAPER_SHAPES, PaperShape
from pagoda.optim.rule import TensorRule
from pagoda.plan.exchanges import Exchange
from pagoda.plan.units import ModuleSpec, ParamSpec, is_within, layers_of

_DESCRIBED = 2
"""Number of layers that are built to describe a built-in shape."""


@dataclass(frozen=True)
class ModelDescription:
    """A model as a forecast needs it."""

    name: str
    params: int
    """Number of parameters. Tied ones count once. If ranks divide the experts, the experts of all ranks count."""
    root: ModuleSpec
    """The module tree of one rank."""
    forward_flops: Mapping[str, float]
    """Module -> FLOPs of one forward pass of the batch. Empty if they were not asked for."""
    layers: int
    """Number of layers in a forward pass."""
    hidden: int
    ffn: int
    """Width inside a layer's MLP, added up over the experts that a token is sent to."""
    vocab: int
    measurable: bool
    """Whether its compute can be measured. A paper's shape is never built, and the time of a mixture of experts depends
    on routing."""
    top_k: int = 0
    """Number of experts that each token is sent to. 0 without experts."""
    exchanged: Mapping[str, int] = field(default_factory=dict)
    """Module that holds a block's experts -> token elements that a rank sends to other ranks' experts in one forward
    pass."""
    at_once: int = 1
    """Number of forward passes whose activations wait for backward at the same time. Above 1 in a pipeline stage."""
    heads: int = 1
    """Most equal parts into which attention can be divided."""
    divisions: Mapping[str, Division] = field(default_factory=dict)
    """Name pattern of modules -> how tensor-parallel ranks divide their matrix. Empty if the model does not say."""
    tensor_parallel: int = 1
    """Number of ranks that divide the layers. `root` and `forward_flops` are those of one rank."""
    summed: tuple[str, ...] = ()
    """Modules whose results these ranks add up."""
    stored_whole: Mapping[str, int] = field(default_factory=dict)
    """Divided module -> elements of its parameters that each of these ranks stores whole."""
    handed_on: tuple[Exchange, ...] = ()
    """What a pipeline stage exchanges with its neighbours."""


def describe_configured(config: PlanConfig, count_flops: bool = True) -> ModelDescription:
    """The model that a configuration names. Raises ConfigError as `describe_model` does."""
    assert config.model is not None
    return describe_model(
        config.model,
        batch_size=config.batch_size,
        seq_len=config.seq_len,
        count_flops=count_flops,
        expert_parallel=config.expert_parallel,
        tile_elements=config.tile_elements,
        cuts_stacks=not isinstance(config.rule, TensorRule),
    )


def describe_model(
    name: str,
    *,
    batch_size: int,
    seq_len: int,
    count_flops: bool = True,
    expert_parallel: int = 1,
    tile_elements: int | None = None,
    cuts_stacks: bool = True,
) -> ModelDescription:
    """Describe the model called `name`: a paper's shape, or a model that `pagoda.models.build_model` builds.

    In an encoder-decoder, the encoder and the decoder each read `seq_len` tokens. With `tile_elements`, layers with
    more weights are cut into tiles, as `wrap(tiles=Tiles(tile_limit=...))` does. Without `cuts_stacks`, stacks of
    experts stay whole, as with an optimizer that takes whole parameters.

    Raises ConfigError as `build_model` does, and if `expert_parallel` ranks cannot divide the experts.
    """
    shape = PAPER_SHAPES.get(name)
    if shape is not None:
        if expert_parallel > 1:
            _check_experts(shape, expert_parallel)
        root = module_spec(shape, expert_parallel)
        flops = forward_flops(shape, batch_size * seq_len, seq_len, expert_parallel)
        if tile_elements is not None:
            root, flops = tiled(root, flops, tile_elements)
        layers, top_k = shape.layers + shape.decoder_layers, shape.top_k
        heads, divisions = shape.heads, OF_PAPERS
        hidden, ffn, vocab = shape.hidden, shape.ffn * max(1, top_k), shape.vocab
    else:
        root, flops, config, layers = _tree_of_transformers(
            name, batch_size, seq_len, count_flops, expert_parallel, tile_elements, cuts_stacks
        )
        top_k, heads, divisions = experts_per_token(config), heads_of(config), divisions_of(config)
        hidden, ffn, vocab = widths(config)
    elsewhere = (expert_parallel - 1) * sum(module.numel for module in root.modules() if module.routed)
    return ModelDescription(
        name=name,
        params=root.numel + elsewhere,
        root=root,
        forward_flops=flops,
        layers=layers,
        hidden=hidden,
        ffn=ffn,
        vocab=vocab,
        measurable=shape is None and not top_k,
        top_k=top_k,
        exchanged=exchanged_elements(root, batch_size * seq_len * top_k * hidden, expert_parallel),
        heads=heads,
        divisions=divisions,
    )


def _check_experts(shape: PaperShape, ranks: int) -> None:
    """Raises ConfigError if ranks cannot divide the experts of a paper's shape."""
    if not shape.experts:
        raise ConfigError(f"--expert-parallel is {ranks}, but model {shape.name!r} has no experts to divide")
    if shape.experts % ranks:
        raise ConfigError(f"--expert-parallel is {ranks}, which does not divide {shape.experts:,} experts")


def _tree_of_transformers(
    name: str,
    batch_size: int,
    seq_len: int,
    count_flops: bool,
    ranks: int,
    tile_elements: int | None,
    cuts_stacks: bool,
) -> tuple[ModuleSpec, dict[str, float], Any, int]:
    """Module tree, FLOPs per module, text configuration and number of layers. The layers of a built-in decoder are
    alike, so two of them are built, without values, and stand for all."""
    from pagoda.construction.construct import describe
    from pagoda.forecast import flops as counting
    from pagoda.models import build_model
    from pagoda.models.build import is_encoder_decoder, layer_count, model_directory
    from pagoda.transforms.operator_tiles import Tiling

    try:
        layers = layer_count(name)
        alike = model_directory(name) is None and layers > _DESCRIBED and not is_encoder_decoder(name)
        with counting.weightless():
            model: Any = build_model(name, seq_len=seq_len, layers=_DESCRIBED if alike else None)
            first: Any = SimpleNamespace(ranks=ranks, rank=0) if ranks > 1 else None
            Tiling(model, tile_elements, cuts_stacks=cuts_stacks, exchange=first)
            counted = counting.forward_flops(model, batch_size, seq_len) if count_flops else {}
            root = describe(model)
    except ConfigError as error:
        if name not in str(error) or "unknown model" not in str(error):
            raise
        raise ConfigError(f"{error} The papers' shapes: {', '.join(PAPER_SHAPES)}.") from error
    if alike:
        root, counted = _repeated(root, counted, layers)
    return root, counted, model.config.get_text_config(), layers


def _repeated(root: ModuleSpec, flops: Mapping[str, float], count: int) -> tuple[ModuleSpec, dict[str, float]]:
    """Extend the tree and the FLOPs of a model to `count` layers. Each new layer is like the last layer of the given
    model."""
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
        if not is_within(name, (row,)):
            counted[name] = number
        elif once:
            counted.update({_moved(inside, last.name, layer): n for layer in names for inside, n in once.items()})
            once = {}
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
    """Rename a module or parameter from one enclosing module to another."""
    return after + name.removeprefix(before) if is_within(name, (before,)) else name


class Widths(NamedTuple):
    """Widths of a language model: hidden, inside the MLP (of all experts that a token is sent to), and vocabulary."""

    hidden: int
    ffn: int
    vocab: int


def widths(config: Any) -> Widths:
    """The widths of a transformers model."""
    hidden = int(config.hidden_size)
    given = (getattr(config, name, None) for name in ("moe_intermediate_size", "intermediate_size", "d_ff", "n_inner"))
    ffn = int(next(filter(None, given), 4 * hidden))
    return Widths(hidden, ffn * max(1, experts_per_token(config)), int(config.vocab_size))


def experts_per_token(config: Any) -> int:
    """Number of experts that a transformers model sends each token to. 0 without experts."""
    if config.model_type == "switch_transformers":
        return 1
    return int(getattr(config, "num_experts_per_tok", None) or 0)
