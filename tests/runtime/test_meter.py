"""What compute waits for."""

import threading

import pytest

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
