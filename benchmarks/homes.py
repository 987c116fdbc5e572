"""Homes on the device: whole units, or states that pass it for their update, or weights and gradients before moments.

    python benchmarks/homes.py

The simulator gives every plan of a model whose state is 1.2 to 4 times what the device has for pages. RAM holds the
rest. The columns are the fastest plan with whole units at home or with updates on the device, the fastest with both,
and the shares of that one.
"""

from dataclasses import replace
from itertools import product

import tyro

from pagoda.config.memory import Split
from pagoda.errors import BudgetError
from pagoda.forecast.config import PlanConfig
from pagoda.forecast.machine import find_machine_for
from pagoda.forecast.model_description import describe_model
from pagoda.forecast.problem import Problem, problem_of
from pagoda.plan.tiers import Budgets

MODEL = "gpt-16x4096"
BYTES_OF_STATE = 14
"""Of a parameter, gradients included."""
RATIOS = (1.2, 2.0, 4.0)
UPDATES = (0.25, 0.5, 0.75, 1.0)
HOMES = (0.5, 1.0)
ONE_OF_THEM = [Split()] + [Split(device_home_share=share) for share in HOMES]
ONE_OF_THEM += [Split(device_update_share=share) for share in UPDATES]
BOTH = [Split(device_update_share=update, device_home_share=home) for update, home in product(UPDATES, HOMES)]


def problem(hardware: str, passes: int, tokens: int, ratio: float) -> Problem:
    """A step of several passes, on a device that holds one part in `ratio` of the state."""
    config = PlanConfig(
        model=MODEL,
        hardware=hardware,
        max_length=tokens,
        gradient_accumulation_steps=passes,
        max_grad_norm=1.0,
        activations="keep",
        precision="bf16",
    )
    described = describe_model(config)
    found, _ = problem_of(config, find_machine_for(config), described)
    state = described.root.numel * BYTES_OF_STATE
    return replace(found, budgets=Budgets(2 * state, int(state / ratio)))


def fastest(asked: Problem, splits: list[Split]) -> tuple[float, Split]:
    """Seconds of a step of the fastest plan, and its split."""
    found = []
    for split in splits:
        divided = replace(asked, options=replace(asked.options, split=split))
        try:
            found.append((divided.simulated(divided.plan()).step_s, split))
        except BudgetError:
            continue
    return min(found, key=lambda each: each[0])


def main() -> None:
    """Print the table."""
    print("| machine | passes x tokens | state / device | one of them | both | faster | shares: updates, homes |")
    print("|---|---|---|---|---|---|---|")
    for hardware, passes, tokens, ratio in product(("h200", "rtx4090"), (1, 4), (1024, 4096), RATIOS):
        asked = problem(hardware, passes, tokens, ratio)
        before, _ = fastest(asked, ONE_OF_THEM)
        after, split = fastest(asked, BOTH)
        shares = f"{split.device_update_share:g}, {split.device_home_share:g}"
        print(
            f"| {hardware} | {passes} x {tokens} | {ratio:g} | {before:.2f} s | {after:.2f} s | "
            f"{before / after - 1:.0%} | {shares} |",
            flush=True,
        )


if __name__ == "__main__":
    tyro.cli(main)
