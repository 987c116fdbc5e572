"""Compute: how long the model's own arithmetic takes, module by module, when nothing disturbs it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pagoda.errors import ConfigError
from pagoda.plan.planner import Plan
from pagoda.plan.trace import Phase
from pagoda.plan.units import ModuleSpec, Use, forward_uses, layers_of

if TYPE_CHECKING:
    from pagoda.calibrate.model import ComputeProfile


@dataclass(frozen=True)
class Compute:
    """Seconds of one micro-batch in each module, its children's not counted. A module that is missing takes none."""

    forward_s: Mapping[str, float]
    backward_s: Mapping[str, float]
    """Recomputation of checkpoints included."""

    @classmethod
    def from_flops(cls, forward_flops: Mapping[str, float], flop_per_s: float, recompute: bool = True) -> "Compute":
        """Backward costs twice forward, and once more where activations are recomputed."""
        forward = {module: flops / flop_per_s for module, flops in forward_flops.items()}
        backward = {module: (3 if recompute else 2) * seconds for module, seconds in forward.items()}
        return cls(forward, backward)

    @classmethod
    def from_profile(cls, profile: "ComputeProfile", root: ModuleSpec) -> "Compute":
        """A measured profile, spread over a model's modules.

        Inside a layer, time goes by parameters. The first module outside the layers is the embedding, the last one the
        head.
        """
        layers = layers_of(root)
        inside = {module.name for layer in layers for module in layer.modules()}
        leaves = [module for module in root.modules() if not module.children and (module.params or module.tied)]
        outside = [leaf.name for leaf in leaves if leaf.name not in inside]
        if not layers or not outside:
            raise ConfigError("a profile of layers needs a model that is made of layers, an embedding and a head")
        forward, backward = dict.fromkeys(outside, 0.0), dict.fromkeys(outside, 0.0)
        for module, forward_s, backward_s in (
            (outside[0], profile.embedding_forward_s, profile.embedding_backward_s),
            (outside[-1], profile.head_forward_s, profile.head_backward_s),
        ):
            forward[module] += forward_s
            backward[module] += backward_s
        for layer in layers:
            for leaf in (module for module in layer.modules() if not module.children):
                share = leaf.numel / layer.numel
                forward[leaf.name] = share * profile.layer_forward_s
                backward[leaf.name] = share * profile.layer_backward_s
        return cls(forward, backward)

    def scaled(self, factor: float) -> "Compute":
        """The times of a micro-batch of `factor` times as many sequences."""
        return Compute(
            {module: factor * seconds for module, seconds in self.forward_s.items()},
            {module: factor * seconds for module, seconds in self.backward_s.items()},
        )

    @property
    def step_s(self) -> float:
        """One forward and backward."""
        return sum(self.forward_s.values()) + sum(self.backward_s.values())

    def of_step(self, root: ModuleSpec, plan: Plan) -> list[float]:
        """Seconds of every access of the step that `plan` assumes, which is what `simulate` takes."""
        uses = forward_uses(root, plan.units)
        times = self.of_uses(uses)
        once = [forward for forward, _ in times] + [backward for _, backward in reversed(times)]
        return once * ((len(plan.trace.accesses) - 1) // len(once))

    def of_uses(self, uses: Sequence[Use]) -> list[tuple[float, float]]:
        """(forward, backward) seconds of each use of a unit in one forward.

        A module's time goes to the use whose module is nearest around it; to the first one where there are several.
        """
        at: dict[str, int] = {}
        for index, use in enumerate(uses):
            at.setdefault(use.module, index)
        seconds = [[0.0, 0.0] for _ in uses]
        for phase, times in ((Phase.FORWARD, self.forward_s), (Phase.BACKWARD, self.backward_s)):
            for module, time in times.items():
                seconds[_nearest(module, at)][phase] += time
        return [(forward, backward) for forward, backward in seconds]


def _nearest(module: str, at: Mapping[str, int]) -> int:
    """The use of the innermost module around `module`; the last use for what lies outside all of them."""
    while module not in at and module:
        module = module.rpartition(".")[0]
    return at.get(module, len(at) - 1)
