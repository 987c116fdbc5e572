"""Progress: a bar on a terminal, a plain line every few steps elsewhere."""

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from pagoda.train import run
from pagoda.train.metrics import read_metrics
from pagoda.train.progress import Progress
from tests.tiny import tiny_run
from tests.train.test_metrics import METRICS


def shown(steps: int, done: int, *, terminal: bool) -> str:
    """What steps of 2 s show, with evaluations of 1 s."""
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=terminal, width=120)
    with Progress(console, steps, done) as progress:
        for step in range(done + 1, steps + 1):
            metrics = replace(METRICS, step=step, step_s=2.0, stall_s={"h2d": 0.0, "ssd_read": 0.5})
            progress.show(metrics, 2.0 * (steps - step))
    return stream.getvalue()


def test_loss_speed_stalls_and_time_left_are_shown() -> None:
    lines = shown(steps=40, done=0, terminal=False).splitlines()
    assert lines[0] == "step 1/40  loss 2.5000  1,024 tokens/s  stalls 25% (ssd_read)  0:01:18 left"
    assert [line.split()[1] for line in lines[1:]] == [f"{step}/40" for step in range(4, 41, 4)]
    assert lines[-1].endswith("0:00:00 left")
    resumed = shown(steps=12, done=9, terminal=False).splitlines()
    assert [line.split()[1] for line in resumed] == ["10/12", "11/12", "12/12"]
    bar = shown(steps=5, done=0, terminal=True)
    assert all(part in bar for part in ("loss 2.5000", "1,024 tokens/s", "stalls 25% (ssd_read)", "5/5", "left"))


class Failing(io.StringIO):
    """A stream that fails after some writes."""

    def __init__(self, error: Exception, left: int) -> None:
        super().__init__()
        self.error, self.left = error, left

    def write(self, text: str) -> int:
        self.left -= 1
        if self.left < 0:
            raise self.error
        return super().write(text)


@pytest.mark.parametrize("error", [BrokenPipeError(32, "Broken pipe"), OSError(5, "Input/output error")])
def test_a_run_goes_on_without_its_output_and_writes_it_to_a_file(
    error: OSError, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A reader that went away before it read anything, and a terminal that was closed while the run went on."""
    stream = Failing(error, left=0 if isinstance(error, BrokenPipeError) else 4)
    config = tiny_run(tmp_path, plan="usual", steps=2)
    console = Console(file=stream)
    assert run(config, console) is not None
    assert console.file is stream
    assert [line["step"] for line in read_metrics(config.out / "metrics.jsonl")] == [1, 2]
    assert (config.out / "checkpoints" / "step-000002").is_dir()
    assert capsys.readouterr().err.count(f"{error}: the run continues") == 1
    assert "step 2/2" in (config.out / "output.txt").read_text()
