"""A wrapped model's weights as dictionaries: torch's `state_dict`, that of the whole model on several ranks, and fp32
masters of the trained or of all parameters."""

from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary, finalize

import torch
from torch import nn

from pagoda.checkpoint.adapter import saved_by_peft
from pagoda.checkpoint.copies import Copies
from pagoda.checkpoint.live import live_weights
from pagoda.checkpoint.module_states import load_into, module_states
from pagoda.checkpoint.state import settled, state_of, states_of, unpaged, whole_states
from pagoda.engine import Engine
from pagoda.errors import CheckpointError, UsageError
from pagoda.interrupts import holding_signals
from pagoda.plan.layout import WEIGHT

_INSTEAD = (
    "Write to the parameter under torch.no_grad() (dict(model.named_parameters())[name].copy_(values)), or load a part "
    "of a state dict with model.load_state_dict(part, strict=False)."
)


@dataclass
class _InDict:
    """What a state dict has so far."""

    copies: WeakValueDictionary[tuple[int | str, int], torch.Tensor] = field(default_factory=WeakValueDictionary)
    """(parameter, or name of a tiled one; version) -> its copy, for tied names and for tiles."""
    versions: dict[str, int] = field(default_factory=dict)
    """Name -> version, since a call of `state_dict` began to fill it."""

    def add(self, name: str, version: int) -> None:
        """A parameter of a version comes in. Raises UsageError if others have another one."""
        if name in self.versions:  # another call fills the same dictionary
            self.versions.clear()
        self.versions[name] = version
        if version != next(iter(self.versions.values())):
            raise UsageError(
                "Another thread updated the parameters during state_dict(), which would have weights of different "
                "steps: use pagoda.full_state_dict(model), for which that thread waits."
            )


class WeightStateDicts:
    """Hooks that put real weights into state dicts, and load them from state dicts.

    `state_dict()` copies weights to RAM in their compute dtype. Tied names share one tensor, as in any model. With
    `keep_vars`, it has the parameters themselves, without values.
    `load_state_dict()` writes values of any precision directly to the master.

    A DTensor parameter appears as a DTensor. If it is loaded from a plain tensor with the whole value, each rank takes
    its part.
    """

    def __init__(self, model: nn.Module, engine: Engine) -> None:
        self._engine = engine
        self._dicts: dict[int, _InDict] = {}
        """By state dict."""
        self._copies = Copies("model.state_dict()", _INSTEAD)
        engine.accesses.before_use.append(self._copies.check)

        def fill(module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any) -> None:
            self._fill(module, state_dict, prefix)  # torch sets an attribute on the hook, so no bound method

        paged = {id(param) for unit in engine.units for param in unit.params}
        for module in model.modules():
            if any(id(param) in paged for param in module.parameters(recurse=False)):
                filling = module.register_state_dict_post_hook(fill)  # type: ignore[no-untyped-call]
                hooks: Any = module._state_dict_hooks
                hooks.move_to_end(filling.id, last=False)  # the user's see real weights
                module.register_load_state_dict_pre_hook(self._take)  # type: ignore[no-untyped-call]

    def _fill(self, module: nn.Module, state_dict: dict[str, Any], prefix: str) -> None:
        params = module.named_parameters(recurse=False)
        if any(state_dict.get(prefix + name, param) is not param for name, param in params):
            with holding_signals(), self._engine.settled(), torch.inference_mode(False):
                self._fill_settled(module, state_dict, prefix)

    def _fill_settled(self, module: nn.Module, state_dict: dict[str, Any], prefix: str) -> None:
        version = sum(
            self._engine.accesses.edition(unit) for unit in self._engine.units
        )  # tiles of one parameter may be in several units
        for name, param in module.named_parameters(recurse=False):
            state = state_of(param)
            if state is None or prefix + name not in state_dict or state.slot in state.unit.gathered:
                continue
            if state_dict[prefix + name] is param:  # with `keep_vars`, it is the parameter that was asked for
                continue
            present = self._in_dict(state_dict)
            present.add(prefix + name, version)
            copies = present.copies
            value = copies.get((id(param), version))
            if value is None:
                value = state.read(WEIGHT)
                part = state.spec.part
                if part is not None:  # a view of the whole, which the tiled layer puts into the dict
                    whole = copies.get((part.whole, version))
                    if whole is None:
                        whole = copies[part.whole, version] = torch.empty(part.shape, dtype=value.dtype)
                        self._copies.add(part.whole, whole)
                    tile = whole.view(-1)[part.start : part.start + value.numel()].view(value.shape)
                    tile.data.copy_(value)  # which counts as no write
                    value = tile
                value = copies[id(param), version] = state.as_param(value)
                if part is None:
                    self._copies.add(state.name, value)
            state_dict[prefix + name] = value

    def _in_dict(self, state_dict: dict[str, Any]) -> _InDict:
        """What is in this state dict. It is forgotten with it, since another may get its address."""
        key = id(state_dict)
        if key not in self._dicts:
            try:
                finalize(state_dict, self._dicts.pop, key, None).atexit = False
            except TypeError:
                raise UsageError(
                    "state_dict(destination=...) takes a collections.OrderedDict, not a plain dict: nothing tells when "
                    "that is freed."
                ) from None
            self._dicts[key] = _InDict()
        return self._dicts[key]

    def _take(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any, *_: Any) -> None:
        if metadata.get("assign_to_params_buffers"):
            raise UsageError(
                "load_state_dict(assign=True) would replace paged parameters; leave assign out. If you did not pass "
                "it, the state dict was loaded with it before, as torch notes in its _metadata: pass dict(state_dict)."
            )
        for name, param in module.named_parameters(recurse=False):
            state, value = state_of(param), state_dict.get(prefix + name)
            if state is None or state.slot in state.unit.gathered:
                continue  # torch copies to it
            if value is param or not isinstance(value, torch.Tensor) or value.shape != param.shape:
                continue  # torch reports what is missing, is not a tensor or has the wrong shape
            state.overwrite(state.stored(value))
            self._copies.forget(state.whole)
            state_dict[prefix + name] = param  # which torch copies to itself


def full_state_dict(model: nn.Module, *, all_ranks: bool = False) -> dict[str, Any]:
    """The `state_dict()` of the whole model: weights in their compute dtype, buffers, and extra states.

    With several ranks, the first one gets it and the others get an empty dict, unless `all_ranks`. torch's
    `get_model_state_dict(full_state_dict=True, cpu_offload=True)` does the same. Weights are gathered one parameter at
    a time. The other ranks hold one whole parameter at a time, even if tensor-parallel ranks divide it. If ranks divide
    experts, the result has the experts of all ranks, numbered as in the whole model. A rank loads its own experts with
    `model.load_state_dict(full, strict=False)`.

    Every rank calls it at the same point of the program. Raises UsageError if the model is not wrapped.
    """
    found: dict[str, Any] = {}
    with live_weights(model, all_ranks) as weights:
        keeps = all_ranks or weights.is_first
        for name, tensor in weights.tensors[WEIGHT].items():
            value = tensor.whole()
            if keeps:
                found[name] = value
    first = {id(param): name for name, param in model.named_parameters()}
    for name, param in model.named_parameters(remove_duplicate=False):
        if first[id(param)] in found:
            found[name] = found[first[id(param)]]
    if not keeps:
        return {}
    return found | {name: value.clone() for name, value in unpaged(model, every_name=True)} | module_states(model)


def trainable_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """Name -> copy of the fp32 master in the parameter's shape, for each parameter that trains. All names of a tied
    parameter share one tensor. For a model with peft adapters, the result has everything that peft saves, which may
    include buffers and frozen parameters.

    `model.save_pretrained(directory, state_dict=pagoda.trainable_state_dict(model))` saves a peft adapter without
    copying the frozen weights to RAM, as `model.state_dict()` would. Raises UsageError in the cases of `ModelState`.
    """
    saved = saved_by_peft(model) if getattr(model, "peft_config", None) else set()
    named = dict(model.named_parameters(remove_duplicate=False))
    wanted = {name: p for name, p in named.items() if p.requires_grad or name in saved}
    states = {name: state for name, p in wanted.items() if (state := state_of(p)) is not None}
    if not states:
        raise UsageError("This model is not wrapped, or all of it is frozen: call pagoda.wrap(model, ...) first.")
    first = {id(wanted[name]): name for name in reversed(states)}
    with settled(states.values()):
        masters = {
            name: whole.master()
            for name, whole in whole_states({name: states[name] for name in first.values()}).items()
        }
    tied = {name: masters[first[id(wanted[name])]] for name in states if first[id(wanted[name])] in masters}
    others = unpaged(model, every_name=True) if saved else ()
    return masters | tied | {name: value.clone() for name, value in others if name in saved}


class ModelState:
    """A wrapped model's weights and persistent buffers, for `torch.distributed.checkpoint`.

        state = {"model": pagoda.ModelState(model), "optim": pagoda.OptimizerState(optimizer)}
        dcp.save(state, checkpoint_id="checkpoints/1000")
        dcp.load(state, checkpoint_id="checkpoints/1000")

    Weights are the exact fp32 master, so plain PyTorch can load them too. A tied parameter appears once, under its
    first name. All weights are in RAM at once while saving or loading, 4 bytes for each parameter (and 8 for the
    optimizer's state). Use `optimizer.save_checkpoint` for models that do not fit. A tiled parameter appears whole. A
    parameter that tensor-parallel or expert-parallel ranks divide appears as a DTensor, of which each rank has its
    part. `dcp.save` joins the parts, and any number of ranks can load the result.

    Raises UsageError if the model is not wrapped.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._states = states_of(model)
        self._wholes = whole_states(self._states)

    def state_dict(self) -> dict[str, Any]:
        """Name -> fp32 master in the parameter's shape, buffer, or extra state. Weights and buffers are copies.

        Raises UsageError between backward and step() if updates run during backward.
        """
        with settled(self._states.values()):
            masters = {name: whole.master() for name, whole in self._wholes.items()}
        buffers = {name: buffer.clone() for name, buffer in unpaged(self._model)}
        return masters | buffers | module_states(self._model)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the result of `state_dict`. Raises CheckpointError, and changes no weight, if names or shapes differ."""
        shapes = {name: whole.shape for name, whole in self._wholes.items()}
        check_shapes({name: state_dict[name] for name in shapes if name in state_dict}, shapes)
        engine = next(iter(self._states.values())).engine
        engine.check_not_gathered("ModelState.load_state_dict()")
        others = {name: value for name, value in state_dict.items() if name not in shapes}
        load_into(self._model, others, engine.device.torch_device)
        for name, whole in self._wholes.items():
            whole.overwrite(state_dict[name])


def check_shapes(state_dict: dict[str, Any], shapes: dict[str, tuple[int, ...]]) -> None:
    """Raises CheckpointError unless a state dict has exactly the tensors of these names and shapes."""
    for name in sorted(shapes.keys() | state_dict.keys()):
        value = state_dict.get(name)
        found = tuple(value.shape) if isinstance(value, torch.Tensor) else None
        if found != shapes.get(name):
            raise CheckpointError(
                f"The state does not belong to this model: {name!r} has shape {found}, but {shapes.get(name)} in the "
                "model (None: it is absent)."
            )
