"""Event logs: the events and operations of a live scheduler, line by line, and their replay.

    PAGODA_EVENT_LOG=events.jsonl python train.py        # writes the log
    python -m pagoda.schedule.event_log events.jsonl     # replays it, and compares every operation

The first line of a log is the scheduler's plan. Each other line is one event with its arguments and the resulting
operations. Operations are numbered in the order in which they were issued. Events refer to them by number.
"""

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, fields
from functools import partial
from inspect import isfunction
from pathlib import Path
from typing import Any

from pagoda.memory.page import PageRun
from pagoda.plan.planner import Plan
from pagoda.plan.trace import Access, Phase, Trace
from pagoda.schedule.operations import Operation, SchedulePlan, UnitPlan, schedule_plan
from pagoda.schedule.records import GradientRecord, Lease, UpdateRecord
from pagoda.schedule.scheduler import Scheduler

EVENTS = [
    name
    for name, method in vars(Scheduler).items()
    if isfunction(method) and not name.startswith("_") and method.__annotations__["return"] is None
]
"""The scheduler's events: its public methods that return nothing. Its other public methods are questions."""


class LoggedScheduler(Scheduler):
    """A scheduler that writes a log to a file."""

    def __init__(self, plan: SchedulePlan, path: Path) -> None:
        super().__init__(plan)
        self._file = path.open("w")
        self._numbers: dict[Operation, int] = {}
        """Operation -> its number."""
        self._write(asdict(plan))
        for name in EVENTS:
            setattr(self, name, partial(self._event, name, getattr(self, name)))

    def _event(self, name: str, event: Any, *arguments: Any, **settings: Any) -> None:
        before = len(self._out)
        event(*arguments, **settings)
        issued = self._out[before:]
        self._numbers |= {operation: len(self._numbers) + index for index, operation in enumerate(issued)}
        self._write([name, arguments, settings, [describe(operation) for operation in issued]])

    def _write(self, line: Any) -> None:
        self._file.write(json.dumps(line, default=self._encode) + "\n")
        self._file.flush()

    def _encode(self, argument: object) -> dict[str, Any] | None:
        """An argument as JSON. None for what only the executor knows."""
        if isinstance(argument, SchedulePlan):
            return {"plan": asdict(argument)}
        if isinstance(argument, Operation):
            return {"operation": self._numbers[argument]}
        return {"access": [argument.unit, argument.phase]} if isinstance(argument, Access) else None


def open_scheduler(plan: Plan, rank: int | None) -> Scheduler:
    """The scheduler of a live run. It writes a log if the environment variable PAGODA_EVENT_LOG names a file.

    Several ranks write FILE.0, FILE.1, and so on. `rank` is None if there is only one.
    """
    path = os.environ.get("PAGODA_EVENT_LOG")
    if not path:
        return Scheduler(schedule_plan(plan))
    return LoggedScheduler(schedule_plan(plan), Path(path if rank is None else f"{path}.{rank}"))


def replay(path: Path) -> int:
    """Replay all events of a log on a new scheduler. Returns the number of events.

    Raises ValueError with the line number if the operations differ from those of the live scheduler.
    """
    with path.open() as lines:
        scheduler = Scheduler(_decode_plan(json.loads(next(lines))))
        operations: list[Operation] = []
        count = 0
        for count, line in enumerate(lines, start=1):
            name, arguments, settings, expected = json.loads(line, object_hook=partial(_decode, operations))
            getattr(scheduler, name)(*arguments, **settings)
            issued = scheduler.take()
            operations += issued
            if [describe(operation) for operation in issued] != expected:
                raise ValueError(f"{path}, line {count + 1}: {name} led to {issued}, but to {expected} in the live run")
    return count


def describe(operation: Operation) -> list[Any]:
    """The kind and all fields of an operation as JSON, except what only the executor knows."""
    return [type(operation).__name__, *(_facts(getattr(operation, field.name)) for field in fields(operation))]


def _facts(value: Any) -> Any:
    """What identifies a record of the scheduler, or a run of pages."""
    match value:
        case Lease():
            return [_facts(value.run), value.version]
        case UpdateRecord():
            return [value.gradient.step, _facts(value.runs)]
        case GradientRecord():
            return [value.step, _facts(value.run), value.own_buffer]
        case PageRun():
            return [value.start, value.count]
        case tuple():
            return [_facts(each) for each in value]
    return value if isinstance(value, int) else None


def _decode(operations: Sequence[Operation], encoded: dict[str, Any]) -> Any:
    if "operation" in encoded:
        return operations[encoded["operation"]]
    if "access" in encoded:
        unit, phase = encoded["access"]
        return Access(unit, Phase(phase))
    if encoded.keys() == {"plan"}:
        return _decode_plan(encoded["plan"])
    return encoded


def _decode_plan(encoded: dict[str, Any]) -> SchedulePlan:
    trace, units = encoded["trace"], tuple(UnitPlan(**unit) for unit in encoded["units"])
    accesses = tuple(Access(access["unit"], Phase(access["phase"])) for access in trace["accesses"])
    return SchedulePlan(**{**encoded, "units": units, "trace": Trace(accesses, trace["assumed"])})


if __name__ == "__main__":
    for log in map(Path, sys.argv[1:]):
        print(f"{log}: {replay(log)} events, the same operations")
