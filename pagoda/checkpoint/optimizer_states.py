"""The optimizer's states as dictionaries: a parameter's entry in torch's `state_dict`, files of such dictionaries, and
all states for `torch.distributed.checkpoint`."""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

from pagoda.checkpoint.contents import Contents
from pagoda.checkpoint.reader import SavedCheckpoint
from pagoda.checkpoint.state import ParameterState, WholeState, named, state_of, whole_states
from pagoda.checkpoint.state_dicts import check_shapes
from pagoda.errors import CheckpointError, StorageError, UsageError
from pagoda.memory.arena import tensor_bytes
from pagoda.mesh.dtensors import DTensorForm
from pagoda.optim.param_groups import check_groups, check_settings
from pagoda.optim.rule import Rule

WriteTensor = Callable[[Any, torch.Tensor], None]
"""Writes a CPU tensor as the values of an entry of a file's content, which has the same dtype and shape."""


def read_entry(state: ParameterState) -> dict[str, Any]:
    """A parameter's entry in a torch `state_dict`. All tensors are copies, and DTensors if the parameter is one.

    Writing back an entry changes no bit.
    """
    return _entry_of(state, {name: state.read(name) for name in state.moments()})


def blank_entry(state: ParameterState, numbers: bool = False) -> dict[str, Any]:
    """Like `read_entry`, with every tensor on the meta device. `numbers`: states that are numbers are read; otherwise
    they are zero, and nothing is read."""
    store, kept = state.engine.store, {}
    for name, span in state.moments().items():
        if span.shape and state.spec.shape:  # a rule may read scalars, and all states of one
            kept[name] = torch.empty(span.shape, dtype=store.dtype(state.unit.index, name), device="meta")
        elif numbers:
            kept[name] = state.read(name)
        else:
            kept[name] = torch.zeros(span.shape, dtype=store.dtype(state.unit.index, name))
    return _entry_of(state, kept, blank=True)


def _entry_of(state: ParameterState, kept: Mapping[str, torch.Tensor], blank: bool = False) -> dict[str, Any]:
    """The entry for a parameter's states, or some of them."""
    entry = dict(state.engine.rule.torch_state(state.unit.steps[state.slot], kept))
    for name, value in entry.items():
        if isinstance(value, torch.Tensor) and blank:
            entry[name] = value.to("meta")
        elif isinstance(value, torch.Tensor) and value.shape == state.spec.shape:
            entry[name] = state.as_param(value)
    return entry


def read_value(state: ParameterState, key: str) -> Any:
    """The value of `read_entry` under one key, which pages have."""
    return _entry_of(state, {spec.name: state.read(spec.name) for spec in state.engine.rule.states_of(key)})[key]


def write_value(state: ParameterState, key: str, value: Any) -> None:
    """Overwrite what `read_value` reads, in any float dtype and from any device."""
    rule = state.engine.rule
    kept = rule.kept_states(_own_parts(state, {key: value}), state.name, state.spec.shape)
    for spec in rule.states_of(key):
        state.write(spec.name, kept[spec.name])


def check_entry(state: ParameterState, entry: Mapping[str, Any]) -> None:
    """Raises CheckpointError if the entry belongs to another optimizer or to a parameter of another shape. States may
    be missing."""
    own, spans, form = blank_entry(state), state.moments(), state.unit.forms[state.slot]
    for name, value in entry.items():
        if value is None or name == "step":
            continue
        if name not in own:
            raise CheckpointError(
                f"The state does not belong to this optimizer: {state.engine.rule.name} keeps no {name!r}, which the "
                f"state has for {state.name!r}."
            )
        shape, wanted = (tuple(torch.as_tensor(each).shape) for each in (value, own[name]))
        whole = tuple(form.shape) if isinstance(form, DTensorForm) and wanted == state.spec.shape else wanted
        if shape not in (wanted, whole, spans[name].shape if name in spans else wanted):
            raise CheckpointError(
                f"The state does not belong to this optimizer: {name!r} of {state.name!r} has shape {shape}, but "
                f"{wanted} here."
            )


def write_entry(state: ParameterState, entry: Mapping[str, Any]) -> None:
    """Load an entry that `check_entry` accepts, with any float dtypes and on any device.

    An empty entry gives the parameter the states of a new one. If tensor-parallel ranks divide the parameter, each
    takes its part of tensors with the parameter's shape.
    """
    engine, unit, slot = state
    unit.steps[slot] = engine.rule.steps_in(entry)
    state.write_entry(_own_parts(state, entry))


def _own_parts(state: ParameterState, entry: Mapping[str, Any]) -> Mapping[str, Any]:
    """The entry for this rank's part of a parameter, if tensor-parallel ranks divide it."""
    form = state.unit.forms[state.slot]
    if not isinstance(form, DTensorForm):
        return entry
    wholes = {k: v for k, v in entry.items() if isinstance(v, torch.Tensor) and v.shape == form.shape}
    return {**entry, **{key: state.stored(value) for key, value in wholes.items()}}


def stored_entry(rule: Rule, checkpoint: SavedCheckpoint, name: str) -> dict[str, torch.Tensor]:
    """A checkpoint's moments of a whole parameter, as torch has them, however ranks had divided it."""
    dim, parts = checkpoint.division(name)
    entries = []
    for part in range(parts):
        kept = {}
        for state in rule.own_states():
            whole, axis = checkpoint.tensors[state.name][name], 0 if state.per > 1 else dim
            size = whole.shape[axis] // parts
            kept[state.name] = whole.narrow(axis, part * size, size).whole()
        entries.append(rule.torch_state(1, kept))
    return {key: torch.cat([entry[key] for entry in entries], dim) for key, value in entries[0].items() if value.dim()}


@contextmanager
def torch_file(path: Path, content: Any) -> Iterator[tuple[Any, WriteTensor]]:
    """A file that `torch.load` reads as `content`. Its tensors are on meta, and get their values inside the block.

    Yields the content with an entry for each tensor, and a function that writes an entry's values. `path` is created or
    replaced if the block succeeds. Tensors that were not written are zeros. Raises StorageError if the file cannot be
    written.
    """
    temporary = path.with_name(f".{path.name}.partial")
    try:
        temporary.unlink(missing_ok=True)  # it may be a link to another file
        with FakeTensorMode():
            tensors = tree_map_only(torch.Tensor, lambda meta: torch.empty(meta.shape, dtype=meta.dtype), content)
            with torch.serialization.skip_data(materialize_fake_tensors=True):
                torch.save(tensors, temporary)
            entries = torch.load(temporary)
        with temporary.open("r+b") as file:

            def write(entry: torch.Tensor, tensor: torch.Tensor) -> None:
                offset = entry.untyped_storage()._checkpoint_offset
                assert offset is not None, "torch.load notes it under FakeTensorMode"
                file.seek(offset)
                file.write(tensor_bytes(tensor))

            yield entries, write
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        raise StorageError(f"{path} could not be written: {error}. Free space there, or name another file.") from error
    finally:
        temporary.unlink(missing_ok=True)


class OptimizerState:
    """The moments, step counts and hyperparameters of a `PagedOptimizer`, for `torch.distributed.checkpoint`.

    It has the form of torch's `get_optimizer_state_dict`: `state` and `param_groups`, by parameter name. Every
    trainable parameter has an entry even before its first step, so that a new run can be loaded into. See `ModelState`.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        states = [state_of(param) for group in optimizer.param_groups for param in group["params"]]
        self._wholes = whole_states({state.name: state for state in states if state is not None})
        self._engine = next(iter(self._wholes.values())).states[0].engine

    def state_dict(self) -> dict[str, Any]:
        """`state`: name -> `step` (fp32 scalar) and the states of torch's class. All tensors are copies. AdamW's
        moments are fp32, whatever their dtype in pages.

        Raises UsageError between backward and step() if updates run during backward.
        """
        self._engine.accesses.take_changes()
        with self._engine.settled():
            states = {name: _whole_entry(whole) for name, whole in self._wholes.items()}
            scale = self._engine.stepper.scaler.state_dict()
        return {"state": states, "param_groups": self._groups(), **({"loss_scale": scale} if scale else {})}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the result of `state_dict`. Gradients that had arrived are dropped.

        Raises CheckpointError, and changes nothing, if names, shapes or groups differ.
        """
        entries, groups = state_dict["state"], state_dict["param_groups"]
        if entries.keys() != self._wholes.keys():
            raise CheckpointError("The state does not belong to this model: its optimizer has other parameters.")
        for name, whole in self._wholes.items():
            shapes = {f"{key} of {name}": shape for key, shape in _whole_shapes(whole).items() if key != "step"}
            found = {f"{key} of {name}": value for key, value in entries[name].items() if key != "step"}
            check_shapes(found, shapes)
        check_settings("The state", groups, self._engine.rule)
        check_groups("The state", groups, self._groups())
        with self._engine.overwriting():
            self._optimizer.zero_grad()
            self._engine.stepper.scaler.load_state_dict(state_dict.get("loss_scale", {}))
            for name, whole in self._wholes.items():
                cut = {key: whole.cut(v) for key, v in entries[name].items() if v.shape == whole.shape}
                for index, state in enumerate(whole.states):
                    state.unit.steps[state.slot] = int(entries[name]["step"])
                    state.write_entry({**entries[name], **{key: parts[index] for key, parts in cut.items()}})
            for mine, given in zip(self._optimizer.param_groups, groups, strict=True):
                mine.update({key: value for key, value in given.items() if key != "params"})
        self._engine.accesses.forget_states()

    def _groups(self) -> list[dict[str, Any]]:
        """The `param_groups` with the names of their parameters, including those on other ranks."""
        groups, links = named(self._optimizer.param_groups), self._engine.links
        if links.stages is not None or links.mesh.ranks.expert_parallel > 1:
            return Contents.of(self._engine, groups).groups(groups)
        wholes = {state.name: name for name, whole in self._wholes.items() for state in whole.states}
        return [{**group, "params": list(dict.fromkeys(map(wholes.__getitem__, group["params"])))} for group in groups]


def _whole_shapes(whole: WholeState) -> dict[str, tuple[int, ...]]:
    """The shapes of the tensors of `_whole_entry`."""
    first = whole.states[0]
    part = {key: tuple(torch.as_tensor(value).shape) for key, value in blank_entry(first).items()}
    return {key: whole.shape if shape == first.spec.shape else shape for key, shape in part.items()}


def _whole_entry(whole: WholeState) -> dict[str, torch.Tensor]:
    """Like `read_entry`, for the whole parameter, with numbers as tensors."""
    steps = {state.unit.steps[state.slot] for state in whole.states}
    if len(steps) > 1:
        raise UsageError(
            f"Parts of {whole.states[0].whole!r} were frozen for a while, so they have had from {min(steps)} to "
            f"{max(steps)} updates, and torch.distributed.checkpoint has one number for all: use save_checkpoint."
        )
    entries = [read_entry(state) for state in whole.states]
    found = {"step": torch.tensor(float(steps.pop()))}
    for key, value in entries[0].items():
        is_number = not isinstance(value, torch.Tensor) or not value.dim()
        found[key] = torch.as_tensor(value) if is_number else whole.join([entry[key] for entry in entries])
    return found
