"""The event log of a live run, replayed, gives the same operations; and a replay that differs is noticed."""

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import pagoda
from pagoda.memory.page import PageRun
from pagoda.plan.trace import STEP, Access, Phase, Trace
from pagoda.schedule import event_log, operations
from pagoda.schedule.event_log import describe, replay
from pagoda.schedule.operations import Operation, SchedulePlan, UnitPlan
from pagoda.schedule.records import GradientRecord, Lease, UpdateRecord

WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "in place": ({"host": "64MiB"}, {"max_grad_norm": 1e-3}),
    "leased from RAM": ({"device": "cpu:128KiB", "host": "64MiB"}, {}),
    "on SSD": ({"host": "900KiB", "ssd": "1GiB"}, {"max_grad_norm": 1.0}),
    "during backward": ({"host": "900KiB", "ssd": "1GiB"}, {"gradient_accumulation_steps": 1}),
    "speculated": (
        {"host": "2MiB", "ssd": "1GiB"},
        {"gradient_accumulation_steps": 1, "max_grad_norm": 1e9},
    ),
    "asynchronous": ({"host": "64MiB"}, {"update": "async"}),
}


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "events.jsonl"
    monkeypatch.setenv("PAGODA_EVENT_LOG", str(path))
    return path


def train(memory: dict[str, Any], directory: Path, **options: Any) -> None:
    if "ssd" in memory:
        memory = {**memory, "ssd": f"{directory / 'pages'}:{memory['ssd']}"}
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(6)))
    sizes = pagoda.Memory(**memory, page_size=4096, unit_limit="20KiB")
    model, optimizer = pagoda.wrap(model, pagoda.AdamW(lr=1e-2), memory=sizes, precision="fp32", **options)
    with optimizer:
        for step in range(7):
            if step == 3:
                optimizer.save_checkpoint(directory / "checkpoint", wait=False)
            model(torch.randn(4, 64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        if "gradient_accumulation_steps" not in options:
            model(torch.randn(4, 64)).square().mean().backward()
            optimizer.zero_grad()


@pytest.mark.inline
@pytest.mark.parametrize("way", WAYS)
def test_a_replay_says_what_the_live_scheduler_said(way: str, log: Path, tmp_path: Path) -> None:
    memory, options = WAYS[way]
    train(memory, tmp_path, **options)
    lines = [json.loads(line) for line in log.read_text().splitlines()[1:]]
    assert replay(log) == len(lines)
    assert {"access", "release", "gradient", "end_step", "ended", "begin_checkpoint"} <= {line[0] for line in lines}


def test_a_replay_that_differs_names_the_line(log: Path, tmp_path: Path) -> None:
    train({"host": "64MiB"}, tmp_path)
    lines = log.read_text().splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith('["end_step"'))
    lines[at] = json.dumps(["end_step", [False, [], [0]], {}, json.loads(lines[at])[3]])
    log.write_text("\n".join(lines) + "\n")
    with pytest.raises(ValueError, match=f"line {at + 1}: end_step"):
        replay(log)


RUN, RUNS, GRADIENTS = PageRun(0, 1), (PageRun(0, 1), PageRun(1, 1)), (GradientRecord(0, 0), GradientRecord(0, 1))
FIELDS: dict[str, tuple[Any, Any]] = {
    "unit": (0, 1),
    "version": (0, 1),
    "state": (0, 1),
    "run": RUNS,
    "runs": ((), RUNS),
    "lease": (Lease(0, RUN, 0), Lease(0, RUN, 1)),
    "gradient": GRADIENTS,
    "awaited": GRADIENTS,
    "update": (UpdateRecord(0, GRADIENTS[0]), UpdateRecord(0, GRADIENTS[1])),
}
"""Field of operations -> two values."""
KINDS = [each for each in vars(operations).values() if isinstance(each, type) and issubclass(each, Operation)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_replay_compares_every_field_of_an_operation(kind: type[Operation]) -> None:
    names = [field.name for field in fields(kind)]
    operation = kind(**{name: FIELDS.get(name, (None, None))[0] for name in names})
    for name in {*names} - {"delivery"}:
        assert describe(replace(operation, **{name: FIELDS[name][1]})) != describe(operation)


def test_each_rank_writes_a_log_of_its_own(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan: Any = SchedulePlan([UnitPlan()], Trace((STEP,)))
    monkeypatch.setattr(event_log, "schedule_plan", lambda plan: plan)
    for rank in (None, 0, 1):
        event_log.open_scheduler(plan, rank).access(Access(0, Phase.FORWARD))
    names = [log.name, f"{log.name}.0", f"{log.name}.1"]
    assert sorted(path.name for path in log.parent.iterdir()) == names
    assert [replay(log.parent / name) for name in names] == [1, 1, 1]
