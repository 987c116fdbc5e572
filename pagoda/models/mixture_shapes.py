"""The built-in mixtures of experts, as data: their shapes and how they route.

`moe` builds them, and any paper's shape with experts.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from pagoda.errors import ConfigError
from pagoda.models.papers import GPT_VOCAB, PAPER_SHAPES, T5_VOCAB, PaperShape

_SMALL_VOCAB = 512
"""Byte-level text uses 256 entries; of a larger table, small models would mostly consist."""
_SOURCE = "Pagoda's own: the widths of GPT-2 or T5, experts as many as the size takes"


@dataclass(frozen=True, kw_only=True)
class RoutingConfig:
    """How the built-in mixtures of experts route; other models have their own ways.

    Raises ConfigError for values out of range.
    """

    top_k: int | None = None
    """Experts that see each token; by default the model's own: 2 for GPT-MoE, 1 for T5-MoE."""
    capacity_factor: float = 1.25
    """While training, an expert takes at most this many times its even share of a sequence's tokens. What it does not
    take skips it: only the residual goes on."""
    balance_coefficient: float = 0.01
    """Weight of the load-balancing loss of each block."""

    def __post_init__(self) -> None:
        if self.top_k is not None and self.top_k < 1:
            raise ConfigError(f"routing.top_k is {self.top_k}; it must be at least 1")
        if not (self.capacity_factor > 0 and math.isfinite(self.capacity_factor)):
            raise ConfigError(f"routing.capacity_factor is {self.capacity_factor}; it must be above 0")
        if not (self.balance_coefficient >= 0 and math.isfinite(self.balance_coefficient)):
            raise ConfigError(f"routing.balance_coefficient is {self.balance_coefficient}; it must be 0 or more")


def _gpt(name: str, nominal: float, layers: int, hidden: int, heads: int, experts: int, vocab: int) -> PaperShape:
    """Two experts see each token, as in GShard (arXiv 2006.16668) and GLaM (arXiv 2112.06905)."""
    ffn = 4 * hidden
    return PaperShape(name, "gpt", nominal, layers, hidden, heads, ffn, vocab, 1_024, _SOURCE, experts=experts, top_k=2)


def _t5(name: str, nominal: float, pairs: int, hidden: int, heads: int, experts: int, vocab: int) -> PaperShape:
    """One expert sees each token, as in Switch Transformer (arXiv 2101.03961)."""
    ffn = 4 * hidden
    return PaperShape(
        name, "t5", nominal, pairs, hidden, heads, ffn, vocab, 512, _SOURCE, pairs, experts=experts, top_k=1
    )


MIXTURE_SHAPES: Mapping[str, PaperShape] = MappingProxyType(
    {
        shape.name: shape
        for shape in (
            #     name         nominal layers hidden heads experts
            _gpt("gpt-moe-15m", 15e6, 6, 192, 6, 8, _SMALL_VOCAB),
            _gpt("gpt-moe-120m", 120e6, 6, 384, 6, 16, _SMALL_VOCAB),
            _gpt("gpt-moe-1b", 1e9, 12, 768, 12, 16, GPT_VOCAB),
            _t5("t5-moe-15m", 15e6, 3, 192, 6, 8, _SMALL_VOCAB),
            _t5("t5-moe-120m", 120e6, 3, 384, 6, 16, _SMALL_VOCAB),
            _t5("t5-moe-1b", 1e9, 6, 768, 12, 16, T5_VOCAB),
        )
    }
)
"""Every built-in mixture of experts by name, smallest first within its family."""


def mixture_shape(name: str) -> PaperShape | None:
    """The shape of a mixture of experts that can be built, built-in or a paper's; None for any other name."""
    shape = MIXTURE_SHAPES.get(name) or PAPER_SHAPES.get(name)
    return shape if shape is not None and shape.experts else None
