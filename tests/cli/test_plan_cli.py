"""`pagoda plan`: what it prints, writes and exits with, as a process and inside this one."""

import json
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pagoda.cli.main import main
from pagoda.models.papers import gpt_of_step
from tests.forecast.machines import SMALL

KEYS = {
    "fits", "params", "bytes", "step_s", "tokens_per_s", "tflops_per_gpu", "binding_lane", "lanes",
    "ssd_bytes_written_per_step", "advice",
}  # fmt: skip


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hardware") / "small.json"
    path.write_text(SMALL.to_json())
    return path


Command = Callable[..., Any]


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs a command of `pagoda` in this process: `returncode`, `stdout`, `stderr`."""

    def run(name: str, *args: object) -> Any:
        try:
            code = main([name, *map(str, args)])
        except SystemExit as exited:
            code = int(exited.code or 0)
        said = capsys.readouterr()
        return SimpleNamespace(returncode=code, stdout=said.out, stderr=said.err)

    return run


@pytest.fixture
def plan(command: Command) -> Command:
    return partial(command, "plan")


def test_it_prints_the_plan_the_figures_and_what_would_help(plan: Command, machine: Path, tmp_path: Path) -> None:
    trace, plot = tmp_path / "trace.json", tmp_path / "step.png"
    done = plan(
        *("--model", "gpt-4x256", "--hardware", machine, "--seq-len", 128, "--memory.host", "150MiB"),
        *("--trace", trace, "--plot", plot),
    )
    assert (done.returncode, done.stderr) == (0, "")
    for said in ("Fits.", "exp_avg_sq", "budget", "tokens/s", "of peak", "binding lane", "drive wear", "compute waits"):
        assert said in done.stdout
    assert "What would help" in done.stdout
    spans = [event for event in json.loads(trace.read_text())["traceEvents"] if event["ph"] == "X"]
    step_us = json.loads(trace.read_text())["otherData"]["step_s"] * 1e6
    assert {"compute", "d2h", "ssd_read", "ssd_write", "update"} == {span["cat"] for span in spans}
    assert all(0 <= s["ts"] <= s["ts"] + s["dur"] <= step_us * (1 + 1e-9) for s in spans)
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_json_is_all_that_it_prints_and_the_exit_code_says_whether_it_fits(plan: Command, machine: Path) -> None:
    asked = ("--model", "gpt-2x192", "--hardware", machine, "--seq-len", 64, "--json")
    fits, does_not = plan(*asked), plan(*asked, "--memory.host", "1MiB")
    assert (fits.returncode, fits.stderr, does_not.returncode, does_not.stderr) == (0, "", 1, "")
    answer: dict[str, Any] = json.loads(fits.stdout)
    assert set(answer) >= KEYS
    assert answer["fits"] is True
    assert answer["params"] == 10_745_088
    assert sum(answer["state_bytes_per_parameter"].values()) == 12
    refused = json.loads(does_not.stdout)
    assert refused["fits"] is False
    assert "needs at least" in refused["refusal"]


@pytest.mark.parametrize(
    ("args", "complaint"),
    [
        (("--model", "gpt2", "--hardware", "h10"), "Did you mean 'h100'?"),
        (("--model", "lama-8b", "--hardware", "rtx4090"), "Did you mean 'llama-8b'?"),
        (("--hardware", "h100"), "--max-model"),
        (("--model", "gpt2", "--hardware", "h100", "--memory.host", "lots"), "memory.host"),
        (("--model", "gpt2", "--hardware", "rtx4090", "--nodes", "2"), "--nodes is 2"),
        (("--model", "gpt2", "--hardware", "h100", "--batch-size", "0"), "batch_size is 0"),
        (("--model", "gpt2", "--hardware", "h100", "--pipeline-parallel", "3"), "--pipeline-parallel is 3, which"),
        (("--model", "gpt-1b", "--hardware", "h100", "--tensor-parallel", "3"), "--tensor-parallel is 3, which"),
        (("--model", "gpt2", "--hardware", "h100", "--tensor-parallel", "2"), "nothing says how the layers of 'gpt2'"),
        (("--model", "gpt2", "--hardware", "rtx4090", "--search-degrees", "tensor"), "there is only one rank"),
        (
            ("--model", "gpt2", "--hardware", "v100-32g-8", "--replicas", "3", "--search-degrees", "pipeline"),
            "is 3, which",
        ),
        (("--max-model", "--hardware", "h100", "--search-degrees", "tensor"), "data-parallel ranks only"),
        (("--model", "gpt2", "--hardware", "h100", "--batch-size", "99999999999"), "batch_size is 99999999999"),
        (("--model", "gpt2", "--hardware", "h100", "--memory.page-size", "3"), "memory.page_size is 3"),
        (("--model", "gpt2", "--hardware", "h100", "--tile-limit", "1"), "tile_limit is '1'"),
        (("--model", "gpt2", "--hardware", "h100", "--optimizer", "LBFGS"), "LBFGS"),
    ],
)
def test_settings_that_cannot_be_used_exit_with_2(plan: Command, args: tuple[str, ...], complaint: str) -> None:
    done = plan(*args)
    assert done.returncode == 2
    assert done.stdout == ""
    assert complaint in done.stderr
    assert "Traceback" not in done.stderr


def test_a_search_of_degrees_names_flags_that_give_what_it_found(plan: Command) -> None:
    asked = ("--model", "gpt-1b", "--hardware", "v100-32g-8", "--plan", "usual", "--json")
    found = json.loads(plan(*asked, "--search-degrees", "tensor", "pipeline").stdout)
    said = next(reason for reason in found["reasons"] if reason.startswith("degrees: "))
    flags = said.removeprefix("degrees: ").partition(".")[0].split()
    assert all(name in said for name in ("--tensor-parallel", "--pipeline-parallel"))
    again = json.loads(plan(*asked, *flags).stdout)
    assert again["degrees"] == found["degrees"]
    assert again["tokens_per_s"] == found["tokens_per_s"]
    assert again["pipeline"] == found["pipeline"]
    only = plan("--model", "gpt2", "--hardware", "v100-32g-8", "--plan", "usual", "--search-degrees", "tensor")
    assert only.returncode == 0
    assert "--tensor-parallel can only be 1" in " ".join(only.stdout.split())


@pytest.mark.slow
def test_the_largest_model_trains_and_a_seventh_more_is_refused_before_anything_is_allocated(
    plan: Command, command: Command, machine: Path, tmp_path: Path
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    memory = ("--memory.host", "90MiB", "--memory.ssd", f"{disk}:120MiB")
    # The usual plan, which a machine that was not measured takes.
    done = plan("--max-model", "--hardware", machine, "--seq-len", 32, "--json", "--plan", "usual", *memory)
    assert done.returncode == 0
    answer = json.loads(done.stdout)

    def train(model: str) -> Any:
        shape = ("--model", model, "--steps", 2, "--batch-size", 1, "--seq-len", 32)
        return command("train", *shape, "--out", tmp_path / model, *memory)

    sizes = ("--memory.host", "90MiB", "--memory.ssd", "120MiB")
    text = plan("--max-model", "--hardware", machine, "--seq-len", 32, "--plan", "usual", *sizes).stdout
    said = next(line for line in text.splitlines() if line.startswith("Train it: pagoda train"))
    for words in (f"--model {answer['model']}", f"--memory.host {90 << 20}", "--memory.ssd DIR:120MiB"):
        assert words in said
    trained = train(answer["model"])
    assert trained.returncode == 0, trained.stderr
    metrics = json.loads((tmp_path / answer["model"] / "metrics.jsonl").read_text().splitlines()[-1])
    assert metrics["peak_bytes"]["host"] <= sum(answer["bytes"]["host"].values()) <= 90 << 20
    assert metrics["peak_bytes"].get("ssd", 0) <= sum(answer["bytes"].get("ssd", {}).values()) <= 120 << 20
    shapes = map(gpt_of_step, count())
    larger = next(shape for shape in shapes if shape.params >= 1.15 * answer["params"])
    refused = train(larger.name)
    assert refused.returncode == 2
    assert "does not fit" in refused.stderr
    assert list(disk.iterdir()) == []
    assert not (tmp_path / larger.name).exists()
