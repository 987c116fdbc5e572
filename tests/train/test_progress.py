"""Progress: a bar on a terminal, a plain line every few steps elsewhere."""

import io
from dataclasses import replace

from rich.console import Console

from pagoda.train.progress import Progress
from tests.train.test_metrics import METRICS


def shown(steps: int, done: int, *, terminal: bool) -> str:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=terminal, width=120)
    with Progress(console, steps, done) as progress:
        for step in range(done + 1, steps + 1):
            progress.show(replace(METRICS, step=step, step_s=2.0, stall_s={"h2d": 0.0, "ssd_read": 0.5}))
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
