"""The inputs of planning: a model, its optimizer's states, budgets, options, and a machine to simulate plans on."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Self

from pagoda.errors import BudgetError, ConfigError
from pagoda.forecast.activations import activations_of, sizes_of
from pagoda.forecast.compute import Compute
from pagoda.forecast.config import PlanConfig
from pagoda.forecast.machine import Machine, budgets_for
from pagoda.forecast.model_description import ModelDescription
from pagoda.optim.rule import StateSpec
from pagoda.plan.activations import NO_BLOCKS, ActivationPlan, Policy, StepSizes, recomputes
from pagoda.plan.exchanges import ROWS, Exchange, of_gradients, of_heads, of_rows, of_sums, of_tokens
from pagoda.plan.layout import GRAD
from pagoda.plan.options import Options
from pagoda.plan.planner import Plan, make_plan
from pagoda.plan.ranks import ALONE, Ranks
from pagoda.plan.tiers import HOST, Budgets
from pagoda.plan.units import ModuleSpec, is_within, layers_of
from pagoda.simulate.hardware import Hardware
from pagoda.simulate.passes import first_passes, pass_begins
from pagoda.simulate.rates import Rates, WorkOf, adamw_work
from pagoda.simulate.simulation import simulate
from pagoda.simulate.timeline import Timeline

MOST_UNITS = 100
"""Plans with many more units are compared on a model with fewer layers."""
_MOST_COMPARED = 0.5
"""If plans can only be compared on more than this share of the layers, they are compared on all."""
_LEAST_LAYERS = 4
_MOST_EXPERTS = 500
"""If a model has many more experts, neighbours are planned and simulated as one, so that it takes no longer."""
EXPERT_S = 400e-6
"""Least seconds of a visit to an expert on a GPU, assumed: Python leases its weights and launches its kernels. On two
AMD EPYC cores, Python takes 1 ms or more for each trained parameter and step."""
_FEW_PASSES = 3
"""Micro-batches that are simulated in an estimate."""


@dataclass(frozen=True)
class Problem:
    """All inputs of planning and simulation. `exchanges` and `saved` mean the same as in `make_plan`."""

    root: ModuleSpec
    states: tuple[StateSpec, ...]
    budgets: Budgets
    hardware: Hardware
    compute: Compute
    options: Options
    ranks: Ranks = ALONE
    exchanges: tuple[Exchange, ...] = ()
    saved: ActivationPlan = NO_BLOCKS
    work: WorkOf = adamw_work
    """The work of the optimizer's updates."""

    def plan(self) -> Plan:
        """The plan that the planner chooses without a search. Raises BudgetError if no plan fits."""
        return make_plan(
            self.root, self.states, self.budgets, self.options, self.ranks, self.exchanges, saved=self.saved
        )

    def simulated(self, plan: Plan) -> Timeline:
        """Simulate a step of a plan."""
        return simulate(plan, self.hardware, self.compute.of_step(self.root, plan), self.work)

    @property
    def bound_s(self) -> float:
        """Seconds of a step that never waits for weights or updates. No plan takes less."""
        again = recomputes(self.options.activations)
        of_pass = pass_bound_s(self.hardware, self.ranks, self.compute, self.exchanges, again)
        return (self.options.gradient_accumulation_steps or 1) * of_pass

    def estimated(self, plan: Plan) -> tuple[float, float]:
        """Seconds of a step and of a micro-batch. If there are many units, some of the layers are simulated, and if
        there are many micro-batches, the first few. Raises BudgetError if no plan fits for these layers."""
        part = self.to_compare(plan)
        longer = 1.0 if part is self else self.bound_s / part.bound_s
        plan = plan if part is self else part.plan()
        trace = first_passes(plan.trace, part.compute.of_step(part.root, plan), _FEW_PASSES) or plan.trace
        timeline = part.simulated(plan.retraced(trace))
        left_out = len(pass_begins(plan.trace)) - len(pass_begins(trace))
        return (timeline.step_s + left_out * timeline.pass_s) * longer, timeline.pass_s * longer

    def with_joined_experts(self) -> Self:
        """The same problem. If there are many experts, as many neighbours in a layer as fit a unit are one module, and
        the page size is that of a plan with every expert. A simulated step uses all experts in their order, so it takes
        about as long. Raises BudgetError if there are many experts and no plan fits."""
        sizes = [expert.numel for module in self.root.modules() if module.routed for expert in module.children]
        if len(sizes) < 2 * _MOST_EXPERTS:
            return self
        plan = self.plan()
        of_unit = plan.unit_limit // (max(sizes) * self.states[0].dtype.itemsize)
        if (together := min(len(sizes) // _MOST_EXPERTS, of_unit)) < 2:
            return self
        inside: dict[str, str] = {}
        """Module in an expert -> the joined module."""

        def joined(experts: Sequence[ModuleSpec]) -> ModuleSpec:
            name = f"{experts[0].name}-{experts[-1].name.rpartition('.')[2]}"
            inside.update((module.name, name) for expert in experts for module in expert.modules())
            return ModuleSpec(name, tuple(param for expert in experts for param in expert.walk()))

        def visit(module: ModuleSpec) -> ModuleSpec:
            if not module.routed:
                return replace(module, children=tuple(map(visit, module.children)))
            of = module.children
            groups = [joined(of[start : start + together]) for start in range(0, len(of), together)]
            return replace(module, children=tuple(groups))

        def added_up(by_module: Mapping[str, float]) -> dict[str, float]:
            sums: defaultdict[str, float] = defaultdict(float)
            for module, seconds in by_module.items():
                sums[inside.get(module, module)] += seconds
            return dict(sums)

        root = visit(self.root)
        compute = Compute(added_up(self.compute.forward_s), added_up(self.compute.backward_s))
        options = replace(self.options, page_bytes=plan.page_bytes)
        return replace(self, root=root, compute=compute, options=options)

    def to_compare(self, plan: Plan) -> Self:
        """The problem on which such plans are compared. If there are many units, it has only the first layers of the
        model, with RAM (except buffers) and SSD reduced in proportion to the parameters.

        The device keeps its size, so that leases come and go as they do with all layers. For that, the weights of the
        smaller model are at least twice as large as the device. If that takes more than half of the layers, or if there
        are few, the whole problem is returned.
        """
        share = MOST_UNITS / len(plan.units)
        if self.budgets.device is not None:
            share = max(share, 2 * self.budgets.device / (self.root.numel * self.states[0].dtype.itemsize))
        if share > _MOST_COMPARED or len(layers_of(self.root)) <= _LEAST_LAYERS:
            return self
        part = self._with_layers(share)
        params, of_all = part.root.numel, self.root.numel
        homes = {GRAD, *(state.name for state in self.states)}
        lines = plan.placement.lines.get(HOST, {})
        buffers = sum(pages for line, pages in lines.items() if line not in homes) * plan.page_bytes
        host, ssd = self.budgets.host, self.budgets.ssd
        budgets = replace(
            self.budgets,
            host=int((host - buffers) * params / of_all) + buffers,
            ssd=None if ssd is None else int(ssd * params / of_all),
        )
        return replace(part, budgets=budgets)

    def _with_layers(self, share: float) -> Self:
        """The same problem with only the first layers of each row of layers."""
        rows: dict[str, list[str]] = {}
        for layer in layers_of(self.root):
            rows.setdefault(layer.name.rpartition(".")[0], []).append(layer.name)
        left_out = {name for row in rows.values() for name in row[max(_LEAST_LAYERS, ceil(share * len(row))) :]}

        def visit(module: ModuleSpec) -> ModuleSpec:
            children = (child for child in module.children if child.name not in left_out)
            return replace(module, children=tuple(map(visit, children)))

        def kept(by_module: Mapping[str, float]) -> dict[str, float]:
            return {module: number for module, number in by_module.items() if not is_within(module, left_out)}

        saved = self.saved
        if saved.policies:
            here = [index for index, layer in enumerate(layers_of(self.root)) if layer.name not in left_out]
            blocks = tuple(saved.sizes.blocks[index] for index in here)
            outside = (*saved.sizes.outside[: len(blocks)], saved.sizes.outside[-1])
            policies = tuple(saved.policies[index] for index in here)
            saved = replace(saved, policies=policies, sizes=StepSizes(blocks, outside))
        return replace(
            self,
            root=visit(self.root),
            compute=Compute(kept(self.compute.forward_s), kept(self.compute.backward_s)),
            exchanges=tuple(e for e in self.exchanges if not is_within(e.module, left_out)),
            saved=saved,
        )


def problem_of(config: PlanConfig, machine: Machine, described: ModelDescription) -> tuple[Problem, tuple[str, ...]]:
    """The problem that a configuration describes, and where its budgets come from.

    Raises BudgetError if activations alone do not fit, and ConfigError for a setting that cannot be used.
    """
    try:
        budgets, notes = budgets_for(machine, config.memory, activations_of(config, described))
    except BudgetError as refusal:
        advice = " or ".join(_ways_to_smaller_activations(config, machine))
        raise BudgetError(f"{refusal} Use {advice}.", refusal.tier, refusal.needed_bytes) from refusal
    options = Options.of(config, replace(config.memory, ssd_checkpoints=config.kept_on_ssd(config.nodes)))
    one_policy = options.may_offload and config.activations != "auto"
    if one_policy and budgets.device is None and budgets.ssd is None:
        raise ConfigError(
            f"--activations is {config.activations}, but there is nowhere to offload to: compute is the CPU, and "
            "activations are in its RAM. Give --memory.ssd, or use recompute."
        )
    saved = NO_BLOCKS
    if one_policy:
        sizes = sizes_of(config, described)
        saved = ActivationPlan((Policy(options.activations),) * len(sizes.blocks), sizes=sizes)
    compute, exchanges = work_of(config, machine, described, recomputes(config.activations))
    problem = Problem(
        described.root,
        config.states,
        budgets,
        machine.hardware,
        compute,
        options,
        machine.ranks,
        exchanges,
        saved,
        config.rule.work,
    )
    return problem, notes


def _ways_to_smaller_activations(config: PlanConfig, machine: Machine) -> Iterator[str]:
    """Settings that lower the bytes of activations and that the configuration has room for."""
    yield "a shorter --max-length"
    if config.per_device_train_batch_size > 1:
        yield "a smaller --per-device-train-batch-size, with more --gradient-accumulation-steps"
    drive = config.memory.ssd if machine.here else machine.hardware.ssd
    offloads = config.activations in (None, "recompute+offload", "auto")  # the default tries it
    if not offloads and (machine.hardware.device is not None or drive is not None):
        yield "--activations recompute+offload"
    if config.sequence_tiles is None:
        yield "--sequence-tiles auto"


def pass_bound_s(
    hardware: Hardware, ranks: Ranks, compute: Compute, exchanges: Sequence[Exchange], again: bool
) -> float:
    """Seconds of a micro-batch that never waits for weights or updates. `again`: layers are recomputed."""
    rates = Rates(hardware, ranks)
    sent = (each for each in exchanges if each.kind != ROWS)  # a plan may do without
    times = ((each, each.forward * (1 + (each.repeated and again)) + each.backward) for each in sent)
    return compute.step_s + sum(rates.exchange_seconds(each) * count for each, count in times)


def work_of(
    config: PlanConfig, machine: Machine, described: ModelDescription, recompute: bool
) -> tuple[Compute, tuple[Exchange, ...]]:
    """Compute of one micro-batch on one rank, and the communication within it."""
    rate = machine.hardware.matmul(config.chosen_precision).reached_flop_per_s.value
    tokens = {module: elements * config.itemsize for module, elements in described.exchanged.items()}
    gradients = {module: elements * config.itemsize for module, elements in described.stored_whole.items()}
    summed = config.tokens * described.hidden * config.itemsize
    attended = config.tokens * described.exchanged_width * config.itemsize
    layers = [layer.name for layer in layers_of(described.root)]
    lookups = [module for module in described.root.modules() if module.lookup == ""]
    rows = {module.name: config.tokens * module.params[0].shape[1] * config.itemsize for module in lookups}
    exchanges = (
        *of_tokens(tokens, machine.ranks),
        *of_sums(described.summed, summed, machine.ranks),
        *of_gradients(gradients, machine.ranks),
        *of_heads(layers, attended, machine.ranks, config.sequence_parallel),
        *of_rows(rows),
        *described.handed_on,
    )
    compute = Compute.from_flops(described.forward_flops, rate, recompute, described.frozen)
    if described.forward_flops:
        compute = compute.with_unpacking(unpacking_s(config, machine.hardware, described), recompute)
        if machine.hardware.device is not None:
            compute = compute.with_least(experts_of(described.root), EXPERT_S, recompute)
    return compute, exchanges


def experts_of(root: ModuleSpec) -> list[ModuleSpec]:
    """The experts whose weights are fetched alone."""
    return [expert for module in root.modules() if module.routed for expert in module.children]


def unpacking_s(config: PlanConfig, hardware: Hardware, described: ModelDescription) -> dict[str, float]:
    """Seconds in which each quantized module reads its packed weights and writes them in 16 or 32 bits."""
    processor = hardware.device or hardware.cpu
    rate = processor.memory_bytes_per_s.value / (hardware.gpus_per_node if hardware.device is None else 1)
    itemsize = config.itemsize + (0.5 if config.quantized_format == "4bit" else 1)
    return {module: elements * itemsize / rate for module, elements in described.packed.items()}
