"""Small models of every kind Pagoda promises to train, and one loop that trains them."""

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

import pagoda
from pagoda.plan.planner import Plan

VOCABULARY, BATCH, LENGTH = 96, 2, 16
Batch = dict[str, torch.Tensor]


class ConvNet(nn.Module):
    """Residual convolutions, a parameter held directly by the model, a linear layer used twice, and optionally
    checkpoints, which a plain module has to make itself."""

    def __init__(self, channels: int = 64, blocks: int = 4) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(channels, 1, 1))
        self.stem = nn.Conv2d(3, channels, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.GroupNorm(4, channels), nn.GELU(), nn.Conv2d(channels, channels, 3, padding=1))
            for _ in range(blocks)
        )
        self.mix = nn.Linear(64, 64)
        self.head = nn.Linear(channels * 4, VOCABULARY)
        self._checkpoint_kwargs: dict[str, bool] | None = None

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: dict[str, bool]) -> None:
        self._checkpoint_kwargs = gradient_checkpointing_kwargs

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.stem(images.to(self.scale.dtype)) * self.scale
        for block in self.blocks:
            if self._checkpoint_kwargs is None:
                hidden = hidden + block(hidden)
            else:
                hidden = hidden + checkpoint(block, hidden, **self._checkpoint_kwargs)
        hidden = self.mix(torch.relu(self.mix(hidden.flatten(2)))).unflatten(2, (8, 8))
        hidden = nn.functional.adaptive_avg_pool2d(hidden, 2)
        return nn.functional.cross_entropy(self.head(hidden.flatten(1)).float(), labels)


def llama() -> nn.Module:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            tie_word_embeddings=True,
            use_cache=False,
        )
    )


def gpt2() -> nn.Module:
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY,
            n_positions=32,
            n_embd=64,
            n_layer=3,
            n_head=4,
            use_cache=False,
            resid_pdrop=0.1,
            embd_pdrop=0.1,
            attn_pdrop=0.0,
            bos_token_id=0,
            eos_token_id=0,
        )
    )


def qwen3() -> nn.Module:
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCABULARY,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            tie_word_embeddings=False,
            use_cache=False,
        )
    )


def t5() -> nn.Module:
    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=VOCABULARY,
            d_model=64,
            d_kv=16,
            d_ff=96,
            num_layers=2,
            num_heads=4,
            decoder_start_token_id=0,
            use_cache=False,
            dropout_rate=0.0,
        )
    )


MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": llama,
    "gpt2": gpt2,
    "qwen3": qwen3,
    "t5": t5,
    "conv": ConvNet,
}


def batch(name: str, generator: torch.Generator) -> Batch:
    """One micro-batch for a model."""
    if name == "conv":
        images = torch.randn(BATCH, 3, 8, 8, generator=generator)
        return {"images": images, "labels": torch.randint(VOCABULARY, (BATCH,), generator=generator)}
    ids = torch.randint(VOCABULARY, (BATCH, LENGTH), generator=generator)
    return {"input_ids": ids, "labels": ids}


def loss_of(output: object) -> torch.Tensor:
    """The loss, whether a model returns it bare or in a Hugging Face output."""
    return output if isinstance(output, torch.Tensor) else output.loss  # type: ignore[attr-defined,no-any-return]


@dataclass(frozen=True)
class Recipe:
    """What to train and how; everything but placement."""

    model: str
    checkpointing: bool = False
    reentrant: bool = False
    clip: float | None = 0.5
    accumulation: int = 1
    announced: bool = False
    frozen: bool = False
    precision: str = "bf16"
    steps: int = 5

    def build(self) -> nn.Module:
        torch.manual_seed(0)
        model = MODELS[self.model]()
        if self.checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": self.reentrant})
        if self.frozen:
            params = list(model.parameters())
            for param in params[2::3]:
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
    moved: list[dict[str, int]] = field(default_factory=list)
    """Per step: lane -> bytes."""
    plan: Plan | None = None

    def assert_same_bits(self, other: "Outcome") -> None:
        assert self.losses == other.losses
        assert self.norms == other.norms
        assert self.weights.keys() == other.weights.keys()
        for name, weight in self.weights.items():
            assert torch.equal(weight, other.weights[name]), name
        mine, others = self.optimizer["state"], other.optimizer["state"]
        assert mine.keys() == others.keys()  # type: ignore[attr-defined]
        for index, states in mine.items():  # type: ignore[attr-defined]
            for name, value in states.items():
                assert torch.equal(value, others[index][name]), (index, name)  # type: ignore[index]


def train(recipe: Recipe, memory: pagoda.Memory) -> Outcome:
    """Train a model of the zoo under a placement."""
    model, optimizer = pagoda.wrap(
        recipe.build(),
        pagoda.AdamW(lr=1e-2, weight_decay=0.1),
        memory=memory,
        precision=recipe.precision,  # type: ignore[arg-type]
        clip_grad_norm=recipe.clip,
        accumulation_steps=recipe.accumulation if recipe.announced else None,
    )
    outcome = Outcome()
    generator = torch.Generator().manual_seed(1)
    torch.manual_seed(2)
    for _ in range(recipe.steps):
        for _ in range(recipe.accumulation):
            loss = loss_of(model(**batch(recipe.model, generator)))
            (loss / recipe.accumulation).backward()
            outcome.losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        outcome.norms.append(optimizer.stats.grad_norm)
        outcome.faults.append(optimizer.stats.faults)
        outcome.moved.append(optimizer.stats.bytes_moved)
    outcome.weights = model.state_dict()
    outcome.optimizer = optimizer.state_dict()
    outcome.peak_bytes = optimizer.stats.peak_bytes
    outcome.plan = pagoda.plan_of(model)
    for tier, peak in outcome.peak_bytes.items():
        assert peak <= pagoda.plan_of(model).peak_bytes[tier], tier
    optimizer.close()
    return outcome


UNIT_LIMIT, PAGE = "128KiB", 4096
RESIDENT = pagoda.Memory(host="64MiB", unit_limit=UNIT_LIMIT, page_size=PAGE)


def least_host(recipe: Recipe, **memory: str) -> int:
    """The smallest host budget that trains a recipe: everything that can be on SSD is there."""
    with pytest.raises(pagoda.BudgetError) as refused:
        train(recipe, pagoda.Memory(host=PAGE, unit_limit=UNIT_LIMIT, page_size=PAGE, **memory))
    assert refused.value.tier == "host"
    assert refused.value.needed_bytes is not None
    return refused.value.needed_bytes
