"""What compute waits for."""

import threading
from contextlib import closing

import pytest
import torch
from torch import nn

import pagoda
from pagoda.runtime.lanes import Handle
from pagoda.runtime.meter import StepMeter
from pagoda.schedule.waits import InFlight


def test_compute_waits_until_few_enough_bytes_are_on_their_way() -> None:
    meter, first, second = StepMeter(("d2h",)), Handle("d2h"), Handle("d2h")
    transfers = InFlight[Handle]()
    transfers.add(first, 2)
    transfers.add(second, 3)
    meter.hold_back(transfers, 5)
    assert meter.stall_s == {"d2h": 0.0}
    threading.Timer(0.05, first.finish).start()
    meter.hold_back(transfers, 4)
    assert first.done
    assert not second.done
    assert meter.stall_s["d2h"] > 0
    second.finish(OSError("the drive failed"))
    with pytest.raises(OSError, match="the drive failed"):
        meter.hold_back(transfers, 5)


def test_what_leases_and_buffers_hold_is_measured_over_each_step() -> None:
    model, batch = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))), torch.ones(2, 8)
    memory = pagoda.Memory(host="64MiB", device="cpu:64KiB", page_size=4096)
    model, optimizer = pagoda.wrap(
        model, pagoda.AdamW(), memory=memory, precision="fp32", gradient_accumulation_steps=1
    )
    with closing(optimizer):
        for _ in range(2):
            model(batch).sum().backward()
            optimizer.step()
        stats, plan = optimizer.stats, optimizer._engine.plan
    assert stats.tier_use.keys() == {"device", "host"}
    for tier, use in stats.tier_use.items():
        assert 0 < use.mean <= use.peak <= 1
        assert use.peak <= plan.peak_bytes[tier] / getattr(plan.budgets, tier)
