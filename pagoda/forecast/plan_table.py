"""The plan as a person reads it before the first step: bytes per tier and state, and why."""

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from pagoda.memory.sizes import format_bytes
from pagoda.plan.planner import Plan


def plan_table(plan: Plan) -> RenderableType:
    """A table with a row per state and a column per tier, its sum and budget, then the automatic choices."""
    tiers = [tier for tier, lines in plan.bytes.items() if lines]
    states = list(dict.fromkeys(state for tier in tiers for state in plan.bytes[tier]))
    title = Text(
        f"Plan: {plan.parameters / 1e6:,.1f} M parameters in {len(plan.units)} units,"
        f" pages of {format_bytes(plan.page_bytes)}"
    )
    table = Table()
    table.add_column("state")
    for tier in tiers:
        table.add_column(tier, justify="right")
    for i, state in enumerate(states):
        cells = (plan.bytes[tier].get(state) for tier in tiers)
        table.add_row(
            state,
            *(format_bytes(cell) if cell else "-" for cell in cells),
            end_section=i == len(states) - 1,
        )
    table.add_row("in all", *(format_bytes(sum(plan.bytes[tier].values())) for tier in tiers), style="bold")
    budgets = (getattr(plan.budgets, tier) for tier in tiers)
    table.add_row("budget", *("-" if budget is None else format_bytes(budget) for budget in budgets))
    return Group(title, table, *(Text(f"- {reason}") for reason in plan.reasons))
