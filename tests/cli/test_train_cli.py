"""`pagoda train` end to end: what a run writes, resuming to the same bits, what bad input leaves behind."""

import json
import os
import re
import signal
import sys
from pathlib import Path

import pytest
import torch
from files import content_of
from safetensors.torch import save_file

from pagoda.cli.main import main
from pagoda.integrations.checkpoints import Checkpoints
from pagoda.optimizer import PagedOptimizer
from pagoda.train.metrics import read_metrics
from pagoda.train.settings_file import read_settings
from tests.cli.workspace import STEPS, Workspace, curve
from tests.tiny import LLAMA, at_the_first_batch

LANES = {"h2d", "d2h", "ssd_read", "ssd_write", "update", "device_update"}


@pytest.fixture
def work(tmp_path: Path) -> Workspace:
    return Workspace(tmp_path)


def test_a_run_writes_metrics_configuration_and_a_trace_and_its_loss_falls(
    work: Workspace, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = work.root / "run" / "trace.json"
    # Weights are on SSD, too. So steps read it whenever updates run.
    metrics = work.train("run", learning_rate=1e-2, trace=trace, memory__host="480KiB")
    assert [line["step"] for line in metrics] == list(range(1, STEPS + 1))
    for line in metrics:
        assert set(line["stall_s"]) - {"data"} == set(line["bytes_moved"]) == LANES
        assert line["grad_norm"] > 0
        assert line["step_s"] > 0
        assert 0 <= line["hit_rate"] <= 1
    assert metrics[-1]["bytes_moved"]["ssd_read"] > 0
    assert metrics[-1]["peak_bytes"]["host"] <= 1 << 20
    assert metrics[-1]["loss"] < metrics[0]["loss"] - 0.2
    saved = read_settings(work.root / "run" / "run.yaml")
    assert (saved.max_steps, saved.memory.host) == (STEPS, "480KiB")
    names = sorted(entry.name for entry in (work.root / "run").iterdir())
    written = ["metrics.jsonl", "plan.json", "run.yaml", "timeline.json"]
    assert names == [f"checkpoint-{STEPS}", *written, "trace.json"]
    shown = capsys.readouterr().out
    assert shown.index("Plan:") < shown.index(f"step 1/{STEPS}")
    for word in ("host", "ssd", "budget", "weight", "exp_avg"):
        assert word in shown
    assert str(trace) in shown.replace("\n", "")
    traced = json.loads(trace.read_text())
    spans = [event for event in traced["traceEvents"] if event["ph"] == "X"]
    lanes = {span["cat"] for span in spans}
    assert {"compute", "d2h", "ssd_read", "ssd_write", "update"} <= lanes <= LANES | {"compute"}
    step_us = traced["otherData"]["step_s"] * 1e6
    assert all(0 <= s["ts"] <= s["ts"] + s["dur"] <= step_us * (1 + 1e-9) for s in spans)
    assert traced["otherData"]["step_s"] == pytest.approx(metrics[2]["step_s"], rel=0.5)


def test_an_asynchronous_run_writes_how_far_weights_lag_and_goes_on_from_its_checkpoint(work: Workspace) -> None:
    settings = {"update": "async", "memory__host": "4MiB", "lr_scheduler_type": "constant"}
    metrics = work.train("run", "--no-save-at-end", max_steps=3, save_steps=2, **settings)
    assert [path.name for path in (work.root / "run").glob("checkpoint-*")] == ["checkpoint-2"]
    for line in metrics:
        assert line["staleness"]
        for seen in line["staleness"].values():
            assert 0 <= seen["last"] <= seen["max"] <= 1
            assert seen["mean"] <= seen["max"]
    assert main(work.resuming("run", "--max-steps", "5")) == 0
    assert [line["step"] for line in work.metrics("run")] == [1, 2, 3, 4, 5]
    assert main(work.resuming("run", "--max-steps", "99", "--update", "sync")) == 2


def test_an_interrupted_run_ends_its_step_saves_itself_and_says_how_to_continue(
    work: Workspace, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    handler = signal.getsignal(signal.SIGINT)
    at_the_first_batch(lambda: signal.raise_signal(signal.SIGINT), monkeypatch)
    assert main(work.args("run")) == 128 + signal.SIGINT
    assert signal.getsignal(signal.SIGINT) is handler
    said = capfd.readouterr()
    assert "SIGINT: stops after step 1 and saves it. Another signal stops at once" in said.err
    assert f"pagoda train --resume-from-checkpoint last --output-dir {work.root / 'run'}" in said.out.replace("\n", "")
    assert [line["step"] for line in work.metrics("run")] == [1]
    assert (work.root / "run" / "checkpoint-1").is_dir()
    names = {"--resume-from-checkpoint": "--resume_from_checkpoint", "--output-dir": "--output_dir"}  # as in Trainer
    assert main([names.get(arg, arg) for arg in work.resuming("run", "--max_steps", "2")]) == 0
    assert [line["step"] for line in work.metrics("run")] == [1, 2]


def test_a_run_that_was_killed_before_the_end_of_its_first_step_begins_with_resume(
    work: Workspace, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(work.args("run", "--resume-from-checkpoint", "last", max_steps=1)) == 0
    assert "has no run yet: it begins with its first step" in capsys.readouterr().out
    assert main(work.args("run", "--resume-from-checkpoint", "last", max_steps=2)) == 0
    assert [line["step"] for line in work.metrics("run")] == [1, 2]


def test_a_signal_in_the_last_step_does_not_stop_the_last_evaluation(
    work: Workspace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    at_the_first_batch(lambda: signal.raise_signal(signal.SIGINT), monkeypatch)
    assert main(work.args("run", "--eval-data", str(work.text), max_steps=1)) == 0
    assert [line["step"] for line in read_metrics(work.root / "run" / "evals.jsonl")] == [0, 1]
    assert "Interrupted" not in capsys.readouterr().out


def test_a_signal_after_the_last_step_does_not_stop_the_last_checkpoint(
    work: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait = PagedOptimizer.wait_for_checkpoint

    def interrupted(optimizer: PagedOptimizer) -> None:
        if sys._getframe(2).f_code is Checkpoints._complete.__code__:  # the last wait of the run
            signal.raise_signal(signal.SIGINT)
        wait(optimizer)

    monkeypatch.setattr(PagedOptimizer, "wait_for_checkpoint", interrupted)
    assert main(work.args("run", max_steps=1)) == 0
    assert (work.root / "run" / "checkpoint-1").is_dir()


BROKEN_MODELS: dict[str, bytes | dict[str, object]] = {
    "not UTF-8": b"\xff\xfe{}",
    "nested deeply": b"[" * 100_000,
    "a list": b"[]",
    "a huge number": b'{"model_type": "llama", "vocab_size": ' + b"9" * 5000 + b"}",
    "no layers": {"num_hidden_layers": 0},
    "layers without end": {"num_hidden_layers": 10**9},
    "a negative size": {"vocab_size": -1},
    "a wrong type": {"rope_theta": "x"},
    "an activation that is none": {"hidden_act": "x"},
    "heads that do not fit": {"num_key_value_heads": 3},
}


@pytest.mark.parametrize("case", [*BROKEN_MODELS, "a FIFO", "no generation_config"])
def test_a_broken_model_directory_is_one_error(case: str, work: Workspace, capsys: pytest.CaptureFixture[str]) -> None:
    path = work.model / "config.json"
    if case == "no generation_config":
        save_file({"model.norm.weight": torch.ones(64)}, work.model / "model.safetensors")
        (work.model / "generation_config.json").write_text("[")
    elif case == "a FIFO":
        path.unlink()
        os.mkfifo(path)
    else:
        broken = BROKEN_MODELS[case]
        path.write_bytes(broken if isinstance(broken, bytes) else json.dumps({**LLAMA, **broken}).encode())
    assert main(work.args("run", memory__ssd=None, memory__host="64MiB")) == 2
    assert capsys.readouterr().err.count("pagoda: ") == 1
    assert not (work.root / "run").exists()


def test_a_model_whose_heads_do_not_fit_is_refused_where_its_plan_is_made_too(
    work: Workspace, capsys: pytest.CaptureFixture[str]
) -> None:
    (work.model / "config.json").write_text(json.dumps({**LLAMA, "num_key_value_heads": 3}))
    machine = ("--hardware", "rtx4090", "--memory.host", "64MiB", "--max-length", "32")
    assert main(["plan", "--model", str(work.model), *machine]) == 2
    assert re.fullmatch(r"pagoda: model .* fails in its first forward .* config\.json\n", capsys.readouterr().err)


def test_resuming_names_what_does_not_belong_to_the_run_and_a_finished_one_is_not_overwritten(
    work: Workspace, capsys: pytest.CaptureFixture[str]
) -> None:
    work.train("run", max_steps=2, save_steps=1)
    before = content_of(work.root / "run")
    (work.root / "other.txt").write_text("another text, as long as it takes. " * 20)
    for args, message in (
        (work.args("run", max_steps=2), "continue the run with --resume-from-checkpoint last"),
        (
            work.args("run", "--resume-from-checkpoint", "last", max_steps=4, data=work.root / "other.txt"),
            "another text",
        ),
        (work.args("elsewhere", "--resume-from-checkpoint", "best"), "there is no run in"),
    ):
        assert main(args) == 2
        assert message in capsys.readouterr().err
    assert main(work.args("run", "--resume-from-checkpoint", "last", max_steps=2)) == 0
    assert "has finished: 2 steps are done" in capsys.readouterr().out
    assert content_of(work.root / "run") == before


RESUMED: dict[str, tuple[dict[str, str], str]] = {
    "fp16": ({"precision": "fp16", "gradients": "fp32", "weight_decay_on": "matrices"}, "exp_avg_sq"),
    "a class of torch": ({"optim": "Adagrad"}, "sum"),
}


@pytest.mark.parametrize("case", ["fp16", pytest.param("a class of torch", marks=pytest.mark.slow)])
def test_a_run_resumes_in_another_memory_split_to_the_same_bits(
    case: str, work: Workspace, capsys: pytest.CaptureFixture[str]
) -> None:
    settings, said = RESUMED[case]
    settings = {**settings, "lr_scheduler_type": "constant"}
    whole = work.train("whole", **settings)
    assert said in capsys.readouterr().out
    if case == "fp16":  # from a scale that overflows at first: random weights have large gradients with so few tokens
        assert {line["loss_scale"] for line in whole} <= {2.0**power for power in range(17)}
        assert [line["grad_norm"] is None for line in whole] == [line["skipped"] for line in whole]
        assert not whole[-1]["skipped"]
    work.train("parts", max_steps=3, save_steps=3, memory__host="1GiB", memory__ssd=None, **settings)
    flags = f"--max-steps {STEPS} --memory.unit-limit 64KiB --memory.host 1MiB"
    assert main(work.resuming("parts", *flags.split())) == 0
    assert curve(work.metrics("parts")) == curve(whole)


def test_what_a_second_placement_moves_is_said_and_in_the_plan(
    work: Workspace, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {"memory__device": "cpu:4MiB", "memory__host": "16MiB", "memory__adapt_after": 1}
    work.train("run", max_steps=2, **settings)
    said = capsys.readouterr().out.replace("\n", " ")
    moved = "After 1 step, activations and all else but pages had taken "
    assert said.index("step 1/2") < said.index(moved) < said.index("step 2/2")
    assert " of states from host to device" in said
    plan = json.loads((work.root / "run" / "plan.json").read_text())
    assert plan["reasons"][-1].startswith(moved)
    assert plan["bytes"]["device"]["exp_avg"] > 0
