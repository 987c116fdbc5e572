"""`pagoda plan`: what a run would take, before it is run."""

from rich.console import Console

from pagoda.forecast.config import PlanConfig

DOES_NOT_FIT = 1


def run(config: PlanConfig, console: Console) -> int:
    """Plans, prints and writes what was asked for; returns the exit code."""
    from pagoda.forecast.command import run as forecast_run

    return 0 if forecast_run(config, console).fits else DOES_NOT_FIT
