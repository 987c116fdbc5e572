"""What the user touches: `wrap`, `Memory`, `Split`, `open_mesh`, `init`, `load`, `gathered`, `plan_of`."""

import os
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from pagoda.checkpoint.full_state import full_state_dict
from pagoda.checkpoint.gathered import gathered, mark_homes
from pagoda.checkpoint.groups import (
    ParamGroups,
    Reserve,
    check_placed,
    named_groups,
    no_decay_groups,
    reserved_names,
)
from pagoda.checkpoint.pretrained import attach_weights
from pagoda.checkpoint.stateful import ModelState, OptimizerState, trainable_state_dict
from pagoda.construction.construct import Builder, describe, init, live_units, move_buffers
from pagoda.construction.model_checks import check_batch_norms, check_model, check_one_dtype
from pagoda.construction.rule_checks import check_extents, check_rule
from pagoda.errors import ConfigError, UsageError
from pagoda.memory.page import PAGE_ALIGN
from pagoda.memory.ram import free_ram
from pagoda.memory.sizes import parse_bytes
from pagoda.models.build import build_from_directory
from pagoda.models.chunked_loss import chunked_loss
from pagoda.optim import SGD, Adafactor, Adam, AdamW, Lion, Muon, Optim
from pagoda.optim.rule import Gradients, Precision, Rule, TensorRule, check_precision, kept_dtype
from pagoda.optimizer import PagedOptimizer
from pagoda.parallel.experts import ExpertExchange
from pagoda.parallel.mesh import Mesh, as_mesh, open_mesh
from pagoda.parallel.start import (
    FromFirst,
    agreed_plan,
    check_equal,
    check_for_ranks,
    least_budgets,
    on_any_rank,
)
from pagoda.parallel.tensors import check_tensor_parallel, divided_in
from pagoda.parallel.wire import Wire
from pagoda.plan.activations import SHARE_OF_MEMORY, ActivationMode
from pagoda.plan.batch_tiles import BatchTiles
from pagoda.plan.options import Options, Split
from pagoda.plan.planner import Plan, make_plan
from pagoda.runtime.blocks import refuse_own_checkpointing
from pagoda.runtime.device import open_device
from pagoda.runtime.engine import Engine
from pagoda.runtime.loss_scale import LossScale, LossScaler
from pagoda.tiers import Memory
from pagoda.transforms.batch_tiles import TiledBlocks, blocks_to_tile
from pagoda.transforms.operator_tiles import Tiling

__all__ = [
    "SGD",
    "Adafactor",
    "Adam",
    "AdamW",
    "Lion",
    "LossScale",
    "Memory",
    "Mesh",
    "ModelState",
    "Muon",
    "Optim",
    "OptimizerState",
    "Split",
    "chunked_loss",
    "full_state_dict",
    "gathered",
    "init",
    "load",
    "no_decay_groups",
    "open_mesh",
    "plan_of",
    "trainable_state_dict",
    "wrap",
]

Update = Literal["sync", "async"]
Model = TypeVar("Model", bound=nn.Module)


def wrap(
    model: Model,
    optimizer: Rule,
    *,
    param_groups: ParamGroups | None = None,
    reserve: Reserve = (),
    memory: Memory | None = None,
    precision: Precision = "bf16",
    clip_grad_norm: float | None = None,
    accumulation_steps: int | None = None,
    keep_checkpoints: int | None = None,
    speculate: bool | None = None,
    update: Update = "sync",
    max_staleness: int = 1,
    activations: ActivationMode = "keep",
    partition_activations: bool = False,
    batch_tiles: BatchTiles | None = None,
    gradients: Gradients | None = None,
    loss_scale: LossScale | float | Literal["dynamic"] | None = None,
    tile_limit: str | int | None = None,
    mesh: Mesh | DeviceMesh | None = None,
) -> tuple[Model, PagedOptimizer]:
    """Move a model's training state into pages and return the model with the optimizer that steps it.

    The model is changed in place and used as before: forward, backward, `optimizer.step()`. Its parameters take
    the compute dtype of `precision`: "bf16" (weights that are the high half of an fp32 master), "fp16" (weights beside
    which 16 bits keep the master) or "fp32". Buffers keep their dtype and move to the device. `gradients` is what
    gradients are accumulated in, "fp32" or "bf16"; left out, it is that of the weights.

    With "fp16", call `optimizer.scale(loss).backward()`. `loss_scale` is "dynamic" (the default; a `LossScale` changes
    its settings): steps with gradients that are not finite are skipped and halve the scale; or a power of two for good.

    `param_groups` is what torch's optimizers take first: parameters, or dictionaries of `params` and what differs for
    them (`lr`, `weight_decay`, `betas`, ...; see `no_decay_groups`). Left out, all trainable parameters are one group.
    Frozen ones in a group may be unfrozen at any time, and any parameter may be frozen: while it is, it gets no
    gradient and no update, and keeps its state. `reserve` names parameters (modules mean all of theirs) that are in no
    group yet, for `optimizer.add_param_group`. Only these and those in groups take memory for gradients and optimizer
    state; all others cost their weights alone, and stay frozen.

    `clip_grad_norm` clips the global gradient norm, exactly, wherever the gradients live. If something else clips too
    (`torch.nn.utils.clip_grad_norm_`, a trainer), the smaller of the two limits holds. `accumulation_steps` announces
    how many backward passes precede each `step()`: then, without clipping, units are updated while backward still runs.
    Left out, any number of passes may precede a step.

    `keep_checkpoints` says of how many checkpoints the pages on SSD are kept at once. A checkpoint keeps them where
    they are instead of copying them, and training writes to others, so each takes as much of the SSD as the weights
    and moments there. Left out, it is one where that fits, else none: then checkpoints copy what is on SSD.

    With clipping or dynamic loss scaling, `accumulation_steps` announced and state on SSD, units are also updated while
    backward still runs, as if nothing would be clipped or overflow: each keeps its old states too, and where `step()`
    finds otherwise, these are taken back, and updated anew if the step counts. The bits are the same; `optimizer.stats`
    counts both outcomes. `speculate` left out does so where there is room for the old states; True gives copies of
    weights, which that takes where they live in RAM, precedence over moments in RAM, and does so with units that have
    all their states in RAM, where copies of these fit; False does without.

    `update="async"` changes the algorithm: forward and backward do not wait for updates, so where these take longer
    than compute (states on SSD), weights lag. The forward of a unit reads weights that lack the gradients of at most
    the last `max_staleness` steps, and waits only where they would lack more; 0 gives the bits of "sync". Every
    gradient is still applied as its own step, clipped by its own norm. RAM keeps the gradients of `max_staleness` + 1
    steps and every weight has a second extent. `optimizer.drain()` applies everything; `state_dict`, `gathered`,
    checkpoints, `close` and, between steps, a forward without gradients drain first.
    `optimizer.stats.staleness` has what was observed.

    `activations` says what becomes of what graphs keep between forward and backward. "keep": it stays, as in plain
    PyTorch. "recompute": of each block (a module that the model repeats, such as its layers) only the inputs stay, and
    backward computes it again. "offload": what is large goes to RAM, where compute has a memory of its own, and else to
    SSD, and comes back ahead of backward. "recompute+offload": as "recompute", and the inputs go. "auto" follows a
    plan, block by block, made of the sizes that a first forward of each bucket of input shapes shows, for
    `memory.activations`. The bits are the same. Compile blocks before `wrap`, if at all. With
    `partition_activations`, tensor-parallel ranks keep, or offload, an equal part each of those inputs that all of them
    have, and gather the whole before they recompute; the bits are the same again.

    `batch_tiles=N` lets each of the model's repeated layers run the batch it is given in N micro-batches, or in as many
    as "auto" finds useful. Feed the whole batch of a step at once: weights are then fetched once for all of it, and
    where it is recomputed a layer's activations are there for one micro-batch at a time. With it you state that these
    layers treat the samples of a batch independently in training; then gradients have the bits of ordinary accumulation
    of the same micro-batches. What can be checked of that is checked, and refused by ConfigError: batch norms that use
    the statistics of the batch, buffers that forward changes, arguments that micro-batches cannot share, outputs that
    are of the batch as a whole. "auto" runs a layer whose batch norms or arguments do not allow it whole, with a
    warning, and `plan_of` says so. Layers of transformers are given no key-value cache while they are tiled.

    `tile_limit=SIZE` cuts linear layers and embeddings whose weights take more into tiles, which are fetched, used and
    dropped one after another. State dicts and checkpoints have the names and shapes of the whole layers. In backward
    the result is rounded differently: what such a layer gives to its input is a sum over tiles.

    Experts of transformers' mixtures are units of their own, fetched when a router has chosen them. With `tile_limit`,
    as many experts of a layer as it allows are one unit; where it allows all, transformers' module stays as it is. A
    mesh with `expert_parallel` divides the experts of every layer over ranks: build the whole model on each.

    Under torchrun, the ranks train one model, each with batches of its own and budgets of its own; gradients are the
    mean over ranks, and weights at the start are those of rank 0. `mesh` says what the ranks share out
    (`pagoda.open_mesh`, or a torch mesh with dimensions replicate, shard and tensor); left out, all of the state is
    divided over all of them (ZeRO stage 3). A model that torch's `parallelize_module` has divided stays so: each rank's
    pages have its parts of the tensors, which ranks with other batches share out, and the norm and checkpoints are
    those of the whole model. `step`, `clip_grad_norm_`, `gathered`, `state_dict` and checkpoints need every rank, at
    the same point of the program.

    Raises BudgetError when the state does not fit `memory` (before any of it is allocated), StorageError for an
    SSD directory that is missing or full, ConfigError for other settings and for a model that cannot be trained with
    them, UsageError for a model wrapped already.
    """
    check_model(model)
    memory = _checked(memory)
    mesh = open_mesh(tensor_parallel=divided_in(model)) if mesh is None else as_mesh(mesh)
    wire = Wire(mesh.world) if mesh.size > 1 else None
    if wire is not None:
        check_for_ranks(update == "async", speculate)
        memory = memory.of_rank(mesh.world)
        if keep_checkpoints is None and mesh.world.nodes > 1:
            keep_checkpoints = 0  # other nodes may have drives that nobody else sees
    check_precision(precision)
    check_rule(optimizer, tiled=tile_limit is not None)
    scaler = _scaler(precision, loss_scale)
    _check_settings(clip_grad_norm, accumulation_steps, keep_checkpoints, speculate, update, max_staleness, scaler)
    _check_activations(activations, partition_activations, memory, model, mesh)
    groups = named_groups(model, param_groups)
    trained = {name for group in groups for name in group["params"]} | reserved_names(model, reserve)
    check_placed(model, trained)
    for group in groups:
        optimizer.with_group({**optimizer.defaults(), **group})
    tiled_blocks = [] if batch_tiles is None else blocks_to_tile(model, batch_tiles)
    device = open_device(memory.torch_device)
    states = optimizer.states(precision)
    check_one_dtype(model, states[0].dtype)
    check_tensor_parallel(model, mesh, optimizer, states, device.torch_device, tile_limit is not None)
    tiled_bytes = _tile_bytes(tile_limit)
    if device.torch_device.type == "cpu":
        check_batch_norms(model, states[0].dtype)
    options = Options(
        page_bytes=memory.page_bytes,
        unit_limit=memory.unit_bytes,
        accumulation_steps=accumulation_steps,
        clipping=clip_grad_norm is not None,
        split=memory.split,
        keep_checkpoints=keep_checkpoints,
        max_staleness=max_staleness if update == "async" else None,
        speculate=speculate,
        activations=activations,
        partition_activations=partition_activations,
        gradients=kept_dtype(gradients),
        may_skip=scaler.dynamic,
    )
    tiling = Tiling(
        model,
        None if tiled_bytes is None else tiled_bytes // states[0].dtype.itemsize,
        cuts_stacks=not isinstance(optimizer, TensorRule),
        exchange=ExpertExchange.over(mesh) if mesh.ranks.expert_parallel > 1 else None,
    )
    trained = {*tiling.renamed(trained)}
    groups = [{**group, "params": tiling.renamed(group["params"])} for group in groups]
    poison = os.environ.get("PAGODA_POISON", "") not in ("", "0")
    try:
        plan = _plan(
            model, trained, optimizer, precision, options, clip_grad_norm, memory, device.torch_device, mesh, wire
        )
        units = live_units(model, plan.units, states[0].dtype, device.torch_device)
        ranks = (mesh, wire) if wire is not None else None
        engine = Engine(
            plan, units, precision, optimizer, memory.ssd_directories, clip_grad_norm, poison, device, scaler, ranks
        )
    except BaseException:
        tiling.undo()
        raise
    try:
        _move_in(model, engine, tiling, wire)
        paged = PagedOptimizer(model, optimizer, engine, groups)
        if batch_tiles is not None:
            setattr(model, _TILED, TiledBlocks(tiled_blocks, batch_tiles))
    except BaseException:
        engine.close()
        raise
    mark_homes(engine)
    setattr(model, _ENGINE, engine)
    return model, paged


def load(directory: str | Path, *, model_class: Any = None) -> nn.Module:
    """A transformers model with the weights of a local Hugging Face directory, for `wrap` to place.

    As `from_pretrained`, by the same rules for the names in the files, but the weights stay in their safetensors files
    until `wrap` streams them to their tier in pieces: until then the model cannot be used, and the files must stay.
    The model is in training mode. fp32, fp16 and bf16 values become the fp32 master as they are. Nothing is downloaded,
    and no code from the directory runs.

    `model_class` is a class of transformers, an Auto class or a model's own; by default the one that the directory's
    config.json names. What the files lack is initialised as in a new model, with a warning; what they have too many is
    left, with a warning.

    Raises ConfigError for a directory without config.json or weights, for weights that do not fit the model, and for
    quantised ones; CheckpointError for a damaged file.
    """
    with init():
        model = build_from_directory(Path(directory), model_class)
    for message in attach_weights(model, Path(directory)).warnings():
        warnings.warn(f"{directory}: {message}", stacklevel=2)
    return model


def _plan(
    model: nn.Module,
    trained: set[str],
    optimizer: Rule,
    precision: Precision,
    options: Options,
    clip_grad_norm: float | None,
    memory: Memory,
    device: torch.device,
    mesh: Mesh,
    wire: Wire | None,
) -> Plan:
    """Where everything goes, which all ranks agree on. Raises BudgetError."""
    root, states, budgets = describe(model, trained), optimizer.states(precision), memory.budgets()
    if wire is None:
        plan = make_plan(root, states, budgets, options)
    else:
        budgets = least_budgets(wire, budgets)
        check_equal(
            wire,
            model=on_any_rank(root, root),
            optimizer=optimizer,
            precision=precision,
            options=options,
            clip=clip_grad_norm,
        )
        make = partial(make_plan, root, states, budgets, options, mesh.ranks, rank=mesh.rank)
        plan = agreed_plan(wire, make, root)
    check_extents(optimizer, plan)
    if options.activations != "auto":
        return plan
    budget = memory.activation_bytes
    room = _free_beside(plan, device, mesh.world.local_size) if budget is None else budget
    return replace(plan, options=replace(options, activation_bytes=room, activations_limited=budget is not None))


def _move_in(model: nn.Module, engine: Engine, tiling: Tiling, wire: Wire | None) -> None:
    """Give every state its values, at home, and buffers theirs; rank 0's, where there are several."""
    with tiling.undone():
        from_first = FromFirst(wire) if wire is not None else None
        Builder(model, engine.store, tiling, from_first).build(engine.units)
    if from_first is not None:
        from_first.copy(model.buffers())
    move_buffers(model, engine.device.torch_device)


def _checked(memory: Memory | None) -> Memory:
    """The budgets given, or those of the machine. Raises ConfigError."""
    if memory is None:
        return Memory()
    if not isinstance(memory, Memory):
        raise ConfigError(f"memory is {memory!r}; give a pagoda.Memory, such as pagoda.Memory(host='8GiB').")
    return memory


def _tile_bytes(limit: str | int | None) -> int | None:
    """Most bytes of a tile's weights. Raises ConfigError."""
    if limit is None:
        return None
    nbytes = parse_bytes(limit, "tile_limit")
    if nbytes < PAGE_ALIGN:
        raise ConfigError(f"tile_limit is {limit}; it must be at least {PAGE_ALIGN} bytes.")
    return nbytes


def _scaler(precision: Precision, loss_scale: LossScale | float | Literal["dynamic"] | None) -> LossScaler:
    """What scales the loss. Raises ConfigError for a setting that makes no sense."""
    if precision != "fp16":
        if loss_scale is not None:
            raise ConfigError(f"loss_scale is for precision='fp16': gradients in {precision} need none.")
        return LossScaler(None)
    if isinstance(loss_scale, str) and loss_scale != "dynamic":
        raise ConfigError(f"loss_scale is {loss_scale!r}; use 'dynamic', a power of two, or a pagoda.LossScale.")
    return LossScaler(LossScale() if loss_scale is None or isinstance(loss_scale, str) else loss_scale)


def _check_settings(
    clip_grad_norm: float | None,
    accumulation_steps: int | None,
    keep_checkpoints: int | None,
    speculate: bool | None,
    update: Update,
    max_staleness: int,
    scaler: LossScaler,
) -> None:
    """Raises ConfigError for settings of `wrap` that no model can be trained with."""
    if clip_grad_norm is not None and not (isinstance(clip_grad_norm, int | float) and clip_grad_norm > 0):
        raise ConfigError(f"clip_grad_norm is {clip_grad_norm!r}; it must be above 0, or None for no clipping.")
    for name, count, least in (
        ("accumulation_steps", accumulation_steps, 1),
        ("keep_checkpoints", keep_checkpoints, 0),
        ("max_staleness", max_staleness, 0),
    ):
        if count is not None and not (isinstance(count, int) and count >= least):
            raise ConfigError(f"{name} is {count!r}; it must be a whole number, at least {least}.")
    if update not in get_args(Update):
        raise ConfigError(f"update is {update!r}; use one of {', '.join(get_args(Update))}.")
    decided_last = clip_grad_norm is not None or scaler.dynamic
    if speculate and (not decided_last or accumulation_steps is None or update == "async"):
        raise ConfigError(
            "speculate=True is for updates under backward with clipping, or dynamic loss scaling: give clip_grad_norm "
            "and accumulation_steps, and leave out update='async'."
        )


def _check_activations(
    activations: ActivationMode, partition: bool, memory: Memory, model: nn.Module, mesh: Mesh
) -> None:
    """Raises ConfigError for a policy that is none, has nowhere to offload to, or divides where nothing is divided;
    UsageError for a model that checkpoints by itself."""
    if activations not in get_args(ActivationMode):
        raise ConfigError(f"activations is {activations!r}; use one of {', '.join(get_args(ActivationMode))}.")
    if partition and activations in ("keep", "offload"):
        raise ConfigError(
            f"partition_activations is for blocks that are recomputed, but activations is {activations!r}: use "
            "'recompute', 'recompute+offload' or 'auto'."
        )
    if partition and mesh.ranks.tensor_parallel == 1:
        raise ConfigError(
            "partition_activations divides them over tensor-parallel ranks, and there are none: leave it out, or use "
            "pagoda.open_mesh(tensor_parallel=N) and parallelize_module."
        )
    if activations == "keep":
        return
    refuse_own_checkpointing(model)
    if activations.endswith("offload") and memory.device is None and memory.ssd is None:
        raise ConfigError(
            f"activations is {activations!r}, but there is nowhere to offload to: compute is the CPU, and activations "
            "are in its RAM. Give memory.ssd, or use 'recompute'."
        )


def plan_of(model: nn.Module) -> Plan:
    """The plan a wrapped model runs by now. Raises UsageError for a model that is not wrapped."""
    engine = getattr(model, _ENGINE, None)
    if not isinstance(engine, Engine):
        raise UsageError("This model is not wrapped: call pagoda.wrap(model, ...) first.")
    plan, tiled = engine.whole_plan, getattr(model, _TILED, None)
    if not isinstance(tiled, TiledBlocks):
        return plan
    whole = (f"Layer {name!r} runs its batch whole: {reason}." for name, reason in tiled.whole.items())
    return replace(plan, reasons=(*plan.reasons, *whole))


_ENGINE, _TILED = "_pagoda_engine", "_pagoda_tiled"


def _free_beside(plan: Plan, device: torch.device, ranks: int) -> int:
    """Bytes that activations may take where compute runs, beside all pages of a plan that are about to be taken; RAM is
    shared by the `ranks` of this node."""
    if device.type == "cuda":
        free, pages = torch.cuda.mem_get_info(device)[0], plan.peak_bytes.get("device", 0)
    else:
        free, pages = free_ram() // ranks, plan.peak_bytes.get("host", 0) + plan.peak_bytes.get("device", 0)
    return max(0, int((free - pages) * SHARE_OF_MEMORY))
