"""The largest model of a machine: a plan of one rank, its simulated step, and a search by size.

The constants are assumptions, each of which the page states.
"""

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import ceil

from pagoda.errors import BudgetError, ConfigError
from pagoda.forecast.compute import Compute
from pagoda.forecast.describe import exchanged_elements
from pagoda.models.papers import PAPER_SHAPES, PaperShape, gpt_of_step
from pagoda.plan.collective import reduce_buffers
from pagoda.plan.exchanges import of_tokens
from pagoda.plan.layout import Layout
from pagoda.plan.options import Options
from pagoda.plan.planner import Plan, make_plan
from pagoda.plan.ranks import Ranks
from pagoda.plan.tiers import Budgets
from pagoda.simulate.hardware import Hardware
from pagoda.simulate.machines import find_machine
from pagoda.simulate.simulation import simulate
from pagoda.simulate.timeline import Timeline
from paper_tables.common import STATES, UNIT_BYTES, flops, tree

CONTEXT_BYTES = 1 << 30
"""Of a GPU's memory for CUDA, its libraries and what the allocator cannot use."""
HOST_SHARE = 0.9
DRIVE_SHARE = 0.9
TILE_BYTES = 256 << 20
"""Most of one matrix; larger ones are tiled."""
MOST_TILES = 64
LOGIT_BYTES = 6
"""Of a logit: in 16 bits and in fp32."""
MOST_UNITS = 200
"""Of a plan; models with more are planned with a part of their layers, and as much of host RAM and drives."""
ROOMY = Budgets(1 << 60, 1 << 60)
OPTIONS = Options(gradient_accumulation_steps=1, unit_limit=UNIT_BYTES, keep_checkpoints=0)  # as the papers count
"""Units are updated during backward: no clipping, one micro-batch."""


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
    on_device = max(0.0, min(checkpoints, device / 2))
    device, host = device - on_device, host - (checkpoints - on_device)
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
    """(plan, shape that it is for, its tiles, how many times it stands for)."""
    tiles = tiles_of(shape)
    widest = 2 * max(4 * shape.hidden**2, shape.vocab * shape.hidden) // tiles
    part = shape if shape.experts else part_of(shape, max(widest, TILE_BYTES))
    times = shape.layers / part.layers
    budgets = budgets_of(setting, shape)
    root = tree(part, tiles, setting.experts)
    chosen = setting.batch * shape.seq_len * part.top_k * part.hidden
    tokens = {module: 2 * n for module, n in exchanged_elements(root, chosen, setting.experts).items()}
    exchanges = of_tokens(tokens, setting.ranks)
    if times > 1:
        layout = make_plan(root, STATES, ROOMY, OPTIONS, setting.ranks, exchanges).layout
        budgets = budgets_of_part(layout, budgets, times)
    return make_plan(root, STATES, budgets, OPTIONS, setting.ranks, exchanges), part, tiles, times


def budgets_of_part(layout: Layout, budgets: Budgets, times: float) -> Budgets:
    """What a part of the layers may use, of which there are so many. What passes the GPU is the same for a part; what
    lives there is a part, as in RAM and on SSD."""
    passing = (layout.lease_pages() + reduce_buffers(layout).pages) * layout.page_bytes
    assert budgets.device is not None
    device = passing + int(max(0, budgets.device - passing) / times)
    ssd = None if budgets.ssd is None else int(budgets.ssd / times)
    return Budgets(int(budgets.host / times), min(device, budgets.device), ssd)


def forecast(shape: PaperShape, setting: Setting) -> Result:
    """One rank's plan and step. Raises BudgetError when it does not fit."""
    plan, part, tiles, times = plan_of(shape, setting)
    rate = setting.hardware.matmul("bf16").reached_flop_per_s.value
    per_module = flops(part, setting.batch * shape.seq_len, shape.seq_len, tiles, setting.experts)
    compute = Compute.from_flops(per_module, rate)
    timeline = simulate(plan, setting.hardware, compute.of_step(tree(part, tiles, setting.experts), plan))
    return Result(plan, timeline, 4 * times * sum(per_module.values()), times * timeline.step_s)


def fits(shape: PaperShape, setting: Setting) -> bool:
    """Whether the planner has a plan for one rank."""
    try:
        plan_of(shape, setting)
    except BudgetError:
        return False
    return True


def largest(family: Callable[[float], PaperShape], fits: Callable[[PaperShape], bool]) -> PaperShape:
    """The largest shape of a family, by parameters, that fits: to 1%."""
    low, high = 1e9, 2e9
    while fits(family(high)):
        low, high = high, 2 * high
    while high / low > 1.01:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if fits(family(middle)) else (low, middle)
    return family(low)


def gpt_shape(params: float, seq_len: int = 1024) -> PaperShape:
    """The largest GPT of the family of `gpt_of_step` with at most `params` parameters. Raises ConfigError below the
    smallest."""
    after = bisect_right(range(100_000), params, key=lambda step: gpt_of_step(step, seq_len).params)
    if not after:
        smallest = gpt_of_step(0, seq_len).params
        raise ConfigError(f"no GPT shape has at most {params:,.0f} parameters; the smallest has {smallest:,}")
    return gpt_of_step(after - 1, seq_len)


def t5_shape(params: float) -> PaperShape:
    """T5 of the width of Angel-PTM's 58B, with as many pairs of layers as `params` takes."""
    base = PAPER_SHAPES["t5-58b"]
    one, two = (replace(base, layers=n, decoder_layers=n).params for n in (1, 2))
    pairs = max(1, int((params - one) // (two - one)) + 1)
    return replace(base, name=f"t5-{pairs}x{base.hidden}", layers=pairs, decoder_layers=pairs, nominal=params)
