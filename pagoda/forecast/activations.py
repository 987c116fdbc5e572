"""Estimates the memory that activations take in forward and backward. Pages are not included."""

from dataclasses import dataclass, replace

from pagoda.forecast.config import SizedRun
from pagoda.forecast.model_description import ModelDescription, Widths
from pagoda.memory.sizes import format_bytes
from pagoda.plan.activations import (
    LEAST_OFFLOADED_BYTES,
    ActivationPlan,
    BlockSizes,
    Policy,
    StepSizes,
    Storages,
    recomputes,
    window_of,
)
from pagoda.plan.units import ModuleSpec, layers_of
from pagoda.prepare.documents import mask_bytes

_LOGIT_BYTES = 12
"""Bytes per logit at the peak of the loss: the logit in 16 bits and in fp32, and its gradient in both. docs/plan.md has
the measurements."""
_CHUNK_BYTES = 14 << 22
"""Bytes that a chunked loss takes: the buffers that `models.linear_cross_entropy` has for one block. It also keeps a
few numbers per token, which take less."""
_HIDDEN_TENSORS, _FFN_TENSORS = 14, 5
"""Number of tensors of hidden width and of MLP width that a layer keeps for backward, including gradients in flight.
Megatron-LM (arXiv 2205.05198) counts 34 bytes per token and hidden element in 16 bits, with an MLP four times as wide.
That is (9 + 2 * 4) * 2. Backward holds the gradients of some of these tensors at a time."""
_NORM_TENSORS = 4
"""How many of those of hidden width are of norms. With sequence tiles, a layer keeps only a piece of these and of those
of MLP width. On two AMD EPYC cores, a layer then kept 10 whole tensors of hidden width."""

MALLOC = 4
"""By how many times its estimated activations a process that computes on the CPU may grow: glibc's malloc cannot reuse
all aligned blocks that torch frees. `benchmarks/activations.py estimate` has seen 1.1 to 2.8 with four layers,
and a fine-tuning run with thirty grew by 2.8 times. This leaves room for more."""
_WHOLE_TENSORS = 8
"""How many of the tensors of hidden width every tensor-parallel rank holds whole. Megatron-LM counts 10 of 18 bytes for
them. Ranks divide all other tensors."""
_CHOICE_TENSORS = 4
"""Tensors of hidden width that a mixture-of-experts layer also keeps for each expert a token is sent to: the sorted
tokens, the experts' outputs, and both multiplied by the routing weights, including gradients in flight."""


@dataclass(frozen=True, slots=True)
class ActivationEstimate:
    """Bytes at the peak of a micro-batch on one rank. This is an estimate, and no budget of pages includes it."""

    saved: int
    """Bytes that all layers keep in compute's memory until backward: their inputs, all activations, or activations on
    their way to another tier."""
    offloaded: int
    """Bytes offloaded to another tier."""
    working: int
    """Bytes that one layer keeps while it, or a piece of its MLP, is recomputed and differentiated. Zero if nothing is
    recomputed."""
    logits: int
    """Bytes around the loss."""
    gradients: int
    """Gradients that autograd holds around the loss and in the layers: the largest; or those of a layer on their way to
    their extents, and of a head that is tied to the embedding, which wait for the embedding's."""
    at_the_end: int
    """Bytes at the end of backward: gradients of the tied head, and of the embedding, which autograd adds to it; the
    first layer's on their way; and three tensors of hidden width: its input, and gradients around the embedding."""
    masks: int = 0
    """Bytes of attention masks of tokens times tokens."""
    at_once: int = 1
    """Number of forward passes whose activations exist at the same time."""

    def with_policies(self, saved: ActivationPlan) -> "ActivationEstimate":
        """The same estimate if each layer has its own policy."""
        blocks = list(zip(saved.sizes.blocks, saved.policies, strict=True))
        kept = self.at_once * sum(block.kept(policy) for block, policy in blocks)
        away = self.at_once * sum(block.away(policy) for block, policy in blocks)
        return replace(self, saved=kept, offloaded=away)

    @property
    def total(self) -> int:
        """Peak bytes in compute's memory. The logits are freed before the first layer's backward."""
        return self.masks + max(self.saved + max(self.working, self.logits) + self.gradients, self.at_the_end)

    def __str__(self) -> str:
        away = f"; {format_bytes(self.offloaded)} are offloaded" if self.offloaded else ""
        peak = "loss" if self.logits >= self.working else "layer that is recomputed"
        parts = (
            f"{format_bytes(self.saved)} kept by layers, {format_bytes(max(self.working, self.logits))} around the "
            f"{peak}, {format_bytes(self.gradients)} of gradients on their way"
        )
        if self.total == self.masks + self.at_the_end:
            parts = "at the end of backward, with gradients of the embedding and of the head that is tied to it"
        masks = f"; {format_bytes(self.masks)} are masks of attention in a window" if self.masks else ""
        return f"about {format_bytes(self.total)} ({parts}{masks}{away})"


def activations_of(config: SizedRun, described: ModelDescription) -> ActivationEstimate:
    """Estimate the activations of a micro-batch of a run with these settings."""
    mode, tokens, itemsize = config.activations, config.tokens, config.itemsize
    running, piece = config.tile_tokens, config.piece_tokens
    again, in_pieces = recomputes(mode), piece < running
    block, policy = _block(described, tokens, itemsize, in_pieces), Policy.RECOMPUTE if again else Policy.KEEP
    saved = described.at_once * described.layers * block.kept(policy)
    offloads, ffn = mode in ("offload", "recompute+offload"), described.ffn // described.tensor_parallel
    tensor = itemsize * running * (described.hidden if again else max(described.hidden, ffn))
    chunked_loss = chunking_helps(config, described) if config.chunked_loss is None else config.chunked_loss
    working = _block(described, running, itemsize, in_pieces).kept(Policy.KEEP) if again else 0
    if in_pieces:
        working += itemsize * piece * (_NORM_TENSORS * described.hidden + _FFN_TENSORS * ffn)
    largest, tied, of_layer = _gradients(described.root, whole_layers=piece < tokens)
    return ActivationEstimate(
        saved=min(saved, 2 * window_of(tensor)) if offloads else saved,
        offloaded=saved if offloads else 0,
        working=working,
        logits=2 * block.inputs.nbytes + _CHUNK_BYTES if chunked_loss else _LOGIT_BYTES * tokens * described.vocab,
        gradients=itemsize * max(largest, tied + of_layer),
        at_the_end=itemsize * (2 * tied + of_layer) + 3 * block.inputs.nbytes,
        masks=mask_bytes(tokens, described.row_with_mask, itemsize),
        at_once=described.at_once,
    )


def _gradients(root: ModuleSpec, whole_layers: bool) -> tuple[int, int, int]:
    """Elements of the largest gradient, of the largest of a tied parameter, and of those of a layer that exist at once.

    Autograd computes one while another is copied to its extent. `whole_layers`: layers or their MLPs run in
    tiles, which add up all gradients of a layer first.
    """
    used_again = {name for module in root.modules() for name in module.tied}
    sizes = {param.name: param.numel for param in root.walk() if param.trainable}
    layers = [[param.numel for param in layer.walk() if param.trainable] for layer in layers_of(root)]
    at_once = (sum(layer if whole_layers else sorted(layer)[-2:]) for layer in layers)
    tied = max((numel for name, numel in sizes.items() if name in used_again), default=0)
    return max(sizes.values(), default=0), tied, max(at_once, default=0)


def sizes_of(config: SizedRun, described: ModelDescription) -> StepSizes:
    """Sizes of what each layer keeps for backward in a micro-batch, without the loss."""
    block = _block(described, config.tokens, config.itemsize, config.sequence_tiles is not None)
    blocks = (block,) * len(layers_of(described.root))
    return StepSizes(blocks, (0,) * (len(blocks) + 1))


def _block(described: ModelDescription, tokens: int, itemsize: int, in_pieces: bool) -> BlockSizes:
    """What one layer keeps for backward for `tokens` tokens, without the pieces of MLPs and norms."""
    hidden, ffn = (itemsize * tokens * width for width in (described.hidden, described.ffn))
    parts, tensors = described.tensor_parallel, _HIDDEN_TENSORS + _CHOICE_TENSORS * described.top_k
    whole = _WHOLE_TENSORS if parts > 1 else tensors
    inputs, inner = Storages().with_one(hidden, LEAST_OFFLOADED_BYTES), Storages()
    whole -= _NORM_TENSORS * in_pieces
    tensors -= _NORM_TENSORS * in_pieces
    wide = 0 if in_pieces else _FFN_TENSORS
    sizes = *[hidden] * (whole - 1), *[hidden // parts] * (tensors - whole), *[ffn // parts] * wide
    for nbytes in sizes:
        inner = inner.with_one(nbytes, LEAST_OFFLOADED_BYTES)
    return BlockSizes(inputs, inputs, inner)


def chunking_helps(config: SizedRun, model: ModelDescription | Widths) -> bool:
    """Whether an unchunked loss would set the peak of activations, and a chunked loss would take less."""
    logits, norms = _LOGIT_BYTES * config.tokens * model.vocab, _NORM_TENSORS * model.hidden
    kept = config.tile_tokens * (_HIDDEN_TENSORS * model.hidden - norms)
    working = config.itemsize * (kept + config.piece_tokens * (norms + _FFN_TENSORS * model.ffn))
    twice_chunked = 2 * (2 * config.itemsize * config.tokens * model.hidden + _CHUNK_BYTES)
    return logits > max(twice_chunked, working if recomputes(config.activations) else 0)
