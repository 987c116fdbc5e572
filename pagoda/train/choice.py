"""The plan of a run: the planner's first choice, or the fastest that a search by simulation finds."""

import time
from dataclasses import dataclass, replace
from typing import Any

import torch
from rich.console import Console

from pagoda.calibrate.matmul import FAR_SLOWER, cpu_slowdown
from pagoda.errors import ConfigError
from pagoda.forecast.activations import chunking_helps
from pagoda.forecast.config import PlanConfig
from pagoda.forecast.forecast import forecast
from pagoda.forecast.machine import Machine, find_machine_for
from pagoda.forecast.subject import widths
from pagoda.parallel.mesh import Mesh
from pagoda.plan.activations import ActivationMode, recomputes
from pagoda.plan.batch_tiles import BatchTiles, tile_tokens
from pagoda.settings import StatesConfig
from pagoda.simulate.hardware import hardware_file, read_hardware
from pagoda.tiers import Memory
from pagoda.train.config import TrainConfig
from pagoda.train.ranks import from_first


def chunks_loss(config: TrainConfig, model: Any) -> bool:
    """Whether the loss of a run is computed in chunks: as asked, or where that lowers the peak of activations."""
    if config.chunked_loss is not None:
        return config.chunked_loss
    hidden, ffn, vocab = widths(model.config.get_text_config())
    tokens = config.batch_size * config.seq_len
    at_a_time = tile_tokens(config.batch_tiles, config.batch_size, config.seq_len)
    itemsize = 2 if config.precision == "bf16" else 4
    return chunking_helps(hidden, ffn, vocab, at_a_time, tokens, itemsize, recomputes(config.activations))


def precision_hint(config: TrainConfig, memory: Memory) -> str | None:
    """A line for whoever trains in 16 bits on a CPU that has no fast instructions for them."""
    if config.precision == "fp32" or memory.torch_device.type != "cpu":
        return None
    slowdown = cpu_slowdown(torch.bfloat16 if config.precision == "bf16" else torch.float16)
    if slowdown < FAR_SLOWER:
        return None
    return (
        f"Precision: this CPU multiplies {config.precision} matrices {slowdown:.0f} times slower than fp32 ones. "
        "--precision fp32 is faster; its weights and gradients take twice the bytes in transfers."
    )


@dataclass(frozen=True)
class Chosen:
    """What a search chose for `wrap`, or what was asked for."""

    memory: Memory
    activations: ActivationMode
    batch_tiles: BatchTiles | None


@dataclass(frozen=True)
class _Found:
    """What a search found on one rank, for all."""

    memory: dict[str, Any]
    """Fields of `Memory`."""
    activations: ActivationMode
    batch_tiles: BatchTiles | None
    reasons: tuple[str, ...]


def choose_plan(config: TrainConfig, memory: Memory, console: Console, mesh: Mesh) -> Chosen:
    """What a search chooses, if there is to be one, else what was asked for; prints the choices and why.

    Of several ranks the first one searches, if that was asked for, and all take what it finds.

    Raises:
        BudgetError: the search finds that nothing fits.
        ConfigError: a setting that cannot be used; the search was asked for, and this machine has not been measured.
    """
    asked = Chosen(memory, config.activations, config.batch_tiles)
    searchable = mesh.size == 1 and config.lora.rank is None and hardware_file().exists()
    mode = config.plan or ("search" if searchable else "usual")
    if mode == "usual":
        return asked
    started = time.perf_counter()
    try:
        found = from_first(mesh, "the choice of a plan", lambda: _searched(config, memory, mesh))
    except ConfigError as error:
        if config.plan == "search":
            raise
        console.print(f"Plan: the usual one; no search, as {error}", soft_wrap=True, highlight=False)
        return asked
    took = time.perf_counter() - started
    lines = (f"Plan: chosen by a search, which took {took:.1f} s (--plan usual: none).", *found.reasons)
    console.print("\n".join(lines), soft_wrap=True, highlight=False)
    return Chosen(replace(memory, **found.memory), found.activations, found.batch_tiles)


def _check_measured_for(mesh: Mesh) -> None:
    """Raises ConfigError where it is not known how fast ranks like these talk to each other."""
    world, again = mesh.world, "calibrate with as many processes: `torchrun ... -m pagoda calibrate`"
    if mesh.ranks.replicas > 1:
        raise ConfigError("--plan search knows no replicas: leave one of --plan and --replicas out")
    if not hardware_file().exists():
        return  # which is said otherwise
    hardware = read_hardware(hardware_file())
    if world.local_size > 1 and hardware.intra_node_bytes_per_s is None:
        raise ConfigError(f"--plan search needs the speed of collectives among the processes of a node: {again}")
    if world.nodes > 1 and hardware.inter_node_bytes_per_s is None:
        raise ConfigError(f"--plan search needs the speed of collectives among nodes: {again}")


def plan_config(config: TrainConfig, mesh: Mesh) -> PlanConfig:
    """What `pagoda plan` is to be asked for the forecast of a run."""
    return PlanConfig(
        model=config.model,
        nodes=mesh.world.nodes,
        gpus_per_node=mesh.world.local_size,
        zero_stage=config.zero_stage,
        expert_parallel=config.expert_parallel,
        batch_size=config.batch_size,
        seq_len=config.seq_len,
        accumulation_steps=config.accumulation_steps,
        precision=config.precision,
        gradients=config.gradients,
        memory=config.memory,
        clip_grad_norm=config.clip_grad_norm,
        speculate=config.speculate,
        update=config.update,
        max_staleness=config.max_staleness,
        keep_checkpoints=config.kept_on_ssd if mesh.world.nodes == 1 else 0,
        optimizer=config.optimizer,
        optim=StatesConfig(options=config.optim.options, moments=config.optim.moments),
        activations=config.activations,
        chunked_loss=config.chunked_loss,
        batch_tiles=config.batch_tiles,
        tile_limit=config.tile_limit,
    )


def _searched(config: TrainConfig, memory: Memory, mesh: Mesh) -> _Found:
    """The choices of the plan that `pagoda plan` forecasts."""
    if mesh.size > 1:
        _check_measured_for(mesh)
    asked = plan_config(config, mesh)
    made = forecast(asked, _here(asked, memory), measure=False)
    if made.choice is None:
        assert made.refusal is not None
        raise made.refusal
    options = made.choice.best.options
    fields = {
        "host": made.plan.budgets.host,
        "page_size": options.page_bytes,
        "unit_limit": options.unit_limit,
        "split": options.split,
    }
    reasons = (*made.resolved, *made.choice.simulated)
    return _Found(fields, made.config.activations, made.config.batch_tiles, reasons)


def _here(asked: PlanConfig, memory: Memory) -> Machine:
    """This machine as it was measured, less a GPU that the run does not use."""
    machine = find_machine_for(asked)
    if memory.torch_device == torch.device("cpu"):
        machine = replace(machine, hardware=replace(machine.hardware, device=None, link=None))
    return machine
