"""The model that a forecast is about: its tree, its arithmetic and its widths, without its weights."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, NamedTuple

from pagoda.errors import ConfigError
from pagoda.forecast.config import PlanConfig
from pagoda.forecast.describe import exchanged_elements, forward_flops, module_spec, tiled
from pagoda.forecast.divisions import OF_PAPERS, Division, divisions_of, heads_of
from pagoda.models.papers import PAPER_SHAPES, PaperShape
from pagoda.optim.rule import TensorRule
from pagoda.plan.exchanges import Exchange
from pagoda.plan.units import ModuleSpec, ParamSpec, is_within, layers_of

_DESCRIBED = 2
"""Layers from which those of a built-in shape are described."""


@dataclass(frozen=True)
class ModelDescription:
    """A model as a forecast needs it."""

    name: str
    params: int
    """Parameters, tied ones counted once; of all ranks where they divide experts."""
    root: ModuleSpec
    """As one rank has it."""
    forward_flops: Mapping[str, float]
    """Module -> FLOPs of one forward pass of the batch; empty where nobody asked for it."""
    layers: int
    """Layers that a forward pass goes through."""
    hidden: int
    ffn: int
    """Width inside a layer's MLP; of all experts that see a token."""
    vocab: int
    measurable: bool
    """Whether its compute can be measured: not of a paper's shape, which is not built, nor of a mixture of experts,
    whose layers take as long as routing makes them."""
    top_k: int = 0
    """Of a mixture of experts, how many see each token."""
    exchanged: Mapping[str, int] = field(default_factory=dict)
    """Module that holds a block's experts -> elements of tokens that a rank sends to others' in one forward pass."""
    at_once: int = 1
    """Forwards whose activations wait for their backward at once: several in a stage of a pipeline."""
    heads: int = 1
    """Equal parts into which attention can be divided at most."""
    divisions: Mapping[str, Division] = field(default_factory=dict)
    """Patterns of modules -> how tensor-parallel ranks divide their matrix; empty where nothing says that."""
    tensor_parallel: int = 1
    """Ranks that divide the layers; `root` and `forward_flops` are one rank's."""
    summed: tuple[str, ...] = ()
    """Modules whose results these ranks add up."""
    handed_on: tuple[Exchange, ...] = ()
    """What a stage of a pipeline exchanges with those beside it."""


def describe_configured(config: PlanConfig, count_flops: bool = True) -> ModelDescription:
    """The model that a configuration names. Raises ConfigError as `describe_model`."""
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
    """The model called `name`: a paper's shape, or what `pagoda.models.build_model` builds.

    Of an encoder-decoder, the encoder reads `seq_len` tokens and the decoder as many. With `tile_elements`, layers
    whose weights have more elements are in tiles, as `wrap(tiles=Tiles(tile_limit=...))` has them; without
    `cuts_stacks`, stacks of experts are whole, as under a rule that takes parameters whole.

    Raises ConfigError: as `build_model`; experts that `expert_parallel` ranks cannot divide.
    """
    shape = PAPER_SHAPES.get(name)
    if shape is not None:
        root, flops = _tree_of_paper(shape, batch_size, seq_len, expert_parallel, tile_elements)
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


def _tree_of_paper(
    shape: PaperShape, batch_size: int, seq_len: int, expert_parallel: int, tile_elements: int | None
) -> tuple[ModuleSpec, dict[str, float]]:
    if expert_parallel > 1:
        asked = f"--expert-parallel is {expert_parallel}"
        if not shape.experts:
            raise ConfigError(f"{asked}, but model {shape.name!r} has no experts to divide")
        if shape.experts % expert_parallel:
            raise ConfigError(f"{asked}, which does not divide {shape.experts:,} experts")
    root = module_spec(shape, expert_parallel)
    flops = forward_flops(shape, batch_size * seq_len, seq_len, expert_parallel)
    return (root, flops) if tile_elements is None else tiled(root, flops, tile_elements)


def _tree_of_transformers(
    name: str,
    batch_size: int,
    seq_len: int,
    count_flops: bool,
    ranks: int,
    tile_elements: int | None,
    cuts_stacks: bool,
) -> tuple[ModuleSpec, dict[str, float], Any, int]:
    """The tree, FLOPs by module, text configuration and layers. Layers of a built-in decoder are alike, so two of them
    are built, without values, and described as all."""
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
    """A name inside one module as it is inside another."""
    return after + name.removeprefix(before) if is_within(name, (before,)) else name


class Widths(NamedTuple):
    """Of a language model: hidden, inside the MLP, of all experts that see a token, and of the vocabulary."""

    hidden: int
    ffn: int
    vocab: int


def widths(config: Any) -> Widths:
    """Those of a model of transformers."""
    hidden = int(config.hidden_size)
    given = (getattr(config, name, None) for name in ("moe_intermediate_size", "intermediate_size", "d_ff", "n_inner"))
    ffn = int(next(filter(None, given), 4 * hidden))
    return Widths(hidden, ffn * max(1, experts_per_token(config)), int(config.vocab_size))


def experts_per_token(config: Any) -> int:
    """How many experts see each token in a model of transformers; 0 where it has none."""
    if config.model_type == "switch_transformers":
        return 1
    return int(getattr(config, "num_experts_per_tok", None) or 0)
