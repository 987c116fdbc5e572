"""The program of a random world: it trains a model through the package, as users do.

It uses layers, makes gradients, steps, evaluates, saves and loads, and is interrupted at any moment. Layers check that
they read the weights that the algorithm says; so do checkpoints, and the homes of states when updates are drained.
"""

import copy
import ctypes
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.hooks import RemovableHandle

import pagoda
from pagoda.checkpoint.reader import SavedCheckpoint
from pagoda.engine import Engine
from pagoda.errors import BudgetError, ConfigError, NonFiniteGradientError, PagodaError, UsageError
from pagoda.memory.ssd import tier
from pagoda.memory.ssd.slots import UNWRITTEN
from pagoda.optim.rule import DTYPES
from pagoda.parameters.unit import LiveUnit
from pagoda.plan.tiers import SSD

from .device import DeviceError, QueuedDevice, SlowDevice
from .model import InterruptionError, Layer, Model
from .threads import SignalError, ViolationError
from .truth import LR, Scaling, Truth, WholeSGD, norm_of, stored_weight

if TYPE_CHECKING:
    from .world import World

LIMIT = 3000.0
"""Of the gradients' norm, in worlds that clip now and then."""


def require(holds: bool, message: str) -> None:
    if not holds:
        raise ViolationError(message)


class Program:
    """The program of one rank."""

    def __init__(self, world: "World", rank: int) -> None:
        self.world = world
        self.rank = rank
        self.rules = rules = world.rules
        self.threads, self.drive, self.note = world.threads, world.drive, partial(world.note, rank)
        self.rng = Random(world.seed)
        """Decides what programs do. They do the same on every rank."""
        self.looks = Random(f"gradients {world.seed}")
        """Decides what programs do with gradients. They do the same on every rank."""
        self.own = Random(f"{world.seed} {rank}")
        """Decides what differs between ranks."""
        kind = QueuedDevice if rules.queued else SlowDevice
        self.device = kind(self.threads, world.haste, rules.failures)
        self.truths = [Truth.first(layer, len(sizes), rules.predicts) for layer, sizes in enumerate(rules.sizes)]
        self.scaling = Scaling(rules.loss_scale)
        self.scalings: dict[Path, Scaling] = {}
        """Those of checkpoints."""
        self.order = rules.order
        self.step_number = 0
        self.attempt = 0
        """Steps that were taken, refused or dropped."""
        self.lr = LR
        self.big = 1.0
        """A factor of this step's gradients."""
        self.coming: dict[int, tuple[float, ...]] = {}
        """Layer -> the gradients that its backward gives now."""
        self.arrived: Counter[tuple[int, int]] = Counter()
        """(layer, slot) -> the gradients of this step that the package has taken."""
        self.activations = 0
        """The number that layers have saved."""
        self.step_begun = False
        """Whether compute has used a layer in a step since the last `step()`."""
        self.evaluating = False
        self.hooks: list[RemovableHandle] = []
        self.held: list[tuple[torch.Tensor, float, int, int]] = []
        """Views of weights that the program keeps: view, value, layer, step."""
        self.saving: tuple[Path, list[Truth]] | None = None
        """The checkpoint that is being written."""
        self.save_error: Exception | None = None
        self.torn = False
        """Whether a write to weights has begun and not ended, so that its failure damages states."""
        self.saved: tuple[Path, list[Truth]] | None = None
        """The last complete checkpoint."""
        self.folder = world.folder

    # --- the whole ---

    def leave_autograd(self) -> None:
        """Let go of what autograd refers to, because Python's garbage collector does not see that."""
        for hook in self.hooks:
            hook.remove()
        self.held.clear()

    def run(self) -> None:
        """Train."""
        with self.healthy():
            self._wrap()
        try:
            if self.rules.failures or self.rules.kernel_failures:
                with self.healthy():
                    self.begin_checkpoint()
                    self.end_checkpoint()
            self.threads.running.signals = self.rules.signals
            for _ in range(self.rules.steps):
                self.mending(self.a_round)
            tries = 0
            while not self.mending(self.finish):
                tries += 1
                if tries == 100:  # a drive that fails often may hardly ever read all that it must
                    self.drive.healthy = True
            with suppress(SignalError):
                self.optimizer.close()
            self.threads.running.signals = 0.0
            self.check_pages()
            self.optimizer.close()
            self.device.stop()
            self.scheduler.at_end()
        finally:
            if not self.engine.accesses.closed:  # it cannot be closed in a world that is over
                self.engine._dropped.detach()
                self.engine.accesses.closed = True
                if self.engine.store.ssd is not None:
                    tier._live.pop(self.engine.store.ssd.record.id, None)

    def check_pages(self) -> None:
        """On SSD, only the pages of versions that something needs have content."""
        store = self.engine.store
        if store.ssd is not None and SSD in self.scheduler.versions.pools:
            written = int((store.ssd._table._live.slots[: store._on_ssd] != UNWRITTEN).sum())
            needed = self.scheduler.versions.pools[SSD].in_use
            require(written <= needed, f"{written} pages on SSD have content, and {needed} are needed")

    def _wrap(self) -> None:
        rules = self.rules
        layers = [
            Layer(
                number,
                sizes,
                number not in rules.frozen,
                number not in rules.unread,
                DTYPES[rules.precision],
                rules.offloads,
            )
            for number, sizes in enumerate(rules.sizes)
        ]
        if not rules.trained:
            for param in layers[0].parameters():
                param.requires_grad_(True)
        self.model = Model(layers, rules.experts)
        settings: dict[str, Any] = {"precision": rules.precision}
        if rules.precision == "fp16":
            settings["precision"] = pagoda.MixedPrecision("fp16", loss_scale=rules.loss_scale)
        if rules.offloads:
            settings["activations"] = "offload"
        if rules.mode == "clipped":
            settings["max_grad_norm"] = LIMIT if rules.clips else 1e9
        if rules.mode == "asynchronous":
            settings["update"] = pagoda.Updates("async", predict=rules.predicts)
            settings["max_grad_norm"] = LIMIT if rules.clips else None
        elif not rules.speculates:
            settings["update"] = pagoda.Updates(speculate=False)
        if rules.announced:
            settings["gradient_accumulation_steps"] = rules.accumulation
        rule = WholeSGD() if rules.whole else rules.rule
        sizes, split = self._first_sizes()
        for tries in range(40):
            memory = self._memory(sizes, split if tries < 10 else None)
            try:
                self.model, self.optimizer = pagoda.wrap(
                    self.model,
                    rule,
                    memory=memory,
                    mesh=self.world.mesh(self.rank),
                    **{"precision": "bf16", **settings},
                )
                break
            except BudgetError as error:
                refusal: Exception = error
                least = error.needed_bytes if error.tier in sizes else None
                for tier in sizes if least is None else (str(error.tier),):
                    sizes[tier] = int(max(sizes[tier], least or 0) * (1.0 + 0.2 * self.rng.random())) + 1
            except ConfigError as error:
                sizes["host"] = int(sizes["host"] * (1.2 if split is None else 1.0))
                refusal, split = error, None
        else:
            raise ViolationError(f"no memory is enough: {refusal}")
        self.note(rules, memory)
        self.engine: Engine = self.optimizer._engine
        self.scheduler = self.engine.scheduler
        self.units: list[LiveUnit] = []
        """By layer."""
        for layer in layers:
            (unit,) = {unit for unit in self.engine.units for param in unit.params if param is layer.p0}
            self.units.append(unit)
            for slot, param in enumerate(layer.parameters()):
                if param.requires_grad:
                    told = partial(self.delivered, layer.number, slot)
                    self.hooks.append(param.register_post_accumulate_grad_hook(told))

    def _first_sizes(self) -> tuple[dict[str, int], pagoda.Split | None]:
        """Budgets to try first, which may be too small."""
        rules = self.rules
        least = (0.05 + 1.5 * rules.scarce) * (16 * sum(map(sum, rules.sizes)) + (1 << 16))
        split = None
        if rules.device and rules.device_updates:
            split = pagoda.Split(
                device_update_share=rules.device_updates,
                device_home_share=float(rules.homes),
                device_speculated_share=1.0,
            )
        states = 16 * sum(map(sum, rules.sizes)) if rules.homes else 0
        device = {"device": int(least / 2 + 0.5 * states)} if rules.device else {}
        return {"host": int(least + 2 * states), **device}, split

    def _memory(self, sizes: dict[str, int], split: pagoda.Split | None) -> pagoda.Memory:
        rules = self.rules
        memory: dict[str, Any] = {"host": sizes["host"], "page_size": 4096, "unit_limit": rules.unit_limit}
        if rules.ssd:
            memory["ssd"] = f"{self.folder}:{64 << 20}"
            memory["ssd_checkpoints"] = int(rules.keeps_pages)
        if rules.device:
            memory |= {"device": f"cpu:{sizes['device']}", "split": split}
            memory["embedding_limit"] = 1 if rules.in_ram else None
            memory["adapt_after"] = 1 if rules.adapts else None
        return pagoda.Memory(**memory)

    # --- what layers report ---

    def saves(self) -> torch.Tensor:
        """An activation that a layer saves for its backward."""
        self.activations += 1
        return torch.full((1100,), float(self.activations))  # more than a page

    def returned(self, activation: torch.Tensor, value: float) -> None:
        """A layer's backward gets the activation that had this value."""
        require(bool((activation == value).all()), f"activation {value} came back as {activation[0].item()}")

    def reads(self, layer: int, values: tuple[torch.Tensor, ...], forward: bool) -> None:
        """A layer reads its weights."""
        self.note("  reads", layer, "forward" if forward else "backward")
        self.step_begun = self.step_begun or not self.evaluating
        for _ in range(2):
            self.check_read(layer, values)
            self.threads.let_others()
        if forward and self.rng.random() < self.rules.holds:
            wanted = self.weights(layer)
            self.held += [(v.detach(), w, layer, self.step_number) for v, w in zip(values, wanted, strict=True)]

    def check_read(self, layer: int, values: Sequence[torch.Tensor]) -> None:
        truth = self.truths[layer]
        for slot, (value, wanted) in enumerate(zip(values, self.weights(layer), strict=True)):
            told = [stored_weight(version[slot].read, self.rules.precision) for version in truth.values]
            message = f"layer {layer} reads {{}}, not {wanted}, version {truth.shown} of {told}"
            self.check_values(layer, value, wanted, message)

    def compute(self, layer: int, work: Callable[[], object]) -> None:
        """A layer does this when compute comes to it, or at once in RAM."""
        if layer in self.rules.in_ram:
            work()
        else:
            self.device.compute(work)

    def check_values(self, layer: int, values: torch.Tensor, wanted: float, message: str) -> None:
        """All of these are `wanted` when compute comes to it. A device's queue does not keep memory alive."""
        place = (ctypes.c_char * values.nbytes).from_address(values.data_ptr())
        found, number, dtype = np.frombuffer(place, f"i{values.itemsize}"), _bits(wanted, values.dtype), values.dtype

        def check() -> None:
            if not (found == number).all():
                raise ViolationError(message.format(_some(torch.from_numpy(found.copy()).view(dtype))))

        self.compute(layer, check)

    def tensor(self, layer: int, size: int, value: float, dtype: torch.dtype) -> torch.Tensor:
        """A gradient that a layer's backward makes."""
        array = np.full(size, -1, f"i{dtype.itemsize}")  # NaN
        self.compute(layer, partial(array.fill, _bits(value, dtype)))
        return torch.from_numpy(array).view(dtype)

    def weights(self, layer: int) -> list[float]:
        """The weights that an access must read."""
        truth = self.truths[layer]
        return [stored_weight(value.read, self.rules.precision) for value in truth.values[truth.shown]]

    def gradients(self, layer: int, scale: float) -> tuple[float, ...] | None:
        """What a layer's backward gives."""
        require(scale == self.scaling.scale, f"the loss is multiplied by {scale}, not {self.scaling.scale}")
        if self.rng is not self.own and self.rng.random() < self.rules.departures / 20:
            return None
        if self.rules.mode != "during backward":
            self.evaluate_now_and_then()
        given = tuple(self.big * self.own.randint(1, 9) for _ in self.rules.sizes[layer])
        if self.rng.random() < self.rules.infinite:
            given = (math.inf, *given[1:])
        self.note("  gradients", layer, given)
        self.coming[layer] = given
        return tuple(scale * each for each in given)

    def delivered(self, layer: int, slot: int, _: torch.Tensor | None = None) -> None:
        """The package has taken a parameter's gradient."""
        self.deliver(layer, slot)
        self.arrived[layer, slot] += 1

    def deliver(self, layer: int, slot: int) -> None:
        of_ranks = self.world.given.setdefault((self.attempt, layer, slot), {})
        of_ranks[self.rank] = of_ranks.get(self.rank, 0.0) + self.coming[layer][slot]

    def reduce(self) -> None:
        """All ranks have come to the end of the step. Its gradients are the mean over them."""
        for (attempt, layer, slot), of_ranks in self.world.given.items():
            if attempt == self.attempt:
                self.truths[layer].gradients[slot] = sum(of_ranks.values()) / self.rules.ranks

    # --- forward and backward ---

    def a_pass(self) -> None:
        """Forward and backward, which may run twice."""
        loss = self.model(self.forward)
        self.between_passes()
        again = self.rules.mode not in ("during backward",) and not self.rules.announced and self.rng.random() < 0.1
        self.optimizer.scale(loss.sum()).backward(retain_graph=again)
        if again:
            self.optimizer.scale(loss.sum()).backward()
        del loss

    def forward(self, model: Model, x: torch.Tensor) -> torch.Tensor:
        rules = self.rules
        if not self.evaluating and any(unit.active for unit in self.units):  # the whole model is one
            self.step_begun = True
        for layer in self.order:
            if self.rng.random() < rules.departures / 2:
                continue
            x = model.layer(layer)(x, self)
            self.evaluate_now_and_then()
            if self.rng.random() < rules.departures / 20:
                raise InterruptionError
        if rules.experts:
            everyone = [*range(len(rules.sizes) - rules.experts, len(rules.sizes))]
            chosen = everyone if rules.steady else self.rng.sample(everyone, self.rng.randint(0, len(everyone)))
            x = model.experts(x, self, chosen)
        return x

    def a_dropped_pass(self) -> None:
        """All ranks drop the gradients of a pass in which each gets as far as it does."""
        self.scheduler.apart = True
        state = self.rng.getstate()
        with suppress(InterruptionError):
            far = self.own.randrange(3)
            loss = self.model(self.forward) if far > 0 else None
            if loss is not None and far > 1:
                self.optimizer.scale(loss.sum()).backward()
            del loss
        self.rng.setstate(state)
        self.drop()
        self.coming.clear()
        self.arrived.clear()

    def a_pass_apart(self) -> None:
        """Ranks use different layers. They meet after forward, as those of trainers do that add up metrics, and after
        backward, if all ranks have one."""
        self.scheduler.apart = True
        meets, evaluates = self.rng.random() < 0.5, self.rng.random() < 0.3
        shared, self.rng = self.rng, self.own
        loss = None
        with suppress(InterruptionError):
            loss = self.model(self.some_layers if meets or self.rng.random() < 0.5 else self.forward)
        self.world.network.meet()
        if loss is not None and (meets or self.rng.random() < 0.8):
            self.optimizer.scale(loss.sum()).backward()
        del loss
        if meets:
            self.world.network.meet()
            if evaluates:
                self.evaluate(self.some_layers)
                self.world.network.meet()
        self.rng = shared

    def use_gradients(self) -> None:
        """Read some gradients, and write others."""
        if self.rules.mode == "during backward":
            return
        for layer, unit in enumerate(self.units):
            for slot, (param, at) in enumerate(
                zip(self.model.layer(layer).parameters(), self.slots(layer), strict=True)
            ):
                if not unit.has_gradient(at) or self.looks.random() < 0.5:
                    continue
                found: torch.Tensor = param.grad.clone()  # type: ignore[union-attr]
                of_ranks = self.world.given[self.attempt, layer, slot]
                wanted = sum(of_ranks.values()) / self.rules.ranks
                self.world.network.meet()  # else others may have more
                require(bool((found == wanted).all()), f"a gradient of layer {layer} is {_some(found)}, not {wanted}")
                if self.looks.random() < 0.5:
                    continue
                value = self.big * self.looks.randint(1, 9)
                self.note("  writes gradient", layer, slot, value)
                if self.looks.random() < 0.5:
                    param.grad = torch.full_like(found, value)
                else:
                    param.grad.fill_(value)  # type: ignore[union-attr]
                of_ranks[self.rank] = value

    def some_layers(self, model: Model, x: torch.Tensor) -> torch.Tensor:
        """A forward that uses some layers, one of which is trained."""
        trained = self.rng.choice(self.rules.trained or [0])
        for layer in self.order:
            if layer == trained or self.rng.random() < 0.5:
                x = model.layer(layer)(x, self)
        return x

    def evaluate_now_and_then(self) -> None:
        """Another layer is used meanwhile, as an evaluation does."""
        if self.rng.random() < self.rules.departures / 4:
            layer = self.rng.randrange(len(self.rules.sizes))
            with self.evaluation():
                self.model.layer(layer)(torch.ones(1), self)

    def between_passes(self) -> None:
        """The program may save, or look at the weights."""
        roll = self.rng.random()
        if self.rules.mode == "during backward":
            return
        if roll < 0.1:
            self.begin_checkpoint()
        elif roll > 0.97:
            self.drain()

    # --- the step ---

    def a_step(self) -> None:
        rng, rules = self.rng, self.rules
        self.big = 16.0 if rules.clips and rng.random() < 0.4 else 1.0
        if rng.random() < rules.reorders:
            self.order = tuple(rng.sample(self.order, len(self.order)))
        self.coming.clear()
        self.arrived.clear()
        if rules.ranks > 1 and rules.mode != "during backward" and not rules.holds and rng.random() < 0.2:
            self.a_dropped_pass()
        passes = rules.accumulation + (not rules.announced and rng.random() < 0.1)
        apart = rules.ranks > 1 and rules.mode != "during backward" and not rules.holds and rng.random() < 0.3
        try:
            for _ in range(passes):
                self.a_pass_apart() if apart else self.a_pass()
                if not apart and self.looks.random() < 0.2:
                    self.use_gradients()
        except InterruptionError:
            self.note("interrupted")
            self.drop()
            return
        if rng.random() < 0.05 and not (rules.ranks > 1 and rules.mode == "during backward"):
            self.drop()
            return
        self.step()

    def step(self) -> None:
        lr = self.lr
        if self.rules.mode != "during backward" and self.rng.random() < self.rules.changes:
            self.lr = lr = LR * self.rng.choice([1.0, 2.0, 0.5])
        self.optimizer.param_groups[0]["lr"] = lr
        self.note("step", self.step_number, "lr", lr)
        refused, before = False, self.engine._step
        self.check_held(self.held)
        try:
            self.optimizer.step()
        except NonFiniteGradientError:
            refused = True
        except SignalError:
            if self.engine._step == before:
                raise  # nothing was done
        self.reduce()
        self.attempt += 1
        norm, scale = norm_of(self.truths, self.rules.sizes), 1.0
        skipped = not math.isfinite(norm) and self.scaling.skips
        wrong = refused != (not math.isfinite(norm) and not skipped)
        require(not wrong, f"step() took a step: {not refused}, and the norm is {norm}")
        if refused:
            self.refused(lr)
            return
        stats = self.optimizer.stats
        require(stats.skipped == skipped, f"the step is skipped: {stats.skipped}, and the norm is {norm}")
        require(stats.loss_scale == self.scaling.scale, f"the scale is {stats.loss_scale}, not {self.scaling.scale}")
        if skipped or any(truth.gradients for truth in self.truths):
            self.scaling.end_step(skipped)
        if skipped:
            self.refused(lr)
            self.turn_over()
            return
        if self.rules.clips and self.rules.mode in ("clipped", "asynchronous"):
            scale = min(1.0, LIMIT / (norm + 1e-6))
        require((stats.grad_norm or 0.0) == norm, f"the norm is {stats.grad_norm}, not {norm}")
        self.note("norm", norm, "scale", scale)
        for truth in self.truths:
            truth.apply(scale, lr)
        self.turn_over()

    def refused(self, lr: float) -> None:
        """A step was not taken. Updates during backward may stand."""
        for layer, truth in enumerate(self.truths):
            unit = self.units[layer]
            slots = self.slots(layer)
            if any(unit.steps[at] > truth.newest[slot].steps for slot, at in enumerate(slots) if at < unit.trainable):
                require(self.rules.mode == "during backward", f"layer {layer} was updated in a step that was not taken")
                require(all(map(math.isfinite, truth.gradients.values())), f"layer {layer} was updated with infinity")
                truth.apply(1.0, lr)
            truth.gradients = {}
        if self.rules.mode == "asynchronous":
            self.drained()
        else:
            self.turn_over()

    def slots(self, layer: int) -> list[int]:
        """By parameter of a layer, its slot in its unit."""
        unit, mine = self.units[layer], [*self.model.layer(layer).parameters()]
        return [next(at for at, param in enumerate(unit.params) if param is each) for each in mine]

    def turn_over(self) -> None:
        """A step is over: what the next one reads."""
        self.step_number += 1
        self.step_begun = False
        for truth in self.truths:
            truth.shown = truth.before if self.rules.mode == "asynchronous" else truth.asked
            truth.before = truth.asked

    def drop(self) -> None:
        """The program drops its gradients. If some are applied, it has to take the step."""
        self.note("drop")
        try:
            self.optimizer.zero_grad()
        except UsageError:
            require(self.rules.mode == "during backward", "gradients cannot be dropped")
            self.count_interrupted()
            self.step()
            return
        self.attempt += 1

    def count_interrupted(self) -> None:
        """An error that came while a gradient was taken, such as that of an earlier one, does not lose it."""
        records = self.engine.gradients.of_step()
        for layer in self.coming:
            record = records.get(self.units[layer].index)
            for slot, at in enumerate(self.slots(layer)) if record is not None else ():
                if at < len(record.arrivals) and record.arrivals[at] > self.arrived[layer, slot]:
                    self.delivered(layer, slot)

    # --- between steps ---

    def drain(self) -> None:
        self.note("drain")
        with self.draining():
            self.optimizer.synchronize()
        self.device.finish()
        self.check_homes()

    @contextmanager
    def draining(self) -> Iterator[None]:
        """Inside, updates are drained. What fails may fail before or after that."""
        try:
            yield
        except (Exception, SignalError):
            if not any(self.scheduler.weights(unit.index).lag for unit in self.units):
                self.drained()
            raise
        self.drained()

    def drained(self) -> None:
        for truth in self.truths:
            if self.rules.mode != "asynchronous" or not self.step_begun:
                truth.shown = truth.asked

    def check_homes(self) -> None:
        """Of drained states."""
        store, completed = self.engine.store, self.engine.collectives.completed
        for layer, truth in enumerate(self.truths):
            unit = self.units[layer]
            for at, value in zip(self.slots(layer), truth.newest, strict=True):
                spans = {state.name: store.plan.layout.span(unit.spec, at, state) for state in store.plan.layout.states}
                found = {
                    name: completed(unit.spec, name, span.first, store.read(unit.index, name, span.first, span.count))
                    for name, span in spans.items()
                    if span
                }
                self.check_states(f"the home of layer {layer}", found, value)

    def check_states(self, where: str, found: dict[str, torch.Tensor], value: Any) -> None:
        weight = found["weight"].flatten()
        shows = stored_weight(value.read, self.rules.precision)
        require(bool((weight.float() == shows).all()), f"{where} shows weights {_some(weight)}, not {shows}")
        master = found.get("master", weight).float().flatten().numpy()
        if "weight_low" in found and self.rules.precision == "fp16":
            unit = 2.0 ** ((weight.view(torch.int16).int() >> 10 & 31).clamp(min=1) - 40)
            master = (weight.float() + found["weight_low"].flatten() * unit).numpy()
        elif "weight_low" in found:
            high = weight.view(torch.int16).numpy().astype(np.int64) << 16
            low = found["weight_low"].flatten().view(torch.int16).numpy().astype(np.int64)
            master = ((high + low) & 0xFFFFFFFF).astype(np.uint32).view(np.float32)
        require((master == value.weight).all(), f"{where} has weights {_some(master)}, not {value.weight}")
        if (momentum := found.get("momentum_buffer")) is not None:
            held = momentum.flatten().numpy()
            require((held == value.momentum).all(), f"{where} has momentum {_some(held)}, not {value.momentum}")

    def evaluate(self, forward: Callable[[Model, torch.Tensor], torch.Tensor] | None = None) -> None:
        self.note("evaluate")
        with self.evaluation(), suppress(InterruptionError):
            self.model(forward or self.forward)

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Inside, uses of layers are no part of a step."""
        before, self.evaluating = self.evaluating, True
        try:
            with torch.no_grad():
                yield
        finally:
            self.evaluating = before

    def look(self) -> None:
        """The program reads weights as the last step left them. Steps read what they would without that."""
        layer = self.rng.randrange(len(self.truths))
        slot = self.rng.randrange(len(self.rules.sizes[layer]))
        self.note("look", layer, slot)
        self.let_go()
        param, value = [*self.model.layer(layer).parameters()][slot], self.truths[layer].newest[slot]
        with pagoda.gathered([param]):
            wanted = stored_weight(value.weight, self.rules.precision)
            require(bool((param.data.float() == wanted).all()), f"layer {layer} is {_some(param.data)}, not {wanted}")

    def overwrite(self) -> None:
        """The program writes weights."""
        layer = self.rng.randrange(len(self.truths))
        slot = self.rng.randrange(len(self.rules.sizes[layer]))
        value = float(self.rng.randint(1, 100))
        if layer in self.rules.frozen and self.rules.keeps_pages:
            return  # SSD has no room for other values of frozen weights than those that a checkpoint keeps
        self.note("overwrite", layer, slot, value)
        self.let_go()
        self.device.finish()
        param = [*self.model.layer(layer).parameters()][slot]
        writes = self.engine.store.writes
        self.torn = True
        try:
            with self.draining(), pagoda.gathered([param], modify=True):
                param.data.fill_(value)
        except SignalError:
            self.torn = False
            raise
        finally:
            if self.engine.store.writes != writes:  # a signal came too late, or states are damaged
                self.truths[layer].overwrite(slot, value, self.rules.precision)
        self.torn = False

    def begin_checkpoint(self) -> None:
        self.end_checkpoint()
        path = self.folder / f"checkpoint-{self.step_number}-{self.rng.randrange(1 << 30)}"
        self.note("save", path.name)
        replaces = [self.saved[0]] if self.saved is not None else []
        self.save_error = None
        self.scalings[path] = copy.copy(self.scaling)
        try:
            self.optimizer.save_checkpoint(path, wait=False, replaces=replaces, on_error=self.save_failed)
        finally:
            if self.engine.saver._job is not None:
                self.saving = path, [truth.rewound() for truth in self.truths]

    def save_failed(self, error: Exception) -> None:
        self.save_error = error

    def end_checkpoint(self) -> None:
        if self.saving is None:
            return
        path, truths = self.saving
        self.optimizer.wait_for_checkpoint()
        self.saving = None
        if self.save_error is not None:
            self.note("saving has failed:", self.save_error)
            self.check_failure(self.save_error)
            return
        self.check_checkpoint(path, truths)
        self.saved = path, truths

    def check_checkpoint(self, path: Path, truths: list[Truth]) -> None:
        """A checkpoint has the states after the step before it, and the weights that the next one reads."""
        precision = self.rules.precision
        with self.healthy(), SavedCheckpoint(path, self.engine.ssd_directories) as checkpoint:
            for layer, truth in enumerate(truths):
                names = [self.units[layer].name(at) for at in self.slots(layer)]
                for name, value, read in zip(names, truth.newest, truth.values[truth.shown], strict=True):
                    found = {
                        state: tensors[name].whole() for state, tensors in checkpoint.tensors.items() if name in tensors
                    }
                    self.check_states(f"layer {layer} in a checkpoint", found, value)
                    late, wanted = found.get("weight_back", found["weight"]), stored_weight(read.read, precision)
                    require(bool((late.float() == wanted).all()), f"steps read {_some(late)}, not {wanted}: {layer}")

    def load(self) -> None:
        """The last checkpoint takes the place of all states."""
        assert self.saved is not None
        path, truths = self.saved
        self.note("load", path.name)
        self.let_go()
        try:
            self.device.finish()
            self.optimizer.load_checkpoint(path)
        except (Exception, SignalError) as error:
            self.check_failure(error)
            with self.healthy():
                self.optimizer.load_checkpoint(path)
        self.truths, self.scaling = copy.deepcopy(truths), copy.copy(self.scalings[path])
        self.attempt += 1
        self.step_begun = self.torn = False

    # --- what fails ---

    @contextmanager
    def healthy(self) -> Iterator[None]:
        """Inside, nothing fails, and no signal comes."""
        me = self.threads.running
        before, signals = self.drive.healthy, me.signals
        self.drive.healthy = self.device.healthy = True
        me.signals = 0.0
        try:
            yield
        finally:
            self.drive.healthy = self.device.healthy = before
            me.signals = signals

    def check_failure(self, error: BaseException) -> None:
        """An error must have a cause: a signal, or a transfer that has failed."""
        if isinstance(error, SignalError) or (isinstance(error, BudgetError) and self.held):
            return
        if not (isinstance(error, PagodaError | DeviceError) and self.drive.failed + self.device.failed):
            raise error

    def mending(self, do: Callable[[], None]) -> bool:
        """Do something. After a failure, drop the step, or load a checkpoint if states are damaged."""
        try:
            do()
            return True
        except (Exception, SignalError) as error:
            self.check_failure(error)
            self.note("failed:", repr(error))
        with self.healthy():
            self.let_go()
        for tries in range(20):  # transfers that were under way may still fail
            if self.engine.damage.cause is not None:
                break
            try:
                with self.healthy() if tries else nullcontext():
                    self.drop()
                return False
            except (Exception, SignalError) as error:
                self.check_failure(error)
                self.note("dropping it failed:", repr(error))
        cause = self.engine.damage.cause
        require(cause is not None, "a step can be neither taken nor dropped, and states are not damaged")
        lost = self.device.failed and self.rules.mode == "during backward"
        torn = self.torn or self.device.failed_in_place or self.rules.adapts  # what fails while states move
        require(bool(lost or torn or self.rules.ranks > 1), f"states are damaged by {cause!r}")
        with self.healthy(), suppress(Exception):
            self.optimizer.wait_for_checkpoint()
        if self.saving is not None and self.save_error is None:
            self.saved = self.saving  # which has replaced the one before
        self.saving = None
        self.load()
        return False

    def let_go(self, before: int | None = None) -> None:
        """Drop views of weights, of all steps or those `before` one. They must have kept their values."""
        old = [each for each in self.held if before is None or each[-1] < before]
        self.held = [each for each in self.held if before is not None and each[-1] >= before]
        self.check_held(old)

    def check_held(self, views: Sequence[tuple[torch.Tensor, float, int, int]]) -> None:
        """Views keep their values. Of weights in their home, they change with the step."""
        for view, value, layer, step in views:
            if step == self.step_number or self.in_frames(layer):
                self.check_values(layer, view, value, f"a view of layer {layer} has {{}}, not {value}")

    def in_frames(self, layer: int) -> bool:
        return not self.engine.leases.in_place(self.units[layer])

    # --- the whole ---

    def a_round(self) -> None:
        number = self.step_number
        self.a_step()
        self.let_go(before=number)
        if self.rng.random() < self.rules.checkpoints:
            self.begin_checkpoint()
        if self.rng.random() < 0.3:
            self.end_checkpoint()
        roll = self.rng.random()
        if roll < 0.15:
            self.drain()
        elif roll < 0.25:
            self.evaluate()
        elif roll < 0.32:
            self.overwrite()
        elif roll > 0.92 and self.rules.mode == "asynchronous":
            self.look()
        elif roll < 0.4 and self.saved is not None:
            self.end_checkpoint()
            self.load()
        elif roll > 0.7 and self.rules.mode == "asynchronous":
            self.end_checkpoint()
            if self.saved is not None:
                self.load()

    def finish(self) -> None:
        self.let_go()
        self.end_checkpoint()
        self.drain()


def _bits(value: float, dtype: torch.dtype) -> Any:
    """A number in a dtype, as an integer with the same bits."""
    return torch.tensor([value], dtype=dtype).view(torch.uint8).numpy().view(f"i{dtype.itemsize}")[0]


def _some(found: Any) -> list[float]:
    """A few of the values in an array."""
    return sorted({*found.tolist()})[:4]
