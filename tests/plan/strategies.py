"""Random module trees, layouts, traces and machines for the tests of this folder."""

from collections.abc import Callable
from dataclasses import replace

from hypothesis import strategies as st

from pagoda.config.memory import Split
from pagoda.errors import BudgetError
from pagoda.optim import AdamW
from pagoda.plan.layout import Layout
from pagoda.plan.options import Options
from pagoda.plan.planner import Plan, make_plan
from pagoda.plan.ranks import ALONE, Ranks
from pagoda.plan.tiers import DEVICE, Budgets
from pagoda.plan.trace import STEP, Access, Phase, Trace
from pagoda.plan.units import ModuleSpec, ParamSpec, UnitSpec, align
from pagoda.simulate.hardware import Cpu, DeviceSpeeds, Drive, Figure, Hardware, Link, MatmulRate, SmallTransfers
from pagoda.simulate.simulation import Simulation
from pagoda.simulate.timeline import TimelineSpan

Draw = Callable[[st.SearchStrategy], object]

LARGE = 1 << 40
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


@st.composite
def plans(draw: Draw, separate: bool, shares: bool = False, ranks: Ranks = ALONE) -> Plan:
    """Plans of random models under random budgets that fit, with a device of its own or not.

    With `shares`, some updates are on the device, it is home to some states, and states in RAM are speculated on; of
    `ranks`, one's plan.
    """
    options = Options(
        page_bytes=4096,
        unit_limit=draw(st.integers(64, 400_000)),
        gradient_accumulation_steps=draw(st.none() | st.integers(1, 3)),
        clipping=draw(st.booleans()),
        split=Split(
            device_update_share=draw(st.sampled_from([0.0, 0.4, 1.0])) * separate,
            device_home_share=draw(st.sampled_from([0.0, 0.5, 1.0])) * separate,
            device_speculated_share=draw(st.sampled_from([0.0, 0.75, 1.0])),
        )
        if shares
        else None,
        speculate=shares and draw(st.booleans()),
    )
    root = draw(large_trees)
    states = STATES[draw(st.sampled_from(["bf16", "fp32"]))]
    budgets = Budgets(0, 0 if separate else None, LARGE if ranks is ALONE or draw(st.booleans()) else None)
    while True:
        try:
            return make_plan(root, states, budgets, options, ranks)
        except BudgetError as error:
            room = int((error.needed_bytes or 0) * draw(st.floats(1.0, 4.0)))
            budgets = replace(budgets, device=room) if error.tier == DEVICE else replace(budgets, host=room)


def figure(value: float) -> Figure:
    return Figure(value, "a test")


_MATMUL = MatmulRate(figure(1e15), figure(1e15))
FAST = Hardware(
    "fast",
    Cpu(
        cores=64,
        memory_bytes=figure(1e13),
        memory_bytes_per_s=figure(1e13),
        update_params_per_s=figure(1e12),
        bf16=_MATMUL,
        fp32=_MATMUL,
        copy_bytes_per_s=figure(1e12),
        gradient_bytes_per_s=figure(1e12),
    ),
    ssd=Drive(figure(1e13), figure(1e10), figure(1e10), figure(1e10), figure(1e15)),
)
"""A machine where the CPU computes, and nothing takes long but the SSD."""
GPU = replace(
    FAST,
    device=DeviceSpeeds(figure(1e12), figure(1e13), _MATMUL, _MATMUL, figure(1e12)),
    link=Link(*[figure(1e12)] * 3),
)


@st.composite
def hardware(draw: Draw) -> Hardware:
    """A machine with an SSD, with a GPU or without, whose rates lie within a factor of a hundred of each other."""
    rate = st.floats(1e8, 1e10).map(figure)
    down, up, read, write, update, ram = (draw(rate) for _ in range(6))

    def both(one: Figure, other: Figure) -> Figure:
        return figure(draw(st.floats(0.3, 1.0)) * (one.value + other.value))

    cpu = replace(
        FAST.cpu,
        cores=draw(st.integers(1, 8)),
        memory_bytes_per_s=ram,
        update_params_per_s=update,
        copy_bytes_per_s=down,
        gradient_bytes_per_s=up,
    )
    slow = [figure(rate.value / 3) for rate in (read, write, both(read, write))]
    drive = Drive(
        *(figure(1e13), read, write, both(read, write), figure(1e15)),
        cpu_share=draw(st.none() | st.floats(0.01, 1.0).map(figure)),
        small=draw(st.none() | st.just(SmallTransfers(1 << 16, *slow, figure(0.5), slow[0]))),
    )
    if draw(st.booleans()):
        return replace(GPU, cpu=cpu, link=Link(down, up, both(down, up)), ssd=drive)
    return replace(FAST, cpu=cpu, ssd=drive)


def drained(simulation: Simulation) -> list[TimelineSpan]:
    """Let every lane finish its work. All spans since the first step."""
    lanes = simulation._lanes
    while lanes._active or any(lanes._ready.values()):
        lanes.advance()
    return [task.span(since=0.0) for task in lanes.ended]
