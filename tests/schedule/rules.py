"""What a random world is like."""

import random
from dataclasses import dataclass

from pagoda.plan.trace import STEP, Access, Phase, Trace
from pagoda.schedule.operations import SchedulePlan, UnitPlan


@dataclass(frozen=True)
class Rules:
    """What a world is like. Drawn at random."""

    plan: SchedulePlan
    order: tuple[int, ...]
    """Units as forward uses them at first, without experts."""
    experts: dict[int, tuple[int, ...]]
    """unit -> the experts among which a router chooses after it."""
    steady: bool
    """Whether routers always choose the same experts."""
    steps: int
    accumulation: int
    holds: bool
    """Whether graphs refer to weights from forward to backward."""
    unread: frozenset[int]
    """Units of whose weights backward reads nothing, as of an embedding's: their gradients come without an access."""
    departures: float
    """How likely a use is left out, an evaluation comes between, or an exception ends a pass."""
    reorders: float
    """How likely a step uses its units in another order from then on."""
    clips: float
    failures: float
    """How likely an operation fails."""
    infinite: float
    """How likely a gradient is not finite."""
    tight: bool
    """Whether SSD has no room for the updates that follow a checkpoint before that is complete."""
    updaters_apart: bool
    """Whether the two updaters share nothing that an update may wait for."""

    @staticmethod
    def draw(rng: random.Random) -> "Rules":
        count = rng.randint(1, 7)
        mode = rng.choice(["clipped", "clipped", "during backward", "asynchronous"])
        agreed = rng.random() < 0.25
        speculates = mode == "clipped" and rng.random() < 0.5
        shared = agreed and rng.random() < 0.3
        layers = rng.sample(range(count), count)
        experts: dict[int, tuple[int, ...]] = {}
        if count > 2 and not agreed and rng.random() < 0.3:
            routed = rng.randint(1, count - 2)
            experts[layers[-1]] = tuple(layers[:routed])
            layers = layers[routed:]
        routed_units = frozenset(unit for some in experts.values() for unit in some)
        units = draw_units(rng, count, mode, speculates, shared, routed_units)
        accumulation = rng.choice([1, 1, 2])
        uses = [Access(u, Phase.FORWARD) for u in layers] + [Access(u, Phase.BACKWARD) for u in reversed(layers)]
        holds = rng.random() < 0.4
        widest = max(unit.lease_frames for unit in units)
        most = sum(unit.lease_frames for unit in units)
        wide, all_pages = max(unit.buffer_pages for unit in units), sum(unit.buffer_pages for unit in units)
        spills = rng.random() < 0.8
        plan = SchedulePlan(
            units,
            Trace((*uses * accumulation, STEP)),
            frame_pool=4 * most + 3 * widest if holds else rng.randint(3 * widest, 3 * widest + most),
            buffer_pool=2 * wide + rng.randint(0, 4) if spills else all_pages,
            buffer_slab=0 if spills else all_pages,
            spills=spills,
            reserve_pages=rng.randint(0, 6),
            during_backward=mode == "during backward",
            max_staleness=rng.randint(0, 3) if mode == "asynchronous" else None,
            ranks_fetch_alike=agreed,
        )
        return Rules(
            plan,
            tuple(layers),
            experts,
            steady=rng.random() < 0.5,
            steps=rng.randint(1, 6 if experts else 5),
            accumulation=accumulation,
            holds=holds,
            unread=frozenset(u for u in layers if rng.random() < 0.2),
            departures=rng.choice([0.0, 0.1, 0.3]),
            reorders=rng.choice([0.0, 0.0, 0.3]),
            clips=rng.choice([0.0, 0.1, 0.3]),
            failures=0.0 if agreed else rng.choice([0.0, 0.0, 0.02]),
            infinite=0.1 if not agreed and mode != "asynchronous" and rng.random() < 0.3 else 0.0,
            tight=rng.random() < 0.3,
            updaters_apart=not speculates and not agreed and not any(unit.buffer_pages for unit in units),
        )


def draw_units(
    rng: random.Random, count: int, mode: str, speculates: bool, shared: bool, routed: frozenset[int]
) -> list[UnitPlan]:
    framed, staged, two_updaters = rng.random() < 0.7, rng.random() < 0.6, rng.random() < 0.3
    return [
        UnitPlan(
            lease_frames=rng.randint(0 if rng.random() < 0.1 else 1, 3) if framed else 0,
            buffer_pages=rng.randint(0 if rng.random() < 0.3 else 1, 3) if staged and mode != "asynchronous" else 0,
            old_state_pages=rng.choice([0, 1, 2]),
            streamed=rng.random() < 0.8,
            trained=rng.random() < 0.85,
            speculated=speculates and rng.random() < 0.8,
            updater=rng.randint(0, 1) if two_updaters else 0,
            shared=shared and rng.random() < 0.9,
            routed=unit in routed,
        )
        for unit in range(count)
    ]
