"""How long planning and simulating one step takes: `.venv/bin/python benchmarks/simulate_speed.py`.

A GPT with 100 layers on one H200, from everything in RAM to most of it on SSD; the best of five runs of each.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TypeVar

from pagoda.forecast.compute import Compute
from pagoda.forecast.describe import forward_flops, module_spec
from pagoda.models.papers import PAPER_SHAPES
from pagoda.optim import AdamW
from pagoda.plan.options import Options
from pagoda.plan.placement import Budgets
from pagoda.plan.planner import make_plan
from pagoda.simulate.machines import find_machine
from pagoda.simulate.simulation import simulate

GIB = 1 << 30
LAYERS, TOKENS, SEQ_LEN = 100, 8192, 1024
HOST_GIB = (400, 60, 30)

T = TypeVar("T")


def best_of_five(work: Callable[[], T]) -> tuple[float, T]:
    """Seconds of the fastest run, and what the last one gave."""
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        result = work()
        seconds.append(time.perf_counter() - start)
    return min(seconds), result


def main() -> None:
    machine = find_machine("h200-x1")
    shape = replace(PAPER_SHAPES["gpt-10b"], layers=LAYERS)
    root = module_spec(shape)
    compute = Compute.from_flops(forward_flops(shape, TOKENS, SEQ_LEN), machine.matmul("bf16").reached_flop_per_s.value)
    print(f"{shape.params / 1e9:.1f}B parameters in {LAYERS} layers, one step of {TOKENS} tokens")
    for host_gib in HOST_GIB:
        for clipping in (False, True):
            budgets = Budgets(host_gib * GIB, device=20 * GIB, ssd=4000 * GIB)
            options = Options(accumulation_steps=1, clipping=clipping)
            plan_s, plan = best_of_five(partial(make_plan, root, AdamW().states("bf16"), budgets, options))
            ticks = compute.of_step(root, plan)
            simulate_s, timeline = best_of_five(partial(simulate, plan, machine, ticks))
            print(
                f"{host_gib:4d} GiB of RAM, clipping {'on ' if clipping else 'off'}: {len(plan.units)} units; "
                f"planned in {plan_s * 1e3:.0f} ms, simulated in {simulate_s * 1e3:.0f} ms "
                f"(a step of {timeline.step_s:.1f} s, {timeline.binding_lane} binds)"
            )


if __name__ == "__main__":
    main()
