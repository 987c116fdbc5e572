"""Model and optimizer as `torch.distributed.checkpoint` takes them: `Stateful` objects, keyed by parameter name."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from pagoda.checkpoint.contents import Contents
from pagoda.checkpoint.gathered import home_of
from pagoda.errors import CheckpointError, UsageError
from pagoda.optim.flat import join
from pagoda.optim.rule import StateSpec
from pagoda.plan.layout import WEIGHT
from pagoda.plan.packed import Span
from pagoda.runtime.engine import Engine
from pagoda.runtime.store import LOW
from pagoda.runtime.unit import LiveUnit


class ModelState:
    """A wrapped model's weights and persistent buffers, for `torch.distributed.checkpoint`.

        state = {"model": pagoda.ModelState(model), "optim": pagoda.OptimizerState(optimizer)}
        dcp.save(state, checkpoint_id="checkpoints/1000")
        dcp.load(state, checkpoint_id="checkpoints/1000")

    Weights are the fp32 master, exact, so plain PyTorch can load them too; a tied parameter is there once, under its
    first name. All of them are in RAM at once while saving or loading, 4 bytes a parameter (and 8 for the optimizer's
    state): `optimizer.save_checkpoint` is for what does not fit. Where ranks divide experts, each has its own, by their
    names in the whole model, and `dcp.save` joins them: any number of ranks can load what it wrote. Of a
    parameter that tensor-parallel ranks divide there is a DTensor, of which each rank has its part.

    Raises UsageError for a model that is not wrapped.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._homes = {name: home for name, p in model.named_parameters() if (home := home_of(p)) is not None}
        if not self._homes:
            raise UsageError("This model is not wrapped: call pagoda.wrap(model, ...) first.")

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Name -> fp32 master, in the parameter's shape, or buffer; all are copies.

        Raises UsageError between backward and step() where updates run under backward.
        """
        for engine in {id(engine): engine for engine, _, _ in self._homes.values()}.values():
            engine.settle()
        masters = {name: _master(*home) for name, home in self._homes.items()}
        return masters | {name: buffer.detach().clone() for name, buffer in unpaged(self._model)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take what `state_dict` gave. Raises CheckpointError, with nothing changed, where names or shapes differ."""
        buffers = dict(unpaged(self._model))
        shapes = {name: tuple(unit.params[slot].shape) for name, (_, unit, slot) in self._homes.items()}
        _check(state_dict, shapes | {name: tuple(buffer.shape) for name, buffer in buffers.items()})
        for name, (engine, unit, slot) in self._homes.items():
            with engine.overwriting():
                part = unit.part_of(slot, state_dict[name].detach())
                engine.store.write_master(unit.spec, slot, part.cpu().float().reshape(-1))
                engine.weights_changed(unit)
        for name, buffer in buffers.items():
            buffer.detach().copy_(state_dict[name])


def unpaged(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Persistent buffers, and parameters that Pagoda leaves alone, by name."""
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}".lstrip("."), buffer
    for name, param in model.named_parameters():
        if home_of(param) is None:
            yield name, param.data


def trainable_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """Name -> fp32 master, a copy in the parameter's shape, of the parameters that train: neither frozen nor tied.

    For adapters: `model.save_pretrained(directory, state_dict=pagoda.trainable_state_dict(model))` is peft's own
    writer without the frozen weights in RAM, of which `model.state_dict()` makes copies. Raises UsageError as
    `ModelState`.
    """
    trained = {name: home for name, p in model.named_parameters() if p.requires_grad and (home := home_of(p))}
    if not trained:
        raise UsageError("This model is not wrapped, or all of it is frozen: call pagoda.wrap(model, ...) first.")
    for engine in {id(engine): engine for engine, _, _ in trained.values()}.values():
        engine.settle()
    return {name: _master(*home) for name, home in trained.items()}


class OptimizerState:
    """A `PagedOptimizer`'s moments, step counts and hyperparameters, for `torch.distributed.checkpoint`.

    In the form of torch's `get_optimizer_state_dict`: `state` and `param_groups`, by parameter name. Every trainable
    parameter has an entry, also before its first step, so that a new run can be loaded into. See `ModelState`.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        homes = [home for group in optimizer.param_groups for p in group["params"] if (home := home_of(p)) is not None]
        self._engine = homes[0][0]
        self._slots = {unit.name(slot): (unit, slot) for _, unit, slot in homes}
        self._moments = [s for s in self._engine.plan.layout.states if s.name not in (WEIGHT, LOW)]

    def state_dict(self) -> dict[str, Any]:
        """`state`: name -> `step` (fp32 scalar) and moments, in the parameter's shape; all are copies.

        A state with one element for many of the parameter's is flat.

        Raises UsageError between backward and step() where updates run under backward.
        """
        self._engine.settle()
        states = {
            name: {"step": torch.tensor(float(unit.steps[slot]))}
            | {
                moment.name: self._read(unit, slot, moment, span)
                for moment in self._moments
                if (span := self._span(name, moment)) is not None
            }
            for name, (unit, slot) in self._slots.items()
        }
        scale = self._engine.stepper.scaler.state_dict()
        return {"state": states, "param_groups": self._groups(), **({"loss_scale": scale} if scale else {})}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take what `state_dict` gave; gradients that had arrived are dropped.

        Raises CheckpointError, with nothing changed, for names, shapes or groups that differ.
        """
        states, groups = state_dict["state"], state_dict["param_groups"]
        for moment in self._moments:
            spans = {name: span for name in self._slots if (span := self._span(name, moment)) is not None}
            found = {name: state[moment.name] for name, state in states.items() if moment.name in state}
            _check(found, {name: self._shape(name, span) for name, span in spans.items()})
        if states.keys() != self._slots.keys():
            raise CheckpointError("The state does not belong to this optimizer: it has other parameters.")
        live = self._groups()
        if [sorted(group["params"]) for group in groups] != [sorted(group["params"]) for group in live]:
            raise CheckpointError("The state does not belong to this optimizer: its groups have other parameters.")
        with self._engine.overwriting():
            self._optimizer.zero_grad()
            self._engine.stepper.scaler.load_state_dict(state_dict.get("loss_scale", {}))
            for name, (unit, slot) in self._slots.items():
                unit.steps[slot] = int(states[name]["step"])
                for moment in self._moments:
                    span = self._span(name, moment)
                    if span is not None:
                        part = unit.part_of(slot, states[name][moment.name].detach())
                        flat = part.cpu().to(moment.dtype).reshape(-1)
                        self._engine.store.write(unit.index, moment.name, span.first, flat)
            for mine, given in zip(self._optimizer.param_groups, groups, strict=True):
                mine.update({key: value for key, value in given.items() if key != "params"})

    def _groups(self) -> list[dict[str, Any]]:
        """The `param_groups`, with the names of their parameters, also of those that other ranks have."""
        names = {id(unit.params[slot]): name for name, (unit, slot) in self._slots.items()}
        groups = [
            {**group, "params": [names[id(p)] for p in group["params"]]} for group in self._optimizer.param_groups
        ]
        together = self._engine.together
        if together is None or together.parts == 1:
            return groups
        return Contents.of(self._engine.units, self._engine.plan.layout, groups, together).groups(groups)

    def _read(self, unit: LiveUnit, slot: int, moment: StateSpec, span: Span) -> torch.Tensor:
        """A parameter's moment."""
        flat = self._engine.store.read(unit.index, moment.name, span.first, span.count)
        return unit.as_param(slot, flat.view(span.shape))

    def _shape(self, name: str, span: Span) -> tuple[int, ...]:
        """Shape of a moment, of the whole parameter where this rank has a part of it."""
        unit, slot = self._slots[name]
        return span.shape if unit.forms[slot] is None else tuple(unit.params[slot].shape)

    def _span(self, name: str, state: StateSpec) -> Span | None:
        """Where a parameter's state lies."""
        unit, slot = self._slots[name]
        return self._engine.plan.layout.span(unit.spec, slot, state)


def _master(engine: Engine, unit: LiveUnit, slot: int) -> torch.Tensor:
    """A parameter's fp32 master; of a frozen one, its weights."""
    store, placed = engine.store, unit.spec.slots[slot]
    weight = store.read(unit.index, WEIGHT, placed.offset, placed.param.numel)
    if store.has_low and placed.param.trainable:
        master = torch.empty(weight.shape)
        join(weight, store.read(unit.index, LOW, placed.offset, placed.param.numel), master)
    else:
        master = weight.float()
    return unit.as_param(slot, master.view(placed.param.shape))


def _check(state_dict: dict[str, Any], shapes: dict[str, tuple[int, ...]]) -> None:
    """A state dict has tensors of the shapes expected, and no others."""
    for name in sorted(shapes.keys() | state_dict.keys()):
        value = state_dict.get(name)
        found = tuple(value.shape) if isinstance(value, torch.Tensor) else None
        if found != shapes.get(name):
            raise CheckpointError(
                f"The state does not belong to this model: {name!r} has shape {found}, and {shapes.get(name)} in the "
                "model (None: it is absent)."
            )
