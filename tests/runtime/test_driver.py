"""The driver of the scheduler: what breaks on one thread is not waited for on another."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from pagoda.runtime.driver import Driver


def scheduler(**questions: Any) -> Any:
    return SimpleNamespace(take=list, idle=False, **questions)


def breaks() -> None:
    raise LookupError("an event that contradicts itself")


@pytest.mark.parametrize("waits_first", [False, True])
def test_an_error_of_an_event_reaches_whoever_waits(waits_first: bool) -> None:
    driver = Driver(scheduler(), lambda _: None)

    def on_a_lane() -> None:
        with pytest.raises(LookupError):
            driver.tell(breaks)

    thread = threading.Timer(0.2 if waits_first else 0.0, on_a_lane)
    thread.start()
    if not waits_first:
        thread.join()
    with pytest.raises(RuntimeError, match="the scheduler has failed on another thread"):
        driver.wait(lambda: False, lambda: None)
    thread.join()
