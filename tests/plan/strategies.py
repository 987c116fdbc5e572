"""Random module trees, layouts, traces and machines for the tests of this folder."""

from collections.abc import Callable

from hypothesis import strategies as st

from pagoda.optim import AdamW
from pagoda.plan.layout import Layout
from pagoda.plan.trace import STEP, Access, Phase, Trace
from pagoda.plan.units import ModuleSpec, ParamSpec, UnitSpec, align
from pagoda.simulate.hardware import Cpu, Device, Drive, Figure, Hardware, Link, MatmulRate, SmallTransfers

Draw = Callable[[st.SearchStrategy], object]

STATES = {precision: AdamW().states(precision) for precision in ("bf16", "fp32")}

_shapes = st.lists(st.integers(1, 24), min_size=0, max_size=2).map(tuple)
_large_shapes = st.tuples(st.integers(1, 200_000))


def _trees(shapes: st.SearchStrategy) -> st.SearchStrategy:
    own = st.lists(st.tuples(shapes, st.booleans()), max_size=3)
    return st.recursive(st.tuples(own, st.just([])), lambda t: st.tuples(own, st.lists(t, max_size=4)), max_leaves=12)


def _named(tree: tuple, name: str) -> ModuleSpec:
    own, children = tree
    prefix = f"{name}." if name else ""
    return ModuleSpec(
        name,
        tuple(ParamSpec(f"{prefix}p{i}", shape, trainable) for i, (shape, trainable) in enumerate(own)),
        tuple(_named(child, f"{prefix}m{i}") for i, child in enumerate(children)),
    )


module_trees = _trees(_shapes).map(lambda tree: _named(tree, "")).filter(lambda root: any(root.walk()))
"""Trees that hold at least one parameter; some are frozen, some modules hold none."""

large_trees = (
    _trees(_large_shapes).map(lambda tree: _named(tree, "")).filter(lambda root: any(p.trainable for p in root.walk()))
)
"""Trees of which something trains, with parameters that the planner has reason to split into units."""


def unit(index: int, trainable: int, frozen: int = 0) -> UnitSpec:
    """A unit of given elements; what the planner looks at beyond them does not matter."""
    return UnitSpec(index, f"m{index}", (), align(trainable) + align(frozen), align(trainable))


@st.composite
def layouts(draw: Draw) -> Layout:
    """Up to eight units of unequal size, some of them frozen in part or whole."""
    sizes = draw(
        st.lists(st.tuples(st.integers(0, 20_000), st.integers(0, 6_000)).filter(any), min_size=1, max_size=8).filter(
            lambda units: any(trainable for trainable, _ in units)
        )
    )
    units = tuple(unit(index, *size) for index, size in enumerate(sizes))
    return Layout(units, STATES[draw(st.sampled_from(["bf16", "fp32"]))], draw(st.sampled_from([4096, 16384])))


@st.composite
def traces(draw: Draw, units: int) -> Trace:
    """Forward in some order, back in reverse, once or twice; tied units come up again, some are never used."""
    accesses: list[Access] = []
    for _ in range(draw(st.integers(1, 2))):
        order = draw(st.lists(st.integers(0, units - 1), min_size=1, max_size=2 * units))
        passes = [Access(u, Phase.FORWARD) for u in order] + [Access(u, Phase.BACKWARD) for u in reversed(order)]
        for access in passes:
            if not accesses or accesses[-1] != access:
                accesses.append(access)
    return Trace((*accesses, STEP))


def figure(value: float) -> Figure:
    return Figure(value, "a test")


@st.composite
def small_transfers(draw: Draw, read: Figure, write: Figure) -> SmallTransfers:
    """Small transfers are no faster than large ones."""
    shares = [draw(st.floats(0.05, 1.0)) for _ in range(3)]
    few = [figure(share * many.value) for share, many in zip(shares, (read, write), strict=False)]
    both = figure(shares[2] * sum(rate.value for rate in few))
    taken, left = (figure(draw(st.floats(0.01, 1.0))) for _ in range(2))
    return SmallTransfers(draw(st.integers(4096, 1 << 20)), *few, both, taken, figure(left.value * both.value))


@st.composite
def hardware(draw: Draw) -> Hardware:
    """A machine with an SSD, with a GPU or without, whose rates lie within a factor of a hundred of each other."""
    rate = st.floats(1e8, 1e10).map(figure)
    matmul = MatmulRate(figure(1e12), figure(1e12))
    cpu = Cpu(
        cores=draw(st.integers(1, 8)),
        memory_bytes=figure(float(1 << 40)),
        memory_bytes_per_s=draw(rate),
        update_params_per_s=draw(rate),
        bf16=matmul,
        fp32=matmul,
        copy_bytes_per_s=draw(rate),
        gradient_bytes_per_s=draw(rate),
    )
    read, write = draw(rate), draw(rate)
    share = draw(st.floats(0.3, 1.0))
    drive = Drive(
        capacity_bytes=figure(1e13),
        read_bytes_per_s=read,
        write_bytes_per_s=write,
        both_bytes_per_s=figure(share * (read.value + write.value)),
        endurance_bytes=figure(1e15),
        cpu_share=draw(st.none() | st.floats(0.01, 1.0).map(figure)),
        beside_bytes_per_s=draw(
            st.none() | st.floats(0.1, 1.0).map(lambda left: figure(left * share * (read.value + write.value)))
        ),
        small=draw(st.none() | small_transfers(read, write)),
    )
    if not draw(st.booleans()):
        return Hardware("cpu", cpu, ssd=drive)
    down, up = draw(rate), draw(rate)
    device = Device(figure(1e12), figure(1e12), matmul, matmul, draw(rate))
    link = Link(down, up, figure(draw(st.floats(0.5, 1.0)) * (down.value + up.value)))
    return Hardware("gpu", cpu, device=device, link=link, ssd=drive)
