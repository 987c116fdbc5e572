"""Event logs: what a live scheduler was told, and what it said, line by line; and their replay.

    PAGODA_EVENT_LOG=events.jsonl python train.py        # writes the log
    python -m pagoda.schedule.event_log events.jsonl     # replays it, and compares every operation

The first line of a log is the scheduler's plan. Each other line is one event with its arguments, and the operations
that came of it. Operations are numbered in the order in which they came; events name them by number.
"""

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from pagoda.plan.planner import Plan
from pagoda.plan.trace import Access, Phase, Trace
from pagoda.schedule.from_plan import schedule_plan
from pagoda.schedule.operations import Operation, SchedulePlan, UnitPlan
from pagoda.schedule.scheduler import Scheduler

EVENTS = (
    "access",
    "expect",
    "release",
    "gradient",
    "scale_known",
    "drop_gradients",
    "drain",
    "overwritten",
    "restored",
    "prepare_checkpoint",
    "begin_checkpoint",
    "end_checkpoint",
    "issued",
    "ended",
    "failed",
    "refused",
    "old_states_kept",
    "gradient_used",
    "weights_written",
    "reclaimed",
    "let_go",
)


class LoggedScheduler(Scheduler):
    """A scheduler that writes its log to a file."""

    def __init__(self, plan: SchedulePlan, path: Path) -> None:
        super().__init__(plan)
        self._file = path.open("w")
        self._numbers: dict[Operation, int] = {}
        """Operation -> its number."""
        self._write(_encode_plan(plan))
        for name in EVENTS:
            setattr(self, name, partial(self._event, name, getattr(self, name)))

    def _event(self, name: str, event: Any, *arguments: Any, **settings: Any) -> None:
        before = len(self._out)
        event(*arguments, **settings)
        said = self._out[before:]
        self._numbers |= {operation: len(self._numbers) + index for index, operation in enumerate(said)}
        encoded = [self._encode(argument) for argument in arguments]
        self._write([name, encoded, settings, [_describe(operation) for operation in said]])

    def _encode(self, argument: Any) -> Any:
        if isinstance(argument, Operation):
            return {"operation": self._numbers[argument]}
        if isinstance(argument, Access):
            return {"access": [argument.unit, argument.phase]}
        return argument

    def _write(self, line: Any) -> None:
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()


def open_scheduler(plan: Plan, rank: int | None = None) -> Scheduler:
    """The scheduler of a live run: it writes a log where the environment variable PAGODA_EVENT_LOG names a file.

    Several ranks write FILE.0, FILE.1, ...; `rank` is None where there is one.
    """
    path = os.environ.get("PAGODA_EVENT_LOG")
    if not path:
        return Scheduler(schedule_plan(plan))
    return LoggedScheduler(schedule_plan(plan), Path(path if rank is None else f"{path}.{rank}"))


def replay(path: Path) -> int:
    """Tell a new scheduler all events of a log; returns how many there were.

    Raises ValueError, naming the line, where it says other operations than the live one did.
    """
    with path.open() as lines:
        scheduler = Scheduler(_decode_plan(json.loads(next(lines))))
        operations: list[Operation] = []
        count = 0
        for count, line in enumerate(lines, start=1):
            name, arguments, settings, expected = json.loads(line)
            getattr(scheduler, name)(*(_decode(argument, operations) for argument in arguments), **settings)
            said = scheduler.take()
            operations += said
            if [_describe(operation) for operation in said] != expected:
                raise ValueError(f"{path}, line {count + 1}: {name} led to {said}, but live to {expected}")
    return count


def _describe(operation: Operation) -> list[Any]:
    run = None if operation.run is None else [operation.run.start, operation.run.count]
    steps = list(operation.steps)
    return [operation.kind, operation.unit, run, operation.version, steps, operation.home, operation.undoable]


def _decode(argument: Any, operations: Sequence[Operation]) -> Any:
    if not isinstance(argument, dict):
        return argument
    if "operation" in argument:
        return operations[argument["operation"]]
    unit, phase = argument["access"]
    return Access(unit, Phase(phase))


def _encode_plan(plan: SchedulePlan) -> dict[str, Any]:
    accesses = [[access.unit, access.phase] for access in plan.trace.accesses]
    return {**asdict(plan), "trace": {"accesses": accesses, "assumed": plan.trace.assumed}}


def _decode_plan(encoded: dict[str, Any]) -> SchedulePlan:
    accesses = tuple(Access(unit, Phase(phase)) for unit, phase in encoded["trace"]["accesses"])
    units = tuple(UnitPlan(**unit) for unit in encoded["units"])
    return SchedulePlan(**{**encoded, "units": units, "trace": Trace(accesses, encoded["trace"]["assumed"])})


if __name__ == "__main__":
    for log in map(Path, sys.argv[1:]):
        print(f"{log}: {replay(log)} events, the same operations")
