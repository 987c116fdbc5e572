"""An SSD that is slower than the machine's: every transfer takes as long as it would at a given rate."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from pagoda.memory.page import PageRun
from pagoda.memory.ssd.tier import SSDTier


@contextmanager
def slow_ssd(bytes_per_s: float) -> Iterator[None]:
    """Inside, reads and writes of the SSD tier take at least as long as at this rate in each direction."""
    free_at = {"load": 0.0, "store": 0.0}
    lock = threading.Lock()

    def slowed(name: str) -> Any:
        transfer = getattr(SSDTier, name)

        def slow(self: SSDTier, run: PageRun, offset_bytes: int, view: memoryview) -> None:
            with lock:
                begin = max(time.perf_counter(), free_at[name])
                end = free_at[name] = begin + view.nbytes / bytes_per_s
            transfer(self, run, offset_bytes, view)
            time.sleep(max(0.0, end - time.perf_counter()))

        return slow

    with mock.patch.multiple(SSDTier, load=slowed("load"), store=slowed("store")):
        yield
