"""Together: all that a model's ranks do with one another, as the engine asks for it."""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from pagoda.optim.rule import StateSpec
from pagoda.parallel.agreement import Call
from pagoda.parallel.exact import exact_parts
from pagoda.parallel.foreseen import SIGNATURE_BITS
from pagoda.parallel.mesh import Mesh
from pagoda.parallel.wire import Wire
from pagoda.plan.layout import WEIGHT
from pagoda.plan.ops import COLLECTIVE
from pagoda.plan.units import UnitSpec
from pagoda.runtime.collective import Collectives
from pagoda.runtime.device import Device, Event
from pagoda.runtime.driver import Driver
from pagoda.runtime.gathering import Fill, Gathering
from pagoda.runtime.gradients import Gradients, UnitGradient
from pagoda.runtime.lanes import Handle, Lane
from pagoda.runtime.reducing import Reducer
from pagoda.runtime.rows import Buffers
from pagoda.runtime.sharing import Sharing
from pagoda.runtime.store import Store
from pagoda.runtime.unit import LiveUnit

_MESSAGE_ELEMENTS = 1 << 20

Counts = Callable[[UnitSpec, int], bool]
"""Whether a norm counts what this rank has of a unit's parameter."""
SquareSums = Callable[[Iterable[UnitGradient], Counts], list[list[float]]]
"""The square sums of the gradients that a step uses, by param group."""


@dataclass(frozen=True)
class NormTerms:
    """Terms of a global norm."""

    square_sums: list[list[float]]
    """By param group: what they add up to, exactly, the square sums of all ranks do."""
    non_finite: str | None
    """Name of the first parameter whose gradient is NaN or infinite on some rank."""


class Together:
    """One engine's dealings with those of other ranks. See `Collectives` for their order."""

    def __init__(
        self,
        mesh: Mesh,
        wire: Wire,
        store: Store,
        units: Sequence[LiveUnit],
        gradients: Gradients,
        buffers: Buffers | None,
        device: Device,
        copies: Lane,
        driver: Driver,
        latest: Callable[[LiveUnit], Handle | None],
        is_to_come: Callable[[LiveUnit], bool],
        fill: Fill,
        stalled: Callable[[str, float], None],
    ) -> None:
        """`buffers` are for gradients of several ranks; None where no two have any of the same elements. `latest` gives
        what ends when the latest update of a unit that was asked for has written its weights."""
        self._store = store
        self._units = units
        self._gradients = gradients
        wire.connect(device.torch_device)
        early = store.plan.options.update_under_backward
        listed = not (early or store.plan.layout.expert_units)
        self.collectives = Collectives(mesh, wire, store.shards, device, listed)
        self.gathering: Gathering | None = None
        """Where ranks have slices of the weights."""
        if mesh.ranks.shards_weights:
            self.gathering = Gathering(self.collectives, store, units, device, latest, is_to_come, fill)
        self._sharing = Sharing(self.collectives, store, units, early)
        self._signatures: set[int] = set()
        """What ranks said last of what they came to in this step."""
        self._reducer = (
            None
            if buffers is None
            else Reducer(
                self.collectives,
                gradients,
                units,
                buffers,
                device,
                copies,
                driver,
                stalled,
                early,
                self.gathering.gathered if self.gathering is not None else None,
            )
        )
        self._driver = driver
        wire.watcher.start()
        self.saver_wire = Wire(mesh.world, wire.watcher)
        """For the thread that writes checkpoints."""
        store.assemble = self._assemble

    @property
    def unforeseen(self) -> tuple[int, int]:
        """Gathers that this rank has asked others for one by one, and collectives that it has passed over, so far."""
        passed, gathering = self.collectives.foreseen.passed, self.gathering
        return (0, passed) if gathering is None else (gathering.asked, passed + gathering.foreseen.passed)

    @property
    def lanes(self) -> dict[str, Lane]:
        """All of which work for the lane `collective`."""
        return {COLLECTIVE: self.collectives.lane, **(self.gathering.lanes if self.gathering is not None else {})}

    @property
    def rank(self) -> int:
        return self.collectives.mesh.rank

    @property
    def ranks(self) -> int:
        return self.collectives.mesh.size

    @property
    def parts(self) -> int:
        """Parts of the experts of a block, on different ranks."""
        return self.collectives.mesh.ranks.expert_parallel

    def of_every_part(self, what: str, mine: torch.Tensor, receivers: Collection[int]) -> list[torch.Tensor]:
        """What each part of the experts has of something alike in shape, which `what` names; nothing where this rank
        is none of the `receivers`. The first rank of each part sends."""
        parts, part_of_mine = self.parts, self.collectives.mesh.expert_index
        found: list[torch.Tensor] = []
        if self.rank in receivers:
            found = [mine if part == part_of_mine else torch.empty_like(mine) for part in range(parts)]

        def messages(tensor: torch.Tensor) -> Iterable[torch.Tensor]:
            return torch.split(tensor.view(-1), _MESSAGE_ELEMENTS)

        def work(_: object) -> None:
            others = [rank for rank in receivers if rank % parts != part_of_mine and self.rank < parts]
            sends = [(rank, message) for rank in others for message in messages(mine)]
            coming = [(part, tensor) for part, tensor in enumerate(found) if part != part_of_mine]
            self.collectives.wire.trade(sends, [(part, message) for part, each in coming for message in messages(each)])

        self.collectives.jointly(what, work)
        return found

    @property
    def arrivals(self) -> Gradients | Reducer:
        """Where gradients go from autograd."""
        return self._reducer or self._gradients

    def when_flushed(self, bring: Callable[[UnitGradient, bool], None]) -> None:
        """Have `bring` told of gradients that wait for a buffer to be reduced to."""
        if self._reducer is not None:
            self._reducer.bring = bring

    def flush(self, last: bool = False) -> None:
        """Reduce what has arrived since the last time."""
        if self._reducer is not None:
            self._reducer.flush(last)

    def announce(self, what: str, data: bytes) -> list[bytes]:
        """Every rank's bytes, which each of them gives at the same point of its program."""
        found: list[bytes] = []
        self.collectives.jointly(what, lambda _: found.extend(self.collectives.wire.announce_bytes(data)))
        return found

    def gather(self, unit: LiveUnit, weights: torch.Tensor, own: Handle, free: Event) -> Handle:
        """Complete a lease of this rank's slice, if ranks have slices; see `Gathering.gather`."""
        if self.gathering is None or not self._store.shards.is_cut(unit.spec, WEIGHT):
            return own
        return self.gathering.gather(unit, weights, own, free)

    def share(self, record: UnitGradient) -> None:
        """Have all of a unit's new weights here, once this rank has updated what it updates of them."""
        if record.shown is not record.updated:
            self._sharing.share(record.unit, record.updated).then(record.shown.finish)

    def norm_terms(self, what: str, terms: Mapping[int, UnitGradient], square_sums: SquareSums) -> NormTerms:
        """What the gradient's norm is the root of the sum of, of all ranks, and the first parameter that is not finite.

        All ranks ask for it at the same point (`what` says which), and whatever was asked for before is done then.
        `terms` are gradients whose update has been queued; the others of this step are found when all ranks are there.
        """
        self.flush()
        if self.gathering is not None:
            self.gathering.finish()
        found: list[NormTerms] = []

        def work(calls: Sequence[Call]) -> None:
            self._signatures = {call.version for call in calls}
            records = {**terms, **{r.unit.index: r for r in self._gradients.records()}}
            for record in records.values():
                self._mark(record)
            wire = self.collectives.wire
            of_groups = square_sums(records.values(), self._store.shards.counts)
            finite = [[s for s in sums if math.isfinite(s)] for sums in of_groups]
            sums = [wire.announce_floats(exact_parts(of_group)) for of_group in finite]
            found.append(NormTerms(sums, self._first_non_finite(records.values())))

        self.collectives.jointly(what, work, self._signature)
        if self.gathering is not None:
            self.gathering.settle()
        return found[0]

    def _signature(self) -> int:
        """Stands for what this rank came to in this step."""
        gathers = self.gathering.foreseen.signature() if self.gathering is not None else 0
        return gathers << SIGNATURE_BITS | self.collectives.foreseen.signature()

    def end_step(self) -> None:
        """A step has ended, whose norm all ranks have."""
        mask = (1 << SIGNATURE_BITS) - 1
        self.collectives.foreseen.end_step(len({told & mask for told in self._signatures}) == 1)
        if self.gathering is not None:
            self.gathering.end_step(len({told >> SIGNATURE_BITS for told in self._signatures}) == 1)

    def drop_gradients(self) -> None:
        """Forget gradients that no step has used, on every rank at once."""
        if self._reducer is None or (self._reducer.is_empty and not self._gradients.records()):
            return
        self._reducer.drop()
        self.collectives.jointly("optimizer.zero_grad() with gradients to drop", lambda _: None, lambda: 0)
        self.collectives.foreseen.restart()

    def close(self) -> None:
        """Leave the others."""
        self.collectives.close()
        if self.gathering is not None:
            self.gathering.close()
        self.collectives.wire.watcher.close()

    def _first_non_finite(self, records: Iterable[UnitGradient]) -> str | None:
        """Name of the parameter whose gradient was the first on any rank that is NaN or infinite."""
        here = [(at[0], record.unit.index, at[1]) for record in records if (at := record.non_finite_slot())]
        everywhere = self.collectives.wire.announce(min(here, default=(-1, -1, -1)))
        found = [(order, unit, slot) for order, unit, slot in everywhere if unit >= 0]
        if not found:
            return None
        _, unit, slot = min(found)
        return self._units[unit].name(slot)

    def _mark(self, record: UnitGradient) -> None:
        """Let parameters show a gradient that has arrived on other ranks only: this step updates them."""
        unit = record.unit
        for slot in record.present:
            if not record.arrivals[slot]:
                unit.params[slot].grad = unit.markers[slot]

    def _assemble(self, spec: UnitSpec, state: StateSpec, start: int, out: torch.Tensor) -> None:
        """Elements of a state from `start` on: this rank's lie in `out`, the others' come."""
        shards = self._store.shards

        def parts(rank: int) -> list[torch.Tensor]:
            found: list[torch.Tensor] = []
            for span in shards.held(spec, state.name, rank):
                part = span.within(start, start + out.numel())
                if part is not None:
                    found.extend(torch.split(out[part.start - start : part.stop - start], _MESSAGE_ELEMENTS))
            return found

        def work(_: object) -> None:
            others = [rank for rank in shards.sharers(spec) if rank != shards.rank]
            sends = [(rank, part) for rank in others for part in parts(shards.rank)]
            self.collectives.wire.trade(sends, [(rank, part) for rank in others for part in parts(rank)])

        self.collectives.jointly(f"reading {state.name} of unit {spec.index} from element {start}", work)
