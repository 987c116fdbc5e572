"""Describes the model of a forecast: its module tree, its FLOPs and its widths, without its weights."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, lru_cache
from types import SimpleNamespace
from typing import Any, NamedTuple

from pagoda.config.memory import Memory
from pagoda.errors import ConfigError
from pagoda.forecast.config import PlanConfig
from pagoda.forecast.describe import exchanged_elements, forward_flops, module_spec, tiled
from pagoda.models.build import first_forward, model_directory
from pagoda.models.divisions import OF_PAPERS, Division, divisions_of, heads_of
from pagoda.models.lora import LoraConfig
from pagoda.models.papers import PAPER_SHAPES, PaperShape
from pagoda.optim.rule import TensorRule
from pagoda.plan.exchanges import Exchange
from pagoda.plan.units import ModuleSpec, ParamSpec, is_within, layers_of
from pagoda.prepare.documents import window_of
from pagoda.prepare.sequence_parallel import exchanged_width, reason_against
from pagoda.process import without_garbage_collection

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
    """Whether its compute can be measured. A paper's shape is never built, the time of a mixture of experts depends on
    routing, and layers are measured without adapters."""
    packed: Mapping[str, int] = field(default_factory=dict)
    """Quantized module -> the elements that its weights have once they are dequantized."""
    top_k: int = 0
    """Number of experts that each token is sent to. 0 without experts."""
    exchanged: Mapping[str, int] = field(default_factory=dict)
    """Module that holds a block's experts -> token elements that a rank sends to other ranks' experts in one forward
    pass."""
    at_once: int = 1
    """Number of forward passes whose activations wait for backward at the same time. Above 1 in a pipeline stage."""
    row_with_mask: int = 0
    """Tokens of a row that has an attention mask of tokens times tokens, because layers attend in a window. 0 without
    a mask."""
    exchanged_width: int = 0
    """Elements a token that ranks exchange in a layer, if they divide sequences."""
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

    @cached_property
    def frozen(self) -> frozenset[str]:
        """The modules whose own parameters, or those of others that they use, are all frozen."""
        trained = {param.name for param in self.root.walk() if param.trainable}
        used = (
            (module.name, {*module.tied, *(param.name for param in module.params)}) for module in self.root.modules()
        )
        return frozenset(name for name, params in used if params and trained.isdisjoint(params))

    @cached_property
    def step_flops(self) -> float:
        """FLOPs of a forward and a backward, without recomputation."""
        return sum(flops * (2 if module in self.frozen else 3) for module, flops in self.forward_flops.items())


def describe_model(config: PlanConfig, count_flops: bool = True) -> ModelDescription:
    """Describe the model that a configuration names: a paper's shape, or one that `pagoda.models.build_model` builds.

    In an encoder-decoder, the encoder and the decoder each read `seq_len` tokens. With `tile_limit`, layers with more
    weights are cut into tiles, as `wrap(tiles=Tiles(tile_limit=...))` does. With an optimizer that takes whole
    parameters, stacks of experts stay whole.

    Raises ConfigError as `build_model` does, and if `expert_parallel` ranks cannot divide the experts.
    """
    name, ranks = config.model, config.expert_parallel
    assert name is not None
    shape, packed = PAPER_SHAPES.get(name), {}
    if shape is not None:
        if config.lora_r is not None:
            raise ConfigError(f"--lora-r is for models of transformers, and {name!r} is a paper's shape")
        if ranks > 1:
            _check_experts(shape, ranks)
        root = module_spec(shape, ranks)
        flops = forward_flops(shape, config.tokens, config.seq_len, ranks)
        if config.tile_elements is not None:
            root, flops = tiled(root, flops, config.tile_elements, config.looked_up_elements)
        layers, top_k = len(layers_of(root)), shape.top_k
        heads, divisions = shape.heads, OF_PAPERS
        params = root.numel
        hidden, ffn, vocab, row_with_mask = shape.hidden, shape.ffn * max(1, top_k), shape.vocab, 0
        text: Any = SimpleNamespace(
            num_attention_heads=heads, hidden_size=hidden, is_encoder_decoder=shape.decoder_layers > 0
        )
    else:
        root, before, counted, built, layers = _tree_of_transformers(config, name, count_flops)
        params, packed = before.numel, _packed(before, root)
        each = max(1, config.per_device_train_batch_size) / config.sequence_parallel
        flops = {module: each * of_one for module, of_one in counted.items()}
        top_k, heads, divisions = experts_per_token(built), heads_of(built), divisions_of(built)
        hidden, ffn, vocab = widths(built)
        row_with_mask = 0 if window_of(built, config.seq_len) is None else config.seq_len
        text = built
    width = 0
    if (divided := config.sequence_parallel) > 1:
        if (reason := reason_against(text, divided)) is not None:
            raise ConfigError(f"--sequence-parallel is {divided}, which does not work with {name!r}: {reason}")
        width = exchanged_width(text, divided)
    elsewhere = (ranks - 1) * sum(module.numel for module in root.modules() if module.routed)
    return ModelDescription(
        name=name,
        params=params + elsewhere,
        root=root,
        forward_flops=flops,
        layers=layers,
        hidden=hidden,
        ffn=ffn,
        vocab=vocab,
        measurable=shape is None and not top_k and config.lora_r is None and config.sequence_parallel == 1,
        packed=packed,
        top_k=top_k,
        exchanged=exchanged_elements(root, config.tokens * top_k * hidden, ranks),
        row_with_mask=row_with_mask,
        exchanged_width=width,
        heads=heads,
        divisions=divisions,
    )


def check_named(name: str) -> None:
    """Raises ConfigError if there is no model of this name."""
    if name not in PAPER_SHAPES:
        try:
            model_directory(name)
        except ConfigError as error:
            raise _with_papers(error) from error


def _with_papers(error: ConfigError) -> ConfigError:
    """The error. If the model is unknown, it lists the papers' shapes, too."""
    known = f". The papers' shapes: {', '.join(PAPER_SHAPES)}." if "unknown model" in str(error) else ""
    return ConfigError(f"{error}{known}")


def _check_experts(shape: PaperShape, ranks: int) -> None:
    """Raises ConfigError if ranks cannot divide the experts of a paper's shape."""
    if not shape.experts:
        raise ConfigError(f"--expert-parallel is {ranks}, but model {shape.name!r} has no experts to divide")
    if shape.experts % ranks:
        raise ConfigError(f"--expert-parallel is {ranks}, which does not divide {shape.experts:,} experts")


def _packed(before: ModuleSpec, root: ModuleSpec) -> dict[str, int]:
    """Module -> the elements that its own parameters had `before` they were quantized, if they have fewer in `root`."""
    own = {module.name: sum(param.numel for param in module.params) for module in root.modules()}
    elements = {module.name: sum(param.numel for param in module.params) for module in before.modules()}
    return {name: count for name, count in elements.items() if own.get(name, count) < count}


_OF_TREE = (
    *("model", "max_length", "expert_parallel", "tile_limit", "precision", "optim", "optim_args", "moments"),
    *("load_in_4bit", "load_in_8bit", *(field.name for field in fields(LoraConfig))),
)
"""The settings on which the tree of a model of transformers depends, in addition to the limit of embeddings."""
_Tree = tuple[ModuleSpec, ModuleSpec, Mapping[str, float], Any, int]


def _tree_of_transformers(config: PlanConfig, name: str, count_flops: bool) -> _Tree:
    """Module tree, the same before layers are quantized, FLOPs per module of one sequence, text configuration, number
    of layers of text."""
    from pagoda.models.build import configuration_text

    memory = Memory(embedding_limit=config.memory.embedding_limit)
    asked = PlanConfig(memory=memory, **{setting: getattr(config, setting) for setting in _OF_TREE})
    try:
        return _built_tree(asked, configuration_text(name), count_flops)
    except ConfigError as error:
        raise _with_papers(error) from error


@lru_cache(maxsize=16)
@without_garbage_collection()
def _built_tree(asked: PlanConfig, configuration: str, count_flops: bool) -> _Tree:
    """As `_tree_of_transformers`, once for each content of a model's configuration. The layers of a built-in decoder
    are alike, so two of them are built, without values, and stand for all. In the tree, quantized parameters count as
    what they take."""
    from pagoda.forecast import flops as counting
    from pagoda.models import build_model
    from pagoda.models.build import is_encoder_decoder, layer_count
    from pagoda.models.lora import add_adapters
    from pagoda.prepare.construct import describe
    from pagoda.prepare.operator_tiles import Tiling
    from pagoda.prepare.quantize import linear_layers, pack_without_values, targets_of

    name, ranks, lora = str(asked.model), asked.expert_parallel, asked.part(LoraConfig)
    first: Any = SimpleNamespace(ranks=ranks, rank=0) if ranks > 1 else None
    layers, pairs = layer_count(name), is_encoder_decoder(name)
    alike = model_directory(name) is None and layers > _DESCRIBED and not pairs
    with counting.weightless():
        model: Any = build_model(name, seq_len=asked.seq_len, layers=_DESCRIBED if alike else None)
        packed: Mapping[str, Any] = {}
        if asked.quantized_format is not None:
            packed = linear_layers(model)
            lora = replace(lora, lora_target_modules=targets_of(model, lora.lora_target_modules))
        if lora.lora_r is not None:
            model = add_adapters(model, lora)
        Tiling(
            model,
            asked.tile_elements,
            cuts_stacks=not isinstance(asked.rule, TensorRule),
            in_blocks=any(state.per > 1 for state in asked.rule.own_states()),
            exchange=first,
            most_looked_up=asked.looked_up_elements,
        )
        with first_forward(name):
            counted = counting.forward_flops(model, 1, asked.seq_len) if count_flops else {}
        whole = root = describe(model)
        if asked.quantized_format is not None:
            pack_without_values(model, packed.values(), asked.quantized_format)
            root = describe(model, weight=asked.states[0].dtype)
    if alike:
        whole, _ = _repeated(whole, counted, layers)
        root, counted = _repeated(root, counted, layers)
    if pairs:  # the configuration has the number of one of both
        layers = len(layers_of(root))
    return root, whole, counted, model.config.get_text_config(), layers


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
    return after + name.removeprefix(before) if f"{name}.".startswith(f"{before}.") else name


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
