"""Finds out what states a `torch.optim.Optimizer` class keeps for a parameter, by running it on tiny parameters.

Shapes are classified by kind: the number of dimensions, and which of them are 1, which are equal, and which is larger.
Each kind is run on two tiny shapes. A dimension of a state that differs between the two runs follows the parameter's:
it is matched with the product of some of the parameter's dimensions. Behaviour for large parameters only is not seen
here. An update whose states differ from those found is refused when it happens.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import chain, combinations
from math import prod
from typing import Any

import torch

from pagoda.errors import ConfigError

Make = Callable[[list[Any]], torch.optim.Optimizer]
"""Of parameters, or of param groups."""
Kind = tuple[int, ...]
"""For each dimension: 0 if its size is 1, otherwise the place of its size, from 1, among the distinct sizes above 1."""

COMMON_SHAPES = ((4,), (4, 5), (5, 4), (4, 4), (4, 5, 6), (4, 5, 3, 3))
"""Shapes whose kinds are probed before any model is known, to name the states."""
_SIZES = ((3, 5, 7, 11, 13, 17), (5, 7, 11, 13, 17, 19))
"""Sizes of the distinct dimensions in each of the two runs."""
_STEPS = 3
_PLAIN = (bool, int, float, str, type(None))
_TAKEN = {"weight", "weight_low", "weight_back", "grad", "grad_queue", "buffers"}
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


class Probe:
    """Runs the optimizer that `make` returns on tiny parameters. Raises ConfigError for a class that cannot be run unit
    by unit."""

    def __init__(self, label: str, make: Make) -> None:
        self.label = label
        self._make = make
        self._by_kind: dict[Kind, Mapping[str, ProbedState] | str] = {}
        """kind -> its states by name, or why the class refuses it."""
        self._same: dict[frozenset[str], bool] = {}
        self.states: dict[str, ProbedState] = {}
        """Name -> the state, of the first kind that has it."""
        self.group: dict[str, Any] = {}
        """The settings in a new param group that are numbers, text or tuples of them."""
        for shape in COMMON_SHAPES:
            found = self._found(kind_of(shape))
            for name, state in found.items() if not isinstance(found, str) else ():
                if not name.isidentifier() or name in _TAKEN:
                    raise ConfigError(f"{label} cannot be run: its state {name!r} has a name that Pagoda uses itself.")
                known = self.states.setdefault(name, state)
                if (known.dtype, known.number) != (state.dtype, state.number):
                    raise ConfigError(f"{label} cannot be run: its state {name!r} is not always {known.dtype}.")
        if all(isinstance(found, str) for found in self._by_kind.values()):
            raise ConfigError(f"{label} cannot be run: {self._by_kind[kind_of(COMMON_SHAPES[1])]}")

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

    def of(self, parameter: str, shape: tuple[int, ...]) -> Mapping[str, ProbedState]:
        """The states of a parameter, by name. Raises ConfigError if the class refuses the parameter."""
        found = self._found(kind_of(shape))
        if isinstance(found, str):
            raise ConfigError(f"{self.label} cannot update {parameter!r}, of shape {list(shape)}: {found}")
        unknown = sorted(found.keys() - self.states.keys())
        if unknown:
            raise ConfigError(
                f"{self.label} keeps {unknown} for {parameter!r}, of shape {list(shape)}, but for none of the shapes "
                "that were tried first: pagoda.Optim cannot run it with this parameter."
            )
        return found

    def _found(self, kind: Kind) -> Mapping[str, ProbedState] | str:
        if kind not in self._by_kind:
            self._by_kind[kind] = self._probed(kind)
        return self._by_kind[kind]

    def _probed(self, kind: Kind) -> Mapping[str, ProbedState] | str:
        """The states of a kind, or the class's message if it refuses the kind."""
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            runs = []
            for sizes in _SIZES:
                try:
                    runs.append(_Run(self.label, self._make, tuple(1 if k == 0 else sizes[k - 1] for k in kind)))
                except Exception as error:
                    return f"it raises {type(error).__name__}: {error}"
            runs[0].check()
        self.group = runs[0].group
        first, second = (run.states for run in runs)
        if first.keys() != second.keys():
            raise ConfigError(f"{self.label} cannot be run: what it keeps depends on a parameter's size.")
        return {name: self._state(name, first[name], second[name], [run.shape for run in runs]) for name in first}

    def _state(self, name: str, one: Any, other: Any, shapes: list[tuple[int, ...]]) -> ProbedState:
        """A state, from its values in two runs."""
        if isinstance(one, bool | int | float):
            return ProbedState(torch.float64 if isinstance(one, float) else torch.int64, (), type(one))
        if not isinstance(one, torch.Tensor) or one.layout is not torch.strided or one.dim() != other.dim():
            kind = type(one).__name__
            raise ConfigError(f"{self.label} cannot be run: its state {name!r} is a {kind}, not a tensor or a number.")
        every = range(len(shapes[0]))
        subsets = list(chain.from_iterable(combinations(every, count) for count in range(1, len(every) + 1)))
        dims: list[int | tuple[int, ...]] = []
        for size, grown in zip(one.shape, other.shape, strict=True):
            products = (s for s in subsets if [prod(shape[i] for i in s) for shape in shapes] == [size, grown])
            followed = size if size == grown else next(products, None)
            if followed is None:
                raise ConfigError(
                    f"{self.label} cannot be run: its state {name!r} is {list(one.shape)} for a parameter of "
                    f"{list(shapes[0])} and {list(other.shape)} for {list(shapes[1])}, which follows no known rule."
                )
            dims.append(followed)
        return ProbedState(one.dtype, tuple(dims))


class _Run:
    """A few steps of the class on one tiny parameter."""

    def __init__(self, label: str, make: Make, shape: tuple[int, ...]) -> None:
        self.shape = shape
        self._refused = f"{label} cannot be run unit by unit"
        self._make = make
        self._param = _parameter(shape, 0)
        optimizer = make([self._param])
        self.group = {key: value for key, value in optimizer.param_groups[0].items() if _is_plain(value)}
        groups, before = _numbers_of(optimizer), torch.get_rng_state()
        for step in range(_STEPS):
            _take(optimizer, [self._param], step)
        self._random = not torch.equal(before, torch.get_rng_state())
        self._changed = sorted(key for key, value in _numbers_of(optimizer).items() if groups.get(key) != value)
        self.states = kept_in(optimizer, self._param)

    def check(self) -> None:
        """Raises ConfigError unless a parameter's update depends on its states and gradient alone, whatever else is
        updated."""
        if self._random:
            raise ConfigError(f"{self._refused}: its step draws random numbers.")
        if self._changed:
            raise ConfigError(
                f"{self._refused}: its step changes {self._changed} in param_groups, which all parameters share. It "
                "needs every parameter at once."
            )
        pair = [_parameter(self.shape, 0), _parameter(self.shape, 1)]
        together, alone = self._make(pair), _parameter(self.shape, 0)
        states: dict[str, Any] = {}
        for step in range(_STEPS):
            _take(together, pair, step)
            resumed = self._make([alone])
            if step:
                resumed.state[alone] = states
            _take(resumed, [alone], step)
            states = kept_in(resumed, alone)
        if not torch.equal(pair[0], self._param):
            raise ConfigError(f"{self._refused}: a parameter's update depends on the others.")
        if not torch.equal(alone, self._param):
            raise ConfigError(f"{self._refused}: it keeps something outside `state`, so it cannot be resumed.")


def kind_of(shape: tuple[int, ...]) -> Kind:
    """The kind of a parameter's shape."""
    distinct = sorted({size for size in shape if size != 1})
    return tuple(0 if size == 1 else 1 + distinct.index(size) for size in shape)


def kept_in(optimizer: torch.optim.Optimizer, param: torch.nn.Parameter) -> dict[str, Any]:
    """What an optimizer keeps for a parameter, without entries that are None."""
    return {name: value for name, value in optimizer.state.get(param, {}).items() if value is not None}


def _parameter(shape: tuple[int, ...], seed: int) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(seed)))


def _take(optimizer: torch.optim.Optimizer, params: list[torch.nn.Parameter], step: int) -> None:
    for index, param in enumerate(params):
        param.grad = torch.randn(param.shape, generator=torch.Generator().manual_seed(100 * index + step + 10))
    optimizer.step()


def _is_plain(value: Any) -> bool:
    return isinstance(value, _PLAIN) or (isinstance(value, tuple) and all(isinstance(each, _PLAIN) for each in value))


def _numbers_of(optimizer: torch.optim.Optimizer) -> dict[str, float]:
    group = optimizer.param_groups[0]
    return {key: float(value) for key, value in group.items() if isinstance(value, bool | int | float)}
