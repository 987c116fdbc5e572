"""What a run writes of its plan and machine, for `pagoda report`."""

import json
import os
import platform
from dataclasses import asdict
from typing import Any

import torch

from pagoda.memory.ram import ram_bytes
from pagoda.plan.planner import Plan


def plan_record(plan: Plan) -> str:
    """JSON: bytes per tier and state against budgets, the homes of every unit, the plan's reasons, the machine."""
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
    record: dict[str, Any] = {
        "parameters": plan.parameters,
        "page_bytes": plan.page_bytes,
        "bytes": {tier: dict(lines) for tier, lines in plan.bytes.items()},
        "budgets": asdict(plan.budgets),
        "units": units,
        "reasons": list(plan.reasons),
        "machine": _machine(),
    }
    return json.dumps(record, indent=1) + "\n"


def _machine() -> dict[str, str]:
    found = {
        "system": platform.platform(),
        "CPU": f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores, {torch.get_num_threads()} threads",
        "RAM": f"{ram_bytes() / 2**30:.1f} GiB",
        "torch": torch.__version__,
    }
    if torch.cuda.is_available():
        found["GPU"] = torch.cuda.get_device_name()
    return found
