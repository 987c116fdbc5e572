"""Lanes run work in order, wait for nobody in vain, and carry errors to whoever depends on them; so does the driver."""

import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn

import pagoda
from pagoda.plan import layout
from pagoda.runtime.damage import Damage
from pagoda.runtime.device import PAST
from pagoda.runtime.driver import Driver
from pagoda.runtime.lanes import Handle, Lane, all_of, wait_all
from pagoda.runtime.store import Store

SOON_S = 30
"""What must happen does so long before; a lane that hangs fails the test instead of stopping it."""


class WorkError(Exception):
    """What work in these tests raises."""


class Memory:
    """What work reads."""


def ended(*handles: Handle) -> None:
    """Fails unless every handle ends soon; their errors do not count."""
    for handle in handles:
        done = threading.Event()
        handle.then(lambda _, done=done: done.set())
        assert done.wait(SOON_S), "the work never ended"


@pytest.fixture
def lane() -> Iterator[Lane]:
    lane = Lane("update")
    yield lane
    lane.close()


@pytest.fixture
def other() -> Iterator[Lane]:
    lane = Lane("ssd_read", threads=2)
    yield lane
    lane.close()


def fail(error: BaseException) -> None:
    raise error


# --- order and errors ----------------------------------------------------------------------------------------


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_any_graph_of_work_ends_with_each_after_what_it_needs(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 25))
    needs = [data.draw(st.sets(st.integers(0, max(0, n - 1)), max_size=3)) - {n} for n in range(size)]
    failing = data.draw(st.sets(st.integers(0, size - 1), max_size=2))
    order = data.draw(st.permutations(range(size)))
    threads = data.draw(st.sampled_from([1, 3]))
    lanes = [Lane("h2d", threads), Lane("update", threads)]
    started: list[int] = []
    finished: list[int] = []
    seen_when_started: dict[int, set[int]] = {}
    gates = [Handle("h2d") for _ in range(size)]

    def work(n: int) -> None:
        seen_when_started[n] = set(finished)
        started.append(n)
        if n in failing:
            raise WorkError(n)
        finished.append(n)

    # Gates stand for handles that exist before their work is submitted, so that any order may be submitted.
    try:
        handles = {}
        for n in order:
            handles[n] = lanes[n % 2].submit(lambda n=n: work(n), [gates[need] for need in needs[n]], nbytes=n)
            handles[n].then(gates[n].finish)
        ended(*handles.values())
    finally:
        for lane in lanes:
            lane.close()

    doomed: dict[int, set[int]] = {}
    for n in range(size):
        doomed[n] = ({n} if n in failing else set()).union(*(doomed[need] for need in needs[n]))
    ran = [n for n in range(size) if not any(doomed[need] for need in needs[n])]
    assert sorted(started) == ran
    for n in ran:
        assert needs[n] <= seen_when_started[n]
    for n, handle in handles.items():
        assert handle.succeeded == (not doomed[n])
        if doomed[n]:
            with pytest.raises(WorkError) as caught:
                handle.wait()
            assert caught.value.args[0] in doomed[n]
    assert sum(lane.take_counters()[1] for lane in lanes) == sum(ran)


def test_a_callback_that_raises_neither_ends_a_lanes_thread_nor_keeps_others_from_being_told(lane: Lane) -> None:
    error, start, told = WorkError("bookkeeping"), threading.Event(), list[BaseException | None]()
    handle = lane.submit(lambda: start.wait(SOON_S) and None)
    handle.then(lambda _: fail(error))
    handle.then(told.append)
    child = lane.submit(lambda: None, after=[handle])
    start.set()
    ended(child, lane.submit(lambda: None))
    assert told == [error]
    for failed in (handle, child):
        with pytest.raises(WorkError) as caught:
            failed.wait()
        assert caught.value is error


def test_wait_all_waits_for_everything_before_it_raises_the_first_error(lane: Lane, other: Lane) -> None:
    finish, meeting = threading.Event(), threading.Barrier(2, timeout=SOON_S)
    first, second = WorkError("first"), WorkError("second")

    def meet_and_fail(error: WorkError) -> None:
        meeting.wait()  # both threads of the lane work at once
        raise error

    handles = [
        other.submit(lambda: meet_and_fail(first)),
        lane.submit(lambda: finish.wait(SOON_S) and None),
        other.submit(lambda: meet_and_fail(second)),
    ]
    threading.Timer(0.05, finish.set).start()
    with pytest.raises(WorkError) as caught:
        wait_all(handles)
    assert caught.value is first
    assert all(handle.done for handle in handles)


def test_a_lane_keeps_nothing_of_the_work_it_has_done(lane: Lane) -> None:
    memory, gone = Memory(), threading.Event()
    weakref.finalize(memory, gone.set)
    handle = lane.submit(lambda memory=memory: None)
    del memory
    handle.wait()
    assert gone.wait(SOON_S), "the last work lives until the lane gets more"


def test_an_engine_closes_while_fetches_are_on_their_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of a step starts the fetches of the next, which never comes."""
    monkeypatch.setattr(layout, "FETCH_PIECE_BYTES", 4096)
    load = Store.load

    def slow(*args: Any) -> None:
        time.sleep(0.01)
        load(*args)

    settings = {"device": "cpu:8MiB", "ssd": str(tmp_path), "unit_limit": "140KiB", "page_size": 4096}
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(3)))
    with pytest.raises(pagoda.BudgetError) as refused:
        pagoda.wrap(model, pagoda.AdamW(), memory=pagoda.Memory(host=4096, **settings), precision="bf16")
    model, optimizer = pagoda.wrap(
        model, pagoda.AdamW(), memory=pagoda.Memory(host=refused.value.needed_bytes, **settings), precision="bf16"
    )
    model(torch.ones(2, 256, dtype=torch.bfloat16)).float().sum().backward()
    monkeypatch.setattr(Store, "load", slow)
    optimizer.step()
    thread = threading.Thread(target=optimizer.close, daemon=True)
    thread.start()
    thread.join(4)
    assert not thread.is_alive(), "close() never returned"


# --- work that a device has in its queue ---------------------------------------------------------------------


class Queued:
    """The event of work that a device has not done yet."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.reached = threading.Event()
        self._error = error

    def synchronize(self) -> None:
        assert self.reached.wait(SOON_S)
        if self._error is not None:
            raise self._error


def test_a_lane_goes_on_while_a_device_works_and_ends_what_has_ended(lane: Lane, other: Lane) -> None:
    """What depends on a device's work starts when that has ended."""
    events = [Queued(), Queued()]
    handles = [lane.submit(lambda event=event: event) for event in events]
    after = lane.submit(lambda: None)
    seen: list[bool] = []
    dependent = other.submit(lambda: seen.append(events[0].reached.is_set()), after=handles[:1])
    ended(after)
    assert [handle.wait_until_issued() for handle in handles] == events
    assert all(handle.issued and not handle.done for handle in handles)
    assert not dependent.issued
    events[0].reached.set()
    ended(handles[0], dependent)
    assert seen == [True]
    assert not handles[1].done
    events[1].reached.set()
    ended(handles[1])
    assert all(handle.succeeded for handle in handles)
    assert [handle.wait_until_issued() for handle in (*handles, after)] == [PAST] * 3


def test_work_in_several_pieces_is_issued_when_a_device_has_all_of_them_in_its_queue(lane: Lane, other: Lane) -> None:
    events, gate = [Queued(), Queued()], threading.Event()
    told: list[bool] = []
    first = lane.submit(lambda: events[0])
    read = other.submit(lambda: gate.wait(SOON_S) and None)
    whole = all_of([first, lane.submit(lambda: events[1], after=[read])])
    whole.when_issued(lambda: told.append(whole.done))
    assert first.wait_until_issued() is events[0]
    assert not whole.issued
    gate.set()
    assert whole.wait_until_issued() is events[1]
    assert told == [False]
    for event in events:
        event.reached.set()
    ended(whole)
    assert whole.succeeded


def test_work_of_which_a_piece_has_failed_is_not_issued(lane: Lane, other: Lane) -> None:
    def fail() -> None:
        raise WorkError

    failed = other.submit(fail)
    ended(failed)
    event = Queued()
    whole = all_of([failed, lane.submit(lambda: event)])
    ended(lane.submit(lambda: None))
    assert not whole.issued
    event.reached.set()
    with pytest.raises(WorkError):
        whole.wait_until_issued()


def test_every_thread_of_a_lane_uses_the_gpu_of_the_thread_that_made_the_lane(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the thread that waits for the device: a new thread would make a context on GPU 0."""
    chosen = threading.local()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: chosen.gpu)
    monkeypatch.setattr(torch.cuda, "set_device", lambda gpu: setattr(chosen, "gpu", gpu))
    chosen.gpu = 3
    seen: list[int] = []

    class Waited:
        def synchronize(self) -> None:
            seen.append(chosen.gpu)

    def work() -> Waited:
        seen.append(chosen.gpu)
        return Waited()

    lane = Lane("h2d")
    lane.submit(work).wait()
    lane.close()
    assert seen == [3, 3]


def test_an_error_of_a_devices_work_reaches_whoever_waits_for_it(lane: Lane) -> None:
    event = Queued(WorkError())
    handle = lane.submit(lambda: event)
    event.reached.set()
    ended(handle)
    for wait in (handle.wait, handle.wait_until_issued):
        with pytest.raises(WorkError):
            wait()


def test_what_a_devices_work_reads_stays_alive_until_it_has_ended_and_no_longer() -> None:
    """And a lane is closed when its device has done all that it was given."""
    lane, event, memory, gone = Lane("h2d"), Queued(), Memory(), threading.Event()
    weakref.finalize(memory, gone.set)
    handle = lane.submit(lambda memory=memory: event)
    del memory
    handle.wait_until_issued()
    closing = threading.Thread(target=lane.close)
    closing.start()
    assert not handle.done
    assert not gone.is_set()
    event.reached.set()
    closing.join(SOON_S)
    assert handle.succeeded
    assert not closing.is_alive()
    assert gone.wait(SOON_S)


# --- the driver of the scheduler -----------------------------------------------------------------------------


@pytest.mark.parametrize("waits_first", [False, True])
def test_an_error_of_an_event_reaches_whoever_waits(waits_first: bool) -> None:
    scheduler: Any = SimpleNamespace(take=list, idle=False)
    told: list[BaseException] = []
    driver = Driver(scheduler, lambda _: None, Damage(), lambda _: None, told.append)

    def on_a_lane() -> None:
        with pytest.raises(LookupError):
            driver.tell(lambda: fail(LookupError("an event that contradicts itself")))

    thread = threading.Timer(0.2 if waits_first else 0.0, on_a_lane)
    thread.start()
    if not waits_first:
        thread.join()
    with pytest.raises(
        pagoda.StorageError, match="LookupError: an event that contradicts itself -- Start the program again"
    ):
        driver.wait(lambda: False, lambda: None)
    thread.join()
    assert [str(error) for error in told] == ["an event that contradicts itself"], "what waits elsewhere hears of it"
