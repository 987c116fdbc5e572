"""`PagedOptimizer`: a `torch.optim.Optimizer` whose state lives in pages."""

import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from pagoda.autograd.hooks import ModelHooks
from pagoda.checkpoint.merging import guard_merging
from pagoda.checkpoint.optimizer_states import check_entry, torch_file, write_entry
from pagoda.checkpoint.shown_states import ShownStates
from pagoda.checkpoint.snapshot import Snapshot
from pagoda.checkpoint.state import ParameterState, all_states, named, state_of
from pagoda.checkpoint.state_dicts import WeightStateDicts
from pagoda.engine import Engine
from pagoda.errors import UsageError
from pagoda.mesh.dtensors import DTensorForm
from pagoda.optim.param_groups import NamedGroup, check_groups, check_settings
from pagoda.optim.rule import Rule
from pagoda.optim.torch_optimizer import Mode, Optim
from pagoda.parameters.hidden import as_plain
from pagoda.prepare.model_checks import Members, check_step
from pagoda.runtime.stats import StepStats
from pagoda.simulate.timeline import Timeline


class PagedOptimizer(torch.optim.Optimizer):
    """The optimizer of a wrapped model. `pagoda.wrap` makes it.

    LR schedulers, `param_groups`, closures and `state_dict` work as with any torch optimizer, with two differences.
    `step()` consumes the gradients, so `zero_grad()` after it does nothing. And it returns before the weights are
    updated: each unit is updated just before its next use.

    As a context manager, it closes at the end of the block.
    """

    def __init__(
        self, model: nn.Module, rule: Rule, engine: Engine, groups: list[NamedGroup], sync_steps: int = 0
    ) -> None:
        """`sync_steps`: the first steps that wait for their asynchronous updates."""
        self._engine = engine
        self._warned_of_no_gradient = False
        self._states = {id(state.unit.params[state.slot]): state for state in all_states(engine)}
        params = {state.name: state.unit.params[state.slot] for state in self._states.values()}
        super().__init__(
            [{**group, "params": [params[name] for name in group["params"]]} for group in groups], rule.defaults()
        )
        engine.groups.mark()
        _refuse_other_optimizers()
        self._sync_steps = sync_steps
        self._in_model = Members(model, self._states)
        self._hooks = ModelHooks(model, engine)
        guard_merging(model)
        self._weights = WeightStateDicts(model, engine)
        self._shown_states = ShownStates(engine, self._members)
        engine.accesses.forget_states = self._shown_states.forget
        self._snapshot = Snapshot(model, engine)
        self._saving = threading.RLock()
        """Held by the thread that saves a checkpoint, until it has started to write it, or with `wait` has written
        it."""

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Parameters and their settings, as in torch."""
        return self._engine.groups.all

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self._engine.groups.all = groups

    @property
    def state(self) -> Any:
        """The states of each parameter that has been updated, with the keys of torch's class, in fp32. See
        `ShownStates`."""
        return self._shown_states.mapping

    @state.setter
    def state(self, mapping: Any) -> None:
        if hasattr(self, "_shown_states"):  # torch's constructor sets an empty one
            self._shown_states.replace(mapping)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({key: value for key, value in state.items() if key not in ("state", "param_groups")})
        if "param_groups" in state:  # an optimizer in place of which this one was made has the same list
            self.param_groups[:] = state["param_groups"]
        if "state" in state:
            self.state = state["state"]

    @property
    def stats(self) -> StepStats:
        """Statistics of the last step."""
        return self._engine.stats

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step changed nothing because a gradient was not finite. Accelerate reads it."""
        return self.stats.skipped

    @property
    def scales_loss(self) -> bool:
        """Whether `backward` must be called on `scale(loss)`, as with fp16."""
        return self._engine.stepper.scaler.active

    @property
    def updates_have_begun(self) -> bool:
        """Whether some units have this step's update already, during backward, so that no checkpoint can be written
        before `step()`."""
        return self._engine.stepper.updates_have_begun()

    def trace_next_step(self) -> None:
        """Record what compute and every lane do from now until the end of the next `step()`; see `timeline`.

        Call it right after a `step()`. The third step of a run is the first in steady state: the first step shows the
        order in which units are used, and the second is planned for that order.
        """
        self._engine.trace_next_step()

    @property
    def timeline(self) -> Timeline | None:
        """The step that `trace_next_step` recorded, after it has ended. `forecast.chrome_trace` writes it to a file."""
        return self._engine.timeline

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Queue the update of every parameter that has a gradient.

        If there is no gradient, it changes nothing, as in torch, and warns the first time.

        Raises UsageError if the model got trainable parameters after `wrap`, if modules were moved, replaced or deleted
        since, or if all parameters of the optimizer are frozen.

        Raises NonFiniteGradientError if a gradient is NaN or infinite. Gradients are then dropped and weights are
        unchanged. But with updates during backward, units that were updated before that gradient arrived keep their
        update; the error says how many.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._engine.saver.check()
        self._check_members()
        self._engine.accesses.check_open()
        self._in_model.check()
        self._engine.accesses.take_changes()
        stepped = [param for group in self.param_groups for param in group["params"]]
        check_step(param.requires_grad or self._has_gradient(param) for param in stepped)
        after = [self._engine.rule.after_step(group) for group in self.param_groups]
        steps = [step for unit in self._engine.units for step in unit.steps] if self._sync_steps else [0]
        waits = max(steps) < self._sync_steps

        def ended() -> None:
            if self.stats.grad_norm is not None:
                for group, changed in zip(self.param_groups, after, strict=True):
                    group.update(changed)
            if waits:
                self.synchronize()

        self._engine.step(ended, late=not waits)
        self._shown_states.show()
        if self.stats.grad_norm is None and not self.stats.skipped and not self._warned_of_no_gradient:
            self._warned_of_no_gradient = True
            warnings.warn(
                "optimizer.step() was called without a gradient and changed nothing: no backward() has run since the "
                "last step(), or zero_grad() came after it.",
                stacklevel=3,
            )
        return loss

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss to call `backward()` on. With `precision="fp16"` it is multiplied by the loss scale,
        otherwise it is unchanged."""
        scaler = self._engine.stepper.scaler
        scaler.used = True
        return loss.float() * scaler.scale if scaler.active else loss

    def train(self) -> None:
        """Switch weights to training, as schedule-free optimizers (`pagoda.Optim`) ask. Otherwise it does nothing."""
        self._switch("train")

    def eval(self) -> None:
        """Switch weights to evaluation, as `train` does to training. Then evaluate, save and export."""
        self._switch("eval")

    def _switch(self, mode: Mode) -> None:
        """Call a class's `train` or `eval` for one parameter after another. Raises UsageError like `state_dict`."""
        rule = self._engine.rule
        if not isinstance(rule, Optim):
            return
        self._engine.accesses.take_changes()
        for group in self.param_groups:
            if not (changed := rule.after_switch(mode, group)):
                continue
            with self._engine.overwriting():
                for param in group["params"]:
                    _switch(rule.with_group(group), mode, self._states[id(param)])
            group.update(changed)
        self._shown_states.show()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients that no `step()` has consumed. With `set_to_none=False`, set every gradient to zero, also
        those that `step()` has consumed, as plain PyTorch does: the next step then updates parameters that its backward
        does not use, too. With several ranks, all call it equally often in a step."""
        self._engine.accesses.check_open()
        if not set_to_none:
            for param in (param for group in self.param_groups for param in group["params"]):
                if param.grad is not None:
                    param.grad.zero_()
            return
        with as_plain():
            self._engine.accesses.compute_lock.run(self._zero_grad)

    def _zero_grad(self) -> None:
        self._engine.stepper.zero_grad()
        for group in self.param_groups:
            for param in group["params"]:
                param.grad = None

    def clip_grad_norm_(self, max_norm: float) -> float:
        """Clip the global 2-norm of this step's gradients. Returns the norm before clipping, as torch's function does.

        `torch.nn.utils.clip_grad_norm_` does the same if all ranks have gradients of the same parameters. With
        `wrap(max_grad_norm=...)`, the smaller of the two limits holds. Raises UsageError if units are updated during
        backward (with `gradient_accumulation_steps` and without clipping): pass `wrap(max_grad_norm=...)` instead.
        """
        self._engine.accesses.check_open()
        return self._engine.stepper.clipping.clip(max_norm)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters that were passed to `wrap(reserve=...)`. They are updated from their next gradient on.

        Raises UsageError for other parameters (only `wrap` allocates states), ConfigError for unusable settings.
        """
        if not hasattr(self, "_hooks"):  # torch's constructor adds the groups that `wrap` was given
            super().add_param_group(param_group)
            return
        given = param_group["params"]
        params = [given] if isinstance(given, torch.Tensor) else list(given)
        for param in (entry[1] if isinstance(entry, tuple) else entry for entry in params):
            state = self._states.get(id(param))
            if state is None:
                raise UsageError(
                    f"A parameter of shape {tuple(param.shape)} was not placed by wrap(): build the whole model, then "
                    "wrap it."
                )
            if state.slot >= state.unit.trainable:
                raise UsageError(f"{state.name!r} has no room for optimizer state: pass it to wrap(reserve=...) first.")
            if state.slot in state.unit.grouped:
                raise UsageError(f"{state.name!r} is in a param group already.")
        self._engine.rule.with_group({**self.defaults, **param_group})
        super().add_param_group({**param_group, "params": params})
        self._engine.groups.mark()

    def state_dict(self) -> dict[str, Any]:
        """Return the state in torch's own format, all of it in RAM: 8 bytes per parameter with AdamW. See
        `save_state_dict`.

        Raises UsageError between backward and `step()` if units are updated during backward.
        """
        self._engine.accesses.take_changes()
        with self._engine.settled(), self._shown_states.unseen():
            plain = super().state_dict()
            entries = enumerate(map(self._shown_states.copied, self._members()))
            return {**plain, "state": {index: entry for index, entry in entries if entry}, **self._loss_scale()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the result of `state_dict`, or a state dict of the corresponding torch optimizer over the same
        parameters in the same order.

        AdamW's moments are fp32 in a state dict, so they may come from a run with another format of moments. A state
        dict from this optimizer restores the same bits. Parameters may be identified by name, as `save_state_dict`
        writes them: `torch.load(path, mmap=True)` then takes no more RAM than one parameter's state.

        Raises CheckpointError, with nothing changed, if groups have other parameters or states have other shapes. After
        an error during the changes, the state can be neither used nor saved until a checkpoint is loaded.
        """
        states, groups = state_dict["state"], state_dict["param_groups"]
        if any(isinstance(name, str) for group in groups for name in group["params"]):
            live = named(self.param_groups)
            check_groups("the state", groups, live)
            order = [name for group in live for name in group["params"]]
            states = {index: states[name] for index, name in enumerate(order) if name in states}
            indices = iter(range(len(order)))
            groups = [{**group, "params": [next(indices) for _ in group["params"]]} for group in groups]
        check_settings("The state", groups, self._engine.rule)
        with self._engine.overwriting():
            for index, state in enumerate(self._members()):
                check_entry(state, states.get(index, {}))
            self._engine.stepper.scaler.load_state_dict(state_dict.get("loss_scale", {}))
            super().load_state_dict({"state": {}, "param_groups": groups})
            self._engine.groups.mark()
            for index, state in enumerate(self._members()):
                write_entry(state, states.get(index, {}))
            self._shown_states.forget()

    def named_states(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Iterate over the name and torch state of each parameter that has been updated, with one in RAM at a time.

        Raises UsageError if a step was taken, or a backward updated units, before the iteration has ended.
        """
        self._engine.accesses.take_changes()
        queued = self._engine.stepper.queued
        for state in self._members():
            if self._engine.stepper.queued != queued:
                raise UsageError(
                    "The parameters were updated during the iteration over optimizer.named_states(), so the states "
                    "would be from different steps: finish the iteration before the next step."
                )
            with self._engine.settled():  # whoever reads may have done anything since
                entry = self._shown_states.entry(state)
            if entry:
                yield state.name, entry

    def save_state_dict(self, path: str | Path) -> None:
        """Write `state` and `param_groups` to a file for `torch.load`, by parameter name, as torch's
        `get_optimizer_state_dict` does.

        One parameter's states are in RAM at a time. The file appears, or is replaced, only when it is complete. Raises
        StorageError, and UsageError if tensor-parallel ranks divide parameters.
        """
        if any(isinstance(form, DTensorForm) for unit in self._engine.units for form in unit.forms):
            raise UsageError(
                "Each tensor-parallel rank has only a part of each state: use save_checkpoint, or "
                "torch.distributed.checkpoint with pagoda.OptimizerState."
            )
        self._in_model.check()
        self._engine.accesses.take_changes()
        with self._engine.settled():  # numbers are read here
            entries = {state.name: self._shown_states.entry(state, blank=True) for state in self._members()}
        shapes = {name: entry for name, entry in entries.items() if entry}
        blanks = {"state": shapes, "param_groups": named(self.param_groups), **self._loss_scale()}
        with torch_file(Path(path), blanks) as (content, write):
            for name, entry in self.named_states():
                for key, value in entry.items():
                    if isinstance(value, torch.Tensor):
                        write(content["state"][name][key], value)

    def save_checkpoint(
        self,
        directory: str | Path,
        extra: dict[str, Any] | None = None,
        *,
        wait: bool = True,
        replaces: Iterable[str | Path] = (),
        on_error: Callable[[Exception], None] | None = None,
        on_complete: Callable[[], None] | None = None,
    ) -> None:
        """Write weights, master, moments, step counts, hyperparameters and RNG states to `directory`.

        The write is atomic: `directory` appears complete or not at all. The RAM it takes does not depend on the size of
        the model. `load_checkpoint` returns `extra`, with what JSON has: text, numbers, booleans, None, lists, dicts.

        Raises ConfigError for anything else in `extra`, and UsageError between backward and `step()` if units are
        updated during backward (with `gradient_accumulation_steps` and without clipping), because some units have this
        step's update and others do not.

        With `wait=False` it returns at once. Training continues while the current state is written, and the next
        `step()`, `save_checkpoint()`, `wait_for_checkpoint()` or `close()` raises an error of the write. With
        `on_error`, that function gets the error instead, on the thread that writes. One checkpoint is written at a
        time: the next waits for it. Another thread may save, also while this one trains. It saves the
        state after the last `step()`.

        State on SSD is not copied while at most `Memory(ssd_checkpoints=...)` checkpoints keep their pages: it stays in
        place, and later updates go to other pages. Otherwise it is copied. `replaces` lists checkpoints to delete after
        this one is complete. A checkpoint that was moved, is a symbolic link, cannot be read or contains other files is
        kept, with a warning. Before that, `on_complete` is called on the first rank, on the thread that writes. If it
        raises, the checkpoint has failed, and `on_complete` must have deleted the directory.
        """
        # Absolute, because the working directory may change before the thread that writes uses them.
        path, old = Path(directory).absolute(), [Path(each).absolute() for each in replaces]
        self._in_model.check()
        with self._saving:
            self.wait_for_checkpoint()
            with self._engine.alone():
                self._engine.accesses.take_changes()
                self._snapshot.save(path, named(self.param_groups), extra, old, on_error, on_complete)
            if wait:
                self.wait_for_checkpoint()

    def checkpoint_bytes(self, copied: bool = False) -> int:
        """Bytes that the tensors of the next checkpoint take in its directory. Without `copied`, state on SSD that can
        stay in its pages does not count. All ranks call this at the same point."""
        with self._engine.accesses.compute_lock.lock:
            return self._snapshot.nbytes(named(self.param_groups), copied)

    def restart_clock(self) -> None:
        """Count the next step's time and waits from now, as after an evaluation, whose waits are not those of a
        step."""
        self._engine.restart_clock()

    @property
    def checkpoint_pending(self) -> bool:
        """Whether a checkpoint is being written in the background."""
        return self._engine.saver.pending

    def wait_for_checkpoint(self) -> None:
        """Wait until the last checkpoint is on disk. Raises the error of its write."""
        self._engine.saver.wait()

    def load_checkpoint(self, directory: str | Path) -> dict[str, Any]:
        """Restore what `save_checkpoint` wrote, whatever tiers this optimizer uses. Returns `extra`.

        Raises CheckpointError if the directory is incomplete or has another model. The step that has begun is dropped,
        with its gradients and with updates during backward. It also loads after an exception, as that of Ctrl-C, that
        left states damaged.
        """
        self._in_model.check()
        self._engine.active_forwards.check_not_resident("load_checkpoint()")
        with self._engine.alone():
            groups, extra = self._snapshot.load(Path(directory), named(self.param_groups))
            for mine, saved in zip(self.param_groups, groups, strict=True):
                mine.update({key: value for key, value in saved.items() if key != "params"})
            self._shown_states.forget()
        return extra

    def synchronize(self, show: bool = True) -> None:
        """Wait until all queued updates are done and written to their homes. `show`: the next step reads all of them,
        even if updates are asynchronous. Otherwise it reads what it would have read."""
        self._engine.drain(show)

    def close(self) -> None:
        """Drain, finish a checkpoint, stop the threads and free memory and SSD space.

        The model has no weights afterwards: its forward, `state_dict` and everything else that reads weights raise
        UsageError.

        Raises the error of a failed background checkpoint after everything is closed.
        """
        try:
            self._engine.close()
        finally:
            self._hooks.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._engine.__reduce_ex__(protocol)

    def _members(self) -> Iterator[ParameterState]:
        """The state of every parameter in a group, in torch's order."""
        for group in self.param_groups:
            for param in group["params"]:
                yield self._states[id(param)]

    def _has_gradient(self, param: nn.Parameter) -> bool:
        state = self._states[id(param)]
        return state.unit.has_gradient(state.slot)

    def _loss_scale(self) -> dict[str, Any]:
        """The entry of a state dict in addition to torch's own. Empty without dynamic loss scaling."""
        scale = self._engine.stepper.scaler.state_dict()
        return {"loss_scale": scale} if scale else {}

    def _check_members(self) -> None:
        """Raises UsageError if the lists of parameters in `param_groups` have been edited."""
        if self._engine.groups.edited:
            raise UsageError(
                "The parameters in optimizer.param_groups have been changed since wrap() or add_param_group(). To add "
                "parameters, use wrap(reserve=...) and add_param_group(); to stop training some, use "
                "requires_grad_(False)."
            )


def _switch(rule: Optim, mode: Mode, state: ParameterState) -> None:
    """Call `train` or `eval` of a rule's class for a parameter, on copies, inside `Engine.overwriting`."""
    weight, kept = state.master(), {name: state.read(name) for name in state.moments()}
    rule.switch(mode, state.unit.steps[state.slot] > 0, weight, kept)
    state.write_master(weight.reshape(-1))
    for name, value in kept.items():
        state.write(name, value)
    state.engine.accesses.overwritten(state.unit)


def _refuse_foreign_step(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
    if isinstance(optimizer, PagedOptimizer):
        return
    for group in optimizer.param_groups:
        for param in group["params"]:
            state = state_of(param)
            if state is not None:
                raise UsageError(
                    f"{type(optimizer).__name__}.step() was called with {state.name!r}, a parameter of a model "
                    "that pagoda.wrap() wrapped: its weights and gradients are in pages, so only the optimizer that "
                    "wrap() returned can step them. Choose the optimizer in wrap(model, pagoda.AdamW(...)); "
                    "pagoda.Optim takes optimizer classes of torch and other libraries."
                )


@cache
def _refuse_other_optimizers() -> None:
    """After the first call of `wrap`, no other optimizer may step parameters in pages."""
    register_optimizer_step_pre_hook(_refuse_foreign_step)
