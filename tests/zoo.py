"""Small models of every kind Pagoda promises to train, and one loop that trains them."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

import pagoda
from pagoda.config.run import Moments
from pagoda.config.training import ActivationMode, Precision
from pagoda.memory.sizes import parse_bytes
from pagoda.optim import AdamW, Rule
from pagoda.optim.rule import StateSpec, TensorRule
from pagoda.plan.layout import GRAD, WEIGHT
from pagoda.plan.options import Options
from pagoda.plan.planner import Plan, make_plan
from pagoda.plan.tiers import Budgets
from pagoda.plan.units import ModuleSpec
from pagoda.prepare.construct import describe
from pagoda.prepare.operator_tiles import Tiling

VOCABULARY, BATCH, LENGTH = 96, 2, 16
LAYERS = 4
Batch = dict[str, torch.Tensor]


class Checkpointed(nn.Module):
    """Can make checkpoints of its blocks, as models of transformers do."""

    kwargs: dict[str, bool] | None = None

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: dict[str, bool]) -> None:
        self.kwargs = gradient_checkpointing_kwargs

    def through(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return block(x) if self.kwargs is None else checkpoint(block, x, **self.kwargs)


class ConvNet(Checkpointed):
    """Residual convolutions, a parameter held directly by the model, and a linear layer used twice."""

    def __init__(self, channels: int = 64, blocks: int = LAYERS) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(channels, 1, 1))
        self.stem = nn.Conv2d(3, channels, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.GroupNorm(4, channels), nn.GELU(), nn.Conv2d(channels, channels, 3, padding=1))
            for _ in range(blocks)
        )
        self.mix = nn.Linear(64, 64)
        self.head = nn.Linear(channels * 4, VOCABULARY)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.stem(images.to(self.scale.dtype)) * self.scale
        for block in self.blocks:
            hidden = hidden + self.through(block, hidden)
        hidden = self.mix(torch.relu(self.mix(hidden.flatten(2)))).unflatten(2, (8, 8))
        hidden = nn.functional.avg_pool2d(hidden, 4)  # the adaptive one has no deterministic backward on a GPU
        return nn.functional.cross_entropy(self.head(hidden.flatten(1)).float(), labels)


class Block(nn.Module):
    """Half of what a transformer's layer has, with dropout."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + nn.functional.dropout(self.down(torch.tanh(self.up(self.norm(x)))), 0.1, self.training)


class Plain(Checkpointed):
    """A plain module with a parameter of its own, a layer that is used twice and tied weights; faster than those of
    transformers."""

    def __init__(self, blocks: int = LAYERS, width: int = 96, tied: bool = True) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))
        self.embed = nn.Embedding(VOCABULARY, width)
        nn.init.normal_(self.embed.weight, std=width**-0.5)  # so that the head cannot tell each token from the start
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids) * self.scale
        for block in (*self.blocks, self.blocks[0]):
            x = self.through(block, x)
        return nn.functional.cross_entropy(self.head(x).float().flatten(0, 1), labels.flatten())


class _MixedLayer(nn.Module):
    """A norm and a state-space model's `A_log` in fp32 around matrices in bf16, and a router in fp32."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.router = nn.LayerNorm(width), nn.Linear(width, 2)
        self.log = nn.Parameter(torch.rand(width))
        self.up, self.down = nn.Linear(width, 2 * width).bfloat16(), nn.Linear(2 * width, width).bfloat16()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = self.norm(x.float())
        share = self.router(wide).softmax(-1)[..., :1]
        inner = self.down(torch.tanh(self.up((wide * torch.exp(-self.log)).bfloat16())))
        return x + (share * inner.float()).to(x.dtype)


class MixedDtypes(Checkpointed):
    """Layers that are used twice, between a tied embedding in bf16 and a scale in fp32 that the model holds itself."""

    def __init__(self, width: int = 96, layers: int = 3) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))
        self.embed = nn.Embedding(VOCABULARY, width).bfloat16()
        nn.init.normal_(self.embed.weight, std=width**-0.5)
        self.layers = nn.ModuleList(_MixedLayer(width) for _ in range(layers))
        self.head = nn.Linear(width, VOCABULARY, bias=False).bfloat16()
        self.head.weight = self.embed.weight

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = (self.embed(input_ids) * self.scale).bfloat16()
        for layer in (*self.layers, self.layers[0]):
            x = self.through(layer, x)
        return nn.functional.cross_entropy(self.head(x).float().flatten(0, 1), labels.flatten())


SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "use_cache": False,
}


def llama(layers: int = LAYERS) -> nn.Module:
    return LlamaForCausalLM(LlamaConfig(**SIZES, num_hidden_layers=layers, tie_word_embeddings=True))


def qwen3(layers: int = LAYERS) -> nn.Module:
    return Qwen3ForCausalLM(Qwen3Config(**SIZES, num_hidden_layers=layers, head_dim=16, tie_word_embeddings=False))


def gpt2(layers: int = LAYERS) -> nn.Module:
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY,
            n_positions=32,
            n_embd=64,
            n_layer=layers,
            n_head=4,
            use_cache=False,
            resid_pdrop=0.1,
            embd_pdrop=0.1,
            attn_pdrop=0.0,
            bos_token_id=0,
            eos_token_id=0,
        )
    )


def t5(layers: int = 4, dropout: float = 0.0) -> nn.Module:
    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=VOCABULARY,
            d_model=64,
            d_kv=16,
            d_ff=96,
            num_layers=layers,
            num_heads=4,
            decoder_start_token_id=0,
            use_cache=False,
            dropout_rate=dropout,
        )
    )


def mixtral(layers: int = 2) -> nn.Module:
    """With more experts than a micro-batch uses."""
    sizes = {**SIZES, "intermediate_size": 32, "num_hidden_layers": layers, "num_local_experts": 32}
    return MixtralForCausalLM(MixtralConfig(**sizes))


MODELS: dict[str, Callable[..., nn.Module]] = {
    "plain": Plain,
    "llama": llama,
    "mixtral": mixtral,
    "gpt2": gpt2,
    "qwen3": qwen3,
    "t5": t5,
    "conv": ConvNet,
    "mixed": MixedDtypes,
}


def batch(name: str, generator: torch.Generator) -> Batch:
    """One micro-batch for a model."""
    if name == "conv":
        images = torch.randn(BATCH, 3, 8, 8, generator=generator)
        return {"images": images, "labels": torch.randint(VOCABULARY, (BATCH,), generator=generator)}
    ids = torch.randint(VOCABULARY, (BATCH, LENGTH), generator=generator)
    return {"input_ids": ids, "labels": ids}


def assert_equal(mine: Any, other: Any, name: object = "") -> None:
    """The same names, and below them the same, with the same bits."""
    if isinstance(mine, dict):
        assert mine.keys() == other.keys(), name
        for key, value in mine.items():
            assert_equal(value, other[key], f"{name} {key}")
    else:
        assert torch.equal(mine, other) if isinstance(mine, torch.Tensor) else mine == other, name


def loss_of(output: Any) -> torch.Tensor:
    """The loss, whether a model returns it bare or in a Hugging Face output."""
    return output if isinstance(output, torch.Tensor) else output.loss


def precision_of(numbers: str) -> pagoda.MixedPrecision:
    """That of weights and, with "+", that of gradients, as in "bf16+fp32". "own": those of the model."""
    weights, _, gradients = numbers.partition("+")
    return pagoda.MixedPrecision(None if weights == "own" else weights, gradients or None)


@dataclass(frozen=True)
class Recipe:
    """What to train and how; everything but placement."""

    model: str
    checkpointing: bool = False
    clip: float | None = 0.5
    accumulation: int = 1
    announced: bool = False
    frozen: bool | Literal["matrices"] = False
    """Whether every third parameter is frozen; or all but vectors, as with adapters."""
    precision: str = "bf16"
    """As `precision_of` takes it."""
    moments: Moments = "fp32"
    rule: Rule | None = None
    """None: AdamW."""
    activations: ActivationMode = "keep"
    steps: int = 5
    layers: int | None = None
    """Where the usual ones are too few to be streamed."""

    @property
    def numbers(self) -> pagoda.MixedPrecision:
        return precision_of(self.precision)

    def build(self) -> nn.Module:
        torch.manual_seed(0)
        model = MODELS[self.model]() if self.layers is None else MODELS[self.model](self.layers)
        if self.checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if self.frozen:
            params = [*model.parameters()]
            for param in params[2::3] if self.frozen is True else [p for p in params if p.dim() > 1]:
                param.requires_grad_(False)
        return model.train()


@dataclass
class Outcome:
    """Everything a run leaves behind that must not depend on placement."""

    losses: list[float] = field(default_factory=list)
    norms: list[float | None] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    optimizer: dict[str, object] = field(default_factory=dict)
    peak_bytes: dict[str, int] = field(default_factory=dict)
    faults: list[int] = field(default_factory=list)
    guesses: list[tuple[int, int]] = field(default_factory=list)
    """Per step, where they are noted: speculative updates that stood, and that were undone."""
    moved: list[dict[str, int]] = field(default_factory=list)
    """Per step: lane -> bytes."""
    plan: Plan | None = None

    def assert_same_bits(self, other: "Outcome") -> None:
        for of in "losses", "norms", "weights":
            assert_equal(getattr(self, of), getattr(other, of), of)
        assert_equal(self.optimizer["state"], other.optimizer["state"])


Loop = Callable[[nn.Module, Any, Outcome], None]
"""What a user writes: forward, backward, step. The optimizer is Pagoda's or a reference with the same methods."""


def run(
    model: nn.Module,
    memory: pagoda.Memory,
    loop: Loop,
    *,
    lr: float = 1e-2,
    moments: Moments = "fp32",
    rule: Rule | None = None,
    **wrap: Any,
) -> Outcome:
    """Wrap a model, run a training loop over it and collect what it leaves behind."""
    rule = rule or AdamW(lr=lr, weight_decay=0.1, moments=moments)
    model, optimizer = pagoda.wrap(model, rule, memory=memory, **{"precision": "bf16", **wrap})
    outcome = Outcome()
    torch.manual_seed(2)
    loop(model, optimizer, outcome)
    outcome.weights = model.state_dict()
    outcome.optimizer = optimizer.state_dict()
    outcome.peak_bytes = optimizer.stats.peak_bytes
    outcome.plan = pagoda.plan_of(model)
    for tier, peak in outcome.peak_bytes.items():
        assert peak <= outcome.plan.peak_bytes[tier], tier
    optimizer.close()
    return outcome


def take_step(optimizer: Any, outcome: Outcome) -> None:
    """Step, clear the gradients and note the figures of the step."""
    optimizer.step()
    optimizer.zero_grad()
    outcome.norms.append(optimizer.stats.grad_norm)
    outcome.faults.append(optimizer.stats.faults)
    outcome.moved.append(optimizer.stats.bytes_moved)


def losses_of(loss_of: Callable[[int], torch.Tensor], optimizer: Any, steps: int = 3) -> list[float]:
    """Trains on a loss, which may depend on the number of the step."""
    losses = []
    for step in range(steps):
        loss = loss_of(step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def usual_loop(
    recipe: Recipe,
    data: Callable[[Any], Any] = lambda batch: batch,
    after: Callable[[int, Any, Any], None] = lambda step, model, optimizer: None,
) -> Loop:
    """Forward and backward over as many micro-batches as a step accumulates, then the step. `data` moves a batch to
    where the model computes. `after` is called after each step."""

    def loop(model: nn.Module, optimizer: Any, outcome: Outcome) -> None:
        generator = torch.Generator().manual_seed(1)
        scale = getattr(optimizer, "scale", lambda loss: loss)
        for step in range(1, recipe.steps + 1):
            for _ in range(recipe.accumulation):
                loss = loss_of(model(**data(batch(recipe.model, generator))))
                scale(loss / recipe.accumulation).backward()
                outcome.losses.append(loss.item())
            take_step(optimizer, outcome)
            after(step, model, optimizer)

    return loop


def train(recipe: Recipe, memory: pagoda.Memory, loop: Loop | None = None, **settings: Any) -> Outcome:
    """Train a model of the zoo under a placement. `settings`: more of `wrap`."""
    return run(
        recipe.build(),
        memory,
        loop or usual_loop(recipe),
        moments=recipe.moments,
        rule=recipe.rule,
        precision=recipe.numbers,
        max_grad_norm=recipe.clip,
        gradient_accumulation_steps=recipe.accumulation if recipe.announced else None,
        **{"activations": recipe.activations, **settings},
    )


UNIT_LIMIT, PAGE = "128KiB", 4096
RESIDENT = pagoda.Memory(host="64MiB", unit_limit=UNIT_LIMIT, page_size=PAGE)


HOST_WEIGHTS, ALL_ON_SSD, ARENA, ARENA_ALL_ON_SSD = "host-weights", "all-on-ssd", "arena", "arena-all-on-ssd"
PLACEMENTS = (HOST_WEIGHTS, ALL_ON_SSD, ARENA, ARENA_ALL_ON_SSD)


def squeeze(
    model: nn.Module,
    placement: str,
    directory: Path,
    *,
    precision: Precision | None = "bf16",
    announced: int | None = None,
    clipping: bool = True,
    asynchronous: bool = False,
    unit_limit: str = UNIT_LIMIT,
    moments: Moments = "fp32",
    rule: Rule | None = None,
    activations: ActivationMode = "keep",
) -> pagoda.Memory:
    """The smallest budgets under which a model trains in a placement.

    HOST_WEIGHTS keeps weights and gradients in RAM and every moment on SSD; ALL_ON_SSD has in RAM what streams
    through it; ARENA computes in the smallest memory of its own. Without a precision, each parameter keeps its dtype.
    """
    options = Options(
        PAGE, parse_bytes(unit_limit), announced, clipping, asynchronous=asynchronous, activations=activations
    )
    experts = Tiling(model, cuts_stacks=not isinstance(rule, TensorRule))
    own = (lambda param: param.dtype) if precision is None else None
    states = (rule or AdamW(moments=moments)).states(precision or "bf16")
    root = describe(model, None, states[0].dtype, own)
    experts.undo()
    layout = make_plan(root, states, Budgets(1 << 40), options).layout
    device = layout.lease_pages(ahead=1) * PAGE if placement in (ARENA, ARENA_ALL_ON_SSD) else None
    host = 64 << 20
    if placement == HOST_WEIGHTS:
        grads = layout.total_pages(GRAD)
        if options.update_during_backward:
            grads = min(grads, 4 * max(layout.pages(unit, GRAD) for unit in layout.units))
        ring = layout.least_ring_slots * sum(layout.block_pages(state.name) for state in layout.moments)
        weights = layout.total_pages(WEIGHT)
        if asynchronous:
            weights, grads = 2 * weights, 2 * grads
        scales = sum(layout.total_pages(state.name) for state in layout.small)
        host = (weights + grads + ring + scales + layout.work_pages + layout.piece_pages) * PAGE
    elif placement in (ALL_ON_SSD, ARENA_ALL_ON_SSD):
        host = least_host(root, states, Budgets(PAGE, device, 1 << 40), options)
    return pagoda.Memory(
        device=None if device is None else f"cpu:{device}",
        host=host,
        ssd=None if placement == ARENA else f"{directory}:1GiB",
        page_size=PAGE,
        unit_limit=unit_limit,
    )


def least(recipe: Recipe, placement: str, directory: Path, **others: Any) -> pagoda.Memory:
    """The smallest budgets for a recipe."""
    return squeeze(
        recipe.build(),
        placement,
        directory,
        precision=recipe.precision,
        announced=recipe.accumulation if recipe.announced else None,
        clipping=recipe.clip is not None,
        moments=recipe.moments,
        rule=recipe.rule,
        activations=recipe.activations,
        **others,
    )


def least_host(root: ModuleSpec, states: tuple[StateSpec, ...], too_small: Budgets, options: Options) -> int:
    """The smallest host budget of a plan: the one that its refusal names."""
    with pytest.raises(pagoda.BudgetError) as refused:
        make_plan(root, states, too_small, options)
    assert refused.value.tier == "host"
    return refused.value.needed_bytes
