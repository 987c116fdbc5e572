"""A plan, a step and this machine as JSON. `pagoda plan --json` prints it, runs save it, and `pagoda report` reads
it."""

import json
import os
import platform
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

import torch

from pagoda.memory.json_forms import with_hash
from pagoda.memory.ram import ram_bytes
from pagoda.plan.planner import Plan
from pagoda.simulate.timeline import Timeline, TimelineSpan

_PARTS = 1000
"""Spans of the same kind and lane are joined if the gap between them is shorter than a step divided by this number."""


def plan_record(plan: Plan) -> dict[str, Any]:
    """The facts of a plan that every page shows: bytes per tier and state, budgets, and the homes of each unit."""
    homes: dict[int, dict[str, str]] = {}
    for (unit, state), tier in plan.placement.homes.items():
        homes.setdefault(unit, {})[state] = tier
    units = [
        {
            "name": unit.name,
            "parameters": sum(slot.param.numel for slot in unit.slots),
            "homes": homes.get(unit.index, {}),
        }
        for unit in plan.units
    ]
    return {
        "params": plan.parameters,
        "page_bytes": plan.page_bytes,
        "bytes": plan.bytes,
        "budgets": asdict(plan.budgets),
        "units": units,
    }


def timeline_record(timeline: Timeline) -> dict[str, Any]:
    """A step, small enough for a page: its seconds, how long each lane worked, and the work by kind.

    Each entry of `spans` has a lane, a kind, a start and an end.
    """
    return {
        "step_s": timeline.step_s,
        "busy_s": dict(timeline.busy_s),
        "stall_s": dict(timeline.stall_s),
        "spans": [
            [*key, round(start, 9), round(end, 9)]
            for key, spans in _by_kind(timeline).items()
            for start, end in _joined(spans, timeline.step_s / _PARTS)
        ],
    }


def machine_record() -> dict[str, str]:
    """The machine of a run: system, cores, RAM, torch, and the GPU if there is one."""
    found = {
        "system": platform.platform(),
        "CPU": f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores, {torch.get_num_threads()} threads",
        "RAM": f"{ram_bytes() / 2**30:.1f} GiB",
        "torch": torch.__version__,
    }
    if torch.cuda.is_available():
        found["GPU"] = torch.cuda.get_device_name()
    return found


def as_lines(record: Mapping[str, Any]) -> str:
    """JSON with one line per key, and a hash by which `pagoda report` sees that nothing was changed."""
    lines = (f"{json.dumps(key)}: {json.dumps(value)}" for key, value in with_hash(record).items())
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _by_kind(timeline: Timeline) -> dict[tuple[str, str], list[TimelineSpan]]:
    found: dict[tuple[str, str], list[TimelineSpan]] = {}
    for span in sorted(timeline.spans, key=lambda span: span.start_s):
        found.setdefault((span.lane, span.kind), []).append(span)
    return found


def _joined(spans: Iterable[TimelineSpan], gap_s: float) -> list[list[float]]:
    """Join spans that are closer than `gap_s`. `spans` are in the order of their starts. Returns starts and ends within
    the step."""
    found: list[list[float]] = []
    for span in spans:
        start = max(0.0, span.start_s)
        if found and start - found[-1][1] < gap_s:
            found[-1][1] = max(found[-1][1], span.end_s)
        else:
            found.append([start, max(start, span.end_s)])
    return found
