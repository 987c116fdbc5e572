"""Features that do not work together."""

from collections.abc import Sequence

from pagoda.errors import ConfigError
from pagoda.optim.rule import StateSpec
from pagoda.plan.ranks import Ranks


def check_features(states: Sequence[StateSpec], tiled: bool) -> None:
    """Raises ConfigError if an optimizer, whose `states` these are, takes parameters whole that are cut into tiles.
    `tiled`: whether `tile_limit` is set."""
    if tiled and states[0].whole is not None:
        raise ConfigError(
            "an optimizer that takes whole parameters (Adafactor, Muon) does not work with tile_limit: a tile is a "
            "part of a parameter. Leave one of them out."
        )


def check_experts_of_stages(ranks: Ranks) -> None:
    """Raises ConfigError if the ranks of a pipeline stage with experts would need weights of each other at different
    times. A rank that waits for another stage takes part in nothing."""
    if ranks.pipeline_parallel > 1 and (ranks.shares_experts or ranks.shards_weights):
        raise ConfigError(
            "The ranks of a stage use different experts, and a rank that waits for another stage cannot send what "
            "others need of a mixture: give each rank experts of its own, and all other weights, by "
            f"expert_parallel={ranks.data_parallel} and stage=2, or give each stage one rank."
        )
