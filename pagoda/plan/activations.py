"""Activation policies: what is done with the tensors that a block's graph keeps between forward and backward."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from enum import StrEnum
from math import inf

from pagoda.config.training import ActivationMode
from pagoda.errors import BudgetError
from pagoda.memory.sizes import format_bytes
from pagoda.plan.lanes import LaneName
from pagoda.plan.layout import Layout
from pagoda.plan.placement import ACTIVATIONS, Placement
from pagoda.plan.tiers import HOST, SSD, Budgets
from pagoda.plan.units import ModuleSpec, Use, is_within, layers_of

LEAST_OFFLOADED_BYTES = 64 << 10
"""Least size of a storage that is offloaded, and size of the pages of offloaded storages in RAM. The plan's page size
takes its place if it is smaller."""
_BUFFERED = 2
"""Number of storages on their way at once in each direction: one moves while the next is made or used."""
_OPERANDS = 2
"""Number of storages that one operator uses at once."""
_STEPS_PER_OCTAVE = 8

OFFLOAD_LANES: Mapping[str, tuple[str, str]] = {
    HOST: (LaneName.D2H, LaneName.H2D),
    SSD: (LaneName.SSD_WRITE, LaneName.SSD_READ),
}
"""Tier -> the lanes on which activations go there and come back."""
SHARE_OF_MEMORY = 0.8
"""Share of the free memory of compute, without pages, that graphs may keep. Operators need the rest."""
_SHARE_OF_LANES = 0.5
"""Share of a step's compute time for which activations may keep lanes busy. Weights and states need the rest."""


def recomputes(mode: ActivationMode | None) -> bool:
    """Whether blocks may be recomputed in backward. None is the default, which is one of two modes that do."""
    return mode in (None, "recompute", "recompute+offload", "auto")


def window_of(largest: int) -> int:
    """Most bytes of offloaded storages that are on their way out at once, or that come back before they are used.
    `largest`: bytes of the largest one."""
    return _BUFFERED * largest


class Policy(StrEnum):
    """What is done with the activations of one block."""

    KEEP = "keep"
    """They stay."""
    RECOMPUTE = "recompute"
    """Only the block's inputs stay. Backward recomputes the block."""
    OFFLOAD = "offload"
    """Large ones leave the memory of compute, and come back ahead of backward."""
    RECOMPUTE_OFFLOAD = "recompute+offload"
    """Only the block's inputs are saved, and they are offloaded."""

    @property
    def recomputes(self) -> bool:
        return self in (Policy.RECOMPUTE, Policy.RECOMPUTE_OFFLOAD)

    @property
    def offloads(self) -> bool:
        return self in (Policy.OFFLOAD, Policy.RECOMPUTE_OFFLOAD)


@dataclass(frozen=True, slots=True)
class Storages:
    """Total bytes of some storages."""

    nbytes: int = 0
    movable: int = 0
    """Bytes of the storages that are large enough to offload."""
    paged: int = 0
    """The same in whole pages."""
    largest: int = 0
    """Bytes of the largest of them."""

    def with_one(self, nbytes: int, page_bytes: int) -> "Storages":
        """Add a storage, which is offloaded in pages of `page_bytes` if it is large enough."""
        if nbytes < min(LEAST_OFFLOADED_BYTES, page_bytes):
            return replace(self, nbytes=self.nbytes + nbytes)
        paged = -(-nbytes // page_bytes) * page_bytes
        largest = max(self.largest, nbytes)
        return Storages(self.nbytes + nbytes, self.movable + nbytes, self.paged + paged, largest)

    @classmethod
    def most(cls, each: Sequence["Storages"]) -> "Storages":
        """The largest of each figure, so that none of `each` takes more, whether it stays or is offloaded."""
        movable = max(one.movable for one in each)
        stays = max(one.nbytes - one.movable for one in each)
        return cls(stays + movable, movable, max(one.paged for one in each), max(one.largest for one in each))

    def scaled(self, factor: float) -> "Storages":
        """Equally many storages, each `factor` times as large."""
        return Storages(*(int(factor * n) for n in (self.nbytes, self.movable, self.paged, self.largest)))


@dataclass(frozen=True, slots=True)
class BlockSizes:
    """The storages that a block's forward keeps for its backward. Each counts in the block that sees it first."""

    inputs: Storages = Storages()
    """Storages of its arguments. They are saved if the block is recomputed."""
    saved_inputs: Storages = Storages()
    """Storages of its arguments that its graph saves if it is not recomputed."""
    inner: Storages = Storages()
    """All other storages that its graph saves if it is not recomputed."""
    forward_s: float = 0.0
    """Seconds of its forward, which recomputation costs again."""

    def saved(self, policy: Policy) -> tuple[Storages, ...]:
        """What is saved between forward and backward."""
        return (self.inputs,) if policy.recomputes else (self.saved_inputs, self.inner)

    def kept(self, policy: Policy) -> int:
        """Bytes that stay in compute's memory between forward and backward."""
        return sum(part.nbytes - (part.movable if policy.offloads else 0) for part in self.saved(policy))

    def away(self, policy: Policy) -> int:
        """Bytes of pages on other tiers between forward and backward."""
        return sum(part.paged for part in self.saved(policy)) if policy.offloads else 0

    def largest(self, policy: Policy) -> int:
        """Bytes of the largest storage that can be offloaded."""
        return max(part.largest for part in self.saved(policy))

    def in_flight(self, policy: Policy) -> int:
        """Bytes in compute's memory for offloading: storages on their way, and those that the next operator of backward
        uses. A recomputed block already counts its inputs."""
        if not policy.offloads:
            return 0
        largest = self.largest(policy)
        return window_of(largest) + (0 if policy.recomputes else _OPERANDS * largest)

    def extra(self, policy: Policy) -> int:
        """Bytes that the block's own backward has in memory in addition to `kept`."""
        if not policy.recomputes:
            return 0
        return self.inner.nbytes + (self.inputs.movable if policy.offloads else 0)


@dataclass(frozen=True, slots=True)
class StepSizes:
    """The storages that one forward keeps for its backward."""

    blocks: tuple[BlockSizes, ...]
    """Sizes of the blocks, in the order in which forward runs them."""
    outside: tuple[int, ...]
    """Bytes saved outside blocks: before each block, and after the last one. There is one more entry than blocks."""

    @classmethod
    def most(cls, each: Sequence["StepSizes"]) -> "StepSizes":
        """The largest of each figure. `each` are sizes of the same blocks."""
        blocks = tuple(
            BlockSizes(
                Storages.most([block.inputs for block in of_each]),
                Storages.most([block.saved_inputs for block in of_each]),
                Storages.most([block.inner for block in of_each]),
                max(block.forward_s for block in of_each),
            )
            for of_each in zip(*(sizes.blocks for sizes in each), strict=True)
        )
        return cls(blocks, tuple(max(of_each) for of_each in zip(*(sizes.outside for sizes in each), strict=True)))

    def scaled(self, factor: float) -> "StepSizes":
        """The sizes of a forward that keeps `factor` times as much."""
        blocks = tuple(
            BlockSizes(b.inputs.scaled(factor), b.saved_inputs.scaled(factor), b.inner.scaled(factor), b.forward_s)
            for b in self.blocks
        )
        return StepSizes(blocks, tuple(int(factor * n) for n in self.outside))


@dataclass(frozen=True, slots=True)
class ActivationBytes:
    """Peak bytes that graphs keep, by place."""

    kept: int = 0
    """In the memory of compute, in addition to all pages."""
    host: int = 0
    """Offloaded to RAM."""
    ssd: int = 0

    @property
    def total(self) -> int:
        return self.kept + self.host + self.ssd

    def or_more(self, other: "ActivationBytes") -> "ActivationBytes":
        """The larger of each."""
        return ActivationBytes(max(self.kept, other.kept), max(self.host, other.host), max(self.ssd, other.ssd))


@dataclass(frozen=True, slots=True)
class Move:
    """A storage that forward saves and offloads during one use of a unit, and that is used in its backward."""

    use: int
    tier: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class ActivationPlan:
    """The policy of every block, and the peak bytes."""

    policies: tuple[Policy, ...] = ()
    peak: ActivationBytes = ActivationBytes()
    sizes: StepSizes = StepSizes((), (0,))
    """The sizes that it was made for. Without blocks before a step or an estimate has shown them."""
    moves: tuple[Move, ...] = ()
    """What is offloaded, in a forecast, in the order of forward. All storages of a block count as equally large."""

    def __str__(self) -> str:
        counts = {policy: self.policies.count(policy) for policy in Policy if policy in self.policies}
        return ", ".join(f"{count} {policy}" for policy, count in counts.items()) or "no blocks"


NO_BLOCKS = ActivationPlan()
"""Nothing is known of activations."""


@dataclass(frozen=True, slots=True)
class Room:
    """The memory that the activations of a step may use."""

    kept: int
    """Bytes of compute's memory, in addition to the pages."""
    host: int = 0
    """Bytes of RAM to offload to."""
    ssd: int = 0
    movable_host: float = inf
    """Bytes that can go to RAM and come back during a step's compute."""
    movable_ssd: float = inf

    @classmethod
    def least(cls, each: Sequence["Room"]) -> "Room":
        """The least of each figure."""
        return cls(*(min(figures) for figures in zip(*map(astuple, each), strict=True)))

    @classmethod
    def of_step(
        cls, sizes: StepSizes, kept: int, room: Mapping[str, int], rates: Mapping[str, tuple[float, float]]
    ) -> "Room":
        """`room` has the bytes of each tier. `rates` has bytes per second to a tier and back. Without rates, any number
        of bytes can be moved in time."""
        forward_s = _SHARE_OF_LANES * sum(block.forward_s for block in sizes.blocks)
        # Backward takes twice as long as forward.
        movable = {tier: forward_s * min(out, 2 * back) for tier, (out, back) in rates.items()}
        return cls(kept, room.get(HOST, 0), room.get(SSD, 0), movable.get(HOST, inf), movable.get(SSD, inf))


def peak_of(sizes: StepSizes, policies: Sequence[Policy], host_room: int = 0) -> ActivationBytes:
    """Peak bytes of each place, if offloaded storages fill RAM first, in forward order, and then SSD.

    The graph is largest when forward ends, or when a recomputed block is about to run backward.
    """
    in_flight = max((b.in_flight(policy) for b, policy in zip(sizes.blocks, policies, strict=False)), default=0)
    before = peak = host = ssd = 0
    for block, outside, policy in zip(sizes.blocks, sizes.outside, policies, strict=False):
        before += outside + block.kept(policy)
        peak = max(peak, before + block.extra(policy))
        away = block.away(policy)
        here = min(away, max(0, host_room - host))
        host += here
        ssd += away - here
    return ActivationBytes(max(peak, before + sizes.outside[-1]) + in_flight, host, ssd)


def choose(sizes: StepSizes, room: Room) -> ActivationPlan:
    """Choose the policies that cost the least time.

    If all blocks can be kept, they are. Otherwise the search starts from the least memory: every block is recomputed,
    and the inputs of the first blocks are offloaded as far as necessary. The remaining memory is used to keep blocks.
    Those with the most seconds per byte come first. Among equals the last come first, because they are held for the
    shortest time. While lanes have time left, blocks are offloaded, the first ones first, because they have the most
    time to come back. Both orders are tried. If nothing fits, the plan that takes the least memory is returned.
    """
    count = len(sizes.blocks)
    start = [Policy.KEEP] * count
    if not _fits(sizes, start, room):
        start = _tightest(sizes, room)

    def cost(index: int) -> tuple[float, int]:
        block = sizes.blocks[index]
        return -block.forward_s / max(1, block.inner.nbytes), -index

    def keep(policies: list[Policy]) -> list[Policy]:
        return _spared(sizes, policies, room, Policy.KEEP, sorted(range(count), key=cost))

    def offload(policies: list[Policy]) -> list[Policy]:
        return _spared(sizes, policies, room, Policy.OFFLOAD, range(count))

    best = min(offload(keep(start)), keep(offload(start)), key=lambda policies: recomputed_s(sizes, policies))
    return ActivationPlan(tuple(best), peak_of(sizes, best, room.host), sizes)


def recomputed_s(sizes: StepSizes, policies: Sequence[Policy]) -> float:
    """Seconds per step spent on recomputation."""
    return sum(b.forward_s for b, policy in zip(sizes.blocks, policies, strict=True) if policy.recomputes)


def _tightest(sizes: StepSizes, room: Room) -> list[Policy]:
    """Every block recomputed, with as many inputs offloaded as necessary, or as SSD has room for."""
    policies = [Policy.RECOMPUTE] * len(sizes.blocks)
    for index in range(len(policies)):
        if _fits(sizes, policies, room):
            break
        policies[index] = Policy.RECOMPUTE_OFFLOAD
        if peak_of(sizes, policies, room.host).ssd > room.ssd:
            policies[index] = Policy.RECOMPUTE
            break
    return policies


def _spared(
    sizes: StepSizes, policies: Sequence[Policy], room: Room, instead: Policy, order: Iterable[int]
) -> list[Policy]:
    """Replace "recompute" by `instead` for blocks in the given order, while memory and the lanes' time allow it."""
    changed = list(policies)
    for index in order:
        before = changed[index]
        if before.recomputes:
            changed[index] = instead
            if not _fits(sizes, changed, room, in_time=instead is Policy.OFFLOAD):
                changed[index] = before
    return changed


def _fits(sizes: StepSizes, policies: Sequence[Policy], room: Room, in_time: bool = False) -> bool:
    """Whether everything kept and offloaded fits. With `in_time`, lanes must be fast enough too."""
    peak = peak_of(sizes, policies, room.host)
    late = in_time and (peak.host > room.movable_host or peak.ssd > room.movable_ssd)
    return peak.kept <= room.kept and peak.ssd <= room.ssd and not late


def offload_room(layout: Layout, placement: Placement, budgets: Budgets) -> dict[str, int]:
    """tier -> bytes that pages leave for offloaded activations: RAM if compute has memory of its own, and SSD if the
    plan has buffers for it."""
    room: dict[str, int] = dict.fromkeys((HOST, SSD), 0)
    if budgets.device is not None:
        room[HOST] = budgets.host - sum(placement.lines.get(HOST, {}).values()) * layout.page_bytes
    if placement.pages(HOST, ACTIVATIONS) and budgets.ssd is not None:
        room[SSD] = budgets.ssd - sum(placement.lines.get(SSD, {}).values()) * layout.page_bytes
    return room


def plan_activations(
    root: ModuleSpec, uses: Sequence[Use], saved: ActivationPlan, room: Mapping[str, int]
) -> ActivationPlan:
    """`saved`, with the bytes that its policies take, and the moves of offloaded activations in a forward with these
    uses of units.

    Raises BudgetError if there is no room.
    """
    if not saved.policies:
        return saved
    peak = peak_of(saved.sizes, saved.policies, room[HOST])
    if peak.ssd > room[SSD]:
        tier = SSD if room[SSD] else HOST
        raise BudgetError(
            f"Offloaded activations do not fit: they take {format_bytes(peak.host + peak.ssd)}, and training state "
            f"leaves {format_bytes(room[HOST])} of {HOST} and {format_bytes(room[SSD])} of {SSD}. Raise "
            f"memory.{tier}, or use activations='recompute'.",
            tier=tier,
        )
    moves = []
    left = room[HOST]
    blocks = zip(saved.sizes.blocks, saved.policies, _uses_of_blocks(root, uses), strict=True)
    for block, policy, inside in blocks:
        away = block.away(policy)
        host = min(away, left)
        left -= host
        at = inside[-1:] if policy.recomputes else inside  # backward recomputes a block before it uses its units
        for tier, total in ((HOST, host), (SSD, away - host)):
            count = max(1, round(total / block.largest(policy))) if total else 0
            for index in range(count):
                nbytes = total * (index + 1) // count - total * index // count  # as evenly as can be
                moves.append(Move(at[index * len(at) // count], tier, nbytes))
    return replace(saved, peak=peak, moves=tuple(sorted(moves, key=lambda move: move.use)))


def _uses_of_blocks(root: ModuleSpec, uses: Sequence[Use]) -> list[tuple[int, ...]]:
    """The uses inside each of the model's layers. If a unit holds several layers, the use around the layer."""
    found = []
    for layer in layers_of(root):
        inside = tuple(i for i, use in enumerate(uses) if is_within(use.module, (layer.name,)))
        around = (i for i, use in enumerate(uses) if is_within(layer.name, (use.module,)))
        found.append(inside or (next(around, 0),))
    return found


Bucket = tuple[tuple[int, ...], ...]


def bucket_of(shapes: Sequence[Sequence[int]]) -> Bucket:
    """Shapes of a forward's inputs, with each dimension rounded up to one of eight values per power of two.

    Forwards of one bucket share a plan, so varying lengths need few plans.
    """
    return tuple(tuple(_rounded(size) for size in shape) for shape in shapes)


def growth(shapes: Sequence[Sequence[int]]) -> float:
    """By how much the largest forward of a bucket may exceed one of `shapes`. Attention may grow with the square."""
    ratios = [_rounded(size) / size for shape in shapes for size in shape if size]
    return max(ratios, default=1.0) ** 2


def _rounded(size: int) -> int:
    step = max(1, (1 << max(0, size.bit_length() - 1)) // _STEPS_PER_OCTAVE)
    return -(-size // step) * step
