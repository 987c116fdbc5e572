"""Attention of documents that are packed into one long row, without a mask of tokens times tokens.

transformers' sdpa gets such a mask whenever positions start again inside a row. It takes 16 GiB for 128K tokens, and
attention takes the time of one document as long as the row. Here, attention runs on each document alone.
"""

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from pagoda.errors import ConfigError

NAME = "pagoda_documents"
"""Name of this attention in transformers."""
SHORT_TOKENS = 4096
"""Consecutive documents with at most this many tokens in all share one call of attention, with a mask. Rows of at most
this length keep transformers' attention."""
T = TypeVar("T")


def attend_by_document(model: nn.Module) -> None:
    """Let a model of transformers with sdpa attention attend within each document of a row. A document begins where
    `position_ids` do not continue.

    Attention is that of transformers' mask, except for rounding. Layers with a window, and batches with an
    `attention_mask`, still get the whole mask.

    Raises ConfigError for a model whose attention is not transformers' sdpa.
    """
    attention_of_whole_rows(model, NAME, attend)


def attention_of_whole_rows(model: nn.Module, name: str, attention: Callable[..., Any]) -> None:
    """Register an attention function with transformers under a name, and let a model use it. It gets no mask in layers
    whose tokens attend to all earlier tokens of their document.

    Raises ConfigError for a model whose attention is not transformers' sdpa.
    """
    implementation = getattr(getattr(model, "config", None), "_attn_implementation", None)
    if implementation == name:
        return
    settable = getattr(model, "_can_set_attn_implementation", lambda: False)()
    if implementation not in ("sdpa", NAME) or not settable:
        raise ConfigError(
            f"the attention of {type(model).__name__} is {implementation!r}, and not transformers' sdpa: give it "
            "attn_implementation='sdpa', if it has that"
        )
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, _mask)
    model.set_attn_implementation(name)  # type: ignore[operator]


def window_of(config: Any, tokens: int) -> int | None:
    """The smallest window in which layers of a model attend, if it is smaller than `tokens` tokens. transformers' sdpa
    gets a mask of tokens times tokens for it."""
    kinds = getattr(config, "layer_types", None)
    sizes = [
        getattr(config, name, None)
        for name, kind in (("sliding_window", "sliding_attention"), ("attention_chunk_size", "chunked_attention"))
        if (kind in kinds if kinds else getattr(config, f"use_{name}", True))
    ]
    return min((size for size in sizes if size is not None and size < tokens), default=None)


def mask_bytes(tokens: int, row: int, itemsize: int) -> int:
    """Bytes of the mask for `tokens` tokens in rows of `row` tokens: booleans, and what sdpa converts them to, with
    `itemsize` bytes each."""
    return (1 + itemsize) * tokens * row


def groups_of(positions: torch.Tensor, most: int) -> list[list[int]]:
    """Lengths of documents of a row with these positions, [T], in groups of consecutive documents of at most `most`
    tokens in all. A longer document is a group of its own."""
    starts = (positions.diff() != 1).nonzero()[:, 0].add(1).tolist()
    lengths = [stop - start for start, stop in zip([0, *starts], [*starts, len(positions)], strict=True)]
    groups: list[list[int]] = []
    for length in lengths:
        if groups and sum(groups[-1]) + length <= most:
            groups[-1].append(length)
        else:
            groups.append([length])
    return groups


def _mask(
    *,
    q_length: int,
    kv_length: int,
    mask_function: Callable[..., Any],
    attention_mask: torch.Tensor | None = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    **others: Any,
) -> torch.Tensor | None:
    """None if a layer attends to all earlier tokens of each document, which `attend` sees in their positions."""
    from transformers.masking_utils import causal_mask_function, sdpa_mask

    packs = getattr(mask_function, "__qualname__", "") == "and_masks.<locals>.and_mask" and not use_vmap
    plain = attention_mask is None and q_length == kv_length and (local_size is None or local_size >= kv_length)
    if plain and (packs or mask_function is causal_mask_function):
        return None
    whole: torch.Tensor | None = sdpa_mask(
        q_length=q_length,
        kv_length=kv_length,
        mask_function=mask_function,
        attention_mask=attention_mask,
        local_size=local_size,
        use_vmap=use_vmap,
        **others,
    )
    return whole


def attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    position_ids: torch.Tensor | None = None,
    **settings: Any,
) -> tuple[torch.Tensor, None]:
    """Attention within documents. Takes tensors [B, heads, T, d] and returns [B, T, heads, d]."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    batch, _, tokens, _ = query.shape
    if attention_mask is not None or tokens != key.shape[2]:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **settings)[0], None
    if position_ids is None:
        raise ConfigError(f"{type(module).__name__} gets no position_ids, which show where documents end")
    rows = []
    of_rows = _groups_of_rows(position_ids)
    for row, groups in enumerate(of_rows * (batch // len(of_rows))):
        start = 0
        for lengths in groups:
            stop = start + sum(lengths)
            parts = (tensor[row : row + 1, :, start:stop] for tensor in (query, key, value))
            mask = None if len(lengths) == 1 else _mask_of(lengths, query.device)
            rows.append(sdpa_attention_forward(module, *parts, mask, **settings)[0])
            start = stop
    return torch.cat(rows, 1).view(batch, tokens, *rows[0].shape[2:]), None


class OnceAForward(Generic[T]):
    """Computes something of the positions that a forward gives to all of its layers, only for the first layer."""

    def __init__(self, compute: Callable[[torch.Tensor], T]) -> None:
        self._compute = compute
        self._known: Any = WeakTensorKeyDictionary()
        """Positions -> (their version, what was computed)."""

    def __call__(self, position_ids: torch.Tensor) -> T:
        version = None if position_ids.is_inference() else position_ids._version
        known: tuple[int | None, T] | None = self._known.get(position_ids)
        if known is None or known[0] != version:
            known = self._known[position_ids] = version, self._compute(position_ids)
        return known[1]


_groups_of_rows = OnceAForward(lambda position_ids: [groups_of(row, SHORT_TOKENS) for row in position_ids])
"""`groups_of` every row of positions. To read them, the CPU waits for a GPU's queue."""


def _mask_of(lengths: list[int], device: torch.device) -> torch.Tensor:
    """Which tokens [n, n] of several documents each token sees: itself, and those before it in its document."""
    document = torch.arange(len(lengths), device=device).repeat_interleave(torch.tensor(lengths, device=device))
    return (document[:, None] == document).tril()[None, None]
