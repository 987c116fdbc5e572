"""One run of a paper, planned and simulated as `pagoda plan` does it: clipping, and activations that are copied,
included."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

from pagoda.config.memory import Memory, Split
from pagoda.config.training import ActivationMode
from pagoda.errors import BudgetError
from pagoda.forecast.config import PlanConfig
from pagoda.forecast.describe import exchanged_elements, forward_flops, module_spec, tiled
from pagoda.forecast.machine import find_machine_for
from pagoda.forecast.model_description import ModelDescription
from pagoda.forecast.problem import Problem, problem_of
from pagoda.forecast.search import search
from pagoda.models.papers import PaperShape
from pagoda.plan.activations import NO_BLOCKS
from pagoda.plan.planner import Plan
from pagoda.simulate.timeline import Timeline
from paper_tables.common import UNIT_BYTES
from paper_tables.largest import DRIVE_SHARE, HOST_SHARE, ROOMY, TILE_BYTES, Setting, budgets_of_part

_MODES: tuple[ActivationMode, ...] = ("recompute", "recompute+offload")
"""What is tried: the first that fits is taken."""
_MOST_UNITS = 100
"""Of a plan that is simulated."""
_LEAST_LAYERS = 2
_MOST_TILES = 32
"""Of a matrix."""
_GPU_ALONE_RAM = 8 << 30
_FORWARDS = 4
"""FLOPs of a step, in those of forward: recomputation and backward included."""


@dataclass(frozen=True, kw_only=True)
class Setup(Setting):
    """Machines, and how a paper uses one."""

    gpu_alone: bool = False
    """State has its home in GPU memory alone, as in ZeRO; RAM has buffers, and what is below a unit."""

    ram_gib: int | None = None
    """Of a node; None is what the machine has."""


@dataclass(frozen=True)
class Run:
    """A plan of one rank, its step, and what that means for the whole model."""

    shape: PaperShape
    setup: Setup
    mode: ActivationMode
    problem: Problem
    """Of a part of the layers."""
    name: str
    """Of the plan, as the search calls it."""
    plan: Plan
    """Of a part of the layers."""
    timeline: Timeline
    """Of that part."""
    step_s: float
    flop_per_s: float
    """Of one GPU, recomputation included."""

    @property
    def nominal_flop_per_s(self) -> float:
        """Of one GPU, if a parameter and token take 8, as PatrickStar counts."""
        tokens = self.setup.batch * self.shape.seq_len
        return 2 * _FORWARDS * self.shape.nominal * tokens / self.step_s

    def at_pace(self, step_s: float) -> Timeline:
        """The part's step, if compute were so slow that the whole model's compute alone took `step_s`."""
        slower = step_s / self.step_s * self.timeline.step_s / self.problem.compute.step_s
        return replace(self.problem, compute=self.problem.compute.scaled(slower)).simulated(self.plan)


def run(shape: PaperShape, setup: Setup) -> Run:
    """The fastest plan that a short search finds. Raises BudgetError where none fits."""
    return _first_that_fits(shape, setup, _simulated)


def fits(shape: PaperShape, setup: Setup) -> bool:
    """Whether there is a plan."""
    try:
        _first_that_fits(shape, setup, lambda problem, *_: problem.plan())
    except BudgetError:
        return False
    return True


def _first_that_fits(shape: PaperShape, setup: Setup, then: Callable[..., Any]) -> Any:
    for mode in _MODES:
        try:
            return then(*_problem(shape, setup, mode), shape, setup, mode)
        except BudgetError as refusal:
            refused = refusal
    raise refused


def _simulated(problem: Problem, flops: float, shape: PaperShape, setup: Setup, mode: ActivationMode) -> Run:
    usual = problem.plan()
    fixed = replace(problem.options, unit_limit=UNIT_BYTES, page_bytes=usual.page_bytes)
    best = search(replace(problem, options=fixed)).best
    tokens = setup.batch * shape.seq_len
    of_all = sum(forward_flops(shape, tokens, shape.seq_len, setup.experts).values())
    # The embedding and the head are in every part, so time goes by FLOPs.
    step_s = of_all / flops * best.step_s
    return Run(shape, setup, mode, problem, best.name, best.plan, best.timeline, step_s, _FORWARDS * of_all / step_s)


def _problem(shape: PaperShape, setup: Setup, mode: ActivationMode) -> tuple[Problem, float]:
    """What is planned: a part of the layers if they are many, with the same part of every tier, and the FLOPs of its
    forward pass. Activations are those of all layers."""
    hardware, gpus = setup.hardware, setup.hardware.gpus_per_node
    ram = hardware.cpu.memory_bytes.value if setup.ram_gib is None else setup.ram_gib << 30
    host = _GPU_ALONE_RAM if setup.gpu_alone else int(ram * HOST_SHARE / gpus)
    split = Split(device_home_share=1.0) if setup.gpu_alone else None
    config = PlanConfig(
        model=shape.name,
        hardware=setup.machine,
        nodes=setup.nodes,
        gpus_per_node=setup.gpus,
        per_device_train_batch_size=setup.batch,
        max_length=shape.seq_len,
        expert_parallel=setup.experts,
        activations=mode,
        tile_limit=_tile_bytes(shape),
        memory=Memory(host=host, split=split),
        save_minutes=0.0,  # as the papers count
        precision="bf16",
    )
    part = _part(shape)
    times = shape.layers / part.layers
    described = _described(config, shape, part)
    problem, _ = problem_of(config, find_machine_for(config), described)
    budgets = replace(problem.budgets, ssd=None)
    if setup.ssd:
        assert hardware.ssd is not None
        budgets = replace(budgets, ssd=int(hardware.ssd.capacity_bytes.value * DRIVE_SHARE / gpus))
    problem = replace(problem, budgets=budgets)
    if times > 1:
        roomy = replace(problem, budgets=ROOMY, options=replace(problem.options, split=None), saved=NO_BLOCKS)
        problem = replace(problem, budgets=budgets_of_part(roomy.plan().layout, budgets, times))
    return problem, sum(described.forward_flops.values())


def _bytes_of_matrices(shape: PaperShape) -> list[int]:
    """Of a layer, in 16 bits, the largest first."""
    return sorted(2 * shape.hidden * rows for rows in (shape.ffn, shape.ffn, 3 * shape.hidden, shape.hidden))[::-1]


def _tile_bytes(shape: PaperShape) -> int | None:
    """Most bytes of a tile; None where no matrix is cut."""
    largest = _bytes_of_matrices(shape)[0]
    return max(TILE_BYTES, largest // _MOST_TILES) if largest > 2 * TILE_BYTES else None


def _part(shape: PaperShape) -> PaperShape:
    """As many of a model's layers as make a plan of about `_MOST_UNITS` units. All of them if it has experts, because
    moving and updating their states takes longer than computing with them, so time does not go by FLOPs."""
    if shape.experts:
        return shape
    matrices = _bytes_of_matrices(shape)
    tile = _tile_bytes(shape) or matrices[0]
    each = 1 if sum(matrices) <= UNIT_BYTES else 2 + sum(ceil(n / tile) for n in matrices)
    return replace(shape, layers=min(shape.layers, max(_LEAST_LAYERS, _MOST_UNITS // each)))


def _described(config: PlanConfig, shape: PaperShape, part: PaperShape) -> ModelDescription:
    """The part, with the activations of the whole."""
    experts = config.expert_parallel
    root, flops = module_spec(part, experts), forward_flops(part, config.tokens, shape.seq_len, experts)
    if config.tile_elements is not None:
        root, flops = tiled(root, flops, config.tile_elements)
    return ModelDescription(
        name=shape.name,
        params=shape.params,
        root=root,
        forward_flops=flops,
        layers=shape.layers + shape.decoder_layers,
        hidden=shape.hidden,
        ffn=shape.ffn * max(1, shape.top_k),
        vocab=shape.vocab,
        measurable=False,
        top_k=shape.top_k,
        exchanged=exchanged_elements(root, config.tokens * shape.top_k * shape.hidden, experts),
    )
