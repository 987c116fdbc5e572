"""The plan of a run: the planner's first choice, or the fastest that a search by simulation finds."""

import time
from dataclasses import dataclass, replace
from typing import Any

import torch
from rich.console import Console

from pagoda.budgets import compute_device
from pagoda.config.run import Run
from pagoda.console import say
from pagoda.errors import ConfigError
from pagoda.forecast.activations import chunking_helps
from pagoda.forecast.config import PlanConfig
from pagoda.forecast.forecast import forecast
from pagoda.forecast.machine import find_machine_for
from pagoda.forecast.model_description import widths
from pagoda.forecast.record import timeline_record
from pagoda.mesh.mesh import Mesh
from pagoda.mesh.sharing import from_first
from pagoda.simulate.hardware import hardware_file
from pagoda.train.config import TrainConfig


def chunks_loss(config: TrainConfig, model: Any) -> bool:
    """Whether the loss of a run is computed in chunks: if the user asked for it, or if that lowers the peak of
    activations."""
    if config.chunked_loss is not None:
        return config.chunked_loss
    return chunking_helps(config, widths(model.config.get_text_config()))


@dataclass(frozen=True)
class ChosenPlan:
    """What a search has chosen, if there was one."""

    config: TrainConfig
    """With these choices."""
    predicted: dict[str, Any] | None = None
    """A record of the step that the search predicts. None without a search."""
    not_predicted: str = ""
    """Why there was no search."""
    reasons: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        assert bool(self.predicted) != bool(self.not_predicted)


def choose_plan(config: TrainConfig, console: Console, mesh: Mesh) -> ChosenPlan:
    """Search for the fastest plan. Prints whether it does. On several ranks, only the first one searches, and all take
    its choices.

    Raises BudgetError if the search finds that nothing fits. Raises ConfigError for a setting that cannot be used, and
    if a search was asked for on a machine that has not been measured.
    """
    if (why := _why_no_search(config, mesh)) is not None:
        return ChosenPlan(config, not_predicted=why)
    started = time.perf_counter()
    try:
        changes, resolved, reasons, predicted = from_first(
            mesh, "the choice of a plan", lambda: _searched(config, mesh)
        )
    except ConfigError as error:
        if config.plan == "search":
            raise
        say(console, f"Plan: the usual one; no search, as {error}")
        return ChosenPlan(config, not_predicted=str(error))
    took = time.perf_counter() - started
    say(console, f"Plan: chosen by a search, which took {took:.1f} s (--plan usual: none)", *resolved)
    memory = replace(config.memory, **changes.pop("memory"))
    return ChosenPlan(replace(config, memory=memory, **changes), predicted, reasons=(*resolved, *reasons))


def _why_no_search(config: TrainConfig, mesh: Mesh) -> str | None:
    """Why a run takes the planner's first choice, or None if a search chooses."""
    if config.plan == "search":
        return None
    if config.plan == "usual":
        return "--plan usual takes the planner's first choice"
    if config.lora_r is not None:
        return "a search is for the training of all weights, and --lora-r trains adapters"
    if mesh.everyone.size > 1:
        return f"{mesh.everyone.size} ranks take the planner's first choice, unless --plan search is given"
    if not hardware_file().exists():
        return "this machine was not measured: `pagoda calibrate --ssd DIR` does, and takes a minute"
    return None


def plan_config(config: TrainConfig, mesh: Mesh) -> PlanConfig:
    """The settings with which `pagoda plan` forecasts a run."""
    everyone = mesh.everyone
    return PlanConfig(**config.shared(Run), nodes=everyone.nodes, gpus_per_node=everyone.local_size)


def _searched(
    config: TrainConfig, mesh: Mesh
) -> tuple[dict[str, Any], tuple[str, ...], tuple[str, ...], dict[str, Any]]:
    """Changed settings, with those of `Memory` under "memory"; what was chosen for settings that were open; why the
    plan was chosen; and a record of the predicted step."""
    asked = plan_config(config, mesh)
    machine = find_machine_for(asked)
    if compute_device(asked.memory) == torch.device("cpu"):  # the run does not use a GPU
        machine = replace(machine, hardware=replace(machine.hardware, device=None, link=None))
    made = forecast(asked, machine, measure=False)
    if made.choice is None:
        assert made.refusal is not None
        raise made.refusal
    options = made.choice.best.options
    memory = {
        "host": made.plan.budgets.host,
        "page_size": options.page_bytes,
        "unit_limit": options.unit_limit,
        "split": options.split,
    }
    changes: dict[str, Any] = {"memory": memory, "batch_tiles": made.config.batch_tiles, "speculate": options.speculate}
    if config.activations == "auto":
        changes["activations"] = made.config.activations
    return changes, made.resolved, made.choice.simulated, timeline_record(made.timeline)
