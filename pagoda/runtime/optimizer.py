"""The optimizer the user holds: a real `torch.optim.Optimizer` whose state lives in pages."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pagoda.errors import UsageError
from pagoda.optim.adamw import MOMENT_NAMES, AdamW
from pagoda.plan.timeline import Timeline
from pagoda.runtime.engine import Engine
from pagoda.runtime.hooks import ModelHooks
from pagoda.runtime.moments import MomentTensors
from pagoda.runtime.next_update import Group
from pagoda.runtime.snapshot import Snapshot
from pagoda.runtime.state_dicts import WeightStateDicts
from pagoda.runtime.stats import StepStats
from pagoda.runtime.unit import LiveUnit


class PagedOptimizer(torch.optim.Optimizer):
    """Steps a wrapped model; made by `pagoda.wrap`.

    LR schedulers, `param_groups`, closures and `state_dict` work as with any torch optimizer. Two things differ:
    `step()` consumes the gradients (`zero_grad()` after it does nothing more), and it returns before the weights
    are updated: each unit is updated just before something next needs it.
    """

    def __init__(self, model: nn.Module, rule: AdamW, engine: Engine) -> None:
        trainable = [p for unit in engine.units for p in unit.params[: unit.trainable]]
        order = {id(p): n for n, p in enumerate(model.parameters())}
        trainable.sort(key=lambda p: order[id(p)])
        super().__init__(trainable, rule.defaults())
        self._grouped: list[dict[str, Any]] | None = None
        self._groups: dict[int, Group] = {}
        self._engine = engine
        engine.stepper.group_of = self._group_of
        self._hooks = ModelHooks(model, engine)
        self._weights = WeightStateDicts(model, engine)
        self._snapshot = Snapshot(model, engine)
        self._moments = MomentTensors(engine.store, rule)
        self._slots = {id(p): (unit, slot) for unit in engine.units for slot, p in enumerate(unit.params)}

    @property
    def stats(self) -> StepStats:
        """Figures of the last step."""
        return self._engine.stats

    def trace_next_step(self) -> None:
        """Record what compute and every lane do from now until the end of the next `step()`; see `timeline`.

        Call it right after a `step()`. Of the steps of a run, the third is the first in steady state: the first one
        shows the order in which units are used, and the second is planned for it.
        """
        self._engine.trace_next_step()

    @property
    def timeline(self) -> Timeline | None:
        """The step that `trace_next_step` recorded, once it has ended; `plan.chrome_trace` writes it to a file."""
        return self._engine.timeline

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Queue the update of every parameter that has a gradient.

        Raises NonFiniteGradientError, with weights unchanged and gradients dropped, when a gradient is NaN or
        infinite (with updates under backward, units updated before it was found keep their update).
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._engine.saver.check()
        self._engine.step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients that no `step()` has consumed. `set_to_none` is accepted and always true."""
        self._engine.stepper.zero_grad()
        for group in self.param_groups:
            for param in group["params"]:
                param.grad = None

    def clip_grad_norm_(self, max_norm: float) -> float:
        """Clip the global 2-norm of this step's gradients; returns the norm before, as torch's function does.

        Use it in place of `torch.nn.utils.clip_grad_norm_`, or pass `wrap(clip_grad_norm=...)` once.
        """
        return self._engine.stepper.clip(max_norm)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Only `wrap` places parameters, so none can be added later. Raises UsageError."""
        if hasattr(self, "_engine"):
            raise UsageError("Parameters cannot be added after wrap(): build the whole model, then wrap it.")
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """torch's own format, with every moment in RAM in fp32: 8 bytes a parameter. Prefer `save_checkpoint`."""
        self._engine.drain()
        plain = super().state_dict()
        states: dict[int, dict[str, Any]] = {}
        index = 0
        for group in self.param_groups:
            for param in group["params"]:
                unit, slot = self._slots[id(param)]
                if unit.steps[slot]:
                    states[index] = {"step": torch.tensor(float(unit.steps[slot]))}
                    for name in MOMENT_NAMES:
                        states[index][name] = self._moments.read(unit, slot, name)
                index += 1
        return {**plain, "state": states}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` gave, or the state of a `torch.optim.AdamW` over the same parameters in order.

        Moments are fp32 there, so they may come from a run that keeps them otherwise. What this one gave comes back
        without a changed bit.
        """
        self._engine.settle()
        states = state_dict["state"]
        super().load_state_dict({**state_dict, "state": {}})
        index = 0
        for group in self.param_groups:
            for param in group["params"]:
                unit, slot = self._slots[id(param)]
                state = states.get(index, {})
                unit.steps[slot] = int(state.get("step", 0))
                for name in MOMENT_NAMES:
                    value = state.get(name)
                    self._moments.write(unit, slot, name, torch.zeros(param.shape) if value is None else value)
                index += 1

    def save_checkpoint(
        self,
        directory: str | Path,
        extra: dict[str, Any] | None = None,
        *,
        wait: bool = True,
        replaces: Iterable[str | Path] = (),
    ) -> None:
        """Write weights, master, moments, step counts, hyperparameters and RNG states to `directory`.

        Atomic: `directory` appears complete or not at all. RAM used does not depend on the model's size. `extra`
        must be JSON-able; `load_checkpoint` returns it.

        Raises UsageError between backward and `step()` where units are updated under backward (`accumulation_steps`
        announced, no clipping): some have had this step's update by then, and others have not.

        With `wait` False it returns at once, training goes on while the state of now is written, and an error of that
        is raised by the next `step()`, `save_checkpoint()`, `wait_for_checkpoint()` or `close()`. One checkpoint is
        written at a time: the next waits for it.

        State on SSD stays where it is, and later updates go elsewhere, as long as no more checkpoints keep pages than
        `wrap(keep_checkpoints=...)` says; else it is copied. `replaces` are checkpoints to delete once this one is
        complete.
        """
        groups = super().state_dict()["param_groups"]
        self._snapshot.save(Path(directory), groups, extra or {}, [Path(old) for old in replaces])
        if wait:
            self.wait_for_checkpoint()

    @property
    def checkpoint_pending(self) -> bool:
        """Whether a checkpoint is being written in the background."""
        return self._engine.saver.pending

    def wait_for_checkpoint(self) -> None:
        """Wait until the last checkpoint is on disk; raises its error."""
        self._engine.saver.wait()

    def load_checkpoint(self, directory: str | Path) -> dict[str, Any]:
        """Restore what `save_checkpoint` wrote, into whatever tiers this optimizer was wrapped with.

        Raises CheckpointError when the directory is incomplete or holds another model; UsageError between backward
        and `step()` where units are updated under backward, as `save_checkpoint`. Gradients that no `step()` has
        consumed are dropped.
        """
        groups, extra = self._snapshot.load(Path(directory))
        super().load_state_dict({"state": {}, "param_groups": groups})
        return extra

    def drain(self) -> None:
        """Wait until every queued update is done and written home."""
        self._engine.drain()

    def close(self) -> None:
        """Drain, finish a checkpoint, join the threads, give memory and SSD space back. The model is no longer usable.

        Raises the error of a checkpoint in the background that failed, with everything closed.
        """
        self._hooks.remove()
        self._weights.remove()
        self._engine.close()

    def _group_of(self, unit: LiveUnit, slot: int) -> Group:
        if self._grouped is not self.param_groups:  # load_state_dict makes a new list
            self._grouped = self.param_groups
            self._groups = {id(p): group for group in self.param_groups for p in group["params"]}
        return self._groups[id(unit.params[slot])]
