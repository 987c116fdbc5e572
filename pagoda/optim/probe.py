"""Finds out what states a `torch.optim.Optimizer` class keeps for a parameter, by running it on tiny parameters.

Shapes are classified by kind: the number of dimensions, and which of them are 1, which are equal, and which is larger.
Each kind is run on two tiny shapes. A dimension of a state that differs between the two runs follows the parameter's:
it is matched with the product of some of the parameter's dimensions.

For each shape of the model, the class also takes a step on a parameter of that shape without values (a fake tensor).
So states may depend on sizes, as those of low rank, in blocks or with a largest dimension do. Where a class needs
values, it gets them if the parameter is small; for others, the rule found by the tiny shapes holds. An update whose
states differ from those found is refused when it happens.

A class may count its steps in the param group, which all parameters share, as ADOPT and schedule-free optimizers do.
Such numbers are its *clock*, provided that they depend on the settings and the number of steps alone: then one step of
a tiny parameter moves it for all. What depends on gradients, as Prodigy's estimate of the distance, is refused.
"""

import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import chain, combinations
from math import prod
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten_with_path, tree_unflatten

from pagoda.errors import ConfigError, UsageError

Make = Callable[[list[Any]], torch.optim.Optimizer]
"""Of parameters, or of param groups."""
Kind = tuple[int, ...]
"""For each dimension: 0 if its size is 1, otherwise the place of its size, from 1, among the distinct sizes above 1."""

Structure = tuple[tuple[str | None, ...], TreeSpec]
"""The entry of a parameter in the class's `state`, without its values: their names, with None for a value that is None,
and the tree that they are in."""

COMMON_SHAPES = ((4,), (4, 5), (5, 4), (4, 4), (4, 5, 6), (4, 5, 3, 3))
"""Shapes whose kinds are probed before any model is known, to name the states."""
_LARGE_SHAPES = ((2**8, 2**8), (2**20,), (2**12, 2**13), (2**16, 2**12))
"""Further shapes, without values."""
_WITH_VALUES = 2**16
"""Elements of a parameter on which a class that needs values takes its step with values."""
_SIZES = ((3, 5, 7, 11, 13, 17), (5, 7, 11, 13, 17, 19))
"""Sizes of the distinct dimensions in each of the two runs."""
_STEPS = 8
"""RAdam, for one, is another optimizer from its sixth step on."""
_PLAIN = (bool, int, float, str, type(None))
_TAKEN = {"weight", "weight_low", "master", "weight_back", "grad", "grad_queue", "buffers"}
"""Names that Pagoda uses for states of its own."""


@dataclass(frozen=True)
class ProbedState:
    """One state that the class keeps for parameters of one kind."""

    dtype: torch.dtype
    dims: tuple[int | tuple[int, ...], ...]
    """For each dimension of the state: its size, or the parameter's dimensions whose product it is."""
    number: type | None = None
    """The Python type of a state that is a number. None for a tensor."""

    def shape(self, parameter: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the state of a parameter of this shape."""
        return tuple(dim if isinstance(dim, int) else prod(parameter[index] for index in dim) for dim in self.dims)


@dataclass(frozen=True)
class ProbedKind:
    """What the class keeps for parameters of one kind."""

    states: Mapping[str, ProbedState]
    """By name. A tensor of a list has the name of the list, an underscore, and its index."""
    structure: Structure
    unknown: str = ""
    """Why the states of a parameter do not follow from its kind, if they depend on its size in another way, or why the
    class could be run with values only."""

    def entry(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The entry with these values of its states."""
        names, tree = self.structure
        entry: dict[str, Any] = tree_unflatten([None if name is None else values[name] for name in names], tree)
        return entry


class Probe:
    """Runs the optimizer that `make` returns on tiny parameters. Raises ConfigError for a class that cannot be run unit
    by unit."""

    def __init__(self, label: str, make: Make) -> None:
        self.label = label
        self._make = make
        self._by_kind: dict[Kind, ProbedKind | str] = {}
        """kind -> what is kept for it, or why the class refuses it."""
        self._by_shape: dict[tuple[int, ...], ProbedKind | str] = {}
        """shape -> what is kept for it, or why running the class without values fails."""
        self._same: dict[frozenset[str], bool] = {}
        self.states: dict[str, ProbedState] = {}
        """Name -> the state, of the first kind that has it."""
        self.group: dict[str, Any] = {}
        """The settings in a new param group that are numbers, text or tuples of them."""
        self.clock: set[str] = set()
        """Those that each step changes."""
        for found in (*map(self._found, map(kind_of, COMMON_SHAPES)), *map(self._without_values, _LARGE_SHAPES)):
            for name, state in found.states.items() if not isinstance(found, str) else ():
                if not name.isidentifier() or name in _TAKEN:
                    raise ConfigError(f"{label} cannot be run: its state {name!r} has a name that Pagoda uses itself.")
                self._check_dtype(name, self.states.setdefault(name, state), state)
        if all(isinstance(found, str) for found in self._by_kind.values()):
            why = str(self._by_kind[kind_of(COMMON_SHAPES[1])]).removesuffix(".")
            raise ConfigError(f"{label} cannot be run: {why}.")

    def changes(self, method: str, group: Mapping[str, Any]) -> dict[str, Any]:
        """What `step`, `train` or `eval` changes in a param group with the settings `group`.

        Raises UsageError if the class raises, or if a step changes what none of the first steps changed.
        """
        shape = next(shape for shape in COMMON_SHAPES if not isinstance(self._found(kind_of(shape)), str))
        optimizer = self._make([_parameter(shape, 0)])
        optimizer.param_groups[0].update(group)
        try:
            _take(optimizer, optimizer.param_groups[0]["params"], 0) if method == "step" else _call(optimizer, method)
        except Exception as error:
            raise UsageError(f"{self.label}: {error}") from error
        changed = {key: value for key, value in _numbers_of(optimizer).items() if group.get(key) != value}
        if method == "step" and not changed.keys() <= self.clock:
            raise UsageError(
                f"A step of {self.label} changes {sorted(changed.keys() - self.clock)} in param_groups, but none of "
                "the steps that were tried did: pagoda.Optim cannot run it with these settings."
            )
        return changed

    def has_same_states(self, settings: Mapping[str, Any]) -> bool:
        """Whether the class keeps the same states with these settings in a param group, of which each is zero or false
        where that of `group` is not, or the reverse. It is tried once for each set of names."""
        names = frozenset(settings)
        if names not in self._same:
            try:
                others = Probe(self.label, lambda params: self._make([{"params": params, **settings}])).states.keys()
            except ConfigError:  # a class that refuses them says so in its step
                others = self.states.keys()
            self._same[names] = others == self.states.keys()
        return self._same[names]

    def of(self, parameter: str, shape: tuple[int, ...]) -> ProbedKind:
        """What is kept for a parameter. Raises ConfigError if the class refuses the parameter."""
        found = self._found(kind_of(shape))
        if isinstance(found, str):
            raise ConfigError(f"{self.label} cannot update {parameter!r}, of shape {list(shape)}: {found}")
        exact = self._without_values(shape)
        why = exact if isinstance(exact, str) else exact.unknown
        if why and found.unknown:
            raise ConfigError(
                f"{self.label} cannot update {parameter!r}, of shape {list(shape)}: {found.unknown}, and without "
                f"values, it cannot be run on this shape: {why}"
            )
        if not isinstance(exact, str):
            found = exact
        for name in found.states.keys() & self.states.keys():
            self._check_dtype(name, self.states[name], found.states[name])
        unknown = sorted(found.states.keys() - self.states.keys())
        if unknown:
            raise ConfigError(
                f"{self.label} keeps {unknown} for {parameter!r}, of shape {list(shape)}, but for none of the shapes "
                "that were tried first: pagoda.Optim cannot run it with this parameter."
            )
        return found

    def _found(self, kind: Kind) -> ProbedKind | str:
        if kind not in self._by_kind:
            self._by_kind[kind] = self._probed(kind)
        return self._by_kind[kind]

    def _check_dtype(self, name: str, known: ProbedState, state: ProbedState) -> None:
        if (known.dtype, known.number) != (state.dtype, state.number):
            raise ConfigError(
                f"{self.label} cannot be run: its state {name!r} is {known.dtype} for some parameters and "
                f"{state.dtype} for others."
            )

    def _without_values(self, shape: tuple[int, ...]) -> ProbedKind | str:
        """What is kept for a parameter of this shape after one step, or why that is not known."""
        if shape not in self._by_shape:
            from torch._subclasses.fake_tensor import FakeTensorMode  # takes seconds

            draws = _Draws()  # type: ignore[no-untyped-call]
            why = ""
            for mode in (FakeTensorMode(), *([nullcontext()] if prod(shape) <= _WITH_VALUES else ())):
                try:
                    with torch.random.fork_rng(devices=[]), torch.enable_grad(), mode, draws:
                        self._by_shape[shape] = replace(self._after_a_step(shape), unknown=why)
                    break
                except Exception as error:
                    self._by_shape[shape] = why = f"it raises {type(error).__name__}: {error}"
            if draws.random:
                raise ConfigError(
                    f"{self.label} cannot be run unit by unit: its step draws random numbers for a parameter of shape "
                    f"{list(shape)}."
                )
        return self._by_shape[shape]

    def _after_a_step(self, shape: tuple[int, ...]) -> ProbedKind:
        param = torch.nn.Parameter(torch.ones(shape))
        optimizer = self._make([param])
        _call(optimizer, "train")
        param.grad = torch.ones(shape)
        with warnings.catch_warnings(action="ignore"):
            optimizer.step()
        kept, structure = kept_in(optimizer, param)
        return ProbedKind({name: self._as_it_is(name, value) for name, value in kept.items()}, structure)

    def _probed(self, kind: Kind) -> ProbedKind | str:
        """What is kept for a kind, or the class's message if it refuses the kind."""
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            shapes = [tuple(1 if k == 0 else sizes[k - 1] for k in kind) for sizes in _SIZES]
            try:
                runs = [_Run(self.label, self._make, shape) for shape in shapes]
                runs[0].check()
            except ConfigError:
                raise
            except Exception as error:
                return f"it raises {type(error).__name__}: {error}"
        self.group = runs[0].group
        self.clock |= runs[0].clock
        (first, structure), (second, other) = (run.kept for run in runs)
        states = {name: self._as_it_is(name, value) for name, value in {**second, **first}.items()}
        try:
            if structure != other:
                raise _UnknownRuleError("what it keeps depends on a parameter's size")
            return ProbedKind({name: self._state(name, first[name], second[name], shapes) for name in first}, structure)
        except _UnknownRuleError as error:
            return ProbedKind(states, structure, str(error))

    def _as_it_is(self, name: str, value: Any) -> ProbedState:
        """A state whose shape is that of this value."""
        if isinstance(value, bool | int | float):
            return ProbedState(torch.float64 if isinstance(value, float) else torch.int64, (), type(value))
        if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
            kind = type(value).__name__
            raise ConfigError(f"{self.label} cannot be run: its state {name!r} is a {kind}, not a tensor or a number.")
        return ProbedState(value.dtype, tuple(value.shape))

    def _state(self, name: str, one: Any, other: Any, shapes: list[tuple[int, ...]]) -> ProbedState:
        """A state, from its values in two runs."""
        if not isinstance(one, torch.Tensor):
            return self._as_it_is(name, one)
        if one.dim() != other.dim():
            raise _UnknownRuleError(f"its state {name!r} does not always have {one.dim()} dimensions")
        every = range(len(shapes[0]))
        subsets = list(chain.from_iterable(combinations(every, count) for count in range(1, len(every) + 1)))
        dims: list[int | tuple[int, ...]] = []
        for size, grown in zip(one.shape, other.shape, strict=True):
            products = (s for s in subsets if [prod(shape[i] for i in s) for shape in shapes] == [size, grown])
            followed = size if size == grown else next(products, None)
            if followed is None:
                raise _UnknownRuleError(
                    f"its state {name!r} is {list(one.shape)} for a parameter of {list(shapes[0])} and "
                    f"{list(other.shape)} for {list(shapes[1])}, which follows no known rule"
                )
            dims.append(followed)
        return ProbedState(one.dtype, tuple(dims))


class _UnknownRuleError(Exception):
    """The shapes of a class's states do not follow from a few dimensions of the parameter."""


class _Draws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes whether a function draws random numbers."""

    random = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.random |= torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))


class _Run:
    """A few steps of the class on one tiny parameter."""

    def __init__(self, label: str, make: Make, shape: tuple[int, ...]) -> None:
        self.shape = shape
        self._refused = f"{label} cannot be run unit by unit"
        self._make = make
        self._param = _parameter(shape, 0)
        optimizer = make([self._param])
        self.group = {key: value for key, value in optimizer.param_groups[0].items() if _is_plain(value)}
        before, structures = torch.get_rng_state(), []
        _call(optimizer, "train")
        self._numbers = [_numbers_of(optimizer)]
        """The numbers of the param group before each step, and after the last one."""
        for step in range(_STEPS):
            _take(optimizer, [self._param], step)
            self._numbers.append(_numbers_of(optimizer))
            structures.append(kept_in(optimizer, self._param)[1])
        self._random = not torch.equal(before, torch.get_rng_state())
        self._grows = structures[0] != structures[-1]
        started, ended = self._numbers[0], self._numbers[-1]
        self.clock = {key for key, value in ended.items() if started.get(key) != value}
        for key in ended.keys() - started.keys():  # a count that begins when it is first needed
            self.group[key] = started[key] = type(ended[key])(0)
        self.kept = kept_in(optimizer, self._param)

    def check(self) -> None:
        """Raises ConfigError unless a parameter's update depends on its states and gradient alone, whatever else is
        updated."""
        if self._random:
            raise ConfigError(f"{self._refused}: its step draws random numbers.")
        if self._grows:
            raise ConfigError(f"{self._refused}: what it keeps for a parameter changes from step to step.")
        pair = [_parameter(self.shape, 0), _parameter(self.shape, 1)]
        together, alone = self._make(pair), _parameter(self.shape, 0)
        _call(together, "train")
        states: dict[str, Any] = {}
        for step in range(_STEPS):
            _take(together, pair, step)
            resumed = self._make([alone])
            resumed.param_groups[0].update(self._numbers[step])
            if step:
                resumed.state[alone] = states
            _take(resumed, [alone], step)
            states = entry_of(resumed, alone)
            if self.clock:
                new = _parameter(self.shape, 2)
                clock = self._make([new])
                clock.param_groups[0].update(self._numbers[step])
                _take(clock, [new], step + 1)
                self._check_clock(step, _numbers_of(together), _numbers_of(clock))
        other = _parameter(self.shape, 1)
        optimizer = self._make([other])
        _call(optimizer, "train")
        for step in range(_STEPS):
            _take(optimizer, [other], step, first=1)
        if not _same(pair[0], self._param) or not _same(pair[1], other):
            raise ConfigError(f"{self._refused}: a parameter's update depends on the others, or on their order.")
        if not _same(alone, self._param):
            raise ConfigError(f"{self._refused}: it keeps something outside `state`, so it cannot be resumed.")

    def _check_clock(self, step: int, *others: dict[str, Any]) -> None:
        """Raises ConfigError unless the numbers of a param group after a step are the same with other parameters."""
        mine = self._numbers[step + 1]
        differing = sorted(key for key, value in mine.items() if any(value != other.get(key) for other in others))
        if differing:
            raise ConfigError(
                f"{self._refused}: its step computes {differing} in param_groups from all parameters and gradients. It "
                "needs every parameter at once."
            )


def kind_of(shape: tuple[int, ...]) -> Kind:
    """The kind of a parameter's shape."""
    distinct = sorted({size for size in shape if size != 1})
    return tuple(0 if size == 1 else 1 + distinct.index(size) for size in shape)


def entry_of(optimizer: torch.optim.Optimizer, param: torch.nn.Parameter) -> dict[str, Any]:
    """What an optimizer keeps for a parameter, without values that are None."""
    return {name: value for name, value in optimizer.state.get(param, {}).items() if value is not None}


def kept_in(optimizer: torch.optim.Optimizer, param: torch.nn.Parameter) -> tuple[dict[str, Any], Structure]:
    """The same, as in `ProbedKind`."""
    leaves, tree = tree_flatten_with_path(entry_of(optimizer, param))
    names = ["_".join(str(getattr(key, "key", getattr(key, "idx", key))) for key in path) for path, _ in leaves]
    kept = {name: value for name, (_, value) in zip(names, leaves, strict=True) if value is not None}
    return kept, (tuple(name if name in kept else None for name in names), tree)


def _parameter(shape: tuple[int, ...], seed: int) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(seed)))


def _take(optimizer: torch.optim.Optimizer, params: list[torch.nn.Parameter], step: int, first: int = 0) -> None:
    """Take a step with random gradients. Those of the second parameter are larger, as if clipping were needed."""
    for index, param in enumerate(params, first):
        seed = torch.Generator().manual_seed(100 * index + step + 10)
        param.grad = torch.randn(param.shape, generator=seed) * 1e3**index
    optimizer.step()


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have the same elements, also where they are NaN."""
    return torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)


def _call(optimizer: torch.optim.Optimizer, method: str) -> None:
    """Call a method without arguments, such as a schedule-free optimizer's `train`, if the class has it."""
    getattr(optimizer, method, lambda: None)()


def _is_plain(value: Any) -> bool:
    return isinstance(value, _PLAIN) or (isinstance(value, tuple) and all(isinstance(each, _PLAIN) for each in value))


def _numbers_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    group = optimizer.param_groups[0]
    return {key: value for key, value in group.items() if isinstance(value, bool | int | float)}
