"""What `--resume-from-checkpoint last` goes on from: the last checkpoint that is whole, of this run and these settings,
or nothing yet."""

import os
import re
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from files import content_of, flip
from pairwise import each_once
from rich.console import Console

from pagoda.cli.main import main
from pagoda.config.memory import Memory
from pagoda.errors import CheckpointError, ConfigError
from pagoda.train import TrainConfig, run
from pagoda.train.metrics import read_metrics
from pagoda.train.run_dir import RunDir
from tests.tiny import at_the_first_batch, before_step, command, tiny_run, trained, write_model


def config_in(folder: Path) -> TrainConfig:
    memory = Memory(host="64MiB", page_size="4KiB", unit_limit="128KiB")
    return tiny_run(folder, memory=memory, save_steps=2, save_total_limit=0)


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    """A run that has ended, with checkpoints after steps 2 and 4: to be copied, not changed."""
    config = config_in(tmp_path_factory.mktemp("done"))
    run(config, Console(quiet=True))
    return config


@pytest.fixture
def config(done: TrainConfig, tmp_path: Path) -> TrainConfig:
    """That run, elsewhere, to be resumed."""
    shutil.copytree(done.output_dir, tmp_path / "run")
    return replace(done, output_dir=tmp_path / "run", resume_from_checkpoint="last")


def tensors_of(checkpoint: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in checkpoint.rglob("*.safetensors")}


def curve(config: TrainConfig) -> list[tuple[object, ...]]:
    return [(m["step"], m["loss"], m["grad_norm"], m["lr"]) for m in read_metrics(RunDir(config.output_dir).metrics)]


def test_a_run_goes_back_to_the_checkpoint_that_is_named(tmp_path: Path) -> None:
    config = ssd_config(tmp_path)
    run(config, Console(quiet=True))
    config = replace(config, resume_from_checkpoint="last")
    last = RunDir(config.output_dir).checkpoint(4)
    before, first = content_of(last), curve(config)
    result, shown = trained(replace(config, resume_from_checkpoint="checkpoint-2"))
    assert (result.first_step, result.last_step) == (3, 4)
    assert "Going back to the checkpoint after step 2: the 2 steps after it run again" in shown
    later = last.with_name("checkpoint-4.later")
    assert content_of(later) == before
    for checkpoint in (last, later):
        assert main(["export", str(checkpoint), str(tmp_path / checkpoint.name), "--dtype", "fp32"]) == 0
    assert tensors_of(tmp_path / last.name) == tensors_of(tmp_path / later.name) != {}
    assert curve(config) == first
    where = ["--output-dir", str(config.output_dir), "--memory.ssd", str(config.memory.ssd)]
    assert main(["train", "--resume-from-checkpoint", "last", *where]) == 0, "it goes on from the last one again"


DAMAGES: dict[str, Callable[[Path], None]] = {
    "a bit of a tensor": lambda checkpoint: flip(checkpoint / "pagoda" / "exp_avg.safetensors"),
    "no manifest": lambda checkpoint: (checkpoint / "pagoda" / "manifest.json").unlink(),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_refused_with_the_names_of_others(
    damage: str, config: TrainConfig, done: TrainConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    last = RunDir(config.output_dir).checkpoint(4)
    DAMAGES[damage](last)
    before = content_of(config.output_dir)
    for name, message in (
        ("last", r"checkpoint-4 cannot be used: .*Its other checkpoints: checkpoint-2\."),
        ("checkpoint-3", "it has checkpoint-2, checkpoint-4"),
    ):
        assert main(["train", "--resume-from-checkpoint", name, "--output-dir", str(config.output_dir)]) == 2
        assert re.search(message, capsys.readouterr().err)
    assert content_of(config.output_dir) == before
    damaged = content_of(last)
    result, _ = trained(replace(config, resume_from_checkpoint="checkpoint-2"))
    assert (result.first_step, result.last_step) == (3, 4)
    assert content_of(last.with_name("checkpoint-4.later")) == damaged
    assert tensors_of(last) == tensors_of(RunDir(done.output_dir).checkpoint(4))
    assert curve(config) == curve(done)


def test_a_checkpoint_under_the_name_of_another_step_is_not_taken_for_it_and_without_any_a_run_begins_anew(
    config: TrainConfig, done: TrainConfig
) -> None:
    run_dir = RunDir(config.output_dir)
    shutil.rmtree(run_dir.checkpoint(4))
    shutil.copytree(run_dir.checkpoint(2), run_dir.checkpoint(3))
    with pytest.raises(CheckpointError, match="it is the state after step 2, under another name"):
        trained(config)
    for checkpoint in run_dir.path.glob("checkpoint-*"):
        shutil.rmtree(checkpoint)
    result, shown = trained(config)
    assert (result.first_step, result.last_step) == (1, 4)
    assert "has no checkpoint yet: the run starts from its first step" in shown
    assert curve(config) == curve(done)


def ssd_config(tmp_path: Path) -> TrainConfig:
    """All state on SSD, of which a checkpoint keeps the pages."""
    (tmp_path / "ssd").mkdir()
    config = replace(config_in(tmp_path), model=write_model(tmp_path / "model"), save_total_limit=2)
    memory = Memory(host="900KiB", ssd=str(tmp_path / "ssd"), unit_limit="128KiB", page_size="4KiB")
    return replace(config, memory=memory, lr_scheduler_type="constant")


@pytest.mark.parametrize("how", [pytest.param("bits", marks=pytest.mark.slow), "gone"])
def test_a_checkpoint_whose_pages_on_ssd_are_damaged_or_gone_is_not_used(how: str, tmp_path: Path) -> None:
    """Pages are adopted without being read: what is damaged there would show in the middle of a step."""
    config = ssd_config(tmp_path)
    whole = replace(config, output_dir=tmp_path / "whole", memory=Memory(host="64MiB"))
    run(whole, Console(quiet=True))
    run(replace(config, max_steps=2), Console(quiet=True))
    (pages,) = (tmp_path / "ssd").glob("*/pages")
    (first,) = pages.parent.glob("commits/*")
    before = pages.read_bytes()
    trained(replace(config, resume_from_checkpoint="last"))
    content = bytearray(pages.read_bytes())
    changed = [at for at in range(0, len(content), 4096) if content[at : at + 4096] != before[at : at + 4096]]
    assert changed, "the checkpoint after step 4 has pages that the one after step 2 has not"
    if how == "bits":
        for at in changed:
            content[at] ^= 1
        pages.write_bytes(content)
    else:
        (second,) = set(pages.parent.glob("commits/*")) - {first}
        second.unlink()
    with pytest.raises(CheckpointError, match=r"checkpoint-4 cannot be used: .*Its other checkpoints: checkpoint-2\."):
        trained(replace(config, resume_from_checkpoint="last"))
    result, _ = trained(replace(config, resume_from_checkpoint="checkpoint-2"))
    assert result.first_step == 3
    assert curve(config) == curve(whole)


@each_once(ssd=[False, True], predict=[True, False])
def test_with_asynchronous_updates_neither_checkpoints_nor_a_signal_change_a_bit(
    ssd: bool, predict: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = ssd_config(tmp_path) if ssd else config_in(tmp_path)
    config = replace(config, update="async", predict=predict, max_steps=6, eval_share=0.2)
    if ssd:
        config = replace(config, memory=replace(config.memory, host="2MiB"))
    whole = replace(config, output_dir=tmp_path / "whole", save_steps=0, save_minutes=0.0, keep_best=False)
    trained(whole)
    with monkeypatch.context() as patched:
        before_step(3, lambda: signal.raise_signal(signal.SIGTERM), patched)
        assert trained(config)[0].stopped_by == signal.SIGTERM
    assert trained(replace(config, resume_from_checkpoint="last"))[0].first_step == 4
    assert curve(config) == curve(whole)
    exported = []
    for each in (config, whole):
        to = tmp_path / "exported" / each.output_dir.name
        assert command(f"export {each.output_dir} {to} --dtype fp32") == 0
        exported.append(tensors_of(to))
    assert exported[0] == exported[1] != {}


def test_the_last_evaluation_of_an_asynchronous_run_is_of_the_weights_that_it_saves(tmp_path: Path) -> None:
    config = replace(config_in(tmp_path), update="async", predict=True, eval_share=0.2, eval_steps=4)
    trained(config)
    evals = RunDir(config.output_dir).evals
    *before, last = read_metrics(evals)
    evals.write_text("".join(evals.read_text().splitlines(keepends=True)[:-1]))
    trained(replace(config, resume_from_checkpoint="last", max_steps=5))
    again = read_metrics(evals)[len(before)]
    assert (again["step"], again["loss"]) == (last["step"], last["loss"])


def edited(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert re.search(old, text)
    path.write_text(re.sub(old, new, text))


def test_an_edited_configuration_of_the_model_is_noticed(config: TrainConfig, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(config.model, model)
    config = replace(
        config, model=str(model), resume_from_checkpoint=None, output_dir=tmp_path / "other", save_at_end=True
    )
    run(config, Console(quiet=True))
    before = content_of(config.output_dir)
    edited(model / "config.json", "}$", ', "rms_norm_eps": 0.1}')
    with pytest.raises(CheckpointError, match=r"rms_norm_eps was .* and is 0.1"):
        trained(replace(config, resume_from_checkpoint="last", max_steps=6))
    assert content_of(config.output_dir) == before


def test_the_configuration_of_another_run_is_noticed(config: TrainConfig, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = RunDir(config.output_dir)
    run_dir.create(replace(run_dir.started_config(), seed=1))
    before = content_of(config.output_dir)
    capsys.readouterr()
    assert command(f"train --resume-from-checkpoint last --output-dir {config.output_dir} --max-steps 6") == 2
    assert "--seed 1 (the checkpoint has 0)" in capsys.readouterr().err
    assert content_of(config.output_dir) == before


@pytest.mark.parametrize("resume", [False, True])
def test_two_runs_in_one_directory_are_an_error_before_anything_is_written_and_reading_needs_no_lock(
    resume: bool, config: TrainConfig, done: TrainConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def start_others() -> None:
        for again in (False, True):
            with pytest.raises(ConfigError, match=rf"is in use by another run \(process {os.getpid()} on"):
                run(replace(config, resume_from_checkpoint="last" if again else None), Console(quiet=True))
        if resume:
            assert main(["inspect", "--verify", str(config.output_dir)]) == 0
            assert main(["export", str(config.output_dir), str(tmp_path / "exported")]) == 0

    at_the_first_batch(start_others, monkeypatch)
    shutil.rmtree(RunDir(config.output_dir).checkpoint(4) if resume else config.output_dir)
    run(replace(config, resume_from_checkpoint="last" if resume else None), Console(quiet=True))
    assert (tmp_path / "exported" / "config.json").exists() == resume
    assert curve(config) == curve(done)
    assert {path.name for path in config.output_dir.iterdir()} == {path.name for path in done.output_dir.iterdir()}


def test_a_resumed_run_may_divide_a_step_in_another_way_but_not_change_it(config: TrainConfig) -> None:
    for changed, said in (
        ({"gradient_accumulation_steps": 2}, "4 sequences a step, .* has 2"),
        ({"per_device_train_batch_size": 6}, r"6 sequences a step, .* has 2\. Leave out --per-device-train-batch"),
    ):
        with pytest.raises(ConfigError, match=said):
            trained(replace(config, max_steps=5, **changed))
    result, _ = trained(replace(config, max_steps=5, per_device_train_batch_size=1, gradient_accumulation_steps=2))
    assert (result.first_step, result.last_step) == (5, 5)
