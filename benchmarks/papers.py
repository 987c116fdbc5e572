"""The papers' tables beside what Pagoda's planner and simulator give: `python benchmarks/papers.py` writes
docs/papers.md.

Nothing is measured here: the same code gives the same text on every machine, and a test compares it with the file.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import ceil
from pathlib import Path

from pagoda.errors import BudgetError
from pagoda.models.papers import PAPER_SHAPES, PaperShape, find_paper_shape, gpt_shape
from pagoda.optim import AdamW
from pagoda.plan.compute import Compute
from pagoda.plan.describe import forward_flops, module_spec
from pagoda.plan.hardware import Cpu, Device, Figure, Hardware, Link, MatmulRate
from pagoda.plan.machines import find_machine
from pagoda.plan.placement import Budgets
from pagoda.plan.planner import Options, Plan, make_plan
from pagoda.plan.ranks import Ranks
from pagoda.plan.simulate import simulate
from pagoda.plan.timeline import Timeline
from pagoda.plan.units import ModuleSpec

PAGE = Path(__file__).parents[1] / "docs" / "papers.md"
GB, TB, GIB = 1e9, 1e12, 1 << 30
STATES = AdamW().states("bf16")
ROOM = 1 << 60

# --- assumptions, each of which the page states -------------------------------------------------------------

CONTEXT_BYTES = 1 << 30
"""Of a GPU's memory for CUDA, its libraries and what the allocator cannot use."""
HOST_SHARE = 0.9
DRIVE_SHARE = 0.9
UNIT_BYTES = 512 << 20
TILE_BYTES = 256 << 20
"""Most of one matrix; larger ones are tiled."""
MOST_TILES = 64
LOGIT_BYTES = 6
"""Of a logit: in 16 bits and in fp32."""
MOST_UNITS = 200
"""Of a plan; models with more are planned with a part of their layers, and as much of host RAM and drives."""
OPTIONS = Options(accumulation_steps=1, unit_limit=UNIT_BYTES, keep_checkpoints=0)  # as the papers count
"""Units are updated under backward: no clipping, one micro-batch."""


# --- ZeRO's memory -----------------------------------------------------------------------------------------


def zero_bytes(params: float, ranks: int, stage: int, weight: int = 2, gradient: int = 2, other: int = 12) -> float:
    """Bytes of model state on each of `ranks` ranks: table 1 of ZeRO, arXiv 1910.02054."""
    divided = (ranks if stage >= 3 else 1, ranks if stage >= 2 else 1, ranks)
    return params * (weight / divided[0] + gradient / divided[1] + other / divided[2])


def pagoda_bytes(name: str, ranks: int, stage: int) -> int:
    """Bytes of model state, gradients included, that a real plan of one of `ranks` ranks has, in whole pages."""
    shape = find_paper_shape(name)
    shared = Ranks(ranks, min(16, ranks), stage)  # type: ignore[arg-type]
    plan = make_plan(_root(shape), STATES, Budgets(ROOM, ROOM), Options(unit_limit=UNIT_BYTES), shared)
    return sum(nbytes for line, nbytes in plan.bytes["host"].items() if line != "bounce")


@cache
def _root(shape: PaperShape, tiles: int = 1) -> ModuleSpec:
    return module_spec(shape, tiles)


def memory_table() -> Iterator[str]:
    yield "| N_d | stage | 7.5B: ZeRO | Pagoda | 128B: ZeRO | Pagoda | 1T: ZeRO | Pagoda |"
    yield "|---:|---:|---:|---:|---:|---:|---:|---:|"
    for ranks in (1, 4, 16, 64, 256, 1024):
        for stage in (1, 2, 3):
            row = [str(ranks), str(stage)]
            for params, name in ((7.5e9, "zero-7.5b"), (128e9, "zero-128b"), (1e12, "gpt-1t")):
                nominal = find_paper_shape(name).params
                mine = pagoda_bytes(name, ranks, stage) * params / nominal
                row += [_gb(zero_bytes(params, ranks, stage)), _gb(mine)]
            yield f"| {' | '.join(row)} |"


# --- ZeRO-Infinity's efficiency ----------------------------------------------------------------------------

PEAK = 70e12


def efficiency(intensity: float, bytes_per_s: float) -> float:
    """ZeRO-Infinity, arXiv 2104.07857, section 4.1: compute and transfers take turns."""
    return intensity * bytes_per_s / (intensity * bytes_per_s + PEAK)


def efficiency_table() -> Iterator[str]:
    bandwidths = (1, 3, 6, 12, 25, 70, 150, 400, 1500)
    yield f"| what moves | ait | {' | '.join(f'{b} GB/s' for b in bandwidths)} |"
    yield f"|---|---:|{'---:|' * len(bandwidths)}"
    rows: list[tuple[str, float]] = []
    rows += [(f"weights, gradients; batch {b}", 1024.0 * b) for b in (1, 2, 4, 8, 16)]
    rows += [(f"optimizer states; batch {b}", 1024.0 * b / 4) for b in (1, 2, 4, 8, 16)]
    rows += [(f"activation checkpoints; hidden {h}", 24.0 * h) for h in (2048, 8192, 32768)]
    for name, intensity in rows:
        cells = " | ".join(f"{efficiency(intensity, b * GB):.0%}" for b in bandwidths)
        yield f"| {name} | {intensity:,.0f} | {cells} |"


def _one_gpu(bytes_per_s: float) -> Hardware:
    """A V100 behind a link of one figure; RAM and updates never bind."""
    assumed = "as the formula assumes"
    endless, peak = Figure(1e18, assumed), Figure(PEAK, "arXiv 2104.07857")
    rate = MatmulRate(peak, peak)
    link = Figure(bytes_per_s, assumed)
    return Hardware(
        "one GPU",
        Cpu(1, endless, endless, endless),
        device=Device(endless, endless, rate, rate, endless),
        link=Link(link, link, Figure(2 * bytes_per_s, assumed)),
    )


def simulated_efficiency(bytes_per_s: float, batch: int, whole: bool) -> tuple[float, float, float]:
    """(efficiency in the simulator, bytes over the link per parameter, FLOPs per such byte) of 10B on one GPU.

    `whole` makes the model one unit, so that nothing can overlap; else units of 512 MiB and room for four.
    """
    shape = find_paper_shape("gpt-10b")
    root, hardware = _root(shape), _one_gpu(bytes_per_s)
    options = replace(OPTIONS, unit_limit=ROOM if whole else UNIT_BYTES)
    plan = make_plan(root, STATES, Budgets(ROOM, ROOM if whole else 4 * UNIT_BYTES), options)
    compute = Compute.from_flops(forward_flops(shape, 1024 * batch, 1024), PEAK)
    timeline = simulate(plan, hardware, compute.of_step(root, plan))
    moved = sum(timeline.bytes_moved[lane] for lane in ("h2d", "d2h"))
    return compute.step_s / timeline.step_s, moved / shape.params, compute.step_s * PEAK / moved


def overlap_table() -> Iterator[str]:
    yield (
        "| GB/s | batch | paper's formula | one unit: bytes/param | formula for those bytes | simulated "
        "| units of 512 MiB: bytes/param | formula for those bytes | simulated |"
    )
    yield "|---:|---:|---:|---:|---:|---:|---:|---:|---:|"
    for bandwidth, batch in ((1, 4), (3, 4), (3, 16), (12, 1), (12, 4), (70, 1)):
        cells = [f"{efficiency(1024.0 * batch, bandwidth * GB):.1%}"]
        for whole in (True, False):
            simulated, moved, intensity = simulated_efficiency(bandwidth * GB, batch, whole)
            cells += [f"{moved:.1f}", f"{efficiency(intensity, bandwidth * GB):.1%}", f"{simulated:.1%}"]
        yield f"| {bandwidth} | {batch} | {' | '.join(cells)} |"


# --- the largest model of a machine ------------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """Machines, and how one is used."""

    machine: str
    nodes: int = 1
    gpus: int | None = None
    """Per node; None is all."""
    batch: int = 1
    """Sequences a GPU and step."""
    ssd: bool = False
    experts: int = 1
    """Ranks that experts are divided over."""

    @property
    def hardware(self) -> Hardware:
        hardware = find_machine(self.machine)
        return hardware if self.gpus is None else hardware.with_gpus(self.gpus)

    @property
    def ranks(self) -> Ranks:
        per_node = self.hardware.gpus_per_node
        return Ranks(per_node * self.nodes, per_node, expert_parallel=self.experts)


@dataclass(frozen=True)
class Result:
    """A plan of one rank, and its step."""

    plan: Plan
    timeline: Timeline
    flops: float
    """Of one rank and step."""
    step_s: float


def activations(shape: PaperShape, batch: int) -> tuple[float, float]:
    """(bytes of checkpoints, bytes of work) of a micro-batch: ZeRO-Infinity, arXiv 2104.07857, sections 3.2 and 3.3,
    a checkpoint after every layer; and the logits, which the paper leaves out."""
    tokens = batch * shape.seq_len
    layers = shape.layers + shape.decoder_layers
    checkpoints = 2.0 * tokens * shape.hidden * layers
    work = tokens * (16.0 * shape.hidden + 2.0 * shape.heads * shape.seq_len)
    return checkpoints, max(work, LOGIT_BYTES * tokens * shape.vocab)


def budgets_of(setting: Setting, shape: PaperShape) -> Budgets:
    """What one rank may use for pages. Raises BudgetError where activations leave nothing."""
    hardware = setting.hardware
    assert hardware.device is not None
    checkpoints, work = activations(shape, setting.batch)
    device = hardware.device.memory_bytes.value - CONTEXT_BYTES - work
    host = hardware.cpu.memory_bytes.value * HOST_SHARE / hardware.gpus_per_node
    if checkpoints <= device / 2:
        device -= checkpoints
    else:
        host -= checkpoints
    if min(device, host) <= 0:
        raise BudgetError("activations leave nothing for pages", tier="device", needed_bytes=0)
    ssd = None
    if setting.ssd:
        assert hardware.ssd is not None
        ssd = int(hardware.ssd.capacity_bytes.value * DRIVE_SHARE / hardware.gpus_per_node)
    return Budgets(int(host), int(device), ssd)


def tiles_of(shape: PaperShape) -> int:
    """Tiles with which no matrix is above `TILE_BYTES`."""
    tiles = 1
    while 2 * max(shape.ffn, shape.vocab) * shape.hidden / tiles > TILE_BYTES and tiles < MOST_TILES:
        tiles *= 2
    return tiles


def part_of(shape: PaperShape, unit_bytes: int) -> PaperShape:
    """As many of a model's layers as make a plan of about `MOST_UNITS` units."""
    parts = max(1.0, 2 * shape.params / unit_bytes / MOST_UNITS)
    layers = ceil(shape.layers / parts)
    return replace(shape, layers=layers, decoder_layers=layers if shape.decoder_layers else 0)


def plan_of(shape: PaperShape, setting: Setting) -> tuple[Plan, PaperShape, int, float]:
    """(plan, shape that it is for, its tiles, how many times it stands for); `shape` has the experts of one rank."""
    tiles = tiles_of(shape)
    widest = 2 * max(4 * shape.hidden**2, shape.vocab * shape.hidden) // tiles
    part = shape if shape.experts else part_of(shape, max(widest, TILE_BYTES))
    times = shape.layers / part.layers
    budgets = budgets_of(setting, shape)
    ssd = None if budgets.ssd is None else int(budgets.ssd / times)
    budgets = replace(budgets, host=int(budgets.host / times), ssd=ssd)
    root = _root(part, tiles)
    sent = setting.batch * shape.seq_len * shape.hidden * 2 * shape.top_k * (setting.experts - 1) // setting.experts
    exchanges = dict.fromkeys(_rows_of_experts(root), sent) if shape.experts else None
    return make_plan(root, STATES, budgets, OPTIONS, setting.ranks, exchanges), part, tiles, times


def _rows_of_experts(module: ModuleSpec) -> Iterator[str]:
    if module.name.endswith(".experts"):
        yield module.name
    for child in module.children:
        yield from _rows_of_experts(child)


def forecast(shape: PaperShape, setting: Setting) -> Result:
    """One rank's plan and step. Raises BudgetError when it does not fit."""
    plan, part, tiles, times = plan_of(shape, setting)
    rate = setting.hardware.matmul("bf16").reached_flop_per_s.value
    per_module = forward_flops(part, setting.batch * shape.seq_len, shape.seq_len, tiles)
    compute = Compute.from_flops(per_module, rate)
    timeline = simulate(plan, setting.hardware, compute.of_step(_root(part, tiles), plan))
    return Result(plan, timeline, 4 * times * sum(per_module.values()), times * timeline.step_s)


def fits(shape: PaperShape, setting: Setting) -> bool:
    """Whether the planner has a plan for one rank."""
    try:
        plan_of(shape, setting)
    except BudgetError:
        return False
    return True


def largest(family: Callable[[float], PaperShape], setting: Setting) -> PaperShape:
    """The largest shape of a family, by parameters, that fits: to 1%."""
    low, high = 1e9, 2e9
    while fits(family(high), setting):
        low, high = high, 2 * high
    while high / low > 1.01:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if fits(family(middle), setting) else (low, middle)
    return family(low)


def t5_shape(params: float) -> PaperShape:
    """T5 of the width of Angel-PTM's 58B, with as many pairs of layers as `params` takes."""
    base = PAPER_SHAPES["t5-58b"]
    one, two = (replace(base, layers=n, decoder_layers=n).params for n in (1, 2))
    pairs = max(1, int((params - one) // (two - one)) + 1)
    return replace(base, name=f"t5-{pairs}x{base.hidden}", layers=pairs, decoder_layers=pairs, nominal=params)


def with_device_homes(shape: PaperShape, setting: Setting) -> tuple[float, float]:
    """Parameters that would fit if GPU memory that leases leave free were home to state: (in it alone, with the other
    tiers). A closed form, because no plan has homes on the device: 12 bytes a parameter, and four units, tiled, for
    leases and collective buffers."""
    budgets = budgets_of(setting, shape)
    unit = 2 * max(shape.ffn, shape.vocab) * shape.hidden / tiles_of(shape)
    alone = max(0.0, (budgets.device or 0) - 4 * unit)
    ranks = setting.ranks.data_parallel
    return alone * ranks / 12, (alone + budgets.host + (budgets.ssd or 0)) * ranks / 12


@dataclass(frozen=True)
class Claim:
    """A row of the table: what a paper trains on a machine."""

    claim: str
    source: str
    setting: Setting
    why: str
    family: Callable[[float], PaperShape] = gpt_shape
    named: str | None = None
    """A shape to plan as it is, in place of the largest."""


_DRAM = "RAM is the limit: 12 bytes a parameter, where the paper keeps 14 to 16"

CLAIMS: Sequence[Claim] = (
    Claim(
        "18B",
        "PatrickStar, 8xV100, 240 GB",
        Setting("v100-32g-8", batch=4),
        "A plan has no homes in GPU memory, where PatrickStar keeps a part of its state; with them it would be the "
        "closed form's",
    ),
    Claim("68B; DeepSpeed 30B", "PatrickStar, 8xA100-40G, 1 TB", Setting("a100-40g", batch=4), _DRAM),
    Claim("55B; DeepSpeed 28B", "Angel-PTM, 8xA100-40G, 1 TB, GPT", Setting("a100-40g", batch=8), _DRAM),
    Claim(
        "58B; DeepSpeed 27B", "Angel-PTM, 8xA100-40G, 1 TB, T5", Setting("a100-40g", batch=8), _DRAM, family=t5_shape
    ),
    Claim(
        "55B on SSD",
        "the same node with its 11 TB of SSD",
        Setting("a100-40g", batch=8, ssd=True),
        "No claim of the paper: what SSD adds. One drive's 3.5 GB/s for eight GPUs (assumed) makes it slow",
    ),
    Claim(
        "13B, data parallel only",
        "ZeRO, 128 V100 (8 DGX-2)",
        Setting("v100-32g", nodes=8, batch=2),
        "ZeRO uses GPU memory only and stage 2, whose whole 16-bit weights fill a GPU at 13B; a plan uses stage 3 and "
        "13 TB of RAM",
    ),
    Claim(
        "170B, with 16-way model parallelism",
        "ZeRO, 400 V100 (25 DGX-2)",
        Setting("v100-32g", nodes=25, batch=2),
        "As above, with 41 TB of RAM, of which checkpoints take three tenths",
    ),
    Claim(
        "1T",
        "ZeRO-Infinity, one DGX-2 with NVMe",
        Setting("v100-32g", batch=1, ssd=True),
        "28 TB of drives hold 12 bytes a parameter, where ZeRO-Infinity keeps 16 to 20. 1,024 tokens a GPU do not hide "
        "40 TB of drive traffic; a step of more tokens would",
    ),
    Claim(
        "32T",
        "ZeRO-Infinity, 32 DGX-2 with NVMe",
        Setting("v100-32g", nodes=32, batch=1, ssd=True),
        "RAM is the limit: the checkpoints of a sequence a GPU fill it, as this family is deeper than the paper's "
        "shapes and no model parallelism shares them",
    ),
    Claim(
        "32T",
        "the same, in the paper's proportions",
        Setting("v100-32g", nodes=32, batch=1, ssd=True),
        "Fits as it is: drives hold 55% more at 12 bytes a parameter. The paper shares each layer among GPUs too",
        named="gpt-32t",
    ),
    Claim(
        "175B at about 109 TFLOP/s a GPU",
        "PatrickStar, 32 A100-40G (3.5 PFLOP/s, read off its plot)",
        Setting("a100-40g", nodes=4, batch=8),
        "100 Gb/s between nodes, as Angel-PTM has: all-gathers bind; 16,384 tokens a GPU hide most of them, and the "
        "paper's tokens are not known",
        named="gpt3-175b",
    ),
    Claim(
        "175B",
        "the same with 8 x 200 Gb/s between nodes, a DGX A100's",
        Setting("a100-40g-dgx", nodes=4, batch=8),
        "PatrickStar's network is not stated; this is its upper end",
        named="gpt3-175b",
    ),
    Claim(
        "1.2T",
        "Angel-PTM, T5-MoE on hundreds of GPUs: 256 A100-40G here",
        Setting("a100-40g", nodes=32, batch=16, experts=256),
        "9 of 2,304 experts a rank: 4.8B parameters to update in RAM for the FLOPs of 0.5B",
        named="t5-moe-1.2t",
    ),
)


def claim_table() -> Iterator[str]:
    yield (
        "| source | the paper's | Pagoda's plan | closed form: GPU memory alone | GPU memory too "
        "| sequences a GPU and step | step | TFLOP/s a GPU | binding lane | per rank: GPU, RAM, SSD | why it differs |"
    )
    yield "|---|---|---:|---:|---:|---:|---:|---:|---|---|---|"
    for claim in CLAIMS:
        setting = claim.setting
        if claim.named is None:
            shape = largest(claim.family, setting)
            size = f"{_count(shape.params)} ({shape.name})"
            closed = [_count(params) for params in with_device_homes(shape, setting)]
        else:
            whole = find_paper_shape(claim.named)
            shape = replace(whole, experts=whole.experts // setting.experts)
            size = f"{_count(whole.params)} ({whole.name}): fits"
            closed = ["—", "—"]
        result = forecast(shape, setting)
        tiers = result.plan.peak_bytes
        times = result.step_s / result.timeline.step_s
        held = [tiers.get("device", 0), tiers.get("host", 0) * times, tiers.get("ssd", 0) * times]
        cells = [
            claim.source,
            claim.claim,
            size,
            *closed,
            f"{setting.batch} x {shape.seq_len}",
            f"{result.step_s:,.1f} s",
            f"{result.flops / result.step_s / TB:.0f}",
            result.timeline.binding_lane,
            ", ".join(f"{_gb(nbytes)} GB" for nbytes in held),
            claim.why,
        ]
        yield f"| {' | '.join(cells)} |"


def _gb(nbytes: float) -> str:
    return f"{nbytes / GB:.3g}" if nbytes < 999.5 * GB else f"{nbytes / GB:,.0f}"


def _count(params: float) -> str:
    return f"{params / 1e12:.3g}T" if params >= 1e12 else f"{params / 1e9:.3g}B"


# --- the page ----------------------------------------------------------------------------------------------

INTRODUCTION = """\
# The papers' tables, from Pagoda's planner

Written by `python benchmarks/papers.py`; a test compares this file with what that writes. Nothing here was run: the
papers' figures are theirs, and Pagoda's come from the planner that the runtime executes and from the simulator of its
ops, on machines as `pagoda/plan/machines.py` describes them, each figure there with its source.
"""

MEMORY = """
## Memory of a data-parallel rank

GB (1e9 bytes) of model state on each of N_d ranks. ZeRO (arXiv 1910.02054, table 1): 2 bytes a parameter for the
weight, 2 for the gradient, 12 for the rest. Stage 1 divides the 12 by N_d, stage 2 the gradient too, stage 3 all.
Pagoda: 2 + 2 + 10, because a 16-bit weight is the high half of the fp32 master and not a second copy; sums of a real
plan of one rank, in whole pages, scaled from the shape's parameters to the nominal ones. With units updated under
backward a gradient lives in a few buffers only, and 12 bytes remain.
"""

EFFICIENCY = """
## Efficiency by bandwidth

ZeRO-Infinity (arXiv 2104.07857, section 4): efficiency = ait * bw / (ait * bw + peak), peak 70 TFLOP/s, sequences of
1,024. Arithmetic intensity (FLOPs a byte): weights and gradients seq * batch, optimizer states seq * batch / 4,
activation checkpoints 24 * hidden. Transfers and compute take turns in it.
"""

OVERLAP = """
What the simulator gives for plans of a 10B GPT on one such GPU, with a link of that bandwidth each way and with RAM and
updates that never bind. The paper counts 8 bytes a parameter and step: weights in forward, in recomputation and in
backward, and the gradient. A plan gathers weights once for recomputation and backward (6 bytes), and a model that is a
single unit keeps them between forward and backward (4). *One unit* cannot overlap anything, and agrees with the formula
for its own FLOPs and bytes to a tenth of a per cent. *Units of 512 MiB* overlap and are better than the formula: a step
nears the longer of compute and of transfers, which go both ways at once.
"""

LARGEST = """
## The largest model of a machine

The largest shape for which the planner has a plan, and its simulated step. GPTs are of one family (`gpt_shape`: hidden
about 96 times the layers, sequences of 1,024), T5s of hidden 8,192. Assumptions:

- Every rank is data parallel, ZeRO stage 3, and updates units under backward: one micro-batch, no clipping. Clipping
  adds 2 bytes a parameter for gradients. ZeRO's 170B and the 1T and 32T of ZeRO-Infinity used model parallelism too.
- A plan has leases and collective buffers on the GPU and homes in RAM and on SSD. The *closed form* is what would fit
  if the rest of GPU memory were home to state, at 12 bytes a parameter: alone, or beside RAM and SSD. No plan does
  that yet.
- Units are modules of at most 512 MiB of weights.
- Pages may use nine tenths of RAM and of drives, split evenly over a node's ranks, and all of a GPU's memory but 1 GiB
  and the activations: ZeRO-Infinity's formulas with a checkpoint each layer, 2 * tokens * hidden * layers, and
  tokens * (16 * hidden + 2 * heads * seq) while a layer is recomputed, or 6 bytes a logit, if that is more.
  Checkpoints that take more than half of the GPU are in RAM instead; their copies are not in the step time.
- Matrices of more than 256 MiB, the embedding too, are cut in up to 64 tiles (memory-centric tiling).
- Models that would have more than some 200 units are planned with a part of their layers, as large a part of RAM and
  drives, and all of the GPU; the step is as many times as long. The embedding then counts too often, which is safe.
- FLOPs are four forward passes, recomputation included, attention as a full square. GPUs reach the rate that
  `machines.py` has as `reached`; latencies and imbalance between ranks or experts are not modelled.
- T5-MoE is planned with the experts of one rank; the router then has as many columns as the rank has experts.
"""


def page() -> str:
    """The text of docs/papers.md."""
    parts = [INTRODUCTION, MEMORY, *_lines(memory_table()), EFFICIENCY, *_lines(efficiency_table())]
    parts += [OVERLAP, *_lines(overlap_table()), LARGEST, *_lines(claim_table())]
    return "\n".join(parts).rstrip() + "\n"


def _lines(table: Iterator[str]) -> list[str]:
    return ["\n".join(table)]


if __name__ == "__main__":
    PAGE.write_text(page())
