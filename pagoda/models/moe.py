"""GPT-MoE and T5-MoE: the mixtures of experts that are built, by the shapes that are planned.

A model's modules and parameters have the names that `forecast.describe` gives those of its shape.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from pagoda.errors import ConfigError
from pagoda.models.layers import Attention, CrossAttention, Embedding, Head, RelativePositions, norm_of, recomputed
from pagoda.models.mixture import Mixture, TokenExchange
from pagoda.models.mixture_shapes import RoutingConfig
from pagoda.models.papers import PaperShape

_IGNORED = -100
"""A label that no loss is taken of, as in torch and transformers."""


@dataclass(frozen=True)
class MixtureOutput:
    """What a forward of a mixture of experts gives."""

    loss: Tensor | None
    """Cross entropy, and every block's balance loss times its weight; None without labels."""
    logits: Tensor
    """[B, S, vocabulary]."""
    aux_loss: Tensor
    """The balance loss, mean over blocks, without its weight: 1 where every expert has the same load."""
    dropped: Tensor
    """Share of the tokens' choices that no expert had room for, mean over blocks."""


@dataclass(frozen=True)
class _Options:
    """What a model is built with, beside its shape."""

    routing: RoutingConfig
    gradient_checkpointing: bool
    exchange: TokenExchange | None


class Block(nn.Module):
    """Attention, in a decoder of an encoder-decoder attention to the encoder, and a mixture of experts.

    With checkpointing, attention and every expert are recomputed, routing and what travels between ranks are not.
    """

    def __init__(self, shape: PaperShape, options: _Options, *, causal: bool, cross: bool) -> None:
        super().__init__()
        self.attention = Attention(shape, causal=causal)
        self.cross = CrossAttention(shape) if cross else None
        self.mlp = Mixture(
            shape, options.routing, checkpointing=options.gradient_checkpointing, exchange=options.exchange
        )
        self._checkpointing = options.gradient_checkpointing

    def forward(
        self, hidden: Tensor, bias: Tensor | None = None, memory: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """[B, S, H] to the same, with the mixture's balance loss and share of dropped entries."""
        hidden = self._run(self.attention, hidden, bias)
        if self.cross is not None:
            hidden = self._run(self.cross, hidden, memory)
        return self.mlp(hidden)  # type: ignore[no-any-return]

    def _run(self, part: nn.Module, *inputs: Tensor | None) -> Tensor:
        return recomputed(part, *inputs) if self._checkpointing else part(*inputs)  # type: ignore[no-any-return]


class MixtureModel(nn.Module):
    """What GPT-MoE and T5-MoE have in common: blocks that also give figures of their routing, and the loss."""

    def __init__(self, shape: PaperShape, options: _Options) -> None:
        super().__init__()
        self.shape = shape
        self._balance_coefficient = options.routing.balance_coefficient

    def get_input_embeddings(self) -> nn.Module:
        """The table of the token embedding, as transformers' models give it."""
        return self.get_submodule("embedding.token")

    def _output(self, logits: Tensor, labels: Tensor | None, figures: Tensor) -> MixtureOutput:
        """`labels` [B, S] are what `logits` [B, S, vocabulary] should be; `figures` [blocks, 2] are routing's."""
        balance, dropped = figures.mean(0)
        loss = None
        if labels is not None:
            loss = functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), ignore_index=_IGNORED)
            loss = loss + self._balance_coefficient * figures[:, 0].sum()
        return MixtureOutput(loss, logits, balance, dropped.detach())


class GPTMoE(MixtureModel):
    """GPT-2 with a mixture of experts in every block."""

    def __init__(self, shape: PaperShape, options: _Options) -> None:
        super().__init__(shape, options)
        self.embedding = nn.ModuleDict(
            {
                "token": Embedding(shape.vocab, shape.hidden, std=0.02),
                "position": Embedding(shape.seq_len, shape.hidden, std=0.02),
            }
        )
        self.blocks = nn.ModuleList(Block(shape, options, causal=True, cross=False) for _ in range(shape.layers))
        self.norm = norm_of(shape)
        self.head = Head(self.embedding["token"].weight)  # type: ignore[arg-type]

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> MixtureOutput:
        """`input_ids` int64 [B, S]. `labels`, the same or with -100 where no loss is to be taken, are shifted here."""
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        hidden = self.embedding["token"](input_ids) + self.embedding["position"](positions)
        hidden, figures = _through(self.blocks, hidden)
        logits = self.head(self.norm(hidden))
        following = None if labels is None else functional.pad(labels[:, 1:], (0, 1), value=_IGNORED)
        return self._output(logits, following, figures)


class Stack(nn.Module):
    """The encoder or the decoder of a T5, its blocks named by their numbers."""

    def __init__(self, shape: PaperShape, options: _Options, *, decoder: bool) -> None:
        super().__init__()
        self.relative = RelativePositions(shape, causal=decoder)
        self.blocks = [
            Block(shape, options, causal=decoder, cross=decoder)
            for _ in range(shape.decoder_layers if decoder else shape.layers)
        ]
        for index, block in enumerate(self.blocks):
            self.add_module(str(index), block)
        self.norm = norm_of(shape)


class T5MoE(MixtureModel):
    """T5 1.0 with a mixture of experts in every block: Switch Transformer, but for experts in every second block."""

    def __init__(self, shape: PaperShape, options: _Options) -> None:
        super().__init__(shape, options)
        self.embedding = nn.ModuleDict({"token": Embedding(shape.vocab, shape.hidden, std=1.0)})
        self.encoder = Stack(shape, options, decoder=False)
        self.decoder = Stack(shape, options, decoder=True)
        self.head = Head(self.embedding["token"].weight)  # type: ignore[arg-type]

    def forward(self, input_ids: Tensor, labels: Tensor) -> MixtureOutput:
        """The encoder reads `input_ids`, int64 [B, K]; the decoder is to say `labels`, int64 [B, S], -100 where no loss
        is to be taken. What it reads are the labels before each, from 0 on, as in transformers."""
        memory, first = self._run(self.encoder, input_ids)
        before = functional.pad(labels[:, :-1], (1, 0), value=0)
        before = before.masked_fill(before == _IGNORED, 0)
        hidden, second = self._run(self.decoder, before, memory)
        logits = self.head(hidden * self.shape.hidden**-0.5)
        return self._output(logits, labels, torch.cat([first, second]))

    def _run(self, stack: Stack, ids: Tensor, *memory: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.embedding["token"](ids)
        hidden, figures = _through(stack.blocks, hidden, stack.relative(ids.shape[1]), *memory)
        return stack.norm(hidden), figures


def _through(
    blocks: Iterable[nn.Module], hidden: Tensor, bias: Tensor | None = None, memory: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """[B, S, H] after all blocks, and the figures of each: [blocks, 2]."""
    figures = []
    for block in blocks:
        hidden, *of_block = block(hidden, bias, memory)
        figures.append(torch.stack(of_block))
    return hidden, torch.stack(figures)


def build_mixture(
    shape: PaperShape,
    config: RoutingConfig | None = None,
    *,
    gradient_checkpointing: bool = True,
    exchange: TokenExchange | None = None,
) -> MixtureModel:
    """The model of a shape with experts, in training mode, its parameters fp32; call it inside `pagoda.init()` to keep
    them on the meta device.

    With `exchange`, it has one rank's part of every block's experts.

    Raises ConfigError: a shape without experts, more experts a token than there are, or ranks that do not divide them.
    """
    config = config or RoutingConfig()
    if not shape.experts:
        raise ConfigError(f"model {shape.name!r} has no experts")
    if config.top_k is not None and config.top_k > shape.experts:
        raise ConfigError(f"routing.top_k is {config.top_k}, but model {shape.name!r} has {shape.experts} experts")
    if exchange is not None and shape.experts % exchange.ranks:
        raise ConfigError(f"{exchange.ranks} ranks do not divide the {shape.experts} experts of model {shape.name!r}")
    family = {"gpt": GPTMoE, "t5": T5MoE}[shape.family]
    return family(shape, _Options(config, gradient_checkpointing, exchange)).train()
