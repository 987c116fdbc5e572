"""Activations: an estimate of what forward and backward keep beside the pages."""

from dataclasses import dataclass, replace

from pagoda.config.training import ActivationMode
from pagoda.forecast.model_description import ModelDescription, Widths
from pagoda.memory.sizes import format_bytes
from pagoda.plan.activations import (
    BUFFERED,
    LEAST_OFFLOADED_BYTES,
    BlockSizes,
    SavedBlocks,
    StepSizes,
    Storages,
    recomputes,
)
from pagoda.plan.units import layers_of

_LOGIT_BYTES = 12
"""Of a logit at the worst moment of the loss: itself in 16 bits and in fp32, its gradient in both. docs/plan.md has
what was measured."""
_CHUNK_BYTES = 14 << 22
"""Of a chunked loss: what `models.linear_cross_entropy` has of a block, and a few numbers a token, which is less."""
_HIDDEN_TENSORS, _FFN_TENSORS = 14, 5
"""Tensors of hidden and of MLP width that a layer keeps for backward, gradients in flight included. Megatron-LM's
count (arXiv 2205.05198) is 34 bytes per token and hidden in 16 bits with an MLP four times as wide, which is
(9 + 2 * 4) * 2; backward holds a gradient for a part of them at a time."""

_WHOLE_TENSORS = 8
"""Of the tensors of hidden width, those that every tensor-parallel rank has whole: 10 of the 18 bytes that Megatron-LM
counts for them. The others, and those of MLP width, are divided."""
_CHOICE_TENSORS = 4
"""Tensors of hidden width that a layer of a mixture of experts also keeps of each of a token's choices: the tokens as
they are sorted, what experts give, and both with their weights, gradients in flight included."""


@dataclass(frozen=True, slots=True)
class ActivationEstimate:
    """Bytes at the worst moment of a micro-batch, on one rank: an estimate, not part of any budget of pages."""

    saved: int
    """What all layers keep until backward, where compute is: their inputs, everything, or what is on its way."""
    offloaded: int
    """What is elsewhere."""
    working: int
    """What one layer keeps while it is recomputed and differentiated; zero where none is."""
    logits: int
    """Around the loss."""
    gradients: int
    """Two of the largest parameter's gradient: the one autograd makes, and the one on its way to its extent. Or all of
    a layer's, which layers that run in tiles add up first, if that is more."""
    at_once: int = 1
    """Forwards whose layers keep something at once."""

    def with_policies(self, saved: SavedBlocks) -> "ActivationEstimate":
        """The same where each layer has a policy of its own."""
        blocks = list(zip(saved.sizes.blocks, saved.policies, strict=True))
        kept = self.at_once * sum(block.kept(policy) for block, policy in blocks)
        away = self.at_once * sum(block.away(policy) for block, policy in blocks)
        return replace(self, saved=kept, offloaded=away)

    @property
    def total(self) -> int:
        """Where compute is. Logits are gone before the first layer's backward."""
        return self.saved + max(self.working, self.logits) + self.gradients

    def __str__(self) -> str:
        away = f"; {format_bytes(self.offloaded)} are offloaded" if self.offloaded else ""
        return (
            f"about {format_bytes(self.total)} ({format_bytes(self.saved)} kept by layers, "
            f"{format_bytes(max(self.working, self.logits))} around the {self._peak}, "
            f"{format_bytes(self.gradients)} of gradients on their way{away})"
        )

    @property
    def _peak(self) -> str:
        return "loss" if self.logits >= self.working else "layer that is recomputed"


def estimate_activations(
    described: ModelDescription,
    tokens: int,
    itemsize: int,
    mode: ActivationMode,
    chunked_loss: bool | None = None,
    tile_tokens: int | None = None,
) -> ActivationEstimate:
    """Activations of a micro-batch of `tokens` tokens whose elements take `itemsize` bytes.

    `chunked_loss` as `pagoda train` takes it. With `tile_tokens`, layers run so many tokens at a time.
    """
    running = tokens if tile_tokens is None else min(tokens, tile_tokens)
    again = recomputes(mode)
    inputs = itemsize * tokens * described.hidden
    saved = described.at_once * described.layers * (inputs if again else _layer(described, tokens, itemsize))
    offloads = mode in ("offload", "recompute+offload")
    tensor = itemsize * running * (described.hidden if again else max(described.hidden, _ffn(described)))
    if chunked_loss is None:
        chunked_loss = chunking_helps(described, running, tokens, itemsize, again)
    largest = max(param.numel for param in described.root.walk())
    tiled_layer = (described.params - described.vocab * described.hidden) // described.layers if running < tokens else 0
    return ActivationEstimate(
        saved=min(saved, 2 * BUFFERED * tensor) if offloads else saved,
        offloaded=saved if offloads else 0,
        working=_layer(described, running, itemsize) if again else 0,
        logits=2 * inputs + _CHUNK_BYTES if chunked_loss else _LOGIT_BYTES * tokens * described.vocab,
        gradients=itemsize * max(2 * largest, tiled_layer),
        at_once=described.at_once,
    )


def estimate_sizes(described: ModelDescription, tokens: int, itemsize: int) -> StepSizes:
    """What a micro-batch of `tokens` tokens leaves to its backward, layer by layer, in storages: as
    `estimate_activations` counts it, without the loss."""
    hidden, ffn = (itemsize * tokens * width for width in (described.hidden, described.ffn))
    inputs, inner = Storages().with_one(hidden, LEAST_OFFLOADED_BYTES), Storages()
    divided, ffn = hidden // described.tensor_parallel, ffn // described.tensor_parallel
    whole = _whole_tensors(described)
    sizes = *[hidden] * (whole - 1), *[divided] * (_hidden_tensors(described) - whole), *[ffn] * _FFN_TENSORS
    for nbytes in sizes:
        inner = inner.with_one(nbytes, LEAST_OFFLOADED_BYTES)
    blocks = (BlockSizes(inputs, inputs, inner),) * len(layers_of(described.root))
    return StepSizes(blocks, (0,) * (len(blocks) + 1))


def chunking_helps(
    model: ModelDescription | Widths, tile_tokens: int, tokens: int, itemsize: int, checkpointing: bool
) -> bool:
    """Whether the loss in one piece would be the peak of activations, and in chunks would not take as much."""
    logits, layer = _LOGIT_BYTES * tokens * model.vocab, _HIDDEN_TENSORS * model.hidden + _FFN_TENSORS * model.ffn
    working = itemsize * tile_tokens * layer if checkpointing else 0
    return logits > working and logits > 2 * (2 * itemsize * tokens * model.hidden + _CHUNK_BYTES)


def _layer(described: ModelDescription, tokens: int, itemsize: int) -> int:
    """What a layer of `tokens` tokens keeps for backward."""
    whole = _whole_tensors(described)
    divided = (_hidden_tensors(described) - whole) * described.hidden + _FFN_TENSORS * described.ffn
    return itemsize * tokens * (whole * described.hidden + divided // described.tensor_parallel)


def _ffn(described: ModelDescription) -> int:
    """Width inside a layer's MLP on one rank."""
    return described.ffn // described.tensor_parallel


def _hidden_tensors(described: ModelDescription) -> int:
    return _HIDDEN_TENSORS + _CHOICE_TENSORS * described.top_k


def _whole_tensors(described: ModelDescription) -> int:
    """Those of them that every tensor-parallel rank has whole."""
    return _WHOLE_TENSORS if described.tensor_parallel > 1 else _hidden_tensors(described)
