"""The main entry points: `wrap`, `load` and `plan_of`."""

import os
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from pagoda.autograd.activations.blocks import refuse_own_checkpointing
from pagoda.autograd.loss_scale import LossScaler
from pagoda.budgets import budgets_of, compute_device, memory_of_rank, second_placement
from pagoda.checkpoint.export import exported_by_reference
from pagoda.checkpoint.model_config import model_of
from pagoda.checkpoint.pretrained import attach_tensors, attach_weights, dtype_of_files
from pagoda.checkpoint.reader import SavedCheckpoint
from pagoda.checkpoint.state import mark_homes
from pagoda.config.memory import Memory
from pagoda.config.training import (
    ActivationMode,
    Activations,
    MixedPrecision,
    Precision,
    Tiles,
    Training,
    UpdateMode,
    Updates,
    training_of,
)
from pagoda.engine import Engine
from pagoda.errors import ConfigError, UsageError
from pagoda.memory.identity import MANIFEST
from pagoda.memory.ram import free_ram
from pagoda.mesh.dtensors import check_tensor_parallel, divided_in
from pagoda.mesh.mesh import Mesh, as_mesh, open_mesh
from pagoda.models.build import build_from_directory
from pagoda.optim.param_groups import ParamGroups, Reserve, check_placed, named_groups, reserved_names
from pagoda.optim.rule import DTYPES, Rule, TensorRule
from pagoda.optimizer import PagedOptimizer
from pagoda.parameters.quantized import keep_packing
from pagoda.plan.activations import SHARE_OF_MEMORY
from pagoda.plan.combinations import check_experts_of_stages, check_features
from pagoda.plan.layout import WEIGHT
from pagoda.plan.options import Options
from pagoda.plan.planner import Plan, make_plan
from pagoda.plan.ranks import ALONE
from pagoda.plan.second_placement import SecondPlacement
from pagoda.plan.tiers import SSD, Budgets
from pagoda.plan.units import ModuleSpec
from pagoda.prepare.batch_tiles import TiledBlocks, blocks_to_tile
from pagoda.prepare.compiled import compiled_in_place
from pagoda.prepare.construct import (
    Builder,
    deferred_init,
    describe,
    hold_made_anew,
    live_units,
    move_buffers,
    owners_of,
)
from pagoda.prepare.model_checks import (
    check_batch_norms,
    check_converted,
    check_model,
    check_nodes_are_free,
    check_quantized,
    own_precision,
)
from pagoda.prepare.operator_tiles import Tiling
from pagoda.prepare.sequence_tiles import modules_to_tile, tile_sequences
from pagoda.prepare.shared_memory import check_memory_is_apart
from pagoda.ranks.experts import ExpertExchange
from pagoda.ranks.stages import Links
from pagoda.ranks.start import (
    agreed_plan,
    check_equal,
    from_first,
    least_budgets,
    made_by_all,
    rank_independent_text,
)
from pagoda.runtime.device import Device, open_device

Model = TypeVar("Model", bound=nn.Module)


def wrap(
    model: Model,
    optimizer: Rule,
    *,
    param_groups: ParamGroups | None = None,
    reserve: Reserve = (),
    memory: Memory | None = None,
    precision: Precision | MixedPrecision | None = None,
    max_grad_norm: float | None = None,
    gradient_accumulation_steps: int | None = None,
    update: UpdateMode | Updates = "sync",
    activations: ActivationMode | Activations = "keep",
    tiles: Tiles | None = None,
    mesh: Mesh | DeviceMesh | None = None,
) -> tuple[Model, PagedOptimizer]:
    """Move a model's training state into pages. Returns the model and the optimizer that steps it.

    The model is changed in place and used as before: forward, backward, `optimizer.step()`. Call `torch.compile` before
    `wrap`. Buffers keep their dtype and move to the device.

    Args:
        model: The model. Each expert of a transformers mixture of experts is fetched by itself, after a router has
            chosen it.
        optimizer: What updates the weights, such as `pagoda.AdamW(lr=3e-4)`.
        param_groups: As for torch's optimizers: parameters, or dictionaries of `params` and their own settings (`lr`,
            `weight_decay`, `betas`, ...; see `no_decay_groups`). By default, all trainable parameters are one group.
            Any parameter may be frozen at any time: it then gets no gradient and no update, and keeps its state. Frozen
            parameters in a group may be unfrozen. Parameters outside all groups and `reserve` stay frozen, and take
            memory only for their weights.
        reserve: Parameters, or modules for all of their parameters, that a later `optimizer.add_param_group` may add.
            They take memory for gradients and optimizer state.
        memory: Where the state may live. By default 80% of the free RAM.
        precision: Compute dtype of all parameters: "bf16" (weights are the high half of an fp32 master), "fp16"
            (weights and 16 more bits make up the master; call `optimizer.scale(loss).backward()`) or "fp32". By
            default, each keeps its own. `MixedPrecision` also sets the dtype of accumulated gradients and the loss
            scaling.
        max_grad_norm: Largest global norm of the gradients, which is exact in all tiers. If something else clips too
            (`torch.nn.utils.clip_grad_norm_`, a trainer), the smaller of the two limits holds. 0 or None: no clipping.
        gradient_accumulation_steps: Number of backward passes before each `step()`. If it is given and nothing clips,
            updates run during backward. By default, any number of passes may precede a step.
        update: "sync", or "async", which changes the algorithm: weights lack the last step's update, which has the time
            of a step to run. `state_dict` and `gathered` read states with every update. A forward between steps reads
            the weights of the next step. Neither they nor a checkpoint changes a bit. After `optimizer.synchronize()`,
            the next step reads every update. `Updates(speculate=...)` allows updates during backward before the norm is
            known.
        activations: What happens to activations between forward and backward: see `Activations`.
        tiles: Which operators run in pieces: see `Tiles`.
        mesh: With several ranks, what they divide: `pagoda.open_mesh`, or a torch mesh with dimensions replicate, shard
            and tensor. By default, all state is divided over all ranks (ZeRO stage 3).

    Under torchrun, the ranks train one model. Each rank has its own batches and its own budgets. Gradients are the mean
    over ranks, and the initial weights are those of rank 0. The norm and checkpoints are those of the whole model.
    Every rank must call `step`, `clip_grad_norm_`, `gathered`, `state_dict` and the checkpoint methods at the same
    point of the program.

    - *Tensor parallelism*: a model that torch's `parallelize_module` has divided stays divided. Each rank's pages have
      its parts of the tensors, and ranks with different batches divide these parts.
    - *Expert parallelism*: build the whole model on each rank. The mesh divides the experts of every layer.
    - *Pipelines*: each rank wraps the layers of its stage, under their names in the whole model, and torch's
      `torch.distributed.pipelining` runs them. Everything here is then about the ranks of one stage, except the norm,
      clipping and checkpoints.

    Raises BudgetError if the state does not fit `memory` (before any of it is allocated), StorageError if an SSD
    directory is missing or full, ConfigError for other invalid settings and for a model that cannot be trained with
    them, and UsageError for a model that is wrapped already.
    """
    training = training_of(
        precision=precision,
        max_grad_norm=max_grad_norm,
        gradient_accumulation_steps=gradient_accumulation_steps,
        update=update,
        activations=activations,
        tiles=tiles,
    )
    if not isinstance(memory, Memory | None):
        raise ConfigError(f"memory is {memory!r}; give a pagoda.Memory, such as pagoda.Memory(host='8GiB').")
    check_model(model)
    model = cast(Model, compiled_in_place(model))
    keep_packing(model)
    mesh = open_mesh(tensor_parallel=divided_in(model)) if mesh is None else as_mesh(mesh)
    return model, _Wrapping(model, optimizer, training, memory or Memory(), mesh).wrapped(param_groups, reserve)


class _Wrapping:
    """One call of `wrap`: a model and its training settings."""

    def __init__(self, model: nn.Module, rule: Rule, training: Training, memory: Memory, mesh: Mesh) -> None:
        self._model = model
        self._converts = training.precision is not None
        if not self._converts:
            training = replace(training, precision=own_precision(model))
        self._training = training
        self._dtype = DTYPES[training.chosen_precision]
        self._mesh = mesh
        if not isinstance(rule, Rule):
            raise ConfigError(
                f"wrap() takes an optimizer such as pagoda.AdamW(lr=3e-4), not {rule!r}. Give a class of torch or of "
                "another package as pagoda.Optim(torch.optim.Adagrad, lr=1e-2)."
            )
        self._rule = rule.predicting(training.ahead)
        self._states = self._rule.states(training.chosen_precision)
        check_features(self._states, training.tile_bytes is not None)
        _check_activations(training, memory, model, mesh)
        if memory.adapt_after is not None and training.asynchronous:
            raise ConfigError(
                "memory.adapt_after moves states once all updates have ended, which changes what asynchronous updates "
                "compute: leave it out, or use update='sync'."
            )
        self._links = Links.open(mesh)
        self._asked = memory
        self._memory = memory if mesh.everyone.size == 1 else memory_of_rank(memory, mesh.everyone)

    def wrapped(self, param_groups: ParamGroups | None, reserve: Reserve) -> PagedOptimizer:
        """Move the model into pages. Returns its optimizer."""
        model, rule, training = self._model, self._rule, self._training
        groups = named_groups(model, param_groups)
        trained = {name for group in groups for name in group["params"]} | reserved_names(model, reserve)
        in_fp16 = any(self._dtype_of(p) is torch.float16 for name, p in model.named_parameters() if name in trained)
        if training.precision == "fp16" and training.loss_scale is None and not in_fp16:
            training = self._training = replace(training, loss_scale=1.0)  # gradients are fp32
        check_placed(model, trained)
        check_memory_is_apart(model, trained)
        for group in groups:
            rule.with_group({**rule.defaults(), **group})
        tiled_blocks = [] if training.batch_tiles is None else blocks_to_tile(model, training.batch_tiles)
        in_pieces = [] if training.sequence_tiles is None else modules_to_tile(model, training)
        device = open_device(compute_device(self._memory))
        if self._converts:
            check_converted(model, self._dtype)
        check_nodes_are_free(model, self._dtype_of, device.torch_device)
        check_quantized(model, self._dtype_of, trained)
        tiled_bytes = training.tile_bytes
        check_tensor_parallel(model, self._mesh, device.torch_device)
        if device.torch_device.type == "cpu":
            check_batch_norms(model, self._dtype_of)
        itemsize = max((self._dtype_of(param).itemsize for param in model.parameters()), default=1)
        tiling = Tiling(
            model,
            None if tiled_bytes is None else tiled_bytes // itemsize,
            trained=trained,
            cuts_stacks=not isinstance(rule, TensorRule),
            in_blocks=any(state.per > 1 for state in self._states),
            exchange=ExpertExchange(self._mesh) if self._mesh.ranks.expert_parallel > 1 else None,
            most_looked_up=None if (most := self._memory.embedding_bytes) is None else most // itemsize,
        )
        groups = [{**group, "params": tiling.renamed(group["params"])} for group in groups]
        try:
            self._check_stages(len(groups))
            engine = self._engine({*tiling.renamed(trained)}, device)
        except BaseException:
            tiling.undo()
            raise
        try:
            self._move_in(engine, tiling)
            paged = PagedOptimizer(model, rule, engine, groups, training.sync_steps)
            engine.begin_measuring()
            if training.batch_tiles is not None:
                setattr(model, _TILED, TiledBlocks(tiled_blocks, training.batch_tiles))
            if training.sequence_tiles is not None:
                tile_sequences(in_pieces, training.sequence_tiles)
        except BaseException:
            engine.close()
            raise
        mark_homes(engine)
        setattr(model, _ENGINE, engine)
        return paged

    def _engine(self, trained: set[str], device: Device) -> Engine:
        """Make the engine that runs the plan. Raises BudgetError, on all stages if one has no plan."""
        stages, make = self._links.stages, partial(self._plan, trained, device.torch_device)
        plan = make() if stages is None else made_by_all(make, partial(stages.announce, "pagoda.wrap()"), "Stage")
        return Engine(
            plan,
            live_units(self._model, plan.units, self._dtype, device.torch_device),
            self._rule,
            self._memory.ssd_directories,
            self._training.clipping_norm,
            os.environ.get("PAGODA_POISON", "") not in ("", "0"),
            device,
            LossScaler(self._training.scaling),
            self._links,
            second_placement(self._asked, plan.budgets),
        )

    def _dtype_of(self, param: torch.Tensor) -> torch.dtype:
        """The dtype of a parameter in pages. Packed weights count as elements of the dtype of most others."""
        return self._dtype if self._converts or not param.is_floating_point() else param.dtype

    def _check_stages(self, groups: int) -> None:
        """Raises ConfigError if the stages of a pipeline are not parts of one model with one optimizer."""
        stages = self._links.stages
        if stages is None:
            return
        settings = {"optimizer": self._rule, "precision": self._training.precision, "param_groups": groups}
        clip = self._training.clipping_norm
        check_equal(stages.transport, "stage", **settings, clip=clip, loss_scale=self._training.scaling)
        stages.check_names(self._model.state_dict(keep_vars=True).keys())

    def _plan(self, trained: set[str], device: torch.device) -> Plan:
        """The plan that all ranks of this stage agree on. Raises BudgetError."""
        states, budgets = self._states, budgets_of(self._memory)
        root = describe(self._model, trained, self._dtype, self._dtype_of, states[0].whole)
        mesh, transport, options = self._mesh, self._links.ranks, Options.of(self._training, self._memory)
        if transport is not None:
            budgets = least_budgets(transport, budgets)
        second = second_placement(self._asked, budgets)
        make = partial(self._made, second, root, budgets, options)
        if transport is None:
            plan = make()
        else:
            check_equal(
                transport,
                model=rank_independent_text(root, root),
                optimizer=self._rule,
                precision=self._training.precision,
                options=options,
                clip=self._training.clipping_norm,
            )
            plan = agreed_plan(transport, make, root)
        _check_extents(self._rule, plan)
        if plan.layout.expert_units:
            check_experts_of_stages(mesh.ranks)
        if options.activations != "auto":
            return plan
        budget = self._memory.activation_bytes
        room = _free_beside(plan, device, mesh.world.local_size) if budget is None else budget
        if second is not None:
            room = second.room_for_activations(room, plan)
        options = replace(plan.options, activation_bytes=room, activations_limited=budget is not None)
        return replace(plan, options=options)

    def _made(self, second: SecondPlacement | None, root: ModuleSpec, budgets: Budgets, options: Options) -> Plan:
        """The plan of this rank. Raises BudgetError."""
        mesh = self._mesh
        ranks, rank = (ALONE, None) if self._links.ranks is None else (mesh.ranks, mesh.rank)

        def make(options: Options) -> Plan:
            return make_plan(root, self._states, budgets, options, ranks, rank=rank)

        return make(options) if second is None else second.first_plan(make, options)

    def _move_in(self, engine: Engine, tiling: Tiling) -> None:
        """Write the values of every state to its home, and move buffers. With several ranks, the values are those of
        rank 0."""
        of_first = None if self._links.ranks is None else partial(from_first, self._links.ranks)
        hold_made_anew(self._model, self._states[0].dtype, engine.device.torch_device, of_first or (lambda mine: mine))
        holders = owners_of(self._model)
        with tiling.undone():
            Builder(self._model, engine, tiling, holders, of_first).build(engine.units)
        if of_first is not None:
            for buffer in self._model.buffers():
                buffer.copy_(of_first(buffer))
        in_ram = {unit.spec.module for unit in engine.units if unit.spec.on_host}
        move_buffers(self._model, engine.device.torch_device, in_ram)


def load(directory: str | Path, *, model_class: Any = None, dtype: torch.dtype | None = None) -> nn.Module:
    """Load a transformers model from a local Hugging Face directory, a GGUF file or a checkpoint, for `wrap` to place.

    It works like `from_pretrained`, with the same rules for the names in the files, and for dtypes: parameters are in
    `dtype`, by default that of config.json, and in fp32 where transformers keeps it. But the weights stay in their
    files until `wrap` copies them to their tier in pieces, so the files must stay. Until then the model may be changed
    like any other: copies and parts of weights stay in the files, other operations read what they need. Quantized
    weights (MXFP4, FP8 in blocks, bitsandbytes, GGUF) are dequantized when they are read, a matrix or an expert at a
    time. From a checkpoint, it loads the weights that `export` would write, with adapters merged, but no optimizer
    state. The model is in training mode.
    Nothing is downloaded, and no code from the directory runs.

    `model_class` is a class of transformers: an Auto class or a model class. By default it is the class that the
    directory's config.json names. Parameters that the files lack are initialised as in a new model, with a warning.
    Extra tensors in the files are ignored, with a warning.

    Raises ConfigError for a directory without config.json or weights, for weights that do not fit the model and for
    weights quantized in other ways, and CheckpointError for a damaged file and for a checkpoint whose model is not from
    transformers.
    """
    directory = Path(directory)
    if (directory / MANIFEST).is_file():
        return _load_checkpoint(directory, model_class, dtype)
    with deferred_init():
        model = build_from_directory(directory, model_class, dtype, of_files=dtype_of_files(directory))
    for message in attach_weights(model, directory).warnings():
        warnings.warn(f"{directory}: {message}", stacklevel=2)
    return model


def _load_checkpoint(directory: Path, model_class: Any, dtype: torch.dtype | None) -> nn.Module:
    if model_class is not None:
        raise ConfigError(f"{directory} is a checkpoint, which names the class of its model: leave out model_class")
    tensors, record = exported_by_reference(SavedCheckpoint(directory))
    with deferred_init():
        model: nn.Module = model_of(record, dtype or getattr(torch, record["config"]["dtype"]))
    attach_tensors(model, directory, tensors, their_dtypes=dtype is None)
    return model


def _check_activations(training: Training, memory: Memory, model: nn.Module, mesh: Mesh) -> None:
    """Raises ConfigError for a policy that has no tier to offload to or no ranks to divide activations over, and
    UsageError for a model with gradient checkpointing of its own."""
    if training.partition_activations and mesh.ranks.tensor_parallel == 1:
        raise ConfigError(
            "partition_activations divides activations over tensor-parallel ranks, but there are none: leave it out, "
            "or use pagoda.open_mesh(tensor_parallel=N) and parallelize_module."
        )
    if training.activations == "keep":
        return
    refuse_own_checkpointing(model)
    if training.activations in ("offload", "recompute+offload") and memory.device is None and memory.ssd is None:
        raise ConfigError(
            f"activations is {training.activations!r}, but there is nowhere to offload to: the CPU computes, so "
            "activations are in RAM already. Give memory.ssd, or use 'recompute'."
        )


def _check_extents(rule: Rule, plan: Plan) -> None:
    """Raises ConfigError for asynchronous updates of whole parameters if weights are on SSD.

    Weights then have two extents, and parameters share pages there. So the update of one parameter would overwrite new
    values of another.
    """
    if plan.options.asynchronous and isinstance(rule, TensorRule) and plan.placement.pages(SSD, WEIGHT):
        raise ConfigError(
            f"update='async' with {rule.name} needs every weight in RAM: raise memory.host, or use update='sync'."
        )


def plan_of(model: nn.Module) -> Plan:
    """The current plan of a wrapped model. Raises UsageError for a model that is not wrapped."""
    engine = getattr(model, _ENGINE, None)
    if not isinstance(engine, Engine):
        raise UsageError("This model is not wrapped: call pagoda.wrap(model, ...) first.")
    plan, tiled = engine.whole_plan, getattr(model, _TILED, None)
    if not isinstance(tiled, TiledBlocks):
        return plan
    whole = (f"Layer {name!r} runs its batch whole: {reason}." for name, reason in tiled.whole.items())
    return replace(plan, notes=(*plan.notes, *whole))


_ENGINE, _TILED = "_pagoda_engine", "_pagoda_tiled"


def _free_beside(plan: Plan, device: torch.device, ranks: int) -> int:
    """Bytes that activations may take on the compute device, after all pages of a new plan are allocated. The `ranks`
    of this node share its RAM."""
    if device.type == "cuda":
        free, pages = torch.cuda.mem_get_info(device)[0], plan.peak_bytes.get("device", 0)
    else:
        free, pages = free_ram() // ranks, plan.peak_bytes.get("host", 0) + plan.peak_bytes.get("device", 0)
    return max(0, int((free - pages) * SHARE_OF_MEMORY))
