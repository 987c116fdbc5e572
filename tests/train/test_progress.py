"""Progress: a line every few steps."""

import io
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from pagoda.config.memory import Memory
from pagoda.memory.sizes import format_rate
from pagoda.train import run
from pagoda.train.callbacks import RunCallback
from pagoda.train.metrics import read_metrics
from pagoda.train.progress import Progress, expected
from tests.tiny import tiny_run, trained, write_model
from tests.train.test_metrics import METRICS


def shown(steps: int, done: int, step_s: float = 2.0) -> list[str]:
    """The lines that steps show."""
    stream = io.StringIO()
    progress = Progress(Console(file=stream, width=120), steps, done)
    for step in range(done + 1, steps + 1):
        line = {**METRICS, "step": step, "step_s": step_s, "stall_s": {"h2d": 0.0, "ssd_read": 0.5}}
        progress.show(line, step_s * (steps - step))
    return stream.getvalue().splitlines()


def test_loss_speed_stalls_and_time_left_are_shown() -> None:
    lines = shown(steps=40, done=0)
    assert lines[0] == "step 1/40  loss 2.5000  1,024 tokens/s  stalls 25% (ssd_read)  0:01:18 left"
    assert [line.split()[1] for line in lines[1:]] == [f"{step}/40" for step in range(4, 41, 4)]
    assert lines[-1].endswith("0:00:00 left")
    assert [line.split()[1] for line in shown(steps=12, done=9)] == ["10/12", "11/12", "12/12"]
    assert len(shown(steps=40, done=0, step_s=10.0)) == 40


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
    config = tiny_run(tmp_path, plan="usual", max_steps=2)
    console = Console(file=stream)
    assert run(config, console) is not None
    assert console.file is stream
    assert [line["step"] for line in read_metrics(config.output_dir / "metrics.jsonl")] == [1, 2]
    assert (config.output_dir / "checkpoint-2").is_dir()
    assert capsys.readouterr().err.count(f"{error}: the run continues") == 1
    assert "step 2/2" in (config.output_dir / "output.txt").read_text()


def test_few_lines_come_before_the_first_step_and_the_reasons_are_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "ssd").mkdir()
    memory = Memory(host="600KiB", ssd=str(tmp_path / "ssd"), unit_limit="16KiB", page_size="4KiB")
    model = write_model(tmp_path / "model")
    config = tiny_run(
        tmp_path, model=model, plan="usual", max_steps=1, per_device_train_batch_size=0, eval_share=0.2, memory=memory
    )
    result, brief = trained(config)
    assert result is not None
    before = brief.partition("step 1/")[0]
    assert len(before.splitlines()) <= 36
    reasons = json.loads((config.output_dir / "plan.json").read_text())["reasons"]
    assert [*result.plan.reasons] == reasons[1:]
    assert "% of the" in reasons[0], "the wear of the drive, which is far less than 1%"
    assert not any(reason.rstrip(".") in before for reason in reasons)
    _, long = trained(replace(config, output_dir=tmp_path / "verbose", verbose=True))
    assert all(reason.rstrip(".") in " ".join(long.split()) for reason in reasons)


def test_time_that_is_left_is_that_of_the_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 1, 2, 3 and 4 s."""
    left: list[float] = []
    monkeypatch.setattr(RunCallback, "measured", lambda _, step: {**METRICS, "step": step, "step_s": float(step)})
    monkeypatch.setattr(Progress, "show", lambda self, metrics, left_s: left.append(left_s))
    trained(tiny_run(tmp_path, plan="usual", max_steps=4, save_at_end=False))
    assert left == pytest.approx([3.0, 3.0, 2.0, 0.0])


@pytest.mark.parametrize(
    ("samples", "rows", "said"),
    [(1, 40_000, "10 steps of 1 sequence (8 tokens), 0.025% of an epoch;"), (4, 40, "(32 tokens), 1 epoch;")],
)
def test_what_a_run_reads_of_its_data_is_said_in_few_digits(samples: int, rows: int, said: str) -> None:
    batches = SimpleNamespace(samples_per_step=samples, tokens_per_step=8 * samples, rows=range(rows))
    assert said in expected(batches, 10, 0, None, evaluates=False)
    assert expected(batches, 10, 0, 360.0, evaluates=True).endswith("; about 1:00:00, without evaluations")
    assert said in expected(batches, 16, 6, None, evaluates=False)  # what a resumed run still reads


@pytest.mark.parametrize(("rate", "said"), [(0.8241, "0.82"), (1.0, "1.00"), (12.34, "12.3"), (1234.5, "1,234")])
def test_rates_have_three_digits(rate: float, said: str) -> None:
    assert format_rate(rate) == said
