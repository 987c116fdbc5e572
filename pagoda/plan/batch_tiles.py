"""How many micro-batches a layer runs its batch in."""

from pagoda.config.training import BatchTiles

TILE_TOKENS = 4096
"""Products of matrices with so many rows run at full speed on any machine; more rows only take more memory."""


def tile_count(tiles: BatchTiles, samples: int, tokens: int) -> int:
    """Micro-batches of `samples` samples that have `tokens` tokens in all: at least one sample in each. "auto" takes as
    few as keep each at `TILE_TOKENS` or below."""
    wanted = -(-tokens // TILE_TOKENS) if tiles == "auto" else tiles
    return max(1, min(wanted, samples))


def tile_tokens(tiles: BatchTiles | None, samples: int, seq_len: int) -> int:
    """Tokens of the largest micro-batch."""
    if tiles is None:
        return samples * seq_len
    return -(-samples // tile_count(tiles, samples, samples * seq_len)) * seq_len
