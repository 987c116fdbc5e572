"""The parts of a transformer that the built-in mixtures are made of, in the style of GPT-2 or of T5.

Shapes: B sequences, S tokens in each (K in another sequence that is attended to), H hidden, A heads of H / A.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from pagoda.models.papers import RELATIVE_BUCKETS, PaperShape

_MAX_DISTANCE = 128
"""T5 tells no larger distances apart."""


def recomputed(module: nn.Module, *inputs: Tensor | None) -> Any:
    """A call of a module that draws no random numbers, and is made once more in backward instead of saving
    activations."""
    if not torch.is_grad_enabled():
        return module(*inputs)
    return checkpoint(module, *inputs, use_reentrant=False, preserve_rng_state=False)


class Linear(nn.Linear):
    """A linear layer with normal weights of a given standard deviation, and zero biases."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool, std: float) -> None:
        self.std = std  # torch's constructor initialises
        super().__init__(inputs, outputs, bias=bias)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.std)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class Embedding(nn.Embedding):
    """A table with normal entries of a given standard deviation."""

    def __init__(self, rows: int, width: int, *, std: float) -> None:
        self.std = std
        super().__init__(rows, width)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.std)


class Head(nn.Module):
    """Logits over the vocabulary, by the embedding's own table."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, hidden: Tensor) -> Tensor:
        """[B, S, H] to [B, S, vocabulary]."""
        return functional.linear(hidden, self.weight)


def norm_of(shape: PaperShape) -> nn.Module:
    """Layer norm in a GPT, root mean square norm in a T5."""
    return nn.LayerNorm(shape.hidden) if shape.family == "gpt" else nn.RMSNorm(shape.hidden, eps=1e-6)


class Attention(nn.Module):
    """Norm, self-attention and residual. T5 does not scale products of queries and keys, but draws queries smaller."""

    def __init__(self, shape: PaperShape, *, causal: bool) -> None:
        super().__init__()
        gpt = shape.family == "gpt"
        self.norm = norm_of(shape)
        self.qkv = QueryKeyValue(shape)
        std = 0.02 / (2 * shape.layers) ** 0.5 if gpt else shape.hidden**-0.5
        self.out = Linear(shape.hidden, shape.hidden, bias=gpt, std=std)
        self._heads = shape.heads
        self._scale = None if gpt else 1.0
        self._causal = causal

    def forward(self, hidden: Tensor, bias: Tensor | None = None) -> Tensor:
        """[B, S, H] to the same. `bias` [1, A, S, S] is added to the products; it then does the masking."""
        query, key, value = (_heads(part, self._heads) for part in self.qkv(self.norm(hidden)).chunk(3, -1))
        attended = functional.scaled_dot_product_attention(
            query, key, value, attn_mask=bias, is_causal=self._causal and bias is None, scale=self._scale
        )
        return hidden + self.out(_joined(attended))  # type: ignore[no-any-return]


class CrossAttention(nn.Module):
    """Norm, attention of a T5's decoder to its encoder's result, and residual."""

    def __init__(self, shape: PaperShape) -> None:
        super().__init__()
        self.norm = norm_of(shape)
        self.qkv = QueryKeyValue(shape)
        self.out = Linear(shape.hidden, shape.hidden, bias=False, std=shape.hidden**-0.5)
        self._heads = shape.heads

    def forward(self, hidden: Tensor, memory: Tensor) -> Tensor:
        """[B, S, H], attending to `memory` [B, K, H], to [B, S, H]."""
        query, key, value = (_heads(part, self._heads) for part in self.qkv(self.norm(hidden), memory))
        attended = functional.scaled_dot_product_attention(query, key, value, scale=1.0)
        return hidden + self.out(_joined(attended))  # type: ignore[no-any-return]


class QueryKeyValue(Linear):
    """Queries, keys and values in one matrix, [3H, H]."""

    def __init__(self, shape: PaperShape) -> None:
        gpt = shape.family == "gpt"
        self._query_std = 0.02 if gpt else shape.hidden**-0.5 * (shape.hidden // shape.heads) ** -0.5
        super().__init__(shape.hidden, 3 * shape.hidden, bias=gpt, std=0.02 if gpt else shape.hidden**-0.5)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        nn.init.normal_(self.weight[: self.in_features], std=self._query_std)

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]
        """[B, S, H] to [B, S, 3H]; with `memory` [B, K, H], its keys and values, apart: [B, S, H], [B, K, H] twice."""
        if memory is None:
            return super().forward(x)
        query = functional.linear(x, self.weight[: self.in_features])
        key, value = functional.linear(memory, self.weight[self.in_features :]).chunk(2, -1)
        return query, key, value


class RelativePositions(Embedding):
    """T5's bias of attention by distance, [32, A]: near distances one by one, far ones by their logarithm."""

    def __init__(self, shape: PaperShape, *, causal: bool) -> None:
        super().__init__(RELATIVE_BUCKETS, shape.heads, std=shape.hidden**-0.5)
        self._causal = causal

    def forward(self, length: int) -> Tensor:  # type: ignore[override]
        """The bias [1, A, S, S] of a sequence of `length` tokens; minus infinity where a token must not look."""
        positions = torch.arange(length, device=self.weight.device)
        ahead = positions[None, :] - positions[:, None]
        bias = super().forward(self._buckets(ahead)).permute(2, 0, 1)[None]
        return bias.masked_fill(ahead > 0, -math.inf) if self._causal else bias

    def _buckets(self, ahead: Tensor) -> Tensor:
        """int64 [S, S]: the row of the table for each distance, positive for keys that follow the query."""
        rows = RELATIVE_BUCKETS if self._causal else RELATIVE_BUCKETS // 2
        distance = (-ahead).clamp(min=0) if self._causal else ahead.abs()
        near = rows // 2
        share = (distance.clamp(min=near).float() / near).log() / math.log(_MAX_DISTANCE / near)
        far = (near + (share * (rows - near)).long()).clamp(max=rows - 1)
        row = torch.where(distance < near, distance, far)
        return row if self._causal else row + rows * (ahead > 0)


def _heads(x: Tensor, heads: int) -> Tensor:
    """[B, S, H] to [B, A, S, H / A]."""
    return x.view(*x.shape[:-1], heads, -1).transpose(1, 2)


def _joined(x: Tensor) -> Tensor:
    """[B, A, S, H / A] to [B, S, H]."""
    return x.transpose(1, 2).flatten(-2)
