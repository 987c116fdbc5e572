"""The stream: everything that passes through a ring in blocks. It decides which block is read, updated and written
next, and in which slot. Capitals name what is done with a block (`Do`), not operations of the scheduler.

    [READ ->] UPDATE [-> WRITE] -> over

The states of a *streamed* unit live on SSD. A block of them is read into a slot of the ring, updated there, and written
back. Then the slot is free. Other blocks are updated at home. Where an updater has little room, such as slots on a GPU,
a block takes a place there for as long as it is updated. The CPU's update lane has places too, so that its queue stays
short. Small updates take none, and so overtake the others.

Rules:

- The two updaters share the ring, and each has a room of its own. The one with fewer slots of the ring gets the next.
- Blocks of a unit begin in the order of their pages. Updates of one updater begin in the order in which they were asked
  for, except those that share no ring or room.
- A block is not read before the earlier blocks that it shares a page with have been written.
- While no update needs a slot, the blocks of the unit that will probably be updated next are read ahead. Reading ahead
  leaves `kept_free` slots, so that an update of the other updater never waits for what may be needed much later. The
  updater's own next streamed update uses what was read ahead, or drops it.
- A READ or WRITE of an update that fails is repeated on `try_again`, because the states before and after it are still
  there: on SSD, and in the slot. So is an UPDATE that fails, after another READ, if the update is `repeatable`: it
  changes no state where it was. Until then, no further block of its update begins.
- After another error, or once what has failed is given up, no further block of an update begins. The update is over
  once the blocks under way are.

This file has neither threads nor tensors nor a clock: events come in, actions (`take`) come out. `runtime/updates.py`
carries them out, and `simulate/updates.py` those of the simulator.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, NamedTuple

from pagoda.plan.blocks import StreamPlan, UnitBlocks

_MOST_READING = 16
"""Most blocks that are read at once. More would not make a drive faster, and would only make its queue longer."""


class Do(Enum):
    """What an action does with a block, or says about an update."""

    READ = auto()
    """Read a block's states into its slot, then report `has_read`."""
    UPDATE = auto()
    """Update a block, then report `has_updated`."""
    WRITE = auto()
    """Write a block's states from its slot, then report `has_written`."""
    SUSPEND = auto()
    """Each block of an update that is under way waits for `try_again` or `give_up`, because one has failed."""
    USED = auto()
    """An update has read its gradients. If no states are streamed, it has also written all its states."""
    END = auto()
    """An update is over."""


@dataclass(eq=False, slots=True)
class Block:
    """A block under way."""

    unit: int
    index: int
    flow: "Flow | None"
    """What it is a part of. None if it was read in vain."""
    slot: int | None = None
    """Its slot of the ring, if its unit is streamed."""
    place: int | None = None
    """Its place in the updater's room, while it is updated, if it takes one."""
    is_read: bool = False
    payload: Any = None
    """For whoever carries out its actions. The stream does not use it."""

    @property
    def update(self) -> Any:
        """The update that it is a part of. None if that has not been asked for."""
        return None if self.flow is None else self.flow.update


@dataclass(eq=False, slots=True)
class Flow:
    """The blocks of one unit's update, or of an update that has not been asked for yet."""

    unit: int
    blocks: UnitBlocks
    order: Sequence[int]
    """Numbers of the blocks that it consists of, in ascending order."""
    update: Any = None
    """What was asked for. None while it is only read ahead."""
    repeatable: bool = False
    """Whether a block can be updated again after an UPDATE that has failed."""
    next: int = 0
    """Position in `order` of the next block that begins."""
    begun: dict[int, Block] = field(default_factory=dict)
    """Blocks under way."""
    written: set[int] = field(default_factory=set)
    """Blocks that are over, if others must come after them."""
    not_updated: int = 0
    """Number of blocks that have not been updated and will be."""
    updating: int = 0
    """Number of blocks that are being updated."""
    is_used: bool = False
    is_over: bool = False
    """Whether USED and END have been said."""
    suspended_by: BaseException | None = None
    """The first error of what will be tried again."""
    error: BaseException | None = None
    """The first error that ends it."""

    @property
    def has_more(self) -> bool:
        """Whether some block has not begun."""
        return self.next < len(self.order)

    @property
    def may_read(self) -> bool:
        """Whether the next block may be read."""
        if not self.has_more:
            return False
        earlier = self.blocks.after.get(self.order[self.next], ())
        return all(index in self.written or index not in self.order for index in earlier)


class Action(NamedTuple):
    """What is to be done next."""

    do: Do
    about: Any
    """A Block for READ, UPDATE and WRITE. Otherwise the update that was asked for."""
    error: BaseException | None
    """For SUSPEND: the error of what will be tried again. For USED and END: the first error that ended the update."""


class _Updater:
    """The stream's view of one updater."""

    def __init__(self, places: int) -> None:
        self.places = [*range(places)]
        """The free places of its room."""
        self.flows: list[Flow] = []
        """Updates with blocks that have not begun, in the order in which they were asked for."""
        self.ahead: Flow | None = None
        """The unit that is read ahead."""
        self.waiting: deque[Block] = deque()
        """Blocks that are read and wait for a place."""
        self.held = 0
        """Number of slots of the ring that it holds."""

    def first(self, streamed: bool) -> Flow | None:
        """The first update with blocks that have not begun, among those that are streamed, or that are not."""
        flows = (flow for flow in self.flows if flow.blocks.streamed is streamed and flow.suspended_by is None)
        return next(flows, None)


class Stream:
    """Turns events into actions (`take`). Deterministic.

    Invariants: a slot and a place have one owner; each block that was asked for is updated once, unless its update
    fails; reading ahead never delays an update.
    """

    def __init__(self, plan: StreamPlan) -> None:
        self._plan = plan
        self._free = deque(range(plan.slots))
        """The free slots of the ring."""
        self._updaters = tuple(map(_Updater, plan.places))
        self._reading = 0
        """Number of blocks that are being read."""
        self._open = 0
        """Number of updates that were asked for and are not over."""
        self._suspended: dict[Flow, list[tuple[Do, Block]]] = {}
        """What has failed of each update and will be tried again."""
        self._actions: list[Action] = []

    def take(self) -> list[Action]:
        """The actions since the last call, in order."""
        actions, self._actions = self._actions, []
        return actions

    @property
    def idle(self) -> bool:
        """Whether nothing is under way."""
        return not self._open and not self._reading

    # --- events: what is asked for ---

    def ask(self, update: Any, unit: int, order: Sequence[int], repeatable: bool = False) -> None:
        """Carry out an update (not None) of the blocks in `order` of a unit, after earlier updates."""
        blocks = self._plan.units[unit]
        updater = self._updaters[blocks.updater]
        flow = Flow(unit, blocks, order, update, repeatable, not_updated=len(order))
        self._open += 1
        if not order:
            self._note_used(flow)
            self._end_if_over(flow)
            return
        updater.flows.append(flow)
        if blocks.streamed:
            self._use_ahead(updater, flow)
        while not (blocks.streamed or blocks.takes_place) and flow.has_more:
            self._update(self._begin(flow), flow)
        self._go_on()

    def read_ahead(self, unit: int) -> None:
        """This unit will probably be updated next. Read its blocks as far as there is room."""
        blocks = self._plan.units[unit]
        updater = self._updaters[blocks.updater]
        self._drop_ahead(updater)
        updater.ahead = Flow(unit, blocks, range(len(blocks.bounds)))
        self._go_on()

    def drop_ahead(self) -> None:
        """Read nothing ahead, and forget what was. It is over once `idle`."""
        for updater in self._updaters:
            self._drop_ahead(updater)
        self._go_on()

    def try_again(self) -> None:
        """Try again what has failed."""
        suspended, self._suspended = self._suspended, {}
        for flow, failed in suspended.items():
            flow.suspended_by = None
            for do, block in failed:
                if do is Do.UPDATE:
                    self._may_update(block, flow)
                    continue
                self._reading += do is Do.READ
                self._act(do, block)
        self._go_on()

    def give_up(self, update: Any = None) -> None:
        """Do not try again what has failed of an update, or of all updates. It ends its update."""
        for flow in [*self._suspended]:
            if update is None or flow.update is update:
                self._fail(flow, flow.suspended_by)
        self._go_on()

    def refuse(self, error: BaseException) -> None:
        """End every update of which no block has begun with an error."""
        for updater in self._updaters:
            for flow in [*updater.flows]:
                if not flow.begun and not flow.next:
                    self._fail(flow, error)
        self._go_on()

    # --- events: how blocks end ---

    def has_read(self, block: Block, error: BaseException | None) -> None:
        """A block's READ has ended."""
        self._reading -= 1
        flow = block.flow
        if flow is None:
            self._free.append(_slot_of(block))
        elif flow.update is None and error is not None:  # the update will read it again
            self._drop_ahead(self._updaters[flow.blocks.updater])
            self._free.append(_slot_of(block))
        elif flow.error is not None:
            self._over(block, flow)
        elif error is not None:
            self._suspend(Do.READ, block, error)
        elif flow.update is None:
            block.is_read = True
        else:
            self._may_update(block, flow)
        self._go_on()

    def has_updated(self, block: Block, error: BaseException | None) -> None:
        """A block's UPDATE has ended."""
        flow = block.flow
        assert flow is not None
        if block.place is not None:
            self._updaters[flow.blocks.updater].places.append(block.place)
            block.place = None
        flow.updating -= 1
        if error is not None and flow.repeatable and flow.error is None:
            self._suspend(Do.READ if flow.blocks.streamed else Do.UPDATE, block, error)
            self._go_on()
            return
        flow.not_updated -= 1
        if error is not None:
            self._fail(flow, error)
        self._note_used(flow)
        if flow.blocks.streamed and flow.error is None:
            self._act(Do.WRITE, block)
        else:
            self._over(block, flow)
        self._go_on()

    def has_written(self, block: Block, error: BaseException | None) -> None:
        """A block's WRITE has ended."""
        assert block.flow is not None
        if error is not None and block.flow.error is None:
            self._suspend(Do.WRITE, block, error)
        else:
            self._over(block, block.flow)
        self._go_on()

    # --- decisions ---

    def _go_on(self) -> None:
        """Begin every block that can begin now."""
        for updater in self._updaters:
            while updater.waiting and updater.places:
                block = updater.waiting.popleft()
                assert block.flow is not None
                self._update(block, block.flow)
            while updater.places and (flow := updater.first(streamed=False)) is not None:
                self._update(self._begin(flow), flow)
        while self._free and self._reading < _MOST_READING and (flow := self._next_to_read()) is not None:
            block = self._begin(flow)
            block.slot = self._free.popleft()
            self._updaters[flow.blocks.updater].held += 1
            self._reading += 1
            self._act(Do.READ, block)

    def _next_to_read(self) -> Flow | None:
        """The flow whose next block gets the next slot."""
        updaters = sorted(self._updaters, key=lambda updater: updater.held)
        for updater in updaters:
            flow = updater.first(streamed=True)
            if flow is not None and flow.may_read:
                return flow
        if len(self._free) > self._plan.kept_free:
            for updater in updaters:
                if updater.ahead is not None and updater.ahead.may_read and updater.first(streamed=True) is None:
                    return updater.ahead
        return None

    def _begin(self, flow: Flow) -> Block:
        """The flow's next block begins."""
        index = flow.order[flow.next]
        block = flow.begun[index] = Block(flow.unit, index, flow)
        flow.next += 1
        if not flow.has_more:
            self._unlist(flow)
        return block

    def _may_update(self, block: Block, flow: Flow) -> None:
        """A block of an update is read, or is updated again."""
        if flow.blocks.takes_place:
            self._updaters[flow.blocks.updater].waiting.append(block)
        else:
            self._update(block, flow)

    def _update(self, block: Block, flow: Flow) -> None:
        if flow.blocks.takes_place:
            block.place = self._updaters[flow.blocks.updater].places.pop()
        flow.updating += 1
        self._act(Do.UPDATE, block)

    def _use_ahead(self, updater: _Updater, flow: Flow) -> None:
        """An update of a streamed unit was asked for. It takes over its blocks that were read ahead. All others that
        were read ahead are dropped."""
        ahead = updater.ahead
        if ahead is None or ahead.unit != flow.unit:
            self._drop_ahead(updater)
            return
        updater.ahead = None
        flow.next = bisect_left(flow.order, ahead.next)
        asked = set(flow.order[: flow.next])
        for index, block in ahead.begun.items():
            if index not in asked:
                self._drop(block, updater)
                continue
            block.flow, flow.begun[index] = flow, block
            if block.is_read:
                self._may_update(block, flow)
        if not flow.has_more:
            self._unlist(flow)

    def _drop_ahead(self, updater: _Updater) -> None:
        ahead, updater.ahead = updater.ahead, None
        for block in () if ahead is None else ahead.begun.values():
            self._drop(block, updater)

    def _drop(self, block: Block, updater: _Updater) -> None:
        """A block was read in vain. Its slot is free once nothing fills it."""
        block.flow = None
        updater.held -= 1
        if block.is_read:
            self._free.append(_slot_of(block))

    # --- ends ---

    def _over(self, block: Block, flow: Flow) -> None:
        """Nothing more happens to a block of an update."""
        updater = self._updaters[flow.blocks.updater]
        del flow.begun[block.index]
        if block.slot is not None:
            updater.held -= 1
            self._free.append(block.slot)
        if flow.blocks.after:
            flow.written.add(block.index)
        self._note_suspended(flow)
        self._end_if_over(flow)

    def _fail(self, flow: Flow, error: BaseException | None) -> None:
        """An update has failed. No further block of it begins."""
        flow.error = flow.error or error
        updater = self._updaters[flow.blocks.updater]
        flow.next, flow.not_updated = len(flow.order), flow.updating
        self._unlist(flow)
        self._note_used(flow)
        for block in [block for block in updater.waiting if block.flow is flow]:
            updater.waiting.remove(block)
            self._over(block, flow)
        for _, block in self._suspended.pop(flow, ()):
            self._over(block, flow)
        self._end_if_over(flow)

    def _suspend(self, do: Do, block: Block, error: BaseException) -> None:
        flow = block.flow
        assert flow is not None
        flow.suspended_by = flow.suspended_by or error
        self._suspended.setdefault(flow, []).append((do, block))
        self._note_suspended(flow)

    def _note_suspended(self, flow: Flow) -> None:
        """Say so once nothing else of a suspended update is under way."""
        if len(self._suspended.get(flow, ())) == len(flow.begun) > 0:
            self._act(Do.SUSPEND, flow.update, flow.suspended_by)

    def _unlist(self, flow: Flow) -> None:
        """Every block of a flow has begun, or none will."""
        flows = self._updaters[flow.blocks.updater].flows
        if flow in flows:
            flows.remove(flow)

    def _note_used(self, flow: Flow) -> None:
        if not flow.not_updated and not flow.is_used:
            flow.is_used = True
            self._act(Do.USED, flow.update, flow.error)

    def _end_if_over(self, flow: Flow) -> None:
        if not flow.begun and not flow.has_more and not flow.is_over:
            flow.is_over = True
            self._open -= 1
            self._act(Do.END, flow.update, flow.error)

    def _act(self, do: Do, about: Any, error: BaseException | None = None) -> None:
        self._actions.append(Action(do, about, error))


def _slot_of(block: Block) -> int:
    assert block.slot is not None
    return block.slot
