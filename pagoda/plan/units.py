"""Units: parameters that are fetched together."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch

from pagoda.errors import BudgetError

ALIGN_ELEMENTS = 256
"""Every parameter starts at a multiple of this many elements in its extent. BLAS results may depend on alignment, CUDA
needs 256 bytes, and blocks of 8-bit moments (`optim.moments`) must not depend on the layout."""
_MOST_UNIT_BYTES, _LEAST_UNIT_BYTES = 512 << 20, 64 << 10
_UNITS_WANTED = 8


@dataclass(frozen=True, slots=True)
class Part:
    """The part of a user's parameter that a parameter holds: consecutive elements."""

    whole: str
    """Name of the parameter that was cut into tiles."""
    shape: tuple[int, ...]
    """Shape of the whole parameter."""
    start: int
    """First element."""


@dataclass(frozen=True, slots=True)
class TensorShard:
    """How a parameter is divided over tensor-parallel ranks. It does not say which part a rank has.

    As a flat tensor, the whole has `rows` rows of `row` elements. A part has `width` adjoining elements of each row,
    one row after another.
    """

    shape: tuple[int, ...]
    """Shape of the whole parameter."""
    dim: int
    ranks: int
    """Number of parts. They are equal."""

    @property
    def rows(self) -> int:
        return prod(self.shape[: self.dim])

    @property
    def row(self) -> int:
        return prod(self.shape[self.dim :])

    @property
    def width(self) -> int:
        return self.row // self.ranks

    @property
    def part_shape(self) -> tuple[int, ...]:
        """Shape of each part."""
        return (*self.shape[: self.dim], self.shape[self.dim] // self.ranks, *self.shape[self.dim + 1 :])

    def name_of_part(self, name: str, index: int) -> str:
        """The name of part number `index` of the parameter `name`, in a place that has all parts."""
        return f"{name}@{index}/{self.ranks}"


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """One parameter as the planner sees it. `name` is its first name in the model (tied parameters have several)."""

    name: str
    shape: tuple[int, ...]
    trainable: bool = True
    part: Part | None = None
    """None for a parameter that was not cut."""
    shard: TensorShard | None = None
    """With tensor parallelism: the division of which this parameter is a part. `shape` is the shape of the part."""
    dtype: torch.dtype | None = None
    """The dtype of its weight, if the model mixes dtypes. None: that of the states of most parameters."""

    @property
    def numel(self) -> int:
        return prod(self.shape)

    def nbytes(self, itemsize: int) -> int:
        """Bytes of its weight. `itemsize`: bytes of an element in the dtype of most parameters."""
        return self.numel * (itemsize if self.dtype is None else self.dtype.itemsize)


@dataclass(frozen=True, slots=True)
class ModuleSpec:
    """A module tree in pre-order. A tied parameter appears once, under its first owner."""

    name: str
    params: tuple[ParamSpec, ...]
    children: tuple["ModuleSpec", ...] = ()
    tied: tuple[str, ...] = ()
    """Names of parameters that the module uses and an earlier module owns."""
    apart: bool = False
    """Whether the module shares no unit with the modules around it, such as a tile that is fetched alone."""
    routed: bool = False
    """Whether its children are experts. Each forward uses the ones that a router chose."""
    lookup: str | None = None
    """For an embedding: why the CPU cannot look up its rows while a GPU computes, or "" if it can. None for others."""
    on_host: bool = False
    """Whether it computes in RAM, although the device computes everything else."""

    def modules(self) -> Iterator["ModuleSpec"]:
        """Every module of the subtree, in pre-order."""
        rest = [self]
        while rest:
            module = rest.pop()
            yield module
            rest += reversed(module.children)

    def walk(self) -> Iterator[ParamSpec]:
        """Every parameter of the subtree, in pre-order."""
        return (param for module in self.modules() for param in module.params)

    @property
    def numel(self) -> int:
        """Elements of all parameters of the subtree."""
        return sum(param.numel for param in self.walk())

    def nbytes(self, itemsize: int) -> int:
        """Bytes of all weights of the subtree, like `ParamSpec.nbytes`."""
        return sum(param.nbytes(itemsize) for param in self.walk())

    @property
    def is_split(self) -> bool:
        """Whether it contains modules that share no unit with the modules around them: experts, and modules that are
        `apart` or compute in RAM."""
        return any(self.routed or child.apart or child.on_host or child.is_split for child in self.children)

    def with_on_host(self, names: Collection[str]) -> "ModuleSpec":
        """The same tree, in which the named modules compute in RAM."""
        if not names:
            return self
        children = tuple(child.with_on_host(names) for child in self.children)
        return replace(self, children=children, on_host=self.name in names)

    def experts(self) -> Iterator[str]:
        """Names of all experts in the subtree."""
        return (child.name for module in self.modules() if module.routed for child in module.children)


@dataclass(frozen=True, slots=True)
class Slot:
    """The place of one parameter in its unit's extents, in elements."""

    param: ParamSpec
    offset: int


@dataclass(frozen=True, slots=True)
class UnitSpec:
    """Parameters fetched together, laid out flat.

    Trainable parameters come first, so that the extents of gradients and optimizer states are the prefix [0,
    trainable_numel) of the weights' layout. Frozen parameters cost only their weights.
    """

    index: int
    module: str
    """Qualified name of the module whose forward needs the unit ("" is the model itself)."""
    slots: tuple[Slot, ...]
    numel: int
    """Elements of the weight extent, padding included."""
    trainable_numel: int
    """Elements of the gradient and optimizer extents, padding included."""
    on_host: bool = False
    """Whether its module computes in RAM, where its weights live."""
    dtype: torch.dtype | None = None
    """The dtype of its weights, like `ParamSpec.dtype`."""

    @property
    def name(self) -> str:
        return self.module or "(model)"

    @property
    def is_mostly_frozen(self) -> bool:
        """Whether some of its parameters are trained, and most are not."""
        return 0 < 2 * self.trainable_numel < self.numel


def first_limit(nbytes: int) -> int:
    """Bytes of the largest units that are tried first, for a model whose weights take `nbytes`: an eighth of them,
    within limits."""
    return max(_LEAST_UNIT_BYTES, min(_MOST_UNIT_BYTES, nbytes // _UNITS_WANTED))


def discover(root: ModuleSpec, limit_bytes: int, itemsize: int) -> tuple[UnitSpec, ...]:
    """Divide a module tree into units, top down.

    A subtree whose weights fit `limit_bytes` is one unit. A larger subtree, or one that `is_split`, is divided into its
    children, and the parameters that it holds directly become a unit of their own, however large. Units are in
    pre-order.

    A unit has one dtype. If parameters have several, there is a unit of each for the same module, and all of them are
    in use together.
    """
    units: list[UnitSpec] = []

    def add(module: ModuleSpec, params: Sequence[ParamSpec]) -> None:
        for dtype in dict.fromkeys(param.dtype for param in params):
            units.append(_lay_out(len(units), module, [param for param in params if param.dtype is dtype]))

    def visit(module: ModuleSpec) -> None:
        if not module.is_split:
            params = list(module.walk())
            if params and module.nbytes(itemsize) <= limit_bytes:
                add(module, params)
                return
        add(module, module.params)
        for child in module.children:
            visit(child)

    visit(root)
    if not units:
        raise BudgetError("The model has no floating-point parameters, so there is nothing to train in pages.")
    return tuple(units)


def layers_of(root: ModuleSpec) -> tuple[ModuleSpec, ...]:
    """The layers of a model, in forward order: the outermost modules that are named by numbers and hold parameters,
    without experts and tiles."""
    layers: list[ModuleSpec] = []
    for child in root.children:
        numbered = child.name.rpartition(".")[2].isdigit()
        if numbered and not child.apart and not root.routed and next(child.walk(), None) is not None:
            layers.append(child)
        else:
            layers += layers_of(child)
    return tuple(layers)


def is_within(module: str, modules: Collection[str]) -> bool:
    """Whether a module is one of `modules` or inside one of them."""
    return module in modules or any(around in modules for around in around_of(module))


@dataclass(frozen=True, slots=True)
class Use:
    """A module that needs a unit in a forward pass."""

    unit: int
    module: str


def forward_uses(root: ModuleSpec, units: tuple[UnitSpec, ...]) -> tuple[Use, ...]:
    """The uses of units in one forward pass that runs modules in the order of their declaration.

    A module that uses another module's parameter needs the unit of that one at its own position.
    """
    owner = {slot.param.name: unit for unit in units for slot in unit.slots}
    together: dict[str, list[int]] = {}
    for unit in units:
        together.setdefault(unit.module, []).append(unit.index)
    uses: list[Use] = []

    def use(module: str, needed: Sequence[int]) -> None:
        if [use.unit for use in uses[-len(needed) :]] != needed:
            uses.extend(Use(unit, module) for unit in needed)

    def visit(module: ModuleSpec) -> None:
        for name in module.tied:
            use(module.name, [owner[name].index])
        for param in module.params:
            owning = owner[param.name].module
            use(owning, together[owning])
        for child in module.children:
            visit(child)

    visit(root)
    return tuple(uses)


def enclosing(units: tuple[UnitSpec, ...]) -> dict[int, frozenset[int]]:
    """unit -> the other units of its own module, and the units of the modules around it. They stay in use while its
    module's forward runs."""
    by_module: dict[str, list[int]] = {}
    for unit in units:
        by_module.setdefault(unit.module, []).append(unit.index)
    return {
        unit.index: frozenset(
            other
            for name in (unit.module, *around_of(unit.module))
            for other in by_module.get(name, ())
            if other != unit.index
        )
        for unit in units
    }


def around_of(module: str) -> Iterator[str]:
    """Names of the modules around a module, from the nearest one to the model."""
    while module:
        module = module.rpartition(".")[0]
        yield module


def align(elements: int) -> int:
    """`elements` rounded up to the alignment of a parameter."""
    return -(-elements // ALIGN_ELEMENTS) * ALIGN_ELEMENTS


def _lay_out(index: int, module: ModuleSpec, params: list[ParamSpec]) -> UnitSpec:
    slots: list[Slot] = []
    offset = 0
    trainable = 0
    for wanted in (True, False):
        for param in params:
            if param.trainable is wanted:
                slots.append(Slot(param, offset))
                offset += align(max(param.numel, 1))  # so that each has a place, even if it is empty
        if wanted:
            trainable = offset
    return UnitSpec(index, module.name, tuple(slots), offset, trainable, module.on_host, params[0].dtype)
