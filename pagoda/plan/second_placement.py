"""The second placement: homes are chosen again, once the first steps have shown what else needs memory.

Before the first step, nobody knows how much memory activations and everything else need. So pages begin with a part of
the memory. After some steps, the measured peak of everything that is not pages tells how much is left for homes of
states. PatrickStar (Fang et al., 2021) places its chunks in the same way after a warm-up step. Where states live
changes no bit.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

from pagoda.config.memory import Split
from pagoda.errors import BudgetError
from pagoda.memory.sizes import format_bytes
from pagoda.plan.activations import SHARE_OF_MEMORY
from pagoda.plan.layout import GRAD
from pagoda.plan.options import Options
from pagoda.plan.placement import LEASES
from pagoda.plan.planner import Plan
from pagoda.plan.tiers import DEVICE, HOST, Budgets

_MARGIN = 0.2
"""A reserve for later steps, as a part of what was measured."""
_LEAST_FREE = 0.05
"""The least reserve, as a part of a tier's whole memory."""
_WORTH = 0.03
"""States move only if at least this part of their bytes would get another home, or if the leases would grow or shrink
by this part."""


@dataclass(frozen=True)
class Needs:
    """Bytes of each tier that everything except pages has needed, at the peak."""

    device: int = 0
    host: int | None = 0
    """None if the system does not report it."""

    def or_more(self, other: "Needs") -> "Needs":
        """The larger of both, by tier."""
        host = None if self.host is None or other.host is None else max(self.host, other.host)
        return Needs(max(self.device, other.device), host)


@dataclass(frozen=True)
class SecondPlacement:
    """When homes are chosen again, and the whole memory of each tier: for pages and everything else."""

    after: int
    """Number of steps before homes are chosen again."""
    device: int | None
    """Bytes. None without a separate device."""
    host: int | None
    """Bytes. None if the user has set the budget for pages, which does not change."""

    def first_plan(self, make: Callable[[Options], Plan], options: Options) -> Plan:
        """The plan until homes are chosen again. If the other tiers can hold all states, none lives on the device,
        because a state there would have to pass through RAM to move."""
        if options.split is None:
            with suppress(BudgetError):
                plan = make(replace(options, split=Split()))
                return replace(plan, options=replace(plan.options, split=None))
        return make(options)

    def budgets(self, first: Budgets, needs: Needs) -> Budgets:
        """The budgets for pages that the needs leave. `first`: the budgets until now."""
        device, host = first.device, first.host
        if self.device is not None:
            device = left_for_pages(self.device, needs.device)
        if self.host is not None and needs.host is not None:
            host = left_for_pages(self.host, needs.host)
        return replace(first, device=device, host=host)

    def room_for_activations(self, room: int, plan: Plan) -> int:
        """Bytes of the device for activations: at most `room`, and what pages of `plan` leave."""
        if self.device is None:
            return room
        return min(room, int((self.device - plan.peak_bytes[DEVICE]) * SHARE_OF_MEMORY))

    def plan(self, first: Plan, needs: Needs) -> Plan | None:
        """The plan for the steps to come, with a reason that says what moves. None if `first` stays: little would move,
        or what is left has no room for the states."""
        try:
            plan = first.placed_in(self.budgets(first.budgets, needs))
        except BudgetError:
            return None
        options = plan.options
        if options.activation_bytes is not None and not options.activations_limited:
            room = self.room_for_activations(options.activation_bytes, plan)
            plan = replace(plan, options=replace(options, activation_bytes=room))
        return replace(plan, notes=(self._reason(first, plan, needs),)) if _worth(first, plan) else None

    def _reason(self, first: Plan, plan: Plan, needs: Needs) -> str:
        """A line that says what was measured, and what moves."""
        measured = []
        if self.device is not None:
            measured.append(f"{format_bytes(needs.device)} of {format_bytes(self.device)} on the device")
        if self.host is not None and needs.host is not None:
            measured.append(f"{format_bytes(needs.host)} of {format_bytes(self.host)} of RAM")
        moves = [
            f"{format_bytes(nbytes)} of states from {source} to {target}"
            for (source, target), nbytes in sorted(_moved(first, plan).items())
        ]
        before, after = (each.bytes.get(DEVICE, {}).get(LEASES, 0) for each in (first, plan))
        if before != after:
            moves.append(f"leases take {format_bytes(after)} instead of {format_bytes(before)}")
        return (
            f"After {self.after} step{'s' * (self.after > 1)}, activations and all else but pages had taken "
            f"{' and '.join(measured)}. So homes were chosen again: {', '.join(moves) or 'none moved'}."
        )


def left_for_pages(whole: int, needed: int) -> int:
    """Bytes for pages, if everything else needs `needed` of `whole` bytes."""
    return max(0, whole - max(int(needed * (1 + _MARGIN)), needed + int(whole * _LEAST_FREE)))


def _moved(first: Plan, plan: Plan) -> dict[tuple[str, str], int]:
    """(tier, tier) -> bytes of states that move from one to the other."""
    moved: dict[tuple[str, str], int] = {}
    for (unit, state), source in first.placement.homes.items():
        target = plan.placement.home(unit, state)
        if source != target and state != GRAD:
            nbytes = plan.layout.pages(plan.units[unit], state) * plan.page_bytes
            moved[source, target] = moved.get((source, target), 0) + nbytes
    return moved


def _worth(first: Plan, plan: Plan) -> bool:
    """Whether `plan` changes enough to move states for it, or must replace `first`, which exceeds the new budgets."""
    if plan.placement.lines == first.placement.lines and plan.placement.homes == first.placement.homes:
        return False
    budgets = {DEVICE: plan.budgets.device, HOST: plan.budgets.host}
    if any(budget is not None and first.peak_bytes.get(tier, 0) > budget for tier, budget in budgets.items()):
        return True
    states = sum(first.layout.total_pages(state.name) for state in first.layout.states) * first.page_bytes
    before, after = (each.placement.pages(DEVICE, LEASES) for each in (first, plan))
    return sum(_moved(first, plan).values()) >= _WORTH * states or abs(after - before) >= _WORTH * max(before, 1)
