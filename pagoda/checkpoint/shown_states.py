"""What `optimizer.state` shows: ordinary dictionaries, whose tensors are markers for states in pages."""

import math
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import Any

import torch

from pagoda.autograd.gradient_values import ValuesCopy
from pagoda.autograd.markers import Marked, marker
from pagoda.checkpoint.copies import Copies
from pagoda.checkpoint.optimizer_states import (
    blank_entry,
    check_entry,
    read_entry,
    read_value,
    write_entry,
    write_value,
)
from pagoda.checkpoint.state import ParameterState
from pagoda.errors import UsageError
from pagoda.interrupts import holding_signals
from pagoda.parameters.hidden import Hidden, as_plain, name_of

COUNT = "step"
"""The key under which rules, and most classes of torch, count the updates of a parameter."""

_INSTEAD = (
    "Write to optimizer.state[param] instead, or load the state dict after the write, with optimizer.load_state_dict."
)


class MarkedState(Marked):
    """The state behind a marker. It keeps nothing alive."""

    def __init__(self, shown: "ShownStates", param: int, key: str) -> None:
        self._shown, self._param, self._key = weakref.ref(shown), param, key

    def open(self, marker: object, asked_by: str) -> tuple[Any, ...]:
        shown = self._shown()
        state = None if shown is None else shown.find(self._param, self._key, marker)
        if state is None:
            raise UsageError(
                f"{asked_by}() was called on {name_of(marker)}, which is gone: it was removed from optimizer.state or "
                "replaced there, or a checkpoint was loaded. Take it from optimizer.state anew, and clone() what you "
                "keep."
            )
        return shown, state, self._key

    @property
    def is_alone(self) -> bool:
        shown = self._shown()
        return shown is not None and shown.is_alone


class ShownStates:
    """`optimizer.state`, from its first use on.

    It is a `defaultdict`, or what the user puts in its place. Each parameter that has been updated has an entry with
    the keys of torch's class. Its tensors are markers: a function on one gets a copy, and what it writes goes to pages.
    The count of a rule is a tensor in RAM.

    Nothing tells when a dictionary changes. So `take` compares them with what was shown, before states are used:
    what is missing begins anew, and what was set is written to pages. On several ranks, all must read, write and change
    the same at the same points of their programs.
    """

    def __init__(self, engine: Any, members: Callable[[], Iterable[ParameterState]]) -> None:
        """`members`: returns the state of each parameter in a group, in torch's order."""
        self._engine, self._members = engine, members
        self.is_alone: bool = engine.links.mesh.size == 1
        """Whether states can be read without other ranks."""
        self._mapping: MutableMapping[Any, Any] | None = None
        self._shown: dict[int, dict[str, Any]] = {}
        """Identity of a parameter -> its entry, as it was last shown. Empty if it has had an update and no states."""
        self._counts: dict[int, int] = {}
        """Identity of a parameter -> the count that its entry shows, if that is a rule's."""
        self._found: dict[int, ParameterState] = {}
        self._numbers: set[str] = set()
        """Keys of the states that are numbers. They have no markers."""
        self._unseen = False
        self._copies = Copies("optimizer.state_dict()", _INSTEAD)
        engine.accesses.before_use += [self._copies.check, self.take]

    @property
    def mapping(self) -> MutableMapping[Any, Any]:
        """The dictionary. Raises UsageError if it begins between backward and `step()` of updates during backward."""
        accesses = self._engine.accesses
        if self._unseen:
            return {}
        if self._mapping is None and not accesses.closed:
            if not accesses.stopped and self._engine.stepper.updates_have_begun():
                self._engine.check_between_steps()  # which tells what to do
            with holding_signals():
                self._mapping = defaultdict(dict)
                self.show()
        return defaultdict(dict) if self._mapping is None else self._mapping

    def replace(self, mapping: Any) -> None:
        """`optimizer.state` is set."""
        if not isinstance(mapping, MutableMapping):
            raise UsageError(f"optimizer.state is a dictionary of dictionaries, not {type(mapping).__name__}.")
        _ = self.mapping  # what it showed so far
        self._mapping = mapping

    def forget(self) -> None:
        """All states were replaced. Dictionaries and markers from before show them no longer."""
        self._mapping = None
        self._copies.forget()
        self._shown.clear()
        self._counts.clear()

    @contextmanager
    def unseen(self) -> Iterator[None]:
        """Inside, `mapping` is empty: torch's own code shall not fill a dictionary."""
        self._unseen = True
        try:
            yield
        finally:
            self._unseen = False

    def entry(self, state: ParameterState, blank: bool = False) -> dict[str, Any]:
        """A parameter's entry in a state dict, as `read_entry` gives it. Empty before the parameter's first update."""
        exists = state.unit.steps[state.slot] or self._shown.get(_identity(state))
        if not exists:
            return {}
        return blank_entry(state, numbers=True) if blank else read_entry(state)

    def copied(self, state: ParameterState) -> dict[str, Any]:
        """Like `entry`. Writes to it are refused."""
        with torch.inference_mode(False):
            entry = self.entry(state)
        for key, value in entry.items():
            if isinstance(value, torch.Tensor):
                self._copies.add(f"{key} of {state.name}", value)
        return entry

    def find(self, param: int, key: str, marker: object) -> ParameterState | None:
        """The state for which a marker stands, if it still does."""
        return self._found[param] if self._shown.get(param, {}).get(key) is marker else None

    # --- values ---

    def read(self, state: ParameterState, key: str, _asked_by: str) -> ValuesCopy:
        """A copy of a state."""
        with holding_signals(), self._engine.settled(), torch.inference_mode(False), torch.no_grad():
            value = read_value(state, key)
            return ValuesCopy(value.to(_device(state, value)), None)

    def write(self, state: ParameterState, key: str, values: torch.Tensor, _asked_by: str, _reading: Any) -> None:
        """Overwrite a state."""
        with self._engine.overwriting(), torch.inference_mode(False), torch.no_grad():
            write_value(state, key, values)

    # --- dictionaries ---

    def show(self) -> None:
        """Show what updates have added, and what they have counted."""
        if self._mapping is None:
            return
        with holding_signals(), torch.inference_mode(False), torch.no_grad():
            for state in self._members():
                param, steps = _identity(state), state.unit.steps[state.slot]
                if param not in self._shown and steps:
                    self._found[param] = state
                    self._shown[param] = self._markers(state)
                    self._put(state)
                if self._counts.get(param, steps) != steps:
                    self._shown[param][COUNT].fill_(steps)
                    self._counts[param] = steps
                if self._numbers:
                    self._show_numbers(state)

    def take(self) -> None:
        """Write what the user has changed to pages. Raises UsageError, with nothing written, for what has no place
        there."""
        if self._mapping is None or self._engine.accesses.closed:
            return
        with self._engine.alone():
            changes = self._changes()
            if not changes:
                return
            self._check_apart()
            ready = [(state, given, self._values(state, given)) for state, given in changes]
            with self._engine.overwriting(), torch.inference_mode(False), torch.no_grad():
                for state, given, values in ready:
                    self._write(state, given, values)
            self.show()

    def _changes(self) -> list[tuple[ParameterState, dict[str, Any]]]:
        """Each parameter whose entry was changed, with what it has now. None counts as missing, as in torch."""
        assert self._mapping is not None
        changes, ours, known = [], set(), 0
        with as_plain():
            for state in self._members():
                param = _identity(state)
                ours.add(param)
                given, shown = self._mapping.get(state.unit.params[state.slot]), self._shown.get(param, {})
                known += given is not None
                if given is not None and not isinstance(given, Mapping):
                    raise UsageError(f"optimizer.state of {state.name!r} is a dictionary, not {type(given).__name__}.")
                held = {key: value for key, value in (given or {}).items() if value is not None}
                if held.keys() != shown.keys() or not all(self._is_same(param, *item) for item in held.items()):
                    changes.append((state, held))
            for key, value in self._mapping.items() if len(self._mapping) > known else ():
                if id(key) not in ours and (not isinstance(value, Mapping) or value):
                    what = f"a tensor of shape {tuple(key.shape)}" if isinstance(key, torch.Tensor) else repr(key)
                    raise UsageError(
                        f"optimizer.state has an entry for {what}, which is no parameter of this optimizer, and only "
                        "states of its parameters have a place in pages: keep the entry in a dictionary of your own."
                    )
        return changes

    def _check_apart(self) -> None:
        """Raises UsageError if a tensor is in two places, as pages cannot have it."""
        assert self._mapping is not None
        seen: dict[int, str] = {}
        for state in self._members():
            for key, value in (self._mapping.get(state.unit.params[state.slot]) or {}).items():
                name = f"{key} of {state.name}"
                if isinstance(value, torch.Tensor) and seen.setdefault(id(value), name) != name:
                    raise UsageError(
                        f"optimizer.state has the same tensor as {seen[id(value)]} and as {name}, but pages have one "
                        "for each: clone() it."
                    )

    def _is_same(self, param: int, key: str, value: Any) -> bool:
        """Whether a value in an entry is what was shown."""
        shown: Any = self._shown[param].get(key)
        if value is shown:
            return key != COUNT or param not in self._counts or float(shown) == self._counts[param]
        return not isinstance(shown, torch.Tensor) and type(value) is type(shown) and value == shown

    def _values(self, state: ParameterState, given: dict[str, Any]) -> dict[str, Any]:
        """What is new in an entry, ready to be written."""
        param, blank, rule = _identity(state), blank_entry(state), self._engine.rule
        for key, value in given.items():
            if key not in blank or not isinstance(value, torch.Tensor | int | float):
                raise UsageError(
                    f"optimizer.state of {state.name!r} has a {type(value).__name__} {key!r}. It has a place for "
                    f"tensors and numbers that {rule.name} keeps: keep others in a dictionary of your own."
                )
        if given and (missing := sorted(blank.keys() - given.keys())):
            raise UsageError(
                f"optimizer.state of {state.name!r} has no {', '.join(missing)}, but {rule.name} needs all its states. "
                "Set them all, or none (optimizer.state[param] = {}), and it begins anew."
            )
        known = self._shown.get(param, {})
        values = {key: value for key, value in given.items() if not (known and self._is_same(param, key, value))}
        for key, value in values.items():
            if isinstance(value, Hidden):  # of another parameter, which may change before it is written
                values[key] = value.detach().clone()  # type: ignore[attr-defined]
        count = torch.as_tensor(values.get(COUNT, 0))
        if count.numel() != 1 or not (count >= 0 and count.isfinite() and count == count.round()):
            raise UsageError(f"optimizer.state of {state.name!r} has a step of {count}, which counts no updates.")
        check_entry(state, values)
        return values

    def _write(self, state: ParameterState, given: dict[str, Any], values: dict[str, Any]) -> None:
        """Write what is new in an entry. If it is empty, the next update is a parameter's first."""
        param, unit = _identity(state), state.unit
        if not given:
            write_entry(state, {})
            self._shown.pop(param, None)
            self._counts.pop(param, None)
            return
        for key, value in values.items():
            if key not in self._counted(state):
                write_value(state, key, value)
        if COUNT in values or not unit.steps[state.slot]:
            unit.steps[state.slot] = self._engine.rule.steps_in({**given, **values})
        shown = self._shown.get(param, {})
        kept = {key: value for key, value in shown.items() if key not in values or value is values[key]}
        self._found[param] = state
        self._shown[param] = {**self._markers(state), **kept}  # old markers show nothing any more
        self._put(state)

    def _counted(self, state: ParameterState) -> set[str]:
        """The key of the count, unless pages have it."""
        return set() if COUNT in state.moments() else {COUNT}

    def _markers(self, state: ParameterState) -> dict[str, Any]:
        """A parameter's entry. Its `_numbers` have no values yet."""
        _, unit, slot = state
        entry, param = blank_entry(state), _identity(state)
        for key, value in entry.items():
            if key in self._counted(state):
                self._counts[param] = unit.steps[slot]
                entry[key] = torch.tensor(float(unit.steps[slot]))
            elif isinstance(value, torch.Tensor):
                fill, device = math.nan if value.is_floating_point() else 0, _device(state, value)
                blank, form = torch.full((), fill, dtype=value.dtype, device=device).expand(value.shape), None
                if value.shape == state.spec.shape:
                    blank, form = unit.as_param(slot, unit.shown(slot, blank)), unit.forms[slot]
                entry[key] = marker(blank.detach(), form, f"{key} of {state.name}", MarkedState(self, param, key))
            else:
                self._numbers.add(key)
        return entry

    def _put(self, state: ParameterState) -> None:
        """Show a parameter's entry, in its present dictionary if there is one."""
        assert self._mapping is not None
        param, shown = state.unit.params[state.slot], self._shown[_identity(state)]
        with as_plain():
            if not shown:
                return
            given = self._mapping.get(param)
            if isinstance(given, MutableMapping):
                given.update(shown)
            else:
                self._mapping[param] = dict(shown)

    def _show_numbers(self, state: ParameterState) -> None:
        shown = self._shown.get(_identity(state), {})
        if numbers := self._numbers & shown.keys():
            with self._engine.settled():
                shown.update({key: read_value(state, key) for key in numbers})
            self._put(state)


def _identity(state: ParameterState) -> int:
    return id(state.unit.params[state.slot])


def _device(state: ParameterState, value: torch.Tensor) -> torch.device:
    """Where a state would be without Pagoda: where the parameter is, or in RAM if it is one number."""
    return state.unit.blanks[state.slot].device if value.dim() or not state.spec.shape else torch.device("cpu")
