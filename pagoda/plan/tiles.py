"""The number of micro-batches in which a layer runs its batch, and of pieces in which MLPs process a sequence."""

from pagoda.config.training import TileCount

TILE_TOKENS = 4096
"""Matrix products with this many rows run at full speed on any machine. More rows only take more memory."""


def tile_count(tiles: TileCount, samples: int, tokens: int) -> int:
    """Number of tiles for `samples` samples of `tokens` tokens in total, with at least one sample each. "auto" takes as
    few as keep each at `TILE_TOKENS` or below. For pieces of sequences, each token is a sample."""
    wanted = -(-tokens // TILE_TOKENS) if tiles == "auto" else tiles
    return max(1, min(wanted, samples))


def tile_tokens(tiles: TileCount | None, samples: int, seq_len: int) -> int:
    """Tokens of the largest micro-batch."""
    if tiles is None:
        return samples * seq_len
    return -(-samples // tile_count(tiles, samples, samples * seq_len)) * seq_len


def piece_tokens(tiles: TileCount | None, tokens: int) -> int:
    """Tokens of the largest piece of `tokens` tokens that an MLP processes."""
    return tokens if tiles is None else -(-tokens // tile_count(tiles, tokens, tokens))
