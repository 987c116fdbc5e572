"""Units: the parameters that are fetched together."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from math import prod

from pagoda.errors import BudgetError

ALIGN_ELEMENTS = 256
"""Every parameter starts on a multiple of this many elements inside its extent: BLAS results may depend on alignment,
CUDA wants 256 bytes, and a block that is quantized together (`optim.codecs`) must not depend on the layout."""


@dataclass(frozen=True, slots=True)
class Part:
    """Which part of a parameter of the user's model a parameter is: consecutive elements."""

    whole: str
    """Name of the parameter that was cut into tiles."""
    shape: tuple[int, ...]
    """Of the whole."""
    start: int
    """First element."""


@dataclass(frozen=True, slots=True)
class TensorShard:
    """How a parameter is divided over tensor-parallel ranks; which of the parts a rank has is not said here.

    Seen flat, the whole is `rows` rows of `row` elements, of each of which a part has `width` adjoining ones. A part
    has them one row after another.
    """

    shape: tuple[int, ...]
    """Of the whole."""
    dim: int
    ranks: int
    """Parts, which are equal."""

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
        """What part number `index` of the parameter `name` is called where all parts are."""
        return f"{name}@{index}/{self.ranks}"


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """One parameter as the planner sees it. `name` is the first name it has in the model (ties have several)."""

    name: str
    shape: tuple[int, ...]
    trainable: bool = True
    part: Part | None = None
    """None for a parameter that was not cut."""
    shard: TensorShard | None = None
    """What this is an equal part of, where tensor-parallel ranks have one each; `shape` is that of the part."""

    @property
    def numel(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class ModuleSpec:
    """A module tree in pre-order. A tied parameter appears once, under its first owner."""

    name: str
    params: tuple[ParamSpec, ...]
    children: tuple["ModuleSpec", ...] = ()
    tied: tuple[str, ...] = ()
    """Names of parameters that it uses and an earlier module owns."""
    apart: bool = False
    """Shares no unit with what is around it, such as a tile that is fetched alone."""
    routed: bool = False
    """Whether its children are experts: each forward uses those that a router chose."""

    def modules(self) -> Iterator["ModuleSpec"]:
        """Every module of the subtree, in pre-order."""
        yield self
        for child in self.children:
            yield from child.modules()

    def walk(self) -> Iterator[ParamSpec]:
        """Every parameter of the subtree, in pre-order."""
        return (param for module in self.modules() for param in module.params)

    @property
    def numel(self) -> int:
        """Elements of all parameters of the subtree."""
        return sum(param.numel for param in self.walk())

    @property
    def is_split(self) -> bool:
        """Whether it holds modules that share no unit with what is around them: those apart, and experts."""
        return any(self.routed or child.apart or child.is_split for child in self.children)

    def experts(self) -> Iterator[str]:
        """Names of all experts in the subtree."""
        return (child.name for module in self.modules() if module.routed for child in module.children)


@dataclass(frozen=True, slots=True)
class Slot:
    """Where one parameter lies in its unit's extents, in elements."""

    param: ParamSpec
    offset: int


@dataclass(frozen=True, slots=True)
class UnitSpec:
    """Parameters fetched together, laid flat.

    Trainable parameters come first, so that the extents of gradients and optimizer states are the prefix
    [0, trainable_numel) of the weights' own layout; frozen parameters cost only their weights.
    """

    index: int
    module: str
    """Qualified name of the module whose forward needs the unit ("" is the model itself)."""
    slots: tuple[Slot, ...]
    numel: int
    """Elements of the weight extent, padding included."""
    trainable_numel: int
    """Elements of the gradient and optimizer extents, padding included."""

    @property
    def name(self) -> str:
        return self.module or "(model)"


def discover(root: ModuleSpec, limit_bytes: int, itemsize: int) -> tuple[UnitSpec, ...]:
    """Split a module tree into units, top down.

    A subtree whose weights fit `limit_bytes` is one unit; a larger one is split into its children, and the
    parameters it holds itself become a unit of their own, however large. So is one that holds modules apart or experts,
    each of which shares no unit with what is around it. Units come in pre-order.
    """
    units: list[UnitSpec] = []

    def visit(module: ModuleSpec) -> None:
        params = list(module.walk())
        if not params:
            return
        if not module.is_split and sum(p.numel for p in params) * itemsize <= limit_bytes:
            units.append(_lay_out(len(units), module.name, params))
            return
        if module.params:
            units.append(_lay_out(len(units), module.name, list(module.params)))
        for child in module.children:
            visit(child)

    visit(root)
    if not units:
        raise BudgetError("The model has no floating-point parameters, so there is nothing to train in pages.")
    return tuple(units)


def layers_of(root: ModuleSpec) -> tuple[ModuleSpec, ...]:
    """The outermost modules of a tree that are named by numbers and hold parameters, experts and tiles apart: what a
    model repeats, in the order of its forward."""
    layers: list[ModuleSpec] = []
    for child in root.children:
        if _is_layer(root, child):
            layers.append(child)
        else:
            layers += layers_of(child)
    return tuple(layers)


def is_within(module: str, modules: Collection[str]) -> bool:
    """Whether a module is one of `modules` or inside one of them."""
    return module in modules or any(around in modules for around in around_of(module))


@dataclass(frozen=True, slots=True)
class Use:
    """A module of a forward pass that needs a unit."""

    unit: int
    module: str


def forward_uses(root: ModuleSpec, units: tuple[UnitSpec, ...]) -> tuple[Use, ...]:
    """The uses of units in one forward pass, taken to run modules in the order in which they are declared.

    A module that uses a parameter of another's needs that one's unit where it stands itself.
    """
    owner = {slot.param.name: unit for unit in units for slot in unit.slots}
    uses: list[Use] = []

    def use(unit: UnitSpec, module: str) -> None:
        if not uses or uses[-1].unit != unit.index:
            uses.append(Use(unit.index, module))

    def visit(module: ModuleSpec) -> None:
        for name in module.tied:
            use(owner[name], module.name)
        for param in module.params:
            use(owner[param.name], owner[param.name].module)
        for child in module.children:
            visit(child)

    visit(root)
    return tuple(uses)


def enclosing(units: tuple[UnitSpec, ...]) -> dict[int, frozenset[int]]:
    """unit -> the units of the modules around its own: in forward they stay in use for as long as it runs.

    A module around another has a unit of its own only if it was split and holds parameters directly.
    """
    by_module = {unit.module: unit.index for unit in units}
    return {
        unit.index: frozenset(by_module[name] for name in around_of(unit.module) if name in by_module) for unit in units
    }


def _is_layer(parent: ModuleSpec, child: ModuleSpec) -> bool:
    numbered = child.name.rpartition(".")[2].isdigit()
    return numbered and not child.apart and not parent.routed and next(child.walk(), None) is not None


def around_of(module: str) -> Iterator[str]:
    """Names of the modules around one, from the nearest to the model."""
    while module:
        module = module.rpartition(".")[0]
        yield module


def align(elements: int) -> int:
    """`elements` rounded up to the alignment of a parameter."""
    return -(-elements // ALIGN_ELEMENTS) * ALIGN_ELEMENTS


def _lay_out(index: int, module: str, params: list[ParamSpec]) -> UnitSpec:
    slots: list[Slot] = []
    offset = 0
    trainable = 0
    for wanted in (True, False):
        for param in params:
            if param.trainable is wanted:
                slots.append(Slot(param, offset))
                offset += align(param.numel)
        if wanted:
            trainable = offset
    return UnitSpec(index, module, tuple(slots), offset, trainable)
