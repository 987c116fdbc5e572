"""The features that do not work together, with the reasons, in one table. All other pairs work."""

from collections.abc import Collection, Mapping, Sequence
from enum import StrEnum

from pagoda.errors import ConfigError
from pagoda.optim.rule import StateSpec
from pagoda.plan.options import DEFAULT_SPLIT, Options
from pagoda.plan.ranks import Ranks


class Feature(StrEnum):
    """A setting that affects how state is stored or updated, as users write it."""

    WHOLE = "an optimizer that takes whole parameters (Adafactor, Muon)"
    EIGHT_BIT = "moments='8bit'"
    GRADIENTS = "gradients in another dtype than weights (MixedPrecision.gradients)"
    ASYNC = "update='async'"
    SPECULATE = "speculate=True"
    AUTO = "activations='auto'"
    TILES = "tile_limit"
    DEVICE_UPDATES = "split.device_update_share"
    DEVICE_HOMES = "split.device_home_share"
    RANKS = "several ranks"
    TENSOR = "tensor_parallel"
    EXPERTS = "expert_parallel"
    PIPELINE = "pipeline_parallel"


F = Feature
ON_DEVICE = (F.DEVICE_UPDATES, F.DEVICE_HOMES)

REFUSED: Mapping[frozenset[Feature], str] = {
    frozenset((F.WHOLE, F.TILES)): "tiles cut parameters",
    frozenset((F.ASYNC, F.SPECULATE)): "asynchronous updates wait for nothing that could be guessed",
}
"""Pairs that are refused, each with the reason."""


def features(
    options: Options, states: Sequence[StateSpec], ranks: Ranks | None, tiled: bool = False
) -> frozenset[Feature]:
    """The features that a run uses. `states` are its optimizer's. `tiled`: whether `tile_limit` is set."""
    split = options.split or DEFAULT_SPLIT
    used = {
        F.WHOLE: states[0].whole is not None,
        F.EIGHT_BIT: any(state.per > 1 for state in states),
        F.GRADIENTS: options.gradients not in (None, states[0].dtype),
        F.ASYNC: options.max_staleness is not None,
        F.SPECULATE: options.speculate is True,
        F.AUTO: options.activations == "auto",
        F.TILES: tiled,
        F.DEVICE_UPDATES: split.device_update_share > 0,
        F.DEVICE_HOMES: split.device_home_share > 0,
        F.RANKS: ranks is not None and ranks.count > 1,
        F.TENSOR: ranks is not None and ranks.tensor_parallel > 1,
        F.EXPERTS: ranks is not None and ranks.expert_parallel > 1,
        F.PIPELINE: ranks is not None and ranks.pipeline_parallel > 1,
    }
    return frozenset(feature for feature, is_used in used.items() if is_used)


def why_not(used: Collection[Feature]) -> str | None:
    """Why some of these features do not work together, or None if all do."""
    for pair, why in REFUSED.items():
        if pair.issubset(used):
            first, second = sorted(pair, key=[*Feature].index)
            return f"{first} does not work with {second}: {why}"
    return None


def check_features(used: Collection[Feature]) -> None:
    """Raises ConfigError if features do not work together."""
    if (why := why_not(used)) is not None:
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
