"""Asynchronous updates: one step late, with the same weights throughout a step, and no gradient lost."""

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import zoo
from pairwise import each_once
from safetensors.torch import load_file
from torch import nn
from zoo import ALL_ON_SSD, HOST_WEIGHTS, PAGE, RESIDENT, Outcome, Recipe, run, squeeze

import pagoda
from pagoda.checkpoint.export import export
from pagoda.config.training import Precision
from pagoda.engine import Engine
from pagoda.optim.flat import weights_of
from pagoda.optim.rule import DTYPES
from pagoda.optimizer import PagedOptimizer
from pagoda.plan.layout import GRAD, GRAD_QUEUE, WEIGHT, WEIGHT_BACK
from pagoda.plan.options import Options
from pagoda.plan.planner import make_plan
from pagoda.plan.tiers import Budgets
from pagoda.prepare.construct import describe

from .conftest import Wrap
from .loops import state_of
from .test_device import memory as on_device

STEPS = 6
OTHER_UNITS = "32KiB"
BOTH = "both"
"""Units live on a device, or their states pass it."""


def memory_of(recipe: Recipe, placement: str, directory: Path, predict: bool = False) -> pagoda.Memory:
    if placement == BOTH:
        return on_device(recipe, 1.0, homes=0.4)
    rule = pagoda.AdamW().predicting(1.0 if predict else None)
    return squeeze(recipe.build(), placement, directory, asynchronous=True, rule=rule)


def engine_of(model: nn.Module) -> Engine:
    engine = model._pagoda_engine
    assert isinstance(engine, Engine)
    return engine


def loss_of(model: nn.Module, generator: torch.Generator) -> torch.Tensor:
    """The generator decides the batch and what dropout draws."""
    torch.manual_seed(int(torch.randint(1000, (), generator=generator)))
    return zoo.loss_of(model(**zoo.batch("plain", generator)))


def steps(model: nn.Module, optimizer: PagedOptimizer, generator: torch.Generator, count: int = 1) -> list[float]:
    """Losses of some steps."""
    return zoo.losses_of(lambda _: loss_of(model, generator), optimizer, count)


def seeded(seed: int = 1) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


LATE = pagoda.Updates("async")
PREDICTED = replace(LATE, predict=True)


# --- what is computed --------------------------------------------------------------------------------------


@each_once(placement=[HOST_WEIGHTS, ALL_ON_SSD, BOTH], checkpointing=[False, True], predict=[False, True])
def test_whatever_the_timing_each_step_reads_the_weights_without_the_step_before_it(
    placement: str, checkpointing: bool, predict: bool, tmp_path: Path, wrap: Wrap, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Updates are delayed at random. The reference computes each gradient at these weights, and applies it at once to
    the states as they have become. If weights are predicted, it goes on from the last step by another like it."""
    recipe = Recipe("plain", checkpointing=checkpointing)
    memory = memory_of(recipe, placement, tmp_path, predict)
    model, optimizer = wrap(recipe.build(), memory, max_grad_norm=0.5, update=PREDICTED if predict else LATE)
    delays = random.Random(1)

    def slow(apply: Callable[..., None]) -> Callable[..., None]:
        def slow_apply(*args: Any) -> None:
            time.sleep(delays.choice([0, 0, 0.002, 0.01]))
            apply(*args)

        return slow_apply

    for updater in engine_of(model)._executor.updates._updaters:
        monkeypatch.setattr(updater, "_apply", slow(updater._apply))
    planned = pagoda.plan_of(model).placement
    assert bool(planned.passing) == bool(planned.units_with("device", [WEIGHT])) == (placement == BOTH)
    mine = Outcome()
    generator = seeded()
    for _ in range(STEPS):
        mine.losses += steps(model, optimizer, generator)
        mine.norms.append(optimizer.stats.grad_norm)
    assert {seen.max for seen in optimizer.stats.staleness.values()} == {1}
    mine.weights, mine.optimizer = model.state_dict(), optimizer.state_dict()

    def late(model: nn.Module, optimizer: PagedOptimizer, outcome: Outcome) -> None:
        units, generator = engine_of(model).units, seeded()
        history: list[dict[str, torch.Tensor]] = []
        before = pagoda.trainable_state_dict(model)
        for step in range(STEPS):
            masters = pagoda.trainable_state_dict(model)
            predicted = {name: value - (before[name] - value) * predict for name, value in masters.items()}
            history.append({name: weights_of(value, torch.bfloat16) for name, value in predicted.items()})
            before = masters
            names = [unit.name(slot) for unit in units for slot in range(len(unit.params))]
            with _shown(model, {name: history[max(0, step - 1)][name] for name in names}):
                loss = loss_of(model, generator)
                loss.backward()
            outcome.losses.append(loss.item())
            optimizer.step()
            outcome.norms.append(optimizer.stats.grad_norm)

    mine.assert_same_bits(run(recipe.build(), RESIDENT, late, max_grad_norm=0.5))


@pytest.mark.parametrize("precision", get_args(Precision))
def test_predicting_changes_no_bit_where_nothing_is_late(precision: Precision, wrap: Wrap) -> None:
    outcomes = []
    for update in (
        pagoda.Updates(),
        replace(PREDICTED, sync_steps=STEPS),
    ):
        model, optimizer = wrap(Recipe("plain").build(), RESIDENT, precision=precision, update=update)
        generator = seeded()
        for _ in range(STEPS):
            torch.manual_seed(int(torch.randint(1000, (), generator=generator)))
            optimizer.scale(zoo.loss_of(model(**zoo.batch("plain", generator)))).backward()
            optimizer.step()
        outcomes.append((pagoda.trainable_state_dict(model), optimizer.state_dict()["state"]))
    for masters, moments in outcomes[1:]:
        zoo.assert_equal(masters, outcomes[0][0])
        zoo.assert_equal(moments, outcomes[0][1])


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_what_is_read_from_outside_is_never_predicted(precision: Precision, tmp_path: Path, wrap: Wrap) -> None:
    recipe, update, rule = Recipe("llama"), PREDICTED, pagoda.AdamW().predicting(1.0)
    memory = squeeze(recipe.build(), ALL_ON_SSD, tmp_path, precision=precision, asynchronous=True, rule=rule)
    model, optimizer = wrap(recipe.build(), memory, precision=precision, update=update)

    def take(model: Any, optimizer: PagedOptimizer, seed: int) -> list[float]:
        generator = seeded(seed)
        return zoo.losses_of(lambda _: zoo.loss_of(model(**zoo.batch("llama", generator))), optimizer, 3)

    take(model, optimizer, 1)
    optimizer.save_checkpoint(tmp_path / "saved")
    masters = pagoda.trainable_state_dict(model)
    true = {name: weights_of(value, DTYPES[precision]) for name, value in masters.items()}
    seen = model.state_dict()
    zoo.assert_equal({name: seen[name] for name in true}, true)
    for name, param in model.named_parameters():
        with torch.no_grad():
            assert not torch.equal(param.clone(), true[name])  # as a forward reads it
        with pagoda.gathered(param):
            assert torch.equal(param, true[name])
    export(tmp_path / "saved", tmp_path / "exported", dtype="fp32")
    exported = load_file(tmp_path / "exported" / "model.safetensors")
    zoo.assert_equal({name: exported[name] for name in exported}, {name: masters[name] for name in exported})
    losses, state = take(model, optimizer, 7), state_of(model, optimizer)
    resumed = wrap(recipe.build(), RESIDENT, precision=precision, update=update)
    resumed[1].load_checkpoint(tmp_path / "saved")
    assert take(*resumed, 7) == losses
    state_of(*resumed).assert_same_bits(state)
    with pytest.raises(pagoda.CheckpointError, match=r"'master'.* but this run keeps"):
        wrap(recipe.build(), RESIDENT, precision=precision)[1].load_checkpoint(tmp_path / "saved")


def test_written_weights_are_read_as_written_and_others_keep_their_master(wrap: Wrap) -> None:
    model, optimizer = wrap(Recipe("plain").build(), RESIDENT, update=PREDICTED)
    steps(model, optimizer, seeded(), 3)
    (name, param), before = next(model.named_parameters()), pagoda.trainable_state_dict(model)
    with pagoda.gathered(param, modify=True):
        param.data[0] = 0.5
    after = pagoda.trainable_state_dict(model)
    assert torch.equal(after[name][1:], before[name][1:])
    with torch.no_grad():
        assert (param[0] == 0.5).all()
        wide = param.float()  # as forwards see the weights, and as most of the masters are not
    model.load_state_dict({**model.state_dict(), name: wide})
    assert torch.equal(pagoda.trainable_state_dict(model)[name], wide)


def test_the_first_steps_wait_for_their_updates_if_asked_also_before_a_resume(tmp_path: Path, wrap: Wrap) -> None:
    recipe = Recipe("plain")
    memory = memory_of(recipe, RESIDENT, tmp_path)

    def trained(update: pagoda.Updates, drained: int = 0, saves: Path | None = None) -> tuple[Any, list[float]]:
        """`drained`: steps after which the program itself drains. `saves`: to save and resume after four."""
        model, optimizer = wrap(recipe.build(), memory, update=update)
        generator, losses = seeded(), []
        for step in range(STEPS):
            losses += steps(model, optimizer, generator)
            if step < drained:
                optimizer.synchronize()
            if step == 3 and saves is not None:
                optimizer.save_checkpoint(saves)
                model, optimizer = wrap(recipe.build(), memory, update=update)
                optimizer.load_checkpoint(saves)
        return model.state_dict(), losses

    def same(one: tuple[Any, list[float]], other: tuple[Any, list[float]]) -> bool:
        return one[1] == other[1] and all(torch.equal(one[0][name], other[0][name]) for name in one[0])

    some = replace(LATE, sync_steps=3)
    assert same(trained(replace(some, sync_steps=STEPS)), trained(pagoda.Updates()))
    assert same(trained(some), trained(LATE, drained=3))
    assert not same(trained(some), trained(LATE))
    assert same(trained(some, saves=tmp_path / "a"), trained(LATE, drained=3, saves=tmp_path / "b"))


@contextmanager
def _shown(model: nn.Module, weights: dict[str, torch.Tensor]) -> Iterator[None]:
    """Forward and backward read other weights than those at home, which stay as they are."""
    engine = engine_of(model)
    homes = {}
    engine.drain()
    for unit in engine.units:
        lease = engine.leases.of(unit)
        homes[unit.index] = lease.base.clone()
        for slot, placed in enumerate(unit.spec.slots):
            value = weights[unit.name(slot)].reshape(-1)
            lease.base[placed.offset : placed.offset + placed.param.numel] = value
    yield
    for unit in engine.units:
        engine.leases.of(unit).base.copy_(homes[unit.index])


# --- what is read ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("placement", [HOST_WEIGHTS, ALL_ON_SSD, BOTH])
def test_evaluations_read_the_weights_of_the_next_step_and_change_no_bit(
    placement: str, tmp_path: Path, wrap: Wrap
) -> None:
    recipe = Recipe("plain")

    def evaluated(model: nn.Module, grad: bool = False) -> float:
        with torch.set_grad_enabled(grad):
            return loss_of(model.eval(), seeded(7)).item()

    outcomes = []
    for evaluates in (False, True):
        directory = tmp_path / str(evaluates)
        directory.mkdir()
        model, optimizer = wrap(recipe.build(), memory_of(recipe, placement, directory), update=LATE)
        generator, losses = seeded(), []
        for _ in range(STEPS):
            losses += steps(model, optimizer, generator)
            if evaluates:
                seen = evaluated(model)
                with torch.no_grad():
                    next(model.parameters()).norm()  # such as a moving average of the weights
                model.train()
        assert {unit.max for unit in optimizer.stats.staleness.values()} == {1}
        if evaluates:
            assert seen == evaluated(model, grad=True)
        else:
            seen = evaluated(model)
            optimizer.synchronize()
            assert seen != evaluated(model)
        outcomes.append(state_of(model, optimizer))
        outcomes[-1].losses = losses
    outcomes[0].assert_same_bits(outcomes[1])


@each_once(placement=[HOST_WEIGHTS, ALL_ON_SSD, BOTH], predict=[False, True])
def test_states_are_read_with_every_step_and_that_changes_no_bit(
    placement: str, predict: bool, tmp_path: Path, wrap: Wrap
) -> None:
    recipe, outcomes, seen, update = Recipe("plain"), [], [], PREDICTED if predict else LATE
    for looks in (False, True):
        directory = tmp_path / str(looks)
        directory.mkdir()
        memory = memory_of(recipe, placement, directory, predict)
        model, optimizer = wrap(recipe.build(), memory, update=update)
        generator, losses = seeded(), []
        for _ in range(STEPS):
            losses += steps(model, optimizer, generator)
            if looks:
                seen.append((model.state_dict(), optimizer.state_dict()["state"]))
                with pagoda.gathered(model):
                    assert torch.equal(next(model.parameters()), next(iter(seen[-1][0].values())))
        assert {unit.max for unit in optimizer.stats.staleness.values()} == {1}
        outcomes.append(state_of(model, optimizer))
        outcomes[-1].losses = losses
    outcomes[0].assert_same_bits(outcomes[1])
    model, optimizer = wrap(recipe.build(), RESIDENT, update=update)
    steps(model, optimizer, seeded(), STEPS - 1)
    optimizer.synchronize()
    zoo.assert_equal(seen[-2][0], model.state_dict())
    zoo.assert_equal(seen[-2][1], optimizer.state_dict()["state"])


def test_a_graph_older_than_the_published_weights_is_refused(wrap: Wrap) -> None:
    model, optimizer = wrap(Recipe("plain").build(), RESIDENT, update="async")
    generator = seeded()
    older = loss_of(model, generator)
    steps(model, optimizer, generator)
    optimizer.synchronize()
    with pytest.raises(pagoda.UsageError, match="as they were in forward"):
        older.backward()


# --- nothing is lost ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("placement", [ALL_ON_SSD, BOTH])
def test_a_checkpoint_holds_every_step_and_a_resumed_run_starts_from_exactly_that(
    placement: str, tmp_path: Path, wrap: Wrap
) -> None:
    recipe = Recipe("plain")
    memory = memory_of(recipe, placement, tmp_path)
    model, optimizer = wrap(recipe.build(), memory, max_grad_norm=0.5, update=LATE)
    generator = seeded()
    optimizer.save_checkpoint(tmp_path / "start")
    start = model.state_dict()
    losses = steps(model, optimizer, generator, 4)
    loss_of(model, generator)  # a step that has begun and is interrupted
    optimizer.save_checkpoint(tmp_path / "saved")
    saved = state_of(model, optimizer)
    assert all(state["step"] == 4 for state in optimizer.state_dict()["state"].values())

    resumed = wrap(recipe.build(), RESIDENT, max_grad_norm=0.5)
    resumed[1].load_checkpoint(tmp_path / "saved")
    state_of(*resumed).assert_same_bits(saved)
    optimizer.load_checkpoint(tmp_path / "start")  # replaces what lags
    zoo.assert_equal(model.state_dict(), start)
    assert steps(model, optimizer, seeded()) == losses[:1]


@each_once(
    placement=[RESIDENT, HOST_WEIGHTS, ALL_ON_SSD, BOTH],
    predict=[False, True],
    paged=[False, True],
    begun=[False, True],
)
def test_neither_a_checkpoint_nor_a_resume_from_it_changes_a_bit(
    placement: str, predict: bool, paged: bool, begun: bool, tmp_path: Path, wrap: Wrap
) -> None:
    """`paged`: the checkpoint keeps pages on SSD. `begun`: a step is interrupted that has begun before it is saved. A
    resumed run may have other units."""
    recipe, saved, update = Recipe("plain"), tmp_path / "saved", PREDICTED if predict else LATE

    def wrapped(name: str) -> tuple[Any, PagedOptimizer]:
        (tmp_path / name).mkdir(exist_ok=True)
        memory = replace(memory_of(recipe, placement, tmp_path / name, predict), ssd_checkpoints=int(paged))
        if name == "other":
            memory = replace(RESIDENT, unit_limit=OTHER_UNITS)
        return wrap(recipe.build(), memory, max_grad_norm=0.5, update=update)

    def ends(run: tuple[Any, PagedOptimizer], losses: list[float], generator: torch.Generator) -> Outcome:
        losses += steps(*run, generator, 3)
        outcome = state_of(*run)
        outcome.losses = losses
        return outcome

    whole, generator = wrapped("whole"), seeded()
    wanted = ends(whole, steps(*whole, generator, 3), generator)
    saving, generator = wrapped("run"), seeded()
    losses = steps(*saving, generator, 3)
    if begun:
        loss_of(saving[0], seeded(2))
    saving[1].save_checkpoint(saved, wait=False)
    state, before = generator.get_state(), [*losses]
    ends(saving, losses, generator).assert_same_bits(wanted)
    saving[1].wait_for_checkpoint()
    again = seeded()
    for name in (None, "run", "other"):
        run = saving if name is None else wrapped(name)
        again.set_state(state)
        run[1].load_checkpoint(saved)
        ends(run, [*before], again).assert_same_bits(wanted)
        assert {seen.max for seen in run[1].stats.staleness.values()} == {1}
        run[1].close()


def test_a_run_with_other_updates_goes_on_from_the_newest_weights_and_says_so(
    tmp_path: Path, wrap: Wrap, caplog: pytest.LogCaptureFixture
) -> None:
    model, optimizer = wrap(Recipe("plain").build(), RESIDENT, update=LATE)
    steps(model, optimizer, seeded(), 3)
    optimizer.save_checkpoint(tmp_path / "late")
    optimizer.synchronize()
    optimizer.save_checkpoint(tmp_path / "drained")
    losses = []
    for name in ("late", "drained"):
        caplog.clear()
        run = wrap(Recipe("plain").build(), RESIDENT)
        run[1].load_checkpoint(tmp_path / name)
        assert ("reads the newest weights" in caplog.text) is (name == "late")
        losses.append(steps(*run, seeded(7), 3))
    assert losses[0] == losses[1]


def test_a_modified_parameter_is_read_by_the_next_forward_and_kept_by_the_next_update(wrap: Wrap) -> None:
    model, optimizer = wrap(Recipe("plain", frozen=True).build(), RESIDENT, update="async")
    generator = seeded()
    params = dict(model.named_parameters())
    frozen = next(name for name, param in params.items() if not param.requires_grad)
    steps(model, optimizer, generator)
    with pagoda.gathered(params[frozen], modify=True):
        params[frozen].data.fill_(0.25)
    for _ in range(3):
        steps(model, optimizer, generator)
        assert torch.equal(model.state_dict()[frozen], torch.full(params[frozen].shape, 0.25, dtype=torch.bfloat16))


USES: dict[str, Callable[[nn.Module, PagedOptimizer], object]] = {
    "synchronize": lambda model, optimizer: optimizer.synchronize(),
    "step": lambda model, optimizer: optimizer.step(),
    "write": lambda model, optimizer: next(model.parameters()).mul_(1.0),
    "load": lambda model, optimizer: model.load_state_dict(model.state_dict()),
}


@pytest.mark.parametrize("use", USES)
def test_weights_that_an_inference_brought_can_be_trained(wrap: Wrap, use: str) -> None:
    model, optimizer = wrap(Recipe("plain").build(), RESIDENT, update="async")
    generator = seeded()
    steps(model, optimizer, generator)
    if use == "step":
        loss_of(model, generator).backward()
    with torch.inference_mode():
        USES[use](model, optimizer)
    steps(model, optimizer, generator, 3)


def test_a_step_that_is_interrupted_or_not_finite_is_dropped_alone(wrap: Wrap) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    outcomes = []
    for disturbed in (True, False):
        model: Any
        model, optimizer = wrap(Recipe("plain").build(), RESIDENT, update="async")
        generator = seeded()
        steps(model, optimizer, generator)
        optimizer.synchronize()
        if disturbed:
            (loss_of(model, seeded(2)) * float("nan")).backward()
            with pytest.raises(pagoda.NonFiniteGradientError):
                optimizer.step()
            optimizer.synchronize()
            handle = model.blocks[1].down.register_forward_pre_hook(interrupt)
            with pytest.raises(KeyboardInterrupt):
                loss_of(model, seeded(2))
            handle.remove()
        for _ in range(2):
            steps(model, optimizer, generator)
            optimizer.synchronize()
        assert max(seen.max for seen in optimizer.stats.staleness.values()) <= 1
        outcomes.append(state_of(model, optimizer))
    outcomes[0].assert_same_bits(outcomes[1])


# --- the plan ----------------------------------------------------------------------------------------------


def test_the_plan_holds_what_asynchronous_updates_take_and_says_so(tmp_path: Path) -> None:
    root, states = describe(Recipe("plain").build()), pagoda.AdamW().states("bf16")
    options = Options(PAGE, 1 << 17, clipping=True, asynchronous=True)
    plan = make_plan(root, states, Budgets(1 << 40), options)
    host = plan.bytes["host"]
    assert host[WEIGHT_BACK] == host[WEIGHT]
    assert host[GRAD_QUEUE] == host[GRAD] == plan.layout.total_pages(GRAD) * PAGE
    assert any("lag one step" in reason for reason in plan.reasons)
    with pytest.raises(pagoda.BudgetError, match="or set update='sync'") as refused:
        make_plan(root, states, Budgets(host[GRAD], None, 1 << 40), options)
    assert refused.value.tier == "host"
    needed = refused.value.needed_bytes
    tight = make_plan(root, states, Budgets(needed, None, 1 << 40), options)
    assert tight.peak_bytes["host"] <= needed
    assert tight.bytes["ssd"][WEIGHT_BACK] == tight.bytes["ssd"][WEIGHT]
    assert tight.bytes["host"][GRAD] + tight.bytes["host"][GRAD_QUEUE] == 2 * host[GRAD]


def test_weights_are_predicted_only_where_steps_resemble_each_other() -> None:
    for rule, why in (
        (pagoda.SGD(lr=1e-2), "without momentum, a step of SGD"),
        (pagoda.SignSGD(lr=1e-2), "without momentum, a step of SignSGD"),
        (pagoda.Muon(lr=1e-2), "element-wise optimizers, not Muon"),
        (pagoda.Optim(torch.optim.Adagrad, lr=1e-2), "element-wise optimizers, not Optim"),
    ):
        with pytest.raises(pagoda.ConfigError, match=why):
            pagoda.wrap(nn.Linear(4, 4), rule, update=PREDICTED, precision="bf16")
    with pytest.raises(pagoda.ConfigError, match="predict=True needs update='async'"):
        pagoda.Updates(predict=True)


def test_settings_that_cannot_be_used_are_refused() -> None:
    with pytest.raises(pagoda.ConfigError, match="update is 'later'"):
        pagoda.Updates("later")
    with pytest.raises(TypeError, match="max_staleness"):
        pagoda.Updates("async", max_staleness=2)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="positional"):
        pagoda.Updates("async", 2)  # type: ignore[misc]
