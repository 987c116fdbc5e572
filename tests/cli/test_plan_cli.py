"""`pagoda plan`: what it prints, writes and exits with."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import GPT2Config

from pagoda.cli.main import main
from pagoda.models.shapes import is_built_in
from pagoda.plan.placement import MEANING
from pagoda.simulate.hardware import Hardware
from tests.forecast.machines import SMALL

KEYS = {
    "fits", "params", "bytes", "step_s", "tokens_per_s", "tflops_per_gpu", "binding_lane", "lanes", "accesses",
    "ssd_bytes_written_per_step", "advice",
}  # fmt: skip


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hardware") / "small.json"
    path.write_text(SMALL.to_json())
    return path


Command = Callable[..., Any]


@pytest.fixture
def plan(capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs `pagoda plan` in this process: `returncode`, `stdout`, `stderr`."""

    def run(*args: object) -> Any:
        try:
            code = main(["plan", *map(str, args)])
        except SystemExit as exited:
            code = int(exited.code or 0)
        said = capsys.readouterr()
        return SimpleNamespace(returncode=code, stdout=said.out, stderr=said.err)

    return run


def test_it_prints_the_plan_the_figures_and_what_would_help(plan: Command, machine: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    done = plan(
        *("--model", "gpt-2x192", "--hardware", machine, "--max-length", 64, "--memory.host", "80MiB"),
        *("--plan", "usual", "--trace", trace),
    )
    assert (done.returncode, done.stderr) == (0, "")
    for said in ("Fits.", "exp_avg_sq", "budget", "tokens/s", "of peak", "binding lane", "drive wear", "compute waits"):
        assert said in done.stdout
    assert "What would help" in done.stdout
    said = " ".join(done.stdout.split())
    for line in re.findall(r"│ (\w+) +│", done.stdout):
        if line in MEANING:
            assert f"{line} = {MEANING[line]}" in said
    spans = [event for event in json.loads(trace.read_text())["traceEvents"] if event["ph"] == "X"]
    step_us = json.loads(trace.read_text())["otherData"]["step_s"] * 1e6
    assert {"compute", "d2h", "ssd_read", "ssd_write", "update"} == {span["cat"] for span in spans}
    assert all(0 <= s["ts"] <= s["ts"] + s["dur"] <= step_us * (1 + 1e-9) for s in spans)


def test_a_length_that_is_left_open_is_at_most_the_models_positions(
    plan: Command, machine: Path, tmp_path: Path
) -> None:
    config = GPT2Config(vocab_size=256, n_positions=512, n_embd=32, n_layer=1, n_head=2)
    config.save_pretrained(tmp_path)
    for model, length in ((tmp_path, 512), ("gpt2", 1024)):
        done = plan("--model", model, "--hardware", machine, "--plan", "usual")
        assert done.returncode == 0
        assert f" x {length} tokens" in done.stdout
        assert ("- --max-length 512: the model's positions." in done.stdout) == (length == 512)
    given = plan("--model", tmp_path, "--hardware", machine, "--max-length", 1024)
    assert (given.returncode, given.stdout) == (2, "")
    assert "max-length 1024 is above the 512 positions of model" in given.stderr


def test_json_is_all_that_it_prints_and_the_exit_code_says_whether_it_fits(plan: Command, machine: Path) -> None:
    asked = ("--model", "gpt-2x192", "--hardware", machine, "--max-length", 64, "--json")
    fits, does_not = plan(*asked), plan(*asked, "--memory.host", "1MiB")
    assert (fits.returncode, fits.stderr, does_not.returncode, does_not.stderr) == (0, "", 1, "")
    answer: dict[str, Any] = json.loads(fits.stdout)
    refused: dict[str, Any] = json.loads(does_not.stdout)
    assert set(answer) >= KEYS
    assert list(refused) == list(answer)
    assert answer["fits"] is True
    assert answer["params"] == 10_745_088
    assert answer["bytes"]["host"]["exp_avg"] >= 4 * answer["params"]
    assert set(answer["lanes"]["compute"]) == {"busy_s", "stall_s"}
    assert sum(answer["state_bytes_per_parameter"].values()) == 12
    assert (refused["fits"], refused["step_s"]) == (False, None)
    assert "needs at least" in refused["refusal"]
    assert "Raise --memory.host" in refused["refusal"]


SETTINGS = {
    "--model lama-8b --hardware rtx4090": "Did you mean 'llama-8b'?",
    "--hardware h100": "--max-model",
    "--model gpt2 --hardware h100x8 --pipeline-parallel 3": "--pipeline-parallel is 3, which",
    "--model gpt2 --hardware rtx4090 --sequence-parallel 3": "--sequence-parallel 3 does not divide",
    "--model mixtral-15m --hardware h100x8 --sequence-parallel 2": "each rank would balance its experts",
    "--model gpt2 --hardware rtx4090 --search-degrees tensor": "there is only one rank",
    "--model gpt2 --hardware v100-32gx8 --replicas 3 --search-degrees pipeline": "is 3, which",
    "--max-model --hardware h100 --search-degrees tensor": "data-parallel ranks only",
    "--model gpt2 --hardware h100 --per-device-train-batch-size 99999999999": "train-batch-size is 99999999999",
}
"""Flags that cannot be used -> what is said of them."""


@pytest.mark.parametrize("flags", SETTINGS)
def test_settings_that_cannot_be_used_exit_with_2(plan: Command, flags: str) -> None:
    done = plan(*flags.split())
    assert (done.returncode, done.stdout) == (2, "")
    assert SETTINGS[flags] in done.stderr
    assert "Traceback" not in done.stderr


def test_a_search_of_degrees_names_flags_that_give_what_it_found(plan: Command) -> None:
    machine = ("--hardware", "v100-32gx8", "--gpus-per-node", 4)
    asked = ("--model", "llama-15m", "--max-length", 128, *machine, "--plan", "usual", "--json")
    found = json.loads(plan(*asked, "--search-degrees", "tensor", "pipeline").stdout)
    said = next(reason for reason in found["reasons"] if reason.startswith("degrees: "))
    flags = said.removeprefix("degrees: ").partition(".")[0].split()
    assert all(name in said for name in ("--tensor-parallel", "--pipeline-parallel"))
    again = json.loads(plan(*asked, *flags).stdout)
    assert again["degrees"] == found["degrees"]
    assert again["tokens_per_s"] == found["tokens_per_s"]
    assert again["pipeline"] == found["pipeline"]
    only = plan("--model", "gpt2", "--hardware", "v100-32gx8", "--plan", "usual", "--search-degrees", "tensor")
    assert only.returncode == 0
    assert "--tensor-parallel can only be 1" in " ".join(only.stdout.split())


def test_the_largest_model_is_one_that_can_be_planned_and_trained_by_its_name(plan: Command, machine: Path) -> None:
    asked = ("--max-model", "--hardware", machine, "--max-length", 32, "--plan", "usual")
    memory = ("--memory.host", "90MiB", "--memory.ssd", "120MiB")
    done = plan(*asked, *memory)
    assert done.returncode == 0
    model = re.search(r"gpt-\d+x\d+", done.stdout)[0]
    assert is_built_in(model)
    assert plan("--model", model, *asked[1:], *memory).returncode == 0


def test_hardware_that_is_unknown_is_refused_before_torch_is_imported() -> None:
    program = (
        "import sys; from pagoda.cli.main import main; "
        "code = main(['plan', '--model', 'gpt2', '--hardware', 'h10']); print(code, 'torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "2 False\n"


def test_a_machine_that_was_not_measured_is_measured_for_its_first_plan(
    plan: Command, tmp_path: Path, on_drive: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Path | None] = []

    def calibrate(ssd: Path | None, _device: object, report: Callable[[str], None]) -> Hardware:
        asked.append(ssd)
        report("everything")
        return SMALL

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("pagoda.calibrate.machine.calibrate", calibrate)
    monkeypatch.setattr("pagoda.forecast.forecast._measured", lambda _config, problem: problem.compute)
    of = ("--model", "gpt-2x192", "--max-length", 64, "--plan", "usual", "--json", "--memory.ssd", on_drive)
    for refused in (("--model", "gpt-2x", *of[2:]), ("--model", "gpt2", "--max-length", 2048)):
        assert (plan(*refused).returncode, asked) == (2, []), "before the machine is measured"
    first, second = plan(*of), plan(*of)
    assert asked == [on_drive]
    assert "has not been measured" in " ".join(first.stderr.split())
    assert second.stderr == ""
    assert json.loads(first.stdout)["fits"]


def test_a_plan_names_the_ram_that_it_assumes_and_takes_another(plan: Command) -> None:
    of = ("--model", "gpt2", "--hardware", "rtx4090", "--plan", "usual")
    assumed, given = (" ".join(plan(*of, *more).stdout.split()) for more in ((), ("--ram", "64GiB")))
    assert "host: 80% of the 128.00 GiB of RAM that it has (assumed: 4 x 32 GB; --ram sets it)." in assumed
    assert "host: 80% of the 64.00 GiB of RAM that it has (as asked)." in given
    here = plan("--model", "gpt2", "--ram", "64GiB")
    assert here.returncode == 2
    assert "--memory.host" in here.stderr


def test_a_plan_for_a_machine_that_was_not_measured_says_so_and_that_no_gpu_has_confirmed_one(
    plan: Command, machine: Path
) -> None:
    of = ("--model", "gpt-2x192", "--max-length", 64, "--plan", "usual")
    named, measured = (" ".join(plan(*of, "--hardware", name).stdout.split()) for name in ("rtx4090", machine))
    assert "rtx4090 was not measured" in named
    assert "No run on a GPU has confirmed a plan yet." in named
    assert "No run on a GPU" not in measured


def test_a_step_has_as_many_tokens_as_pagoda_train_gives_it(plan: Command) -> None:
    of = ("--model", "llama-15m", "--hardware", "rtx4090", "--plan", "usual", "--json")
    tokens = [
        json.loads(plan(*of, *more).stdout)["tokens_per_step"]
        for more in ((), ("--tokens-per-step", 4096), ("--per-device-train-batch-size", 2), ("--max-length", 512))
    ]
    assert tokens == [16384, 4096, 2048, 16384]
