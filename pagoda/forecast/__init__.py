"""Says before a run whether it fits, how fast it will be, what binds, and what would help."""

from pagoda.forecast.config import PlanConfig

__all__ = ["PlanConfig"]
