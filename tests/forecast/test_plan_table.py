import io
from types import SimpleNamespace
from typing import Any

from rich.console import Console

from pagoda.forecast.plan_table import plan_table


def test_the_table_shows_bytes_per_tier_and_state_the_budget_and_the_reasons() -> None:
    plan: Any = SimpleNamespace(
        bytes={"device": {}, "host": {"weight": 1 << 20, "exp_avg": 2 << 20}, "ssd": {"exp_avg": 5 << 20}},
        budgets=SimpleNamespace(device=None, host=4 << 20, ssd=None),
        reasons=("Pages of 4.00 MiB: [as asked].",),
        units=(0, 1),
        page_bytes=4 << 20,
        parameters=1_500_000,
    )
    stream = io.StringIO()
    Console(file=stream, width=80).print(plan_table(plan))
    lines = stream.getvalue().splitlines()
    assert lines[0] == "Plan: 1.5 M parameters in 2 units, pages of 4.00 MiB"
    cells = [[cell.strip() for cell in line.strip("│┃").replace("┃", "│").split("│")] for line in lines]
    assert ["state", "host", "ssd"] in cells
    assert ["weight", "1.00 MiB", "-"] in cells
    assert ["exp_avg", "2.00 MiB", "5.00 MiB"] in cells
    assert ["in all", "3.00 MiB", "5.00 MiB"] in cells
    assert ["budget", "4.00 MiB", "-"] in cells
    assert lines[-1] == "- Pages of 4.00 MiB: [as asked]."
