"""A model and data are enough: what is chosen is sensible, said, and the same when it is given."""

import io
import math
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from pagoda.cli.main import main, parse
from pagoda.config.memory import Memory
from pagoda.config.training import ActivationMode
from pagoda.errors import BudgetError, ConfigError
from pagoda.forecast.activations import activations_of
from pagoda.forecast.config import PlanConfig
from pagoda.forecast.machine import find_machine_for
from pagoda.forecast.model_description import describe_model
from pagoda.forecast.step_size import with_step_size
from pagoda.mesh.mesh import open_mesh
from pagoda.models.build import positions_of
from pagoda.train import TrainConfig, defaults, run
from pagoda.train.data import Rows
from pagoda.train.defaults import Choices, Estimate, completed
from pagoda.train.metrics import read_metrics
from pagoda.train.run_dir import RunDir
from pagoda.train.settings_file import read_settings, settings_as_yaml
from pagoda.train.tokens import DataSets
from tests.text_files import TEXT, chats, write_lines, write_pretrained
from tests.tiny import write_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("request")
    write_pretrained(folder / "model")
    write_model(folder / "random")
    (folder / "text.txt").write_text(TEXT)
    write_lines(folder / "chats.jsonl", [{"messages": chat} for chat in chats(120)])
    write_lines(folder / "two.jsonl", [{"messages": chat} for chat in chats(2)])
    return folder


def chosen(folder: Path, shown: io.StringIO | None = None, **given: Any) -> TrainConfig:
    """All settings of a run of a model and data in the folder; `shown` gets what is said."""
    usual = {"model": "model", "memory": Memory(host="64MiB"), **given}
    usual |= {name: str(folder / usual[name]) for name in ("model", "data", "eval_data") if name in usual}
    config, console = TrainConfig(**usual), Console(file=shown or io.StringIO(), width=300)
    return completed(config, DataSets(config, console), open_mesh(), console)


def a_step(config: TrainConfig) -> int:
    """Sequences of a step of one rank."""
    return config.per_device_train_batch_size * config.gradient_accumulation_steps


def run_of(folder: Path, **given: Any) -> tuple[Any, str]:
    """The settings that a run took, and what it said."""
    shown = io.StringIO()
    settings = {"model": str(folder / "model"), "memory": Memory(host="64MiB"), "plan": "usual", **given}
    result = run(TrainConfig(**settings), Console(file=shown, width=300))
    return RunDir(result.out).started_config(), shown.getvalue()


def test_a_model_and_data_are_enough(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also two conversations, of which none is held out: the last checkpoint is then the best."""
    monkeypatch.chdir(tmp_path)
    Path("runs/model-two").mkdir(parents=True)
    args = ["train", "--model", str(folder / "model"), "--data", str(folder / "two.jsonl")]
    assert main([*args, "--memory.host", "64MiB", "--plan", "usual"]) == 0
    shown = capsys.readouterr().out
    run_dir = RunDir(Path("runs/model-two-2"))
    config = run_dir.started_config()
    assert config.learning_rate == 2e-5
    assert (config.max_length, a_step(config), config.eval_share) == (128, 1, 0.0)
    assert len(read_metrics(run_dir.metrics)) == config.max_steps == 6
    assert "128 tokens a step (--tokens-per-step), so that the usual epochs give 6 steps" in shown
    assert "Run: 6 steps of 1 sequence (128 tokens), 3 epochs; step 1 shows" in shown
    assert "learns little in fewer than 50: give more data, --max-steps or --num-train-epochs\n" in shown
    assert main(["generate", str(run_dir.path), "--prompt", "Hi", "--max-new-tokens", "2", "--checkpoint", "best"]) == 0


def test_tokens_of_a_step_go_by_the_size_of_the_data_and_warm_up_by_what_is_trained(folder: Path) -> None:
    def of(data: str, **given: Any) -> tuple[TrainConfig, int]:
        config = chosen(folder, data=data, **given)
        return config, a_step(config) * config.max_length

    usual, tokens = of("chats.jsonl", max_length=128)
    assert (tokens, usual.max_steps, usual.warmup_steps, usual.eval_share) == (256, 171, 5, 0.05)
    assert of("chats.jsonl", max_length=128, lora_r=2)[0].warmup_steps == 17
    longer, tokens = of("chats.jsonl", max_length=128, num_train_epochs=30.0)
    assert (tokens, longer.max_steps) == (256, 1710)
    assert of("chats.jsonl", max_length=128, tokens_per_step=2048)[1] == 2048
    text, tokens = of("text.txt", max_length=16)
    assert 100 <= text.max_steps < 200
    assert of("text.txt", max_length=16, max_steps=3)[1] == tokens


def test_every_choice_is_said_with_its_reason_and_processes_that_torchrun_restarts_keep_it(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {"data": str(folder / "text.txt"), "tokens_per_step": 512, "max_length": 64}
    given["num_train_epochs"] = 0.05
    config, shown = run_of(folder, output_dir=tmp_path / "run", **given)
    assert (config.per_device_train_batch_size, config.gradient_accumulation_steps, config.eval_share) == (8, 1, 0.05)
    assert config.max_steps == 3
    for chosen in (
        "--learning-rate 2e-05: usual for all of a pretrained model with adamw",
        "--per-device-train-batch-size 8: activations take about",
        "--gradient-accumulation-steps 1: 512 tokens a step (--tokens-per-step)",
        "--eval-share 0.05: of",
        "--max-steps 3: 0.05 epochs of",
    ):
        assert f"Chosen: {chosen}" in shown
    assert "Chosen: --max-length" not in shown, "what is given is not chosen"
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    console = Console(file=io.StringIO(), width=300)
    again = TrainConfig(model=str(folder / "model"), plan="usual", output_dir=tmp_path / "run", **given)
    assert run(again, console) is None
    assert "has finished: 3 steps are done, and --max-steps is 3" in console.file.getvalue()
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "1")
    with pytest.raises(ConfigError, match="name its directory with --output-dir"):
        run(TrainConfig(model=str(folder / "model"), **given))


def test_learning_rates_go_by_what_is_trained(folder: Path) -> None:
    shown = io.StringIO()

    def rate(**given: Any) -> float | None:
        return chosen(folder, shown, data="text.txt", max_steps=1, max_length=64, eval_share=0.0, **given).learning_rate

    assert [rate(optim=name) for name in ("adamw", "lion", "sgd")] == [2e-5, 4e-6, 3e-4]
    assert "a guess: sgd may need another" in shown.getvalue()
    assert rate(model="random", tokenizer="bytes") == 3e-4
    assert rate(lora_r=2) == 2e-4


SAID = re.compile(r"Chosen: (--[\w.-]+) (\S+): (.*)")


@pytest.mark.parametrize("given", [
    {"data": "chats.jsonl"},
    {"data": "chats.jsonl", "max_length": 32, "num_train_epochs": 0.5, "eval_share": 0.0},
    {"data": "chats.jsonl", "max_length": 64, "tokens_per_step": 4096, "eval_steps": 2},
    {"data": "two.jsonl", "eval_data": "chats.jsonl", "max_eval_samples": 8},
    {"data": "text.txt", "max_steps": 10_000, "eval_share": 0.5},
    {"data": "text.txt", "max_steps": 300, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 4},
    {"data": "short.txt", "model": "random", "eval_share": 0.0},
    {"data": "text.txt", "model": "random", "lora_r": 2, "tokenizer": "bytes"},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_every_reason_of_a_choice_is_true_of_it(
    given: dict[str, Any], ranks: int, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TrainConfig, "ranks_with_batches", lambda *_: ranks)
    (folder / "short.txt").write_text("the data are few" * 100)
    shown = io.StringIO()
    found = chosen(folder, shown, **given)
    said = {flag: (value, why) for flag, value, why in SAID.findall(shown.getvalue())}
    assert {"--learning-rate"} <= said.keys()
    of_ranks = a_step(found) * ranks
    tokens = DataSets(found, Console(quiet=True)).open(found.data, "train")
    rows = len(Rows.of(tokens, found.max_length, found.packing))
    left = rows - round(rows * found.eval_share)
    usual = min(given.get("num_train_epochs", 9), 3.0 if tokens.about.chats else 1.0)
    for flag, (value, why) in said.items():
        numbers = [float(number.replace(",", "")) for number in re.findall(r"\d[\d,]*\.?\d*(?=[ %]|$)", why)]
        match flag:
            case "--max-steps":
                epochs, sequences, each, *_ = numbers
                assert (sequences, each, int(value.replace(",", ""))) == (left, of_ranks, found.max_steps)
                assert (found.max_steps - 1) * each < epochs * sequences <= found.max_steps * each
                assert ("learns little" in why) == (found.max_steps < 50)
            case "--warmup-steps":
                assert numbers[0] == pytest.approx(100 * found.warmup_steps / found.max_steps, abs=0.05)
                assert ("the most by default" in why) == (found.warmup_steps == 100)
            case "--gradient-accumulation-steps" if "tokens a step" in why:
                assert numbers[0] == of_ranks * found.max_length
                assert numbers[1:] == [math.ceil(usual * left / of_ranks)] * ("usual epochs" in why)
                assert "usual epochs" not in why or numbers[1] >= 100 or a_step(found) == 1, "a sequence for each rank"
            case "--max-length":
                if "conversations" in why:
                    assert numbers[0] == int(100 * (np.diff(tokens.ends, prepend=0) <= found.max_length).mean())
                elif "the data" in why:
                    assert numbers == [len(tokens)]
                    assert len(tokens) < 8 * 2 * found.max_length < 8 * 2048
                else:
                    assert found.max_length == (positions_of(found.model) if "positions" in why else 1024)
            case "--eval-steps":
                assert numbers[0] == 1 + math.ceil(found.max_steps / found.eval_steps)
            case "--max-eval-samples":
                samples = min(found.max_eval_samples, rows - left or found.max_eval_samples)
                forwards = 1 + math.ceil(found.max_steps / found.eval_steps)
                forwards *= math.ceil(samples / found.per_device_train_batch_size / ranks)
                passes = found.max_steps * found.gradient_accumulation_steps
                assert numbers[0] == pytest.approx(50 * forwards / passes, abs=0.51)


def test_advice_against_few_steps_gives_more_of_them(folder: Path) -> None:
    shown, asked = io.StringIO(), {"data": "chats.jsonl", "max_length": 32, "tokens_per_step": 4096}
    few = chosen(folder, shown, **asked).max_steps
    assert few < 50
    assert "give more data, --max-steps or --num-train-epochs, or fewer --tokens-per-step" in shown.getvalue()
    for advice in ({"num_train_epochs": 9.0}, {"tokens_per_step": 512}):
        assert chosen(folder, **{**asked, **advice}).max_steps > few
    chosen(folder, wanted := io.StringIO(), **asked, max_steps=8)
    assert "learns little" not in wanted.getvalue(), "the user wants these"


def evaluating(asked: TrainConfig, rows: int) -> TrainConfig:
    """The settings of a run with that many sequences to evaluate on."""
    choices = Choices(asked)
    choices.evaluations(rows)
    return choices.config


@pytest.mark.parametrize(("steps", "rows"), [(5, 20), (50, 20), (400, 20), (400, 2000), (10_000, 300)])
def test_evaluations_take_at_most_a_tenth_of_the_time_of_a_run_that_is_not_tiny(steps: int, rows: int) -> None:
    """A forward and its backward take at least as long as two forwards."""
    for batch, passes in ((1, 1), (4, 2), (16, 1)):
        of_step = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": passes}
        asked = TrainConfig(model="gpt2", max_steps=steps, eval_share=0.5, **of_step)
        found = evaluating(asked, rows)
        evaluations = 1 + math.ceil(steps / found.eval_steps)
        forwards = evaluations * math.ceil(min(found.max_eval_samples, rows) / batch)
        assert forwards <= max(2, 0.2 * steps * passes)
        assert 2 <= evaluations <= 11
        given = replace(asked, eval_steps=3, max_eval_samples=7)
        assert evaluating(given, rows) == given


def test_each_stage_of_a_pipeline_has_a_micro_batch(folder: Path) -> None:
    for stages, shape in ((1, (8, 1)), (4, (2, 4))):
        given: dict[str, Any] = {"max_length": 64, "tokens_per_step": 512, "max_steps": 1, "eval_share": 0.0}
        found = chosen(folder, data="text.txt", pipeline_parallel=stages, **given)
        assert (found.per_device_train_batch_size, found.gradient_accumulation_steps) == shape


def test_settings_of_a_run_make_another_like_it(folder: Path, tmp_path: Path) -> None:
    first, _ = run_of(
        folder, data=str(folder / "chats.jsonl"), output_dir=tmp_path / "one", tokens_per_step=512, max_steps=2,
        betas=(0.9, 0.98),
    )  # fmt: skip
    assert main(["train", "--config", str(tmp_path / "one" / "run.yaml"), "--output-dir", str(tmp_path / "two")]) == 0
    losses = [[line["loss"] for line in read_metrics(tmp_path / name / "metrics.jsonl")] for name in ("one", "two")]
    assert losses[0] == losses[1]
    second = RunDir(tmp_path / "two").started_config()
    assert second == replace(first, output_dir=None)
    args = ["train", "--config", str(tmp_path / "one" / "run.yaml"), "--max-length", "32"]
    _, changed = parse(args)
    assert changed == replace(first, max_length=32, output_dir=None, config=changed.config)


def test_a_file_of_settings_is_checked(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("model: gpt2\nlearning_rate: 2e-5\n")
    assert read_settings(path).learning_rate == 2e-5
    config = TrainConfig(model="1e5", tokenizer="2e-5", data=("null", "a: ä"), learning_rate=2e-5)
    path.write_text(settings_as_yaml(config))
    assert read_settings(path) == config
    not_yaml = f"^{re.escape(str(path))} is not YAML"
    for text, message in (
        ("model: gpt2\nlr: 1\n", "unknown settings: 'lr'"),
        ("model: gpt2\nmemory: {hosts: 1}\n", "unknown settings: 'memory.hosts'"),
        ("model: gpt2\nmemory: 1\n", "has 1 as memory, which is not an object"),
        ("model: gpt2\nmax_steps: many\n", "max_steps as 'many', which is a value of the wrong type"),
        ("1: 2\nmax_steps: 3\nsteps: 1\n", "unknown settings: '1', 'steps'"),
        ("model: [\n", not_yaml),
        ("[" * 5000, not_yaml),
        ("model: !!timestamp foo\n", not_yaml),
        ("model: !!bool maybe\n", not_yaml),
    ):
        path.write_text(text)
        with pytest.raises(ConfigError, match=message):
            read_settings(path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="pipe cannot be read: it is not a regular file"):
        read_settings(tmp_path / "pipe")


def test_a_step_has_as_many_tokens_as_pagoda_plan_says_whatever_the_length(folder: Path) -> None:
    """16,384, as nearly as multiples of a power of two of sequences come to them."""
    for length, expected in ((64, 256), (60, 256), (68, 2 * 128)):
        asked = TrainConfig(
            model=str(folder / "random"), max_length=length, memory=Memory(activations="8GiB"), precision="bf16"
        )
        choices = Choices(asked)
        choices.batch(1e9)
        plan = PlanConfig(
            model=asked.model, max_length=length, memory=asked.memory, hardware="rtx4090", precision="bf16"
        )
        planned, _ = with_step_size(plan, find_machine_for(plan))
        for config in (choices.config, planned):
            assert config.per_device_train_batch_size * config.gradient_accumulation_steps == expected


def test_on_a_cpu_the_batch_leaves_room_for_what_malloc_keeps(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = PlanConfig(model=str(folder / "random"), max_length=16, precision="bf16", activations="recompute")
    one = activations_of(config, describe_model(config, count_flops=False)).total
    monkeypatch.setattr(defaults, "free_ram", lambda: 4 * one + (1 << 20))
    asked = TrainConfig(model=str(folder / "random"), max_length=16, memory=Memory(host="1MiB"), precision="bf16")
    tight, roomy = Choices(asked), Choices(replace(asked, memory=Memory(host="1MiB", activations=4 * one)))
    for choices in (tight, roomy):
        choices.batch(1e9)
    assert tight.config.per_device_train_batch_size == 1, "a second sequence would fit if malloc kept nothing"
    assert tight.reasons[0].endswith("with what malloc keeps")
    assert roomy.config.per_device_train_batch_size > 1


def test_inputs_of_blocks_are_offloaded_where_they_would_not_fit(tmp_path: Path) -> None:
    model, batch = "gpt-12x256", 64
    config = PlanConfig(model=model, max_length=16, precision="bf16", per_device_train_batch_size=batch)
    described = describe_model(config, count_flops=False)

    def takes(mode: ActivationMode) -> int:
        return activations_of(replace(config, activations=mode), described).total

    between = (takes("recompute") + takes("recompute+offload")) // 2
    for room, offloads in ((between, True), (2 * takes("recompute"), False)):
        memory = Memory(host="1MiB", ssd=str(tmp_path), activations=room)
        asked = TrainConfig(
            model=model, max_length=16, per_device_train_batch_size=batch, memory=memory, precision="bf16"
        )
        choices, given = Choices(asked), Choices(replace(asked, activations="keep"))
        for each in (choices, given):
            each.activations(batch, Estimate.of_run(asked))
        assert choices.config.activations == ("recompute+offload" if offloads else "recompute")
        assert bool(choices.reasons) == offloads
        assert given.config.activations == "keep"


def test_too_little_memory_for_one_sequence_is_said_before_anything_is_made(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(
        BudgetError, match=r"activations of one sequence.*smaller --max-length, or a larger --memory.activations"
    ):
        run_of(folder, data=str(folder / "text.txt"), output_dir=tmp_path / "run", memory=Memory(activations="4KiB"))
    assert not (tmp_path / "run").exists()
    with pytest.raises(ConfigError, match="not both"):
        TrainConfig(model="gpt2", max_steps=1, num_train_epochs=1.0)
