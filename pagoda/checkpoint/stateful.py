"""Model and optimizer as `torch.distributed.checkpoint` takes them: `Stateful` objects, keyed by parameter name."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from pagoda.checkpoint.contents import Contents
from pagoda.checkpoint.gathered import home_of
from pagoda.errors import CheckpointError, UsageError
from pagoda.optim.flat import join
from pagoda.optim.rule import StateSpec
from pagoda.parallel.mesh import Mesh
from pagoda.parallel.tensors import as_dtensor
from pagoda.plan.layout import WEIGHT
from pagoda.plan.packed import Span
from pagoda.runtime.engine import Engine
from pagoda.runtime.store import LOW
from pagoda.runtime.unit import LiveUnit

Home = tuple[Engine, LiveUnit, int]
"""Where a parameter lives: engine, unit and slot."""


class ModelState:
    """A wrapped model's weights and persistent buffers, for `torch.distributed.checkpoint`.

        state = {"model": pagoda.ModelState(model), "optim": pagoda.OptimizerState(optimizer)}
        dcp.save(state, checkpoint_id="checkpoints/1000")
        dcp.load(state, checkpoint_id="checkpoints/1000")

    Weights are the fp32 master, exact, so plain PyTorch can load them too; a tied parameter is there once, under its
    first name. All of them are in RAM at once while saving or loading, 4 bytes a parameter (and 8 for the optimizer's
    state): `optimizer.save_checkpoint` is for what does not fit. A parameter in tiles is there whole. Of one that ranks
    divide, tensor-parallel ones or those that divide experts, there is a DTensor, of which each rank has its part:
    `dcp.save` joins them, and any number of ranks can load what it wrote.

    Raises UsageError for a model that is not wrapped.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        homes = {name: home for name, p in model.named_parameters() if (home := home_of(p)) is not None}
        self._params = _wholes(homes)
        if not homes:
            raise UsageError("This model is not wrapped: call pagoda.wrap(model, ...) first.")

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Name -> fp32 master, in the parameter's shape, or buffer; all are copies.

        Raises UsageError between backward and step() where updates run under backward.
        """
        _settle_all(self._params)
        masters = {name: param.join([_master(*home) for home in param.homes]) for name, param in self._params.items()}
        return masters | {name: buffer.detach().clone() for name, buffer in unpaged(self._model)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take what `state_dict` gave. Raises CheckpointError, with nothing changed, where names or shapes differ."""
        buffers = dict(unpaged(self._model))
        shapes = {name: param.shape for name, param in self._params.items()}
        _check(state_dict, shapes | {name: tuple(buffer.shape) for name, buffer in buffers.items()})
        for name, param in self._params.items():
            for (engine, unit, slot), part in zip(param.homes, param.cut(state_dict[name]), strict=True):
                with engine.overwriting():
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
    params = _wholes(trained)
    _settle_all(params)
    return {name: param.join([_master(*home) for home in param.homes]) for name, param in params.items()}


class OptimizerState:
    """A `PagedOptimizer`'s moments, step counts and hyperparameters, for `torch.distributed.checkpoint`.

    In the form of torch's `get_optimizer_state_dict`: `state` and `param_groups`, by parameter name. Every trainable
    parameter has an entry, also before its first step, so that a new run can be loaded into. See `ModelState`.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        homes = [home for group in optimizer.param_groups for p in group["params"] if (home := home_of(p)) is not None]
        self._engine = homes[0][0]
        self._params = _wholes({home[1].name(home[2]): home for home in homes})
        self._moments = [s for s in self._engine.plan.layout.states if s.name not in (WEIGHT, LOW)]

    def state_dict(self) -> dict[str, Any]:
        """`state`: name -> `step` (fp32 scalar) and moments, in the parameter's shape; all are copies.

        A state with one element for many of the parameter's is flat.

        Raises UsageError between backward and step() where updates run under backward.
        """
        self._engine.settle()
        states = {
            name: {"step": torch.tensor(float(param.steps))}
            | {moment.name: self._read(param, moment) for moment in self._moments if self._has(param, moment)}
            for name, param in self._params.items()
        }
        scale = self._engine.stepper.scaler.state_dict()
        return {"state": states, "param_groups": self._groups(), **({"loss_scale": scale} if scale else {})}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take what `state_dict` gave; gradients that had arrived are dropped.

        Raises CheckpointError, with nothing changed, for names, shapes or groups that differ.
        """
        states, groups = state_dict["state"], state_dict["param_groups"]
        for moment in self._moments:
            having = {name: param for name, param in self._params.items() if self._has(param, moment)}
            found = {name: state[moment.name] for name, state in states.items() if moment.name in state}
            _check(found, {name: self._shape(param, moment) for name, param in having.items()})
        if states.keys() != self._params.keys():
            raise CheckpointError("The state does not belong to this optimizer: it has other parameters.")
        live = self._groups()
        if [sorted(group["params"]) for group in groups] != [sorted(group["params"]) for group in live]:
            raise CheckpointError("The state does not belong to this optimizer: its groups have other parameters.")
        with self._engine.overwriting():
            self._optimizer.zero_grad()
            self._engine.stepper.scaler.load_state_dict(state_dict.get("loss_scale", {}))
            for name, param in self._params.items():
                param.steps = int(states[name]["step"])
                for moment in self._moments:
                    if self._has(param, moment):
                        self._write(param, moment, states[name][moment.name])
            for mine, given in zip(self._optimizer.param_groups, groups, strict=True):
                mine.update({key: value for key, value in given.items() if key != "params"})

    def _groups(self) -> list[dict[str, Any]]:
        """The `param_groups`, with the names of their parameters, also of those that other ranks have."""
        names = {id(unit.params[slot]): unit.name(slot) for p in self._params.values() for _, unit, slot in p.homes}
        groups = [
            {**group, "params": [names[id(p)] for p in group["params"]]} for group in self._optimizer.param_groups
        ]
        engine, together = self._engine, self._engine.together
        others = together if together is not None and together.parts > 1 else None
        return Contents.of(engine.units, engine.plan.layout, groups, others).groups(groups)

    def _has(self, param: "_Whole", moment: StateSpec) -> bool:
        return self._span(param.homes[0], moment) is not None

    def _read(self, param: "_Whole", moment: StateSpec) -> torch.Tensor:
        """A parameter's moment."""
        return param.join([self._read_part(home, moment) for home in param.homes])

    def _read_part(self, home: Home, moment: StateSpec) -> torch.Tensor:
        _, unit, slot = home
        span = self._span(home, moment)
        assert span is not None
        flat = self._engine.store.read(unit.index, moment.name, span.first, span.count)
        return unit.as_param(slot, flat.view(span.shape))

    def _write(self, param: "_Whole", moment: StateSpec, value: torch.Tensor) -> None:
        rows = [span.shape[0] if (span := self._span(home, moment)) and span.shape else 1 for home in param.homes]
        for home, part in zip(param.homes, param.cut(value, rows), strict=True):
            span = self._span(home, moment)
            assert span is not None
            flat = part.cpu().to(moment.dtype).reshape(-1)
            self._engine.store.write(home[1].index, moment.name, span.first, flat)

    def _shape(self, param: "_Whole", moment: StateSpec) -> tuple[int, ...]:
        """Shape of a moment of a whole parameter."""
        _, unit, slot = param.homes[0]
        if unit.forms[slot] is not None:
            return param.shape
        spans = [span for home in param.homes if (span := self._span(home, moment)) is not None]
        if len(spans) == 1 and param.part is None:
            return spans[0].shape
        if spans[0].shape == tuple(unit.params[slot].shape):
            return param.shape
        return (sum(span.count for span in spans) * param.ranks,)

    def _span(self, home: Home, state: StateSpec) -> Span | None:
        """Where a parameter's state lies."""
        _, unit, slot = home
        return self._engine.plan.layout.span(unit.spec, slot, state)


class _Whole:
    """A parameter of the user's model: one here, or the tiles that it was cut into, of which ranks may have some."""

    def __init__(self, homes: list[Home]) -> None:
        self.homes = homes
        _, unit, slot = homes[0]
        self.part = unit.spec.slots[slot].param.part
        self.shape = tuple(unit.params[slot].shape) if self.part is None else self.part.shape
        self._rows = [home[1].params[home[2]].shape[0] for home in homes] if self.part is not None else []
        self.ranks = 1 if self.part is None else self.shape[0] // sum(self._rows)
        """Those that divide it, in parts of equal size along its first dimension."""

    @property
    def steps(self) -> int:
        """Updates that it has had. Its tiles get gradients together, so they have had as many."""
        _, unit, slot = self.homes[0]
        return unit.steps[slot]

    @steps.setter
    def steps(self, count: int) -> None:
        for _, unit, slot in self.homes:
            unit.steps[slot] = count

    def join(self, parts: list[torch.Tensor]) -> torch.Tensor:
        """The whole of which `parts` are what its tiles have; where ranks divide it, a DTensor with this rank's."""
        if self.part is None:
            return parts[0]
        joined = torch.cat(parts)
        if self.ranks == 1:
            return joined
        from torch.distributed.tensor import DTensor, Replicate, Shard  # slow to import, and only ranks need it

        return DTensor.from_local(joined, self._mesh.experts, (Replicate(), Shard(0)), run_check=False)

    def cut(self, value: torch.Tensor, rows: list[int] | None = None) -> list[torch.Tensor]:
        """What its tiles have of a whole, or of a DTensor as `join` gives one; `rows` are theirs if not its own."""
        value = value.detach()
        if self.part is None:
            _, unit, slot = self.homes[0]
            return [unit.part_of(slot, value)]
        rows = rows or self._rows
        if (divided := as_dtensor(value)) is not None:
            value = divided.to_local()
        elif self.ranks > 1:
            value = value.chunk(self.ranks)[self._mesh.expert_index]
        return list(torch.split(value, rows))

    @property
    def _mesh(self) -> Mesh:
        together = self.homes[0][0].together
        assert together is not None, "one rank has all of a parameter"
        return together.collectives.mesh


def _wholes(homes: Mapping[str, Home]) -> dict[str, _Whole]:
    """Parameters by name -> those of the user's model by name."""
    found: dict[str, list[Home]] = {}
    for name, (engine, unit, slot) in homes.items():
        part = unit.spec.slots[slot].param.part
        found.setdefault(name if part is None else part.whole, []).append((engine, unit, slot))
    return {name: _Whole(of_name) for name, of_name in found.items()}


def _settle_all(params: Mapping[str, _Whole]) -> None:
    for engine in {id(home[0]): home[0] for param in params.values() for home in param.homes}.values():
        engine.settle()


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
