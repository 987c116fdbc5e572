"""Model shapes from the papers that Pagoda follows, as data for plans. Only the shapes with experts can be built, as
Switch Transformers; see `shapes` for other models that can be built.

There are two families. `gpt` is GPT-2's block: learned positions, biases everywhere, the head tied to the embedding.
`t5` is T5 1.0: an encoder and a decoder, no biases, norms with a scale only, ReLU, relative positions, one embedding
for encoder, decoder and head. With `experts`, the MLP of every block is replaced by that many MLPs and a router.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

PaperFamily = Literal["gpt", "t5"]

GPT_VOCAB = 50_304
"""GPT-2's 50,257 entries, rounded up to a multiple of 64."""
T5_VOCAB = 32_128
RELATIVE_BUCKETS = 32
"""Distances that T5 distinguishes. Encoder and decoder each have one table of this many rows, `heads` wide."""


@dataclass(frozen=True, slots=True)
class PaperShape:
    """The dimensions of a model that a plan needs."""

    name: str
    family: PaperFamily
    nominal: float
    """Number of parameters according to the name."""
    layers: int
    """Blocks, or blocks of the encoder if there is a decoder."""
    hidden: int
    heads: int
    ffn: int
    vocab: int
    seq_len: int
    """Tokens of a sequence in the paper, and rows of `gpt`'s position table."""
    source: str
    """Where the shape is from, or how it was chosen if the paper gives none."""
    decoder_layers: int = 0
    experts: int = 0
    """MLPs in each block among which a router chooses. 0: one MLP without a router."""
    top_k: int = 0
    """Experts for each token."""

    @property
    def params(self) -> int:
        """Number of parameters. Tied ones count once."""
        hidden, ffn, blocks = self.hidden, self.ffn, self.layers + self.decoder_layers
        bias = self.family == "gpt"
        norm = 2 * hidden if bias else hidden
        attention = 4 * hidden * hidden + (4 * hidden if bias else 0) + norm
        mlp = 2 * hidden * ffn + (hidden + ffn if bias else 0)
        feed_forward = norm + (self.experts * (mlp + hidden) if self.experts else mlp)
        positions = self.seq_len * hidden if bias else 2 * RELATIVE_BUCKETS * self.heads
        final_norms = norm if bias else 2 * norm
        return (
            self.vocab * hidden
            + positions
            + blocks * (attention + feed_forward)
            + self.decoder_layers * attention
            + final_norms
        )


def _gpt(
    name: str, nominal: float, layers: int, hidden: int, heads: int, source: str, seq_len: int = 1024
) -> PaperShape:
    return PaperShape(name, "gpt", nominal, layers, hidden, heads, 4 * hidden, GPT_VOCAB, seq_len, source)


def _t5(
    name: str, nominal: float, pairs: int, hidden: int, heads: int, ffn: int, source: str, experts: int = 0
) -> PaperShape:
    dense = PaperShape(name, "t5", nominal, pairs, hidden, heads, ffn, T5_VOCAB, 512, source, decoder_layers=pairs)
    return replace(dense, experts=experts, top_k=1) if experts else dense


_PATRICKSTAR = "PatrickStar, arXiv 2108.05818 and its examples/model_builder.py; 16 heads; vocabulary of GPT-2"
_ANGEL = "Angel-PTM, arXiv 2303.02868, gives the size; chosen"
_ANGEL_T5 = f"{_ANGEL}: the width of gpt-55b, equal encoder and decoder, as many layers as the size takes"
_ANGEL_MOE = (
    "Angel-PTM, arXiv 2303.02868: 16 layers of 2,304 experts, from memory, unverified; chosen: half of them encoder, "
    "every block with experts, one expert a token as in Switch Transformer"
)
_GPT3 = "GPT-3, arXiv 2005.14165, table 2.1; PatrickStar trains it at 1,024 tokens"
_INFINITY = "ZeRO-Infinity gives the size; chosen: between its 10T (195 x 65,536) and 101T (315 x 163,840)"
_OF_PAPERS = (
    #     name         nominal layers hidden heads
    _gpt("gpt-1b", 1e9, 20, 2_048, 16, _PATRICKSTAR),
    _gpt("gpt-2b", 2e9, 40, 2_048, 16, _PATRICKSTAR),
    _gpt("gpt-4b", 4e9, 64, 2_304, 16, _PATRICKSTAR),
    _gpt("gpt-6b", 6e9, 53, 3_072, 16, _PATRICKSTAR),
    _gpt("gpt-8b", 8e9, 72, 3_072, 16, _PATRICKSTAR),
    _gpt("gpt-10b", 10e9, 50, 4_096, 16, _PATRICKSTAR),
    _gpt("gpt-12b", 12e9, 60, 4_096, 16, _PATRICKSTAR),
    _gpt("gpt-13b", 13e9, 65, 4_096, 16, f"{_PATRICKSTAR}; stands for the 13B of ZeRO too"),
    _gpt("gpt-15b", 15e9, 78, 4_096, 16, f"{_PATRICKSTAR}; its layers make 15.7B without the embedding"),
    _gpt("gpt-18b", 18e9, 90, 4_096, 16, _PATRICKSTAR),
    _gpt("gpt-20b", 20e9, 25, 8_192, 16, _PATRICKSTAR),
    _gpt("gpt-28b", 28e9, 34, 8_192, 64, f"{_ANGEL}: gpt-55b's width"),
    _gpt("gpt-30b", 30e9, 37, 8_192, 16, "PatrickStar plots the size; chosen: between its 20B and 40B"),
    _gpt("gpt-40b", 40e9, 50, 8_192, 16, _PATRICKSTAR),
    _gpt("gpt-50b", 50e9, 62, 8_192, 16, _PATRICKSTAR),
    _gpt("gpt-55b", 55e9, 68, 8_192, 64, f"{_ANGEL}: PatrickStar's width between 20B and 60B"),
    _gpt("gpt-60b", 60e9, 75, 8_192, 16, _PATRICKSTAR),
    _gpt("gpt-68b", 68e9, 66, 9_216, 16, _PATRICKSTAR),
    _gpt("gpt-100b", 100e9, 125, 8_192, 64, "ZeRO and ZeRO-Infinity, from memory, unverified"),
    _gpt("gpt-170b", 170e9, 212, 8_192, 64, "ZeRO, arXiv 1910.02054, from memory, unverified"),
    _gpt("gpt3-175b", 175e9, 96, 12_288, 96, _GPT3, seq_len=2048),
    _gpt("gpt-1t", 1e12, 128, 25_600, 256, "ZeRO-Infinity, arXiv 2104.07857, fig. 2a, from memory, unverified"),
    _gpt("gpt-32t", 32e12, 254, 102_400, 800, _INFINITY),
    _gpt("zero-7.5b", 7.5e9, 65, 3_072, 24, "ZeRO, fig. 1, gives the size; chosen: the width of its 8B"),
    _gpt("zero-128b", 128e9, 158, 8_192, 64, "ZeRO, table 1, gives the size; chosen: the width of its 170B"),
    _t5("t5-27b", 27e9, 14, 8_192, 64, 32_768, _ANGEL_T5),
    _t5("t5-58b", 58e9, 31, 8_192, 64, 32_768, _ANGEL_T5),
    _t5("t5-moe-1.2t", 1.2e12, 8, 1_024, 16, 16_384, _ANGEL_MOE, experts=2_304),
)
PAPER_SHAPES: Mapping[str, PaperShape] = {shape.name: shape for shape in _OF_PAPERS}
"""The papers' shapes by name."""


def gpt_of_step(step: int, seq_len: int = 1024) -> PaperShape:
    """Shape number `step` of a family of GPTs, to search for the largest model that trains. Number 0 is the smallest,
    with two layers of 192.

    Each step adds either one layer or 64 to hidden, with two layers for every three times 64, so hidden is about 96
    times the layers (64 to 128 in GPT-3's shapes, 36 to 328 in PatrickStar's) and the number of parameters always
    grows. Neighbours differ by about 6% at 1B, 3% at 10B and 1% at 100B.
    """
    grown = step + 5
    units = 3 * grown // 5
    layers, hidden = grown - units, 64 * units
    shape = _gpt(f"gpt-{layers}x{hidden}", 0.0, layers, hidden, units, "Pagoda's own family", seq_len)
    return replace(shape, nominal=float(shape.params))
