"""Uses: functions of torch that use the values of hidden tensors, inside and outside forwards."""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain
from typing import Any, cast

import torch
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from pagoda.autograd.accesses import Accesses
from pagoda.autograd.activations.packing import Packing
from pagoda.autograd.active_forwards import ActiveForwards
from pagoda.errors import UsageError
from pagoda.interrupts import holding_signals
from pagoda.mesh.dtensors import local
from pagoda.parameters.hidden import (
    HOME,
    READS_FIRST,
    Hidden,
    as_plain,
    hidden_in,
    name_of,
    root_of,
    viewed,
    views_of,
    with_gradient,
    write_instead,
)
from pagoda.parameters.unit import DATA_GIVEN
from pagoda.plan.layout import WEIGHT
from pagoda.plan.trace import Phase

EXPORTS = frozenset({"__array__", "numpy"})
"""Functions whose result shares memory with the values, where torch does not see writes. They get a copy, which cannot
be written to."""
_WRITING_OPERATORS = frozenset({"__setitem__"}).union(
    f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")
)


@dataclass(eq=False, repr=False)
class Uses:
    """Carries out functions that use the values of hidden tensors.

    *In a forward*, the unit of a parameter is leased, and its parameters are shown, until the innermost running forward
    ends or other units need room. *Outside*, the unit is leased for this function alone, and reads in a row of one unit
    are one lease. What autograd saves of the values is packed, and gradients go to the parameter.

    There may be room for one unit at a time. So a function that uses parameters of several units gets copies of them.

    A function that *writes in place* outside a forward gets a copy of the parameter as the last `step()` left it. If it
    has changed the copy, this becomes the new weights, like values that `gathered(modify=True)` writes. On several
    ranks, all must write at the same point of their programs.
    """

    _active_forwards: ActiveForwards
    _accesses: Accesses
    _packing: Packing

    def call(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of a function that uses the values of hidden tensors, which may belong to several engines.

        Raises UsageError if it writes to one although its name does not tell.
        """
        if name.startswith("_foreach_") and len(args[0]) > 1:
            return one_by_one(func, args, kwargs)
        used = args[:1] if name in READS_FIRST else (args, kwargs)
        hidden = [vars(root_of(leaf))[HOME].open() for leaf in hidden_in(used)]
        for state in hidden:
            state.engine.active_forwards.make_room({each.unit for each in hidden})
        leaves = hidden_in(used)
        states = {root: vars(root)[HOME].open() for root in map(root_of, leaves)}
        engines = dict.fromkeys(state.engine for state in states.values())
        in_forward = any(engine.active_forwards.runs_here for engine in engines)
        writes = not in_forward and _writes(name, args, kwargs)
        copies = writes or name in EXPORTS or len({state.unit for state in states.values()}) > 1
        with ExitStack() as stack:
            for engine in engines:
                stack.enter_context(engine.active_forwards.around_function())
            values = {}
            for root, state in states.items():
                uses = state.engine.uses
                values[root] = uses._own(root, state) if writes else uses._lent(root, state, copies, stack)
            given = {id(leaf): _given(leaf, values[root_of(leaf)], copies, links=not writes) for leaf in leaves}
            versions = {key: value._version for key, value in given.items()}
            result = func(*replaced(args, given), **replaced(kwargs, given))
            for root in dict.fromkeys(map(root_of, leaves)):
                if any(given[id(leaf)]._version != versions[id(leaf)] for leaf in leaves if root_of(leaf) is root):
                    _write(states[root], values[root], name, allowed=writes)
        if in_forward and func == torch.Tensor.data.__get__:  # type: ignore[attr-defined]
            vars(root_of(args[0])).setdefault(DATA_GIVEN, []).append(result)
        if name in EXPORTS:
            result.setflags(write=False)
        elif not in_forward:
            result = hidden_again(result, name, func, args, kwargs, given)
        return result

    def _lent(self, root: Any, state: Any, copies: bool, stack: ExitStack) -> torch.Tensor:
        """A parameter's values, or a copy of them, to be read until `stack` ends."""
        unit, slot = state.unit, state.slot
        if self._active_forwards.use([unit]):
            values: torch.Tensor = root.data  # which is shown now
        else:
            phase = Phase.FORWARD if torch._C._current_graph_task_id() == -1 else Phase.BACKWARD
            values = unit.as_param(slot, unit.view(slot, self._accesses.read(unit, phase)))
        if not copies:
            return values
        with holding_signals(), torch.inference_mode(False), torch.no_grad():
            copy = values.clone()
        stack.enter_context(self._packing.copied(unit, slot, copy))
        return copy

    def _own(self, root: Any, state: Any) -> torch.Tensor:
        """A copy of a parameter, to be written to."""
        unit, slot = state.unit, state.slot
        if unit.active or state.is_quantized:
            why = "its weights are quantized" if state.is_quantized else "its module's forward is running"
            raise UsageError(f"Parameter {state.name!r} cannot be written to, because {why}.")
        with holding_signals(), state.engine.settled(), torch.inference_mode(False), torch.no_grad():
            stored = state.read(WEIGHT).to(unit.placeholders[slot].device)
            own: torch.Tensor = unit.as_param(slot, unit.shown(slot, stored)).data
            return own.requires_grad_(root.requires_grad)


def _writes(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a function writes to a hidden tensor, as its name or an argument says."""
    target = kwargs.get("out")
    if name in _WRITING_OPERATORS or (name.endswith("_") and not name.endswith("__")):
        target = next(chain(args, kwargs.values()))
    elif kwargs.get("max_norm") is not None:  # an embedding's
        target = args, kwargs
    return bool(hidden_in(target))


def _given(leaf: Any, values: torch.Tensor, copies: bool, links: bool) -> torch.Tensor:
    """What a function gets in place of a hidden tensor. `values` are those of its root."""
    is_shown = not isinstance(leaf, Hidden)  # by a running forward
    with as_plain():
        trains = leaf.requires_grad
    if is_shown and trains and not copies:
        return cast(torch.Tensor, leaf)
    values = viewed(leaf, values)
    if links and trains and torch.is_grad_enabled():
        with as_plain():
            values = with_gradient(leaf, values)
    return values


def replaced(arguments: Any, given: Mapping[int, torch.Tensor]) -> Any:
    """Arguments with other tensors in place of some. `given`: identity of a tensor -> another."""
    return tree_map(lambda leaf: given.get(id(leaf), leaf), arguments)


def _write(state: Any, values: torch.Tensor, name: str, allowed: bool) -> None:
    """A function has changed the values of a parameter, in a copy if that was to be expected (`allowed`)."""
    if not allowed:
        state.engine.accesses.overwritten(state.unit)
        raise UsageError(
            f"{name}() has written to parameter {state.name!r}, where the write is lost, or changes a part of the "
            f"master's bits alone. {write_instead(state.name)}"
        )
    if values.grad_fn is not None:
        raise UsageError(f"{name}() writes to parameter {state.name!r} as a part of a graph: use torch.no_grad().")
    state.overwrite(state.unit.stored(state.slot, values.detach()))


def hidden_again(
    result: Any, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], given: Mapping[int, torch.Tensor]
) -> Any:
    """The result of a function, with hidden tensors in place of those that share memory with what it was `given`."""
    parts, structure = tree_flatten(result)
    memory = {_storage(each) for each in given.values()} - {None}
    shared = [index for index, part in enumerate(parts) if _storage(part) in memory]
    if not shared:
        return result
    leaves = {id(given[id(leaf)]): leaf for leaf in hidden_in((args, kwargs)) if id(leaf) in given}
    views: list[Any] = []
    for index in shared:
        if id(parts[index]) not in leaves and not views:
            views = _views(name, func, args, kwargs)
        parts[index] = leaves.get(id(parts[index])) if id(parts[index]) in leaves else views[index]
    return tree_unflatten(parts, structure)


def _views(name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    try:
        return views_of(func, args, kwargs)
    except (RecursionError, RuntimeError, ValueError) as error:  # placeholders have other strides
        of = name_of(hidden_in((args, kwargs))[0])
        raise UsageError(
            f"{name}() of parameter {of!r} returns a view whose place in pages is not known. Call it on param.clone(), "
            "or inside `with pagoda.gathered(param):`."
        ) from error


def _storage(value: Any) -> int | None:
    """Identity of the memory of a tensor."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return None
    mine = local(value)
    return None if hasattr(mine, "__tensor_flatten__") else mine.untyped_storage()._cdata


def one_by_one(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of a function on lists of tensors, on one tensor of each list at a time."""
    results = []
    for index in range(len(args[0])):
        of_one = [[arg[index]] if isinstance(arg, list | tuple) else arg for arg in args]
        results.append(func(*of_one, **kwargs))
    return None if None in results else (*chain(*results),)
