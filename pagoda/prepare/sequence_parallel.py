"""Sequence parallelism: consecutive ranks divide each sequence, and exchange tokens for heads around attention.

This is Ulysses (arXiv 2309.14509). Everything but attention works on each token alone, so a rank runs it on its own
tokens. For attention, a rank gets all tokens of its share of the heads. For everything else in Pagoda, the ranks are
ordinary data-parallel ranks: their gradients are averaged.

Shapes: N ranks divide a sequence of T tokens; batch B, heads H, width of a head d.
"""

from collections.abc import Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from pagoda.errors import ConfigError, UsageError
from pagoda.mesh.world import join, launched
from pagoda.prepare.documents import OnceAForward, attend, attention_of_whole_rows, window_of

IGNORED = -100
"""The label of a token that the loss does not count."""


class SequenceRanks:
    """The ranks that divide each sequence."""

    def __init__(self, count: int, rank: int, group: Any) -> None:
        self.count, self.rank = count, rank
        """Number of these ranks, and the index of this one among them."""
        self.group = group
        self.whole = OnceAForward(self._gather)
        """The positions [B, T] of whole sequences, given those of this rank's tokens [B, T/N]."""

    def _gather(self, position_ids: torch.Tensor) -> torch.Tensor:
        parts = [torch.empty_like(position_ids) for _ in range(self.count)]
        dist.all_gather(parts, position_ids.contiguous(), group=self.group)
        return torch.cat(parts, 1)

    def part(self, batch: Mapping[str, torch.Tensor]) -> "SequencePart":
        """This rank's part of a batch. The batch has `input_ids` and `labels` [B, T], and `position_ids` [B, T] if
        documents are packed. All ranks of a sequence pass the same batch. Labels are not shifted: each is the token
        itself, or -100.

        Raises UsageError for other tensors, and if the ranks cannot divide the tokens equally.
        """
        others = batch.keys() - {"input_ids", "labels", "position_ids"}
        if others or "input_ids" not in batch or "labels" not in batch:
            what = f"{sorted(others)[0]!r}" if others else "a batch without input_ids and labels"
            raise UsageError(f"Ranks divide input_ids, labels and position_ids of a sequence, and this is {what}.")
        ids = batch["input_ids"]
        tokens = ids.shape[1]
        if tokens % self.count:
            raise UsageError(f"{self.count} ranks cannot divide {tokens} tokens equally: pad them (label {IGNORED}).")
        targets = nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=IGNORED)  # before the cut
        places = batch.get("position_ids", torch.arange(tokens, device=ids.device)[None]).expand_as(ids)
        mine = slice(self.rank * tokens // self.count, (self.rank + 1) * tokens // self.count)
        counted = targets.ne(IGNORED).sum().clamp(min=1) / self.count
        return SequencePart({"input_ids": ids[:, mine], "position_ids": places[:, mine]}, targets[:, mine], counted)


class SequencePart(NamedTuple):
    """A rank's part of a batch."""

    inputs: dict[str, torch.Tensor]
    """Arguments of the model's forward."""
    targets: torch.Tensor
    """For each token, the one that follows it, or -100."""
    counted: torch.Tensor
    """Tokens of the whole batch that the loss counts, divided by the number of ranks."""

    def loss(self, logits: torch.Tensor) -> torch.Tensor:
        """This rank's loss, from the model's logits [B, T/N, V]. Its mean over ranks is the loss of the whole batch."""
        flat = logits.float().view(-1, logits.shape[-1]), self.targets.reshape(-1)
        return nn.functional.cross_entropy(*flat, ignore_index=IGNORED, reduction="sum") / self.counted


def divide_sequences(model: nn.Module, ranks: int) -> SequenceRanks:
    """Let `ranks` consecutive ranks divide each sequence of a causal language model of transformers.

        sequences = pagoda.divide_sequences(model, ranks=2)  # before or after wrap, on every rank
        part = sequences.part(batch)
        loss = part.loss(model(**part.inputs).logits)

    The number of attention heads must be a multiple of `ranks`. Loss and gradients are those of one rank, except for
    rounding.

    Raises ConfigError for models whose attention cannot be divided.
    """
    world = launched()
    if ranks < 1 or world.size % ranks:
        raise ConfigError(f"divide_sequences: {ranks} ranks do not divide {world.size} ranks")
    check_division(model, ranks)
    join(world)
    group: Any = dist.new_subgroups(ranks)[0] if world.size > 1 else None  # type: ignore[no-untyped-call]
    sequences = SequenceRanks(ranks, world.rank % ranks, group)
    if ranks > 1:
        attention_of_whole_rows(model, f"pagoda_sequences_{ranks}", partial(_attend, sequences))
    return sequences


def check_division(model: nn.Module, ranks: int) -> None:
    """Raises ConfigError for a model whose sequences ranks cannot divide exactly."""
    if ranks == 1:
        return
    config: Any = getattr(model, "config", None)
    reason = reason_against(None if config is None else config.get_text_config(), ranks)
    mixing = next((name for name, part in model.named_modules() if isinstance(part, nn.Conv1d)), None)
    if reason is None and mixing is not None:
        reason = f"{mixing!r} mixes tokens of neighbours"
    if reason is not None:
        raise ConfigError(f"{ranks} ranks cannot divide the sequences of {type(model).__name__}: {reason}.")


def reason_against(text: Any, ranks: int) -> str | None:
    """Why ranks cannot divide the sequences of a model with this text configuration of transformers. None if they
    can, as far as the configuration says."""
    heads = getattr(text, "num_attention_heads", None)
    if heads is None or text.is_encoder_decoder:
        return "it is not a causal language model of transformers"
    if heads % ranks:
        return f"{ranks} does not divide its {heads} attention heads"
    if (window := window_of(text, 1 << 62)) is not None:
        return f"layers attend in a window of {window} tokens"
    if getattr(text, "output_router_logits", False):
        return "each rank would balance its experts for its own tokens (set output_router_logits=False)"
    return None


def exchanged_width(text: Any, ranks: int) -> int:
    """Elements a token of the queries, keys, values and results that ranks exchange in a layer, by the model's text
    configuration. If the heads of keys cannot be divided, they are repeated for each head of queries."""
    heads: int = text.num_attention_heads
    of_keys: int = getattr(text, "num_key_value_heads", None) or heads
    width: int = getattr(text, "head_dim", None) or text.hidden_size // heads
    return 2 * width * (heads + (heads if of_keys % ranks else of_keys))


def _attend(
    sequences: SequenceRanks,
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    position_ids: torch.Tensor | None = None,
    **settings: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of this rank's tokens [B, H, T/N, d] to those of all ranks, as [B, T/N, H, d]."""
    if attention_mask is not None or position_ids is None:
        raise UsageError(
            "Attention of divided sequences takes no attention_mask. Call the model with sequences.part(batch).inputs."
        )
    count = sequences.count
    if key.shape[1] % count:  # the ranks cannot divide the heads of keys
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    query, key, value = (_Exchange.apply(x, 1, 2, sequences) for x in (query, key, value))  # type: ignore
    groups, is_causal = query.shape[1] // key.shape[1], getattr(module, "is_causal", True)
    asked: Any = SimpleNamespace(num_key_value_groups=groups, is_causal=is_causal)  # all that sdpa reads from a module
    out, _ = attend(asked, query, key, value, None, sequences.whole(position_ids), **settings)
    mine: torch.Tensor = _Exchange.apply(out, 1, 2, sequences)  # type: ignore[no-untyped-call]
    return mine, None


class _Exchange(torch.autograd.Function):
    """Cut dimension `cut` into a part for each rank, and join the parts from all ranks along dimension `joined`."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, cut: int, joined: int, sequences: SequenceRanks) -> torch.Tensor:
        ctx.settings = joined, cut, sequences
        return _exchanged(tensor, cut, joined, sequences)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _exchanged(grad, *ctx.settings), None, None, None


def _exchanged(tensor: torch.Tensor, cut: int, joined: int, sequences: SequenceRanks) -> torch.Tensor:
    sent = torch.stack(tensor.chunk(sequences.count, cut))
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=sequences.group)
    return torch.cat([*received], joined)
