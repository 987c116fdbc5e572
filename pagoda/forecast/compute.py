"""How long each module of the model computes if nothing else uses the machine."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pagoda.errors import ConfigError
from pagoda.plan.planner import Plan
from pagoda.plan.units import ModuleSpec, around_of, forward_uses, layers_of

if TYPE_CHECKING:
    from pagoda.calibrate.model import ComputeProfile


@dataclass(frozen=True)
class Compute:
    """Seconds per module for one micro-batch, without the module's children. A missing module takes no time."""

    forward_s: Mapping[str, float]
    backward_s: Mapping[str, float]
    """Includes the recomputation of checkpoints."""

    @classmethod
    def from_flops(
        cls,
        forward_flops: Mapping[str, float],
        flop_per_s: float,
        recompute: bool = True,
        frozen: Collection[str] = (),
    ) -> "Compute":
        """Times from FLOPs. Backward costs twice as much as forward, as much for `frozen` modules, which have no
        gradients of weights, and once more if activations are recomputed."""
        forward = {module: flops / flop_per_s for module, flops in forward_flops.items()}
        backward = {module: (2 - (module in frozen) + recompute) * seconds for module, seconds in forward.items()}
        return cls(forward, backward)

    def with_unpacking(self, seconds: Mapping[str, float], recompute: bool) -> "Compute":
        """The same, with the `seconds` in which modules dequantize their weights. Forward and backward each do, and so
        does recomputation."""
        return Compute(
            {**self.forward_s, **{m: self.forward_s.get(m, 0.0) + s for m, s in seconds.items()}},
            {**self.backward_s, **{m: self.backward_s.get(m, 0.0) + (1 + recompute) * s for m, s in seconds.items()}},
        )

    def with_least(self, modules: Sequence[ModuleSpec], least_s: float, recompute: bool) -> "Compute":
        """The same, where each of these modules computes for at least `least_s` seconds in forward, and in backward as
        often again as it runs there."""
        forward, backward = dict(self.forward_s), dict(self.backward_s)
        for module in modules:
            names = [inside.name for inside in module.modules() if not inside.children]
            for times, least in ((forward, least_s), (backward, (1 + recompute) * least_s)):
                missing = least - sum(times.get(name, 0.0) for name in names)
                if missing > 0:
                    times[names[-1]] = times.get(names[-1], 0.0) + missing
        return Compute(forward, backward)

    @classmethod
    def from_profile(cls, profile: "ComputeProfile", root: ModuleSpec) -> "Compute":
        """Distribute a measured profile over the modules of a model.

        Within a layer, each module gets time in proportion to its parameters. The first module outside the layers is
        the embedding, and the last one is the head.
        """
        layers = layers_of(root)
        inside = {module.name for layer in layers for module in layer.modules()}
        leaves = [module for module in root.modules() if not module.children and (module.params or module.tied)]
        outside = [leaf.name for leaf in leaves if leaf.name not in inside]
        if not layers or not outside:
            raise ConfigError("a profile of layers needs a model with layers, an embedding and a head")
        forward, backward = dict.fromkeys(outside, 0.0), dict.fromkeys(outside, 0.0)
        for module, (forward_s, backward_s) in ((outside[0], profile.embedding), (outside[-1], profile.head)):
            forward[module] += forward_s
            backward[module] += backward_s
        for layer in layers:
            for leaf in (module for module in layer.modules() if not module.children):
                share = leaf.numel / layer.numel
                forward[leaf.name], backward[leaf.name] = (share * seconds for seconds in profile.layer)
        return cls(forward, backward)

    def scaled(self, factor: float) -> "Compute":
        """Times of a micro-batch with `factor` times as many sequences."""
        return Compute(
            {module: factor * seconds for module, seconds in self.forward_s.items()},
            {module: factor * seconds for module, seconds in self.backward_s.items()},
        )

    @property
    def step_s(self) -> float:
        """Seconds of one forward and one backward."""
        return sum(self.forward_s.values()) + sum(self.backward_s.values())

    def of_step(self, root: ModuleSpec, plan: Plan) -> list[float]:
        """Seconds of each access in the step that `plan` assumes, as `simulate` takes them.

        Each module's time goes to the use of its innermost enclosing module. If that module is used several times, the
        first use gets all of it. The last use gets the time of a module outside all of them.
        """
        uses = forward_uses(root, plan.units)
        at: dict[str, int] = {}
        for index, use in enumerate(uses):
            at.setdefault(use.module, index)
        forward, backward = [0.0] * len(uses), [0.0] * len(uses)
        for seconds, times in ((forward, self.forward_s), (backward, self.backward_s)):
            for module, time in times.items():
                nearest = (at[name] for name in (module, *around_of(module)) if name in at)
                seconds[next(nearest, len(at) - 1)] += time
        once = forward + backward[::-1]
        return once * ((len(plan.trace.accesses) - 1) // len(once))
