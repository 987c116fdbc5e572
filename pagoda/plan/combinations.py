"""The features that do not work together, with the reasons, in one table."""

from collections.abc import Collection, Mapping, Sequence
from enum import StrEnum

from pagoda.errors import ConfigError
from pagoda.optim.rule import StateSpec
from pagoda.plan.ranks import Ranks


class Feature(StrEnum):
    """A setting that does not work with another one, as users write it."""

    WHOLE = "an optimizer that takes whole parameters (Adafactor, Muon)"
    TILES = "tile_limit"


REFUSED: Mapping[frozenset[Feature], str] = {
    frozenset((Feature.WHOLE, Feature.TILES)): "a tile is a part of a parameter",
}
"""Pairs that are refused, each with the reason."""


def why_not(used: Collection[Feature]) -> str | None:
    """Why some of these features do not work together, or None if all do."""
    for pair, why in REFUSED.items():
        if pair.issubset(used):
            first, second = sorted(pair, key=[*Feature].index)
            return f"{first} does not work with {second}: {why}"
    return None


def check_features(states: Sequence[StateSpec], tiled: bool) -> None:
    """Raises ConfigError if features of a run do not work together. `states` are those of its optimizer. `tiled`:
    whether `tile_limit` is set."""
    used = {
        Feature.WHOLE: states[0].whole is not None,
        Feature.TILES: tiled,
    }
    if (why := why_not([feature for feature, is_used in used.items() if is_used])) is not None:
        raise ConfigError(f"{why}. Leave one of them out.")


def check_experts_of_stages(ranks: Ranks) -> None:
    """Raises ConfigError if the ranks of a pipeline stage with experts would need weights of each other at different
    times. A rank that waits for another stage takes part in nothing."""
    if ranks.pipeline_parallel > 1 and (ranks.shares_experts or ranks.shards_weights):
        raise ConfigError(
            "The ranks of a stage use different experts, and a rank that waits for another stage cannot send what "
            "others need of a mixture: give each rank experts of its own, and all other weights, by "
            f"expert_parallel={ranks.data_parallel} and stage=2, or give each stage one rank."
        )
