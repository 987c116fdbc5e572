"""Chooses the tokens of a sequence and the sequences of a step, where they are left open, as `pagoda train` does."""

from collections.abc import Callable
from dataclasses import replace

from pagoda.budgets import HOST_SHARE
from pagoda.config.memory import FIRST_SHARE
from pagoda.config.run import USUAL_LENGTH
from pagoda.forecast.activations import MALLOC, activations_of
from pagoda.forecast.config import PlanConfig
from pagoda.forecast.machine import Machine
from pagoda.forecast.model_description import describe_model
from pagoda.models.build import check_positions, positions_of
from pagoda.models.papers import PAPER_SHAPES

TOKENS_PER_STEP = 16384


def sequences_at_once(target: int, stages: int, fits: Callable[[int], bool]) -> int:
    """How many of the `target` sequences of a step one forward pass has: a power of two whose activations fit. Each
    pipeline stage has a micro-batch to work on."""
    batch = 1
    while batch * 2 * stages <= target and fits(batch * 2):
        batch *= 2
    return batch


def usual_length(model: str) -> tuple[int, str]:
    """Tokens of a sequence of texts, and why. Raises ConfigError like `build_model`."""
    positions = positions_of(model)
    length = USUAL_LENGTH if positions is None else min(positions, USUAL_LENGTH)
    return length, "the model's positions" if positions == length else "usual for texts"


def with_length(config: PlanConfig) -> tuple[PlanConfig, tuple[str, ...]]:
    """The configuration with the tokens of a sequence, and how they were chosen, unless they are the usual number.

    Raises ConfigError like `build_model`, also if the model has fewer positions than were asked for.
    """
    if config.model is None or config.model in PAPER_SHAPES:
        return config, ()
    if config.max_length:
        check_positions(config.model, config.max_length)
        return config, ()
    length, why = usual_length(config.model)
    chosen = (f"--max-length {length}: {why}.",) if length < USUAL_LENGTH else ()
    return replace(config, max_length=length), chosen


def with_step_size(config: PlanConfig, machine: Machine) -> tuple[PlanConfig, tuple[str, ...]]:
    """The configuration with the sequences of a forward pass and the passes of a step, and how they were chosen. Raises
    ConfigError like `describe_model`."""
    if config.per_device_train_batch_size:
        return config, ()
    described = describe_model(config)
    tokens, config = config.tokens_per_step or TOKENS_PER_STEP, replace(config, tokens_per_step=None)
    ranks = machine.ranks.data_parallel // config.sequence_parallel
    target = max(1, round(tokens / config.seq_len / ranks))
    room, kept = _room_for_activations(config, machine)

    def fits(batch: int) -> bool:
        return kept * activations_of(replace(config, per_device_train_batch_size=batch), described).total <= room

    batch, passes = sequences_at_once(target, config.pipeline_parallel, fits), config.gradient_accumulation_steps
    if passes == 1:
        passes = max(config.pipeline_parallel, round(target / batch))
    chosen = f"--per-device-train-batch-size {batch} --gradient-accumulation-steps {passes}"
    each = batch * passes * ranks * config.seq_len
    reason = f"{chosen}: about {each:,} tokens a step (--tokens-per-step), as `pagoda train` chooses them."
    return replace(config, per_device_train_batch_size=batch, gradient_accumulation_steps=passes), (reason,)


def _room_for_activations(config: PlanConfig, machine: Machine) -> tuple[int, int]:
    """Bytes for activations where a rank computes, and the factor for what malloc keeps of them."""
    memory, whole = config.memory, machine.compute_memory
    on_cpu = machine.hardware.device is None
    if memory.activation_bytes is not None:
        return memory.activation_bytes, 1
    if on_cpu:
        pages = int(whole * HOST_SHARE) if memory.host_bytes is None else memory.host_bytes
        return whole - pages, MALLOC
    return whole - (memory.device_pages or int(whole * FIRST_SHARE)), 1
