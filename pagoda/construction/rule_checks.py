"""What a rule asks of `wrap`'s other settings."""

from pagoda.errors import ConfigError
from pagoda.optim.rule import Rule, TensorRule
from pagoda.plan.layout import WEIGHT
from pagoda.plan.ops import SSD
from pagoda.plan.planner import Plan


def check_rule(optimizer: object) -> None:
    """Raises ConfigError for what is no rule."""
    if not isinstance(optimizer, Rule):
        raise ConfigError(
            f"wrap() takes an optimizer such as pagoda.AdamW(lr=3e-4), not {optimizer!r}. Give a class of torch or of "
            "another package as pagoda.Optim(torch.optim.Adagrad, lr=1e-2)."
        )


def check_extents(rule: Rule, plan: Plan) -> None:
    """Raises ConfigError where parameters that are taken whole would share pages of the weights' two extents on SSD.

    One would take the other's new values back.
    """
    if plan.options.max_staleness is not None and isinstance(rule, TensorRule) and plan.placement.pages(SSD, WEIGHT):
        raise ConfigError(
            f"update='async' with {rule.name} needs every weight in RAM: raise memory.host, or use update='sync'."
        )
