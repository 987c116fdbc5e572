"""What is planned for: a model, what its optimizer keeps, budgets, and a machine to simulate plans on."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Self

from pagoda.forecast.compute import Compute
from pagoda.optim.rule import StateSpec
from pagoda.plan.activations import SavedBlocks
from pagoda.plan.layout import GRAD
from pagoda.plan.ops import HOST
from pagoda.plan.options import Options
from pagoda.plan.placement import Budgets
from pagoda.plan.planner import Plan, make_plan
from pagoda.plan.ranks import Ranks
from pagoda.plan.units import ModuleSpec, is_within, layers_of
from pagoda.simulate.hardware import Hardware
from pagoda.simulate.simulation import simulate
from pagoda.simulate.timeline import Timeline

MOST_UNITS = 100
"""Of a plan that is compared with others whole; of larger ones, a part of the layers is."""
_LEAST_LAYERS = 4


@dataclass(frozen=True)
class Problem:
    """All that plans of one search have in common. `exchanges` and `saved` are as for `make_plan`."""

    root: ModuleSpec
    states: tuple[StateSpec, ...]
    budgets: Budgets
    hardware: Hardware
    compute: Compute
    ranks: Ranks | None = None
    exchanges: Mapping[str, int] = field(default_factory=dict)
    saved: SavedBlocks | None = None

    def plan(self, options: Options) -> Plan:
        """The planner's choice. Raises BudgetError when no plan fits."""
        return make_plan(self.root, self.states, self.budgets, options, self.ranks, self.exchanges, saved=self.saved)

    def simulated(self, plan: Plan) -> Timeline:
        """A step of a plan."""
        return simulate(plan, self.hardware, self.compute.of_step(self.root, plan))

    def to_compare(self, plan: Plan) -> Self:
        """What to compare kinds of plans on, of which `plan` is one: if its units are many, the first of the layers,
        with the share of RAM, buffers apart, and of SSD that their parameters are of all.

        The device stays as large as it is, so that leases come and go as they do with all layers; where that part
        would fit it, or the layers are few, the whole problem.
        """
        layers = layers_of(self.root)
        if len(plan.units) <= MOST_UNITS or len(layers) <= _LEAST_LAYERS:
            return self
        share = MOST_UNITS / len(plan.units)
        part = self._with_layers(share)
        params, of_all = (sum(param.numel for param in root.walk()) for root in (part.root, self.root))
        if self.budgets.device is not None and 2 * self.budgets.device > params * self.states[0].dtype.itemsize:
            return self
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
        """The first layers of each row."""
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
        if saved is not None:
            here = [layer.name not in left_out for layer in layers_of(self.root)]
            blocks = tuple(block for block, is_here in zip(saved.sizes.blocks, here, strict=True) if is_here)
            policies = tuple(policy for policy, is_here in zip(saved.policies, here, strict=True) if is_here)
            outside = (*saved.sizes.outside[: len(blocks)], saved.sizes.outside[-1])
            saved = SavedBlocks(replace(saved.sizes, blocks=blocks, outside=outside), policies)
        return replace(
            self,
            root=visit(self.root),
            compute=Compute(kept(self.compute.forward_s), kept(self.compute.backward_s)),
            exchanges={module: n for module, n in self.exchanges.items() if not is_within(module, left_out)},
            saved=saved,
        )
