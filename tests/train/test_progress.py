import io
from dataclasses import replace

import pytest
from rich.console import Console

from pagoda.train.metrics import StepMetrics
from pagoda.train.progress import Progress

METRICS = StepMetrics(
    step=1,
    loss=2.5,
    grad_norm=1.0,
    lr=1e-3,
    step_s=2.0,
    tokens_per_s=512.0,
    stall_s={"h2d": 0.0, "ssd_read": 0.5},
    bytes_moved={},
    peak_bytes={},
    prefetch_hit_rate=1.0,
    faults=0,
)


def shown(steps: int, done: int, *, terminal: bool) -> str:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=terminal, width=120)
    with Progress(console, steps, done) as progress:
        for step in range(done + 1, steps + 1):
            progress.show(replace(METRICS, step=step))
    return stream.getvalue()


def test_without_a_terminal_a_plain_line_comes_every_few_steps() -> None:
    lines = shown(steps=40, done=0, terminal=False).splitlines()
    assert lines[0] == "step 1/40  loss 2.5000  512 tokens/s  stalls 25% (ssd_read)  0:01:18 left"
    assert [line.split()[1] for line in lines[1:]] == [f"{step}/40" for step in range(4, 41, 4)]
    assert lines[-1].endswith("0:00:00 left")


def test_a_resumed_run_counts_from_where_it_was() -> None:
    lines = shown(steps=12, done=9, terminal=False).splitlines()
    assert [line.split()[1] for line in lines] == ["10/12", "11/12", "12/12"]


@pytest.mark.parametrize("part", ["loss 2.5000", "512 tokens/s", "stalls 25% (ssd_read)", "5/5", "left"])
def test_a_terminal_shows_loss_speed_stalls_and_time_left(part: str) -> None:
    assert part in shown(steps=5, done=0, terminal=True)
