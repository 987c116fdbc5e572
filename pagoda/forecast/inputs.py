"""The inputs of a forecast: all that planning and simulating need, from a configuration and a machine."""

from dataclasses import dataclass, replace

from pagoda.config.run import PlanMode
from pagoda.errors import ConfigError
from pagoda.forecast.activations import ActivationEstimate, estimate_activations, estimate_sizes
from pagoda.forecast.compute import Compute
from pagoda.forecast.config import PlanConfig
from pagoda.forecast.machine import Machine, budgets_for
from pagoda.forecast.model_description import ModelDescription, describe_model
from pagoda.forecast.problem import Problem
from pagoda.forecast.search import Choice, search
from pagoda.optim.rule import TensorRule
from pagoda.plan.activations import Policy, SavedBlocks, recomputes
from pagoda.plan.options import Options
from pagoda.plan.planner import Plan


@dataclass(frozen=True, kw_only=True)
class PlanInputs(Problem):
    """What is planned for, and what chooses among its plans: what advice varies.

    `compute` has the times that a step is forecast with: measured ones where there are some.
    """

    described: ModelDescription
    from_flops: Compute
    """Times that choose a plan: the same in a forecast and in a run, which has no time to measure any."""
    options: Options
    mode: PlanMode = "search"

    def usual_plan(self) -> Plan:
        """The planner's first choice. Raises BudgetError when no plan fits."""
        return self.plan(self.options)

    def search(self) -> Choice:
        """The plan that a run takes, and beside it all others that fit, fastest first.

        Raises BudgetError when no plan fits.
        """
        found = search(replace(self, compute=self.from_flops), self.options)
        if self.mode == "usual":
            found = found.usual()
        return found if self.compute is self.from_flops else found.with_times(self)


def subject_of(config: PlanConfig, count_flops: bool = True) -> ModelDescription:
    """The model that is to be planned. Raises ConfigError as `describe_model`."""
    assert config.model is not None
    return describe_model(
        config.model,
        batch_size=config.batch_size,
        seq_len=config.seq_len,
        count_flops=count_flops,
        expert_parallel=config.expert_parallel,
        tile_elements=config.tile_elements,
        cuts_stacks=not isinstance(config.rule, TensorRule),
    )


def activations_of(config: PlanConfig, described: ModelDescription) -> ActivationEstimate:
    """What activations take."""
    return estimate_activations(
        described,
        config.tokens,
        config.states[0].dtype.itemsize,
        config.activations,
        config.chunked_loss,
        config.tile_tokens,
    )


def inputs_of(config: PlanConfig, machine: Machine, described: ModelDescription) -> tuple[PlanInputs, tuple[str, ...]]:
    """The inputs, and how its budgets were found.

    Raises BudgetError where activations alone do not fit, ConfigError for a setting that cannot be used.
    """
    budgets, notes = budgets_for(machine, config.memory, activations_of(config, described))
    kept = config.kept_on_ssd(config.nodes)
    options = Options.of(config, replace(config.memory, ssd_checkpoints=kept))
    if options.may_offload and config.activations != "auto" and budgets.device is None and budgets.ssd is None:
        raise ConfigError(
            f"--activations is {config.activations}, but there is nowhere to offload to: compute is the CPU, and "
            "activations are in its RAM. Give --memory.ssd, or use recompute."
        )
    itemsize = config.states[0].dtype.itemsize
    rate = machine.hardware.matmul(config.precision).reached_flop_per_s
    times = Compute.from_flops(described.forward_flops, rate.value, recomputes(config.activations))
    saved = None
    if options.may_offload and config.activations != "auto":
        sizes = estimate_sizes(described, config.tokens, itemsize)
        saved = SavedBlocks(sizes, (Policy(config.activations),) * len(sizes.blocks))
    inputs = PlanInputs(
        described.root,
        config.states,
        budgets,
        machine.hardware,
        times,
        machine.ranks,
        {module: elements * itemsize for module, elements in described.exchanged.items()},
        saved,
        described=described,
        from_flops=times,
        options=options,
        mode=config.plan or "search",
    )
    return inputs, notes
