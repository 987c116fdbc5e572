"""The plan of a run: the planner's first choice, or the fastest that a search by simulation finds."""

import time
from dataclasses import replace
from typing import Any

import torch
from rich.console import Console

from pagoda.budgets import compute_device
from pagoda.calibrate.matmul import FAR_SLOWER, cpu_slowdown
from pagoda.config.run import Run
from pagoda.errors import ConfigError
from pagoda.forecast.activations import chunking_helps
from pagoda.forecast.config import PlanConfig
from pagoda.forecast.forecast import forecast
from pagoda.forecast.machine import find_machine_for
from pagoda.forecast.model_description import widths
from pagoda.forecast.record import timeline_record
from pagoda.mesh.mesh import Mesh
from pagoda.plan.activations import recomputes
from pagoda.simulate.hardware import hardware_file
from pagoda.train.config import TrainConfig
from pagoda.train.progress import say
from pagoda.train.ranks import from_first


def chunks_loss(config: TrainConfig, model: Any) -> bool:
    """Whether the loss of a run is computed in chunks: if the user asked for it, or if that lowers the peak of
    activations."""
    if config.chunked_loss is not None:
        return config.chunked_loss
    sizes = config.tile_tokens, config.piece_tokens, config.tokens, config.itemsize
    return chunking_helps(widths(model.config.get_text_config()), *sizes, recomputes(config.activations))


def precision_hint(config: TrainConfig) -> str | None:
    """A line for a run in 16 bits on a CPU that has no fast instructions for them."""
    if config.precision == "fp32" or compute_device(config.memory).type != "cpu":
        return None
    slowdown = cpu_slowdown(torch.bfloat16 if config.precision == "bf16" else torch.float16)
    if slowdown < FAR_SLOWER:
        return None
    return (
        f"Precision: this CPU multiplies {config.precision} matrices {slowdown:.0f} times slower than fp32 ones. "
        "--precision fp32 is faster; its weights and gradients take twice the bytes in transfers."
    )


def choose_plan(config: TrainConfig, console: Console, mesh: Mesh) -> tuple[TrainConfig, dict[str, Any] | None]:
    """Search for the fastest plan. Prints the choices and their reasons.

    Returns the configuration with these choices, and a record of the step that the search predicts. Without a search,
    returns the configuration unchanged, and None. On several ranks, only the first one searches, and all take its
    choices.

    Raises BudgetError if the search finds that nothing fits. Raises ConfigError for a setting that cannot be used, and
    if a search was asked for on a machine that has not been measured.
    """
    searchable = mesh.everyone.size == 1 and config.lora.rank is None and hardware_file().exists()
    mode = config.plan or ("search" if searchable else "usual")
    if mode == "usual":
        return config, None
    started = time.perf_counter()
    try:
        changes, reasons, predicted = from_first(mesh, "the choice of a plan", lambda: _searched(config, mesh))
    except ConfigError as error:
        if config.plan == "search":
            raise
        say(console, f"Plan: the usual one; no search, as {error}")
        return config, None
    took = time.perf_counter() - started
    say(console, f"Plan: chosen by a search, which took {took:.1f} s (--plan usual: none).", *reasons)
    memory = replace(config.memory, **changes.pop("memory"))
    return replace(config, memory=memory, **changes), predicted


def plan_config(config: TrainConfig, mesh: Mesh) -> PlanConfig:
    """The settings with which `pagoda plan` forecasts a run."""
    everyone = mesh.everyone
    return PlanConfig(**config.shared(Run), nodes=everyone.nodes, gpus_per_node=everyone.local_size)


def _searched(config: TrainConfig, mesh: Mesh) -> tuple[dict[str, Any], tuple[str, ...], dict[str, Any]]:
    """Changed settings, with those of `Memory` under "memory"; the reasons; and a record of the predicted step."""
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
    return changes, (*made.resolved, *made.choice.simulated), timeline_record(made.timeline)
