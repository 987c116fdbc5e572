"""Hooks on the live model. They report uses of units and gradients to the engine."""

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from pagoda.autograd.accesses import Accesses
from pagoda.autograd.activations.blocks import ModelBlock, find_blocks, refusal
from pagoda.autograd.activations.graph_memory import GraphMemory
from pagoda.autograd.active_forwards import ActiveForwards
from pagoda.autograd.in_ram import run_in_ram
from pagoda.autograd.reads import has_forward, params_read_in
from pagoda.autograd.stepper import Stepper
from pagoda.errors import UsageError
from pagoda.parameters.hidden import as_plain
from pagoda.parameters.unit import LiveUnit
from pagoda.runtime.device import Device
from pagoda.runtime.next_update import check_is_ours


class Parts(Protocol):
    """The parts of the engine that hooks use."""

    @property
    def accesses(self) -> Accesses: ...

    @property
    def active_forwards(self) -> ActiveForwards: ...

    @property
    def device(self) -> Device: ...

    @property
    def graphs(self) -> GraphMemory: ...

    @property
    def stepper(self) -> Stepper: ...

    @property
    def units(self) -> list[LiveUnit]: ...


class Announcing(nn.Module):
    """A module that announces which children will run, so that their weights can be fetched before."""

    coming: Callable[[Sequence[nn.Module], Sequence[nn.Module]], None] | None = None
    """Set by the runtime. A forward calls it with the children that will run, in order, and with the children that get
    a gradient of zeros without running."""

    computed: Callable[[torch.Tensor, Callable[..., Any], Sequence[torch.Tensor]], AbstractContextManager[None]] | None
    computed = None
    """Set by the runtime. Called with a tensor, a function and its arguments that give it. Inside the context that it
    returns, graphs compute the tensor again in place of saving it."""

    def pieces(self) -> list[tuple[nn.Module, int]]:
        """The children that can run, in order, each with its number of experts."""
        raise NotImplementedError


class ModelHooks:
    """All hooks on a model. After `close`, they refuse every use.

    A unit is leased during the call of its root module, and also during the call of every module that reads one of its
    parameters. Tied weights are used far from their root, and a checkpoint inside the root's call, as in transformers'
    layers, recomputes without calling the root. The outermost call also packs what graphs save.

    Hooks inside a compiled module would be compiled too. So there are none; all units inside it are leased during its
    call.
    """

    def __init__(self, model: nn.Module, engine: Parts) -> None:
        self._engine = engine
        self._refuse = refusal()
        self._accumulators: list[torch.autograd.graph.Node] = []
        self._catches: list[RemovableHandle] = []
        """Handles of the hooks on gradients."""
        self._kept: list[Callable[[Any], None]] = []
        """These hooks."""
        engine.graphs.packing.leave_alone(model.buffers())
        needed = _units_of_modules(model, engine.units)
        device = engine.device.torch_device
        for block in find_blocks(model):
            self._follow(block, needed.get(block.module, []))
        for module, units in needed.items():
            on_host = any(unit.spec.on_host for unit in units)
            self._bracket(module, units, is_root=module is model, results_to=device if on_host else None)
        for unit in engine.units:
            unit.markers = [unit.blanks[slot] for slot in range(unit.trainable)]
            for slot in range(unit.trainable):
                self._catch_gradient(unit, slot)
        for module in model.modules():
            if isinstance(module, Announcing):
                self._announce_chosen(module, needed)

    def close(self) -> None:
        """Refuse gradients from now on, and release model and engine. Python's garbage collector does not see what
        hooks on gradients hold."""
        for catch in self._catches:
            catch.remove()
        for accumulator in self._accumulators:
            accumulator.register_prehook(_refuse)
        self._catches.clear()
        self._accumulators.clear()
        self._kept.clear()

    def _bracket(
        self, module: nn.Module, units: list[LiveUnit], is_root: bool, results_to: torch.device | None
    ) -> None:
        """Lease units during every call of a module, including its own hooks. If a module has `_compiled_call_impl`,
        torch calls that instead of everything else. `results_to`: the module computes in RAM, for this device."""
        module.__dict__["__deepcopy__"] = self._engine.__reduce_ex__  # refuses, before parameters are copied
        module.__dict__["__prepare_scriptable__"] = self._refuse  # torch.jit.script calls it
        call = module._compiled_call_impl
        if call is None:
            call = module._call_impl
            # A bound method, so that copying or pickling the module reaches the engine, which refuses it.
            module.register_forward_pre_hook(self._refuse_compiling, prepend=True)
        if results_to is not None:
            call = partial(run_in_ram, call, results_to)
        module.__dict__["_compiled_call_impl"] = partial(self._run, units, is_root, call)

    def _run(self, units: list[LiveUnit], is_root: bool, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        self._refuse_compiling()
        active_forwards = self._engine.active_forwards
        if not is_root:
            return active_forwards.run(units, call, *args, **kwargs)
        with active_forwards.alone():
            if active_forwards.in_forward:
                return active_forwards.run(units, call, *args, **kwargs)
            accesses, recorded = self._engine.accesses, torch.is_grad_enabled()
            accesses.take_changes()
            if recorded:
                accesses.collectives.begin_forward()
                self._engine.graphs.begin_forward((args, kwargs))
            try:
                return active_forwards.run(units, call, *args, **kwargs)
            finally:
                accesses.collectives.end_forward(recorded)

    def _refuse_compiling(self, *_: object) -> None:
        if torch.compiler.is_dynamo_compiling() or torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
            self._refuse()

    def _follow(self, block: ModelBlock, units: list[LiveUnit]) -> None:
        """Let the activations' policy run a block's forward. Lease its units when backward recomputes it, because no
        hook sees that."""
        active_forwards, graphs = self._engine.active_forwards, self._engine.graphs

        def run(block: ModelBlock, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            again = partial(active_forwards.run, units, forward)
            return graphs.run(block, forward, args, kwargs, again)

        block.wrap(run)

    def _announce_chosen(self, experts: Announcing, needed: dict[nn.Module, list[LiveUnit]]) -> None:
        units_of = {
            expert: list(dict.fromkeys(unit for module in expert.modules() for unit in needed.get(module, [])))
            for expert, _ in experts.pieces()
        }

        def coming(chosen: Sequence[nn.Module], idle: Sequence[nn.Module]) -> None:
            self._engine.accesses.expect([unit for expert in chosen for unit in units_of[expert]])
            for expert in idle:
                for unit in units_of[expert]:
                    unit.used = True  # its gradient of zeros is one of the step's

        experts.coming, experts.computed = coming, self._engine.graphs.packing.computed

    def _catch_gradient(self, unit: LiveUnit, slot: int) -> None:
        param = unit.params[slot]
        accumulate, backward = False, -1
        caught: list[torch.autograd.graph.Node] = []

        def before(_grads: tuple[torch.Tensor, ...]) -> None:
            nonlocal accumulate, backward
            backward = torch._C._current_graph_task_id()
            with as_plain():
                check_is_ours(unit, slot)
                accumulate = unit.has_gradient(slot)
                if param.requires_grad:  # otherwise it was frozen after forward, and autograd adds nothing
                    param.grad = None

        def after(_param: torch.Tensor) -> None:
            self._engine.accesses.compute_lock.run(take)

        def take() -> None:
            with as_plain():
                if not param.requires_grad:
                    return
                adds = is_caught() and accumulate
                grad = param.grad
                if grad is None:  # a hook of the user's has dropped it, and those before it
                    unit.marked.discard(slot)
                    return
                if slot not in unit.grouped:  # nobody will step it: as if it had no gradient
                    param.grad = None
                    return
                if adds:
                    unit.mark(slot)
                else:
                    self._engine.stepper.mark(unit, slot)
                if grad.requires_grad:  # whoever wants its graph is told that it is gone
                    unit.markers[slot].requires_grad_()
                grad = grad.to_dense()  # an embedding with sparse=True gives a sparse one
            self._engine.stepper.on_gradient(unit, slot, unit.stored(slot, grad), adds)

        def is_caught() -> bool:
            """Whether `before` has seen this backward. A cast that was refused gives a parameter another node."""
            if backward == torch._C._current_graph_task_id():
                return True
            if _accumulator(param) is caught[0]:
                name = unit.name(slot)
                raise UsageError(
                    f"Two threads ran backward at once, and both gave {name!r} a gradient: let one wait for the other."
                )
            catch()
            return False

        def catch() -> None:
            # The hook is on the accumulating node. Hooks on the tensor would also run for torch.autograd.grad, which
            # does not change param.grad. As long as the node is held, every later graph uses it, also after a frozen
            # parameter is unfrozen.
            caught[:] = [_accumulator(param)]
            self._accumulators += caught
            self._catches.append(caught[0].register_prehook(_weakly(before)))

        self._kept += [before, after]
        catch()
        trained = param.requires_grad
        param.requires_grad_(True)  # torch refuses hooks on frozen parameters, which may be unfrozen later
        others: dict[int, Any] = param._post_accumulate_grad_hooks or {}
        self._catches.append(param.register_post_accumulate_grad_hook(_weakly(after)))  # type: ignore[no-untyped-call]
        if not self._engine.accesses.plan.options.update_during_backward:
            for key in [*others][:-1]:  # the user's own hooks come later, and find what all backwards have added up
                others[key] = others.pop(key)
        param.requires_grad_(trained)


def _accumulator(param: torch.Tensor) -> torch.autograd.graph.Node:
    """Autograd's node that accumulates a parameter's gradient."""
    trained = param.requires_grad
    param.requires_grad_(True)
    node = torch.autograd.graph.get_gradient_edge(param).node
    param.requires_grad_(trained)
    return node


def _weakly(hook: Callable[[Any], None]) -> Callable[[Any], None]:
    """A hook that keeps nothing alive. Python's garbage collector does not see what nodes of graphs hold."""
    of = weakref.ref(hook)

    def call(argument: Any) -> None:
        live = of()
        (_refuse if live is None else live)(argument)

    return call


def _refuse(_grads: tuple[torch.Tensor, ...]) -> None:
    raise UsageError("Backward needs a model that is trained, but its optimizer is closed.")


def _units_of_modules(model: nn.Module, units: list[LiveUnit]) -> dict[nn.Module, list[LiveUnit]]:
    """module -> the units that must be leased during its forward: those whose root it is, and those with a parameter
    that it reads. Modules with parameters and a forward are all there.

    A compiled module needs the units of everything inside it.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    owner = {id(param): unit for unit in units for param in unit.params}
    needed: dict[nn.Module, list[LiveUnit]] = {}
    for unit in units:
        needed.setdefault(modules[unit.spec.module], []).append(unit)
    for module in filter(has_forward, model.modules()):
        if any(True for _ in module.parameters()):
            needed.setdefault(module, [])  # its forward may use any parameter
        for _, param in params_read_in(module):
            held = owner.get(id(param))
            if held is not None and held not in needed.setdefault(module, []):
                needed[module].append(held)
    for compiled in [module for module in model.modules() if module._compiled_call_impl]:
        inside = [module for module in compiled.modules() if module is not compiled]
        used = [unit for module in inside for unit in needed.pop(module, [])]
        if used:
            needed[compiled] = list(dict.fromkeys((*needed.get(compiled, []), *used)))
    return needed
