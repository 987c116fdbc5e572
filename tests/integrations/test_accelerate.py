"""Accelerate's own example loop, with its state in pages."""

import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import ProjectConfiguration
from safetensors.torch import load_file
from torch.optim.lr_scheduler import LinearLR
from torch.utils.data import DataLoader

import pagoda
from integrations.tiny_text import memory, model, samples, warmed
from pagoda.integrations import Paging, seals, staging
from pagoda.integrations.accelerate import Accelerator
from pagoda.integrations.paging import rule_of

Make = Callable[..., Any]


@pytest.fixture
def paged(tmp_path: Path) -> Iterator[Make]:
    """Makes accelerators that keep state in 300 KiB of RAM and on an SSD."""
    made: list[Accelerator] = []

    def make(host: str = "300KiB", **settings: Any) -> Accelerator:
        AcceleratorState._reset_state()
        GradientState._reset_state()
        paging = Paging(memory=memory(tmp_path / f"ssd-{len(made)}", host))
        made.append(Accelerator(paging=paging, cpu=True, **settings))
        return made[-1]

    yield make
    for accelerator in made:
        for _, optimizer in accelerator._paged:
            optimizer.optimizer.close()


def stock(**settings: Any) -> accelerate.Accelerator:
    AcceleratorState._reset_state()
    GradientState._reset_state()
    return accelerate.Accelerator(cpu=True, **settings)


class Run:
    """A training script for an accelerator, as Accelerate's documentation has it."""

    def __init__(
        self,
        accelerator: Any,
        kind: type = torch.optim.SGD,
        clip: float | None = None,
        schedule: Callable[[Any], Any] = lambda optimizer: LinearLR(optimizer, 1.0, 0.2, 10),
        **settings: Any,
    ) -> None:
        self.accelerator, self._clip = accelerator, clip
        made = model(attention_dropout=0.1)
        optimizer = kind(made.parameters(), **{"lr": 0.1, **settings})
        scheduler = schedule(optimizer)
        loader: Any = DataLoader(samples(40), batch_size=2)
        self.model, self.optimizer, loader, self.scheduler = accelerator.prepare(made, optimizer, loader, scheduler)
        self._batches = iter(loader)

    def skip(self, count: int) -> None:
        """Leave batches out."""
        for _ in range(count):
            next(self._batches)

    def steps(self, count: int) -> list[float]:
        """The losses of so many batches, and the learning rates."""
        found = []
        for batch in [next(self._batches) for _ in range(count)]:
            with self.accelerator.accumulate(self.model):
                loss = self.model(**batch).loss
                self.accelerator.backward(loss)
                if self.accelerator.sync_gradients and self._clip is not None:
                    found.append(float(self.accelerator.clip_grad_norm_(self.model.parameters(), self._clip)))
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
            found += [loss.item(), self.scheduler.get_last_lr()[0]]
        return found


def test_losses_have_the_bits_of_the_stock_accelerator(paged: Make) -> None:
    settings = {"gradient_accumulation_steps": 2}
    run = Run(paged(**settings))
    found = run.steps(8)
    assert found == Run(stock(**settings)).steps(8)
    assert sum(run.optimizer.optimizer.stats.bytes_moved.values()), "state was on the SSD"


@pytest.mark.parametrize("precision", ["no", "fp16"])
def test_a_loaded_state_goes_on_with_the_same_bits(precision: str, paged: Make, tmp_path: Path) -> None:
    """Of losses that are near those of the stock accelerator, clipped and in 16 bits."""
    settings = {"kind": torch.optim.AdamW, "lr": 1e-2, "weight_decay": 0.1, "clip": 0.1}
    scaled = Run(stock(), **settings).steps(6)
    whole = Run(paged(mixed_precision=precision), **settings)
    begun = whole.steps(3)
    for _ in range(2):  # a script may save to the same directory each time
        whole.accelerator.save_state(str(tmp_path / "state"))
    rest = whole.steps(3)
    assert begun + rest == pytest.approx(scaled, rel=1e-5 if precision == "no" else 0.1)
    again = Run(paged(mixed_precision=precision), **settings)
    again.skip(3)
    again.accelerator.load_state(str(tmp_path / "state"))
    assert again.steps(3) == rest
    assert [path.name for path in (tmp_path / "state").iterdir()] == ["pagoda"]
    names = {path.name for path in (tmp_path / "state" / "pagoda").iterdir()}
    assert not names & {"model.safetensors", "optimizer.bin"}, "state is written once"


@pytest.mark.parametrize("looks", [False, True])
def test_hooks_of_a_program_see_every_model_and_do_not_round_the_state(
    looks: bool, paged: Make, tmp_path: Path
) -> None:
    """As in scripts of diffusers, which write files of their own, in bf16 here, and load them again."""
    settings = {"kind": torch.optim.AdamW, "lr": 1e-2}

    def run() -> tuple[Run, torch.nn.Linear]:
        accelerator = paged()
        made = Run(accelerator, **settings)
        other = accelerator.prepare(torch.nn.Linear(2, 2))

        def save(models: list[Any], weights: list[Any], directory: str) -> None:
            assert models == [made.model, other]
            state = weights.pop(0) if looks else made.model.state_dict()
            torch.save({name: value.bfloat16() for name, value in dict(state).items()}, Path(directory, "own.pt"))

        def load(models: list[Any], directory: str) -> None:
            (models.pop(0) if looks else models[0]).load_state_dict(torch.load(Path(directory, "own.pt")))

        accelerator.register_save_state_pre_hook(save)
        accelerator.register_load_state_pre_hook(load)
        return made, other

    whole, other = run()
    whole.steps(2)
    whole.accelerator.save_state(str(tmp_path / "state"))
    rest = whole.steps(2)
    again, loaded = run()
    again.skip(2)
    torch.nn.init.zeros_(loaded.weight)
    again.accelerator.load_state(str(tmp_path / "state"))
    assert torch.equal(loaded.weight, other.weight)
    assert again.steps(2) == rest
    save = tmp_path / "state" / "pagoda"
    assert load_file(save / "model.safetensors").keys() == {"weight", "bias"}, "only the model that is not in pages"


def test_a_process_that_ends_while_it_saves_leaves_one_whole_save(
    paged: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The directory is copied before each file that is written or deleted, and each copy is loaded. Counters, random
    states and weights are all of the first save, or all of the second one."""
    run, state = Run(paged(gradient_accumulation_steps=2)), tmp_path / "state"
    run.steps(1)
    run.accelerator.save_state(str(state))
    run.steps(3)
    copies: list[Path] = []

    def copied_before(owner: Any, name: str) -> None:
        call = getattr(owner, name)

        def copy(*args: Any, **kwargs: Any) -> Any:
            copies.append(tmp_path / f"copy-{len(copies)}")
            shutil.copytree(state, copies[-1])
            return call(*args, **kwargs)

        monkeypatch.setattr(owner, name, copy)

    for owner, name in ((torch, "save"), (seals, "seal"), (staging, "delete"), (os, "unlink"), (os, "rmdir")):
        copied_before(owner, name)
    run.accelerator.save_state(str(state))
    monkeypatch.undo()
    assert len(copies) > 10
    loaded = set()
    for copy in [state, *copies]:
        again = Run(paged(gradient_accumulation_steps=2))
        with warnings.catch_warnings(action="ignore"):
            again.accelerator.load_state(str(copy))
        weight = next(iter(again.model.state_dict().values())).sum().item()
        rng = torch.get_rng_state().sum().item()
        loaded.add((weight, rng, again.accelerator.step, again.scheduler.get_last_lr()[0]))
    assert len(loaded) == 2
    assert {step for _, _, step, _ in loaded} == {1, 4}


def test_automatic_names_keep_the_limit_and_the_last_save_that_is_whole(paged: Make, tmp_path: Path) -> None:
    project = ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True, total_limit=2)
    run = Run(paged(project_config=project))
    (tmp_path / "checkpoints" / "checkpoint_0").mkdir(parents=True)
    (tmp_path / "checkpoints" / "checkpoint_0" / "notes.txt").touch()
    for _ in range(3):
        run.steps(1)
        run.accelerator.save_state()
    first, *kept = sorted((tmp_path / "checkpoints").iterdir())
    assert [path.name for path in first.iterdir()] == ["notes.txt"], "files of the user's stay"
    assert [path.name for path in kept] == ["checkpoint_1", "checkpoint_2"]
    project.iteration = 2
    with pytest.raises(pagoda.CheckpointError, match=r"checkpoint_2 exists already.*iteration"):
        run.accelerator.save_state()
    (scheduler,) = kept[1].glob("*/scheduler.bin")
    scheduler.write_bytes(b"")
    again = Run(paged(project_config=project))
    with pytest.warns(UserWarning, match=r"scheduler\.bin has changed"):
        again.accelerator.load_state()
    assert again.scheduler.scheduler.last_epoch == 2


def test_a_model_is_saved_as_by_the_stock_accelerator(paged: Make, tmp_path: Path) -> None:
    made = {"paged": paged(), "stock": stock()}
    for name, accelerator in made.items():
        run = Run(accelerator)
        run.steps(2)
        (tmp_path / name).mkdir()
        if name == "paged":
            accelerator.save_model(run.model, str(tmp_path / name))  # whose single file is replaced
        accelerator.save_model(run.model, str(tmp_path / name), max_shard_size="40KB")
    files = [{path.name: path for path in (tmp_path / name).iterdir()} for name in made]
    assert files[0].keys() == files[1].keys()
    for name in files[0].keys() - {"model.safetensors.index.json"}:
        mine, theirs = load_file(files[0][name]), load_file(files[1][name])
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(value, theirs[key]) for key, value in mine.items())


def test_a_model_that_pagoda_has_wrapped_can_be_prepared(paged: Make, tmp_path: Path) -> None:
    made = model()
    rule = pagoda.Optim(torch.optim.SGD, lr=0.1)
    _, optimizer = pagoda.wrap(made, rule, memory=pagoda.Memory(host="1MiB"), precision="fp32")
    accelerator = paged()
    prepared, stepped = accelerator.prepare(made, optimizer)
    assert prepared is made
    before = prepared(**{name: value[None] for name, value in samples()[0].items()}).loss
    accelerator.backward(before)
    stepped.step()
    assert prepared(**{name: value[None] for name, value in samples()[0].items()}).loss < before


def test_two_models_larger_than_ram_share_a_directory_and_have_state_of_their_own(paged: Make, tmp_path: Path) -> None:
    accelerator = paged("256KiB")
    one, two = (torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(6))) for _ in range(2))
    rules = [torch.optim.SGD(each.parameters(), momentum=0.5) for each in (two, one)]
    one, two, *optimizers = accelerator.prepare(one, two, *rules)
    for _ in range(2):
        accelerator.backward(two(one(torch.ones(2, 64))).square().mean())
        for optimizer in optimizers:
            optimizer.step()
    for optimizer in optimizers:
        assert sum(optimizer.optimizer.stats.bytes_moved.values()), "its state is on the SSD"
    accelerator.save_state(str(tmp_path / "state"))
    assert {path.name for path in (tmp_path / "state" / "pagoda").iterdir()} >= {"state", "state_1"}


def test_a_model_that_is_prepared_again_has_a_new_optimizer_and_is_saved_once(paged: Make, tmp_path: Path) -> None:
    def program(accelerator: Any) -> list[float]:
        run = Run(accelerator, lr=0.2, momentum=0.9)
        found = run.steps(3)
        optimizer = torch.optim.SGD(run.model.parameters(), lr=0.05, momentum=0.5)
        run.model, run.optimizer = accelerator.prepare(run.model, optimizer)
        run.scheduler = accelerator.prepare(LinearLR(run.optimizer, 1.0, 0.2, 10))
        found += run.steps(2)
        accelerator.save_state(str(tmp_path / type(accelerator).__module__))
        return found + run.steps(2)

    assert program(paged()) == program(stock())
    (save,) = (tmp_path / Accelerator.__module__).iterdir()
    names = {path.name for path in save.iterdir()}
    assert "state_1" not in names
    assert not {name for name in names if name.startswith("optimizer")}


def test_what_cannot_be_combined_is_refused_in_words(paged: Make) -> None:
    with pytest.raises(pagoda.ConfigError, match="together with the one model"):
        paged().prepare(torch.optim.SGD(model().parameters()))
    for settings, message in (
        ({"mixed_precision": "fp8"}, "one of no, bf16, fp16"),
        ({"dynamo_backend": "eager"}, "compile blocks before"),
    ):
        with pytest.raises(pagoda.ConfigError, match=message):
            paged(**settings)


def test_an_optimizer_becomes_a_rule_that_does_the_same() -> None:
    params = [torch.nn.Parameter(torch.zeros(2, 2))]
    rule = rule_of(torch.optim.AdamW(params, lr=0.1, weight_decay=0.2))
    assert isinstance(rule, pagoda.AdamW)
    assert (rule.defaults()["lr"], rule.defaults()["weight_decay"]) == (0.1, 0.2)
    rule = rule_of(torch.optim.AdamW(params, lr=0.1, amsgrad=True, fused=True))
    assert isinstance(rule, pagoda.Optim)
    assert rule.defaults()["amsgrad"] is True


def test_a_setting_that_an_optimizer_keeps_to_itself_is_not_lost() -> None:
    class Silent(torch.optim.SGD):
        def __init__(self, params: Any, lr: float = 0.1, backwards: bool = False) -> None:
            super().__init__(params, lr=lr)
            self.sign = -1 if backwards else 1

    params = [torch.nn.Parameter(torch.zeros(2, 2))]
    assert isinstance(rule_of(Silent(params)), pagoda.Optim)
    with pytest.raises(pagoda.ConfigError, match=r"sign = -1.*Paging\(optimizer="):
        rule_of(Silent(params, backwards=True))


def test_an_optimizer_whose_state_is_made_with_it_is_taken_over(paged: Make) -> None:
    settings = {"kind": torch.optim.Adagrad, "lr": 0.1}
    assert Run(paged(), **settings).steps(3) == Run(stock(), **settings).steps(3)


def test_schedulers_inside_a_scheduler_change_the_rate(paged: Make) -> None:
    assert Run(paged(), schedule=warmed).steps(5) == Run(stock(), schedule=warmed).steps(5)


def test_an_optimizer_of_paging_has_its_own_settings() -> None:
    one, two = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(2))
    made = torch.nn.ParameterList([one, two])
    rule = pagoda.Optim(torch.optim.SGD, lr=0.5, weight_decay=0.2)
    paging = Paging(memory=pagoda.Memory(host="1MiB"), optimizer=rule)
    groups = [{"params": [one], "weight_decay": 0.7}, {"params": [two], "weight_decay": 0.0}]
    with paging.take_over(made, torch.optim.SGD(groups, lr=0.1), None) as optimizer:
        assert [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups] == [(0.5, 0.2), (0.5, 0.0)]
    groups = [{"params": [one], "lr": 0.3}, {"params": [two]}]
    with pytest.raises(pagoda.ConfigError, match="different settings"):
        paging.take_over(made, torch.optim.SGD(groups, lr=0.1), None)


def test_precision_comes_from_accelerate_launch(paged: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    accelerator = paged()
    assert accelerator.mixed_precision == "bf16"
    assert Run(accelerator).model.lm_head.weight.dtype is torch.bfloat16


def test_a_scheduler_waits_if_fp16_overflows(paged: Make) -> None:
    run = Run(paged(mixed_precision="fp16"))
    run.accelerator.backward(run.model(**next(run._batches)).loss * float("inf"))
    run.optimizer.step()
    run.scheduler.step()
    assert run.accelerator.optimizer_step_was_skipped
    assert run.scheduler.get_last_lr() == [0.1]
