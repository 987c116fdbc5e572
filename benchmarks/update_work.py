"""How long each optimizer's update takes on one core, divided by AdamW's: what forecasts assume, and what is measured.

Every rule updates one parameter in precision "bf16", with all states in RAM, in turns with AdamW. What `Rule.work`
says is in the last column. Muon's matrix products are left out: they run at the speed of the CPU's matrix products,
which `pagoda calibrate` measures.

    python benchmarks/update_work.py [--rows 2048] [--columns 4096] [--rounds 7] [--out FILE]
"""

import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import tyro
from rich.console import Console
from rich.table import Table

import pagoda
from pagoda.optim.flat import join, split, update
from pagoda.optim.rule import ElementwiseRule, Rule, TensorRule
from script import machine, write

RULES: Mapping[str, Rule] = {
    "AdamW": pagoda.AdamW(),
    "AdamW, bf16 moments": pagoda.AdamW(moments="bf16"),
    "AdamW, 8-bit moments": pagoda.AdamW(moments="8bit"),
    "Adam": pagoda.Adam(),
    "SGD": pagoda.SGD(),
    "SGD with momentum": pagoda.SGD(momentum=0.9),
    "SignSGD": pagoda.SignSGD(),
    "Lion": pagoda.Lion(),
    "Adafactor": pagoda.Adafactor(),
    "Optim(RMSprop)": pagoda.Optim(torch.optim.RMSprop),
    "Optim(Adagrad)": pagoda.Optim(torch.optim.Adagrad),
}


def updater(rule: Rule, shape: tuple[int, int]) -> Callable[[], object]:
    """A function that updates a parameter of this shape as the runtime does: on fp32 copies, if the rule needs them."""
    torch.manual_seed(0)
    own = {state.name: state.shape("w", shape) for state in rule.states("bf16")}
    dtypes = {state.name: state.dtype for state in rule.states("bf16")}
    states = {name: torch.zeros(s, dtype=dtypes[name]) for name, s in own.items() if s is not None}
    gradient = (torch.randn(shape) * 1e-3).bfloat16()
    if isinstance(rule, ElementwiseRule):
        return lambda: update(rule, states, gradient.view(-1), rule.scalars(2), rule.noise("w", 2))
    assert isinstance(rule, TensorRule)
    if not rule.copies:
        return lambda: rule.update(2, states["weight"], gradient, states)
    weight, low = states.pop("weight").view(-1), states.pop("weight_low").view(-1)
    master = torch.zeros(shape)

    def on_copies() -> None:
        join(weight, low, master.view(-1))
        rule.update(2, master, gradient.float(), states)
        split(master.view(-1), weight, low)

    return on_copies


def main(rows: int = 2048, columns: int = 4096, rounds: int = 7, out: Path | None = None) -> None:
    """Measure every rule in turns, and print medians."""
    torch.set_num_threads(1)
    updaters = {name: updater(rule, (rows, columns)) for name, rule in RULES.items()}
    seconds: dict[str, list[float]] = {name: [] for name in RULES}
    for turn in range(rounds + 1):
        for name, run in updaters.items():
            start = time.perf_counter()
            run()
            if turn:  # the first compiles
                seconds[name].append(time.perf_counter() - start)
    table = Table("optimizer", "ns a parameter", "of AdamW's", "assumed")
    figures = []
    for name, times in seconds.items():
        relative = statistics.median(mine / adamw for mine, adamw in zip(times, seconds["AdamW"], strict=True))
        ns = statistics.median(times) / (rows * columns) * 1e9
        table.add_row(name, f"{ns:.2f}", f"{relative:.2f}", f"{RULES[name].element_work:g}")
        figures.append({"optimizer": name, "ns": ns, "relative": relative, "assumed": RULES[name].element_work})
    Console().print(table)
    write(out, {**machine(), "shape": [rows, columns], "rounds": rounds, "figures": figures})


if __name__ == "__main__":
    tyro.cli(main)
