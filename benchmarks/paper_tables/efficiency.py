"""Efficiency by bandwidth: ZeRO-Infinity's formula, and simulated plans."""

from collections.abc import Iterator

from pagoda.forecast.compute import Compute
from pagoda.forecast.describe import forward_flops
from pagoda.models.papers import PAPER_SHAPES
from pagoda.plan.options import Options
from pagoda.plan.planner import make_plan
from pagoda.plan.tiers import Budgets
from pagoda.simulate.hardware import Cpu, DeviceSpeeds, Figure, Hardware, Link, MatmulRate
from pagoda.simulate.simulation import simulate
from paper_tables.common import GB, ROOM, STATES, UNIT_BYTES, tree

PEAK = 70e12


def efficiency(intensity: float, bytes_per_s: float) -> float:
    """ZeRO-Infinity, arXiv 2104.07857, section 4.1: compute and transfers take turns."""
    return intensity * bytes_per_s / (intensity * bytes_per_s + PEAK)


def _one_gpu(bytes_per_s: float) -> Hardware:
    """A V100 behind a link of one figure; RAM and updates never bind."""
    assumed = "as the formula assumes"
    endless, peak = Figure(1e18, assumed), Figure(PEAK, "arXiv 2104.07857")
    rate = MatmulRate(peak, peak)
    link = Figure(bytes_per_s, assumed)
    return Hardware(
        "one GPU",
        Cpu(1, endless, endless, endless),
        device=DeviceSpeeds(endless, endless, rate, rate, endless),
        link=Link(link, link, Figure(2 * bytes_per_s, assumed)),
    )


def simulated_efficiency(bytes_per_s: float, batch: int, whole: bool) -> tuple[float, float, float]:
    """(efficiency in the simulator, bytes over the link per parameter, FLOPs per such byte) of 10B on one GPU.

    `whole` makes the model one unit, so that nothing can overlap; else units of 512 MiB and room for four.
    """
    shape = PAPER_SHAPES["gpt-10b"]
    root, hardware = tree(shape), _one_gpu(bytes_per_s)
    options = Options(gradient_accumulation_steps=1, unit_limit=ROOM if whole else UNIT_BYTES)
    plan = make_plan(root, STATES, Budgets(ROOM, ROOM if whole else 4 * UNIT_BYTES), options)
    compute = Compute.from_flops(forward_flops(shape, 1024 * batch, 1024), PEAK)
    timeline = simulate(plan, hardware, compute.of_step(root, plan))
    moved = sum(timeline.bytes_moved[lane] for lane in ("h2d", "d2h"))
    return compute.step_s / timeline.step_s, moved / shape.params, compute.step_s * PEAK / moved


def overlap_table() -> Iterator[str]:
    yield "| GB/s | batch | paper's formula | one unit | units of 512 MiB |"
    yield "|---:|---:|---:|---:|---:|"
    for bandwidth, batch in ((1, 4), (3, 4), (3, 16), (12, 4), (70, 1)):
        cells = [f"{efficiency(1024.0 * batch, bandwidth * GB):.1%}"]
        cells += [f"{simulated_efficiency(bandwidth * GB, batch, whole)[0]:.1%}" for whole in (True, False)]
        yield f"| {bandwidth} | {batch} | {' | '.join(cells)} |"
