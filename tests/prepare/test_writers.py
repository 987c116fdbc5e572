"""Values are brought to their homes on all cores, and no more of them wait than the largest parameter takes."""

import os
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

import pagoda
from pagoda.prepare import construct
from pagoda.prepare.construct import Writers

SOON_S = 30


def test_writes_run_side_by_side_within_their_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(4))
    both, lock, held, most = threading.Barrier(2, timeout=SOON_S), threading.Lock(), 0, 0

    def write(nbytes: int) -> None:
        nonlocal held, most
        with lock:
            held += nbytes
            most = max(most, held)
        both.wait()  # passes only if two are under way at once
        with lock:
            held -= nbytes

    with Writers(most_bytes=100) as writers:
        for _ in range(6):
            writers.submit(50, lambda: write(50))
    assert most == 100
    with Writers(most_bytes=100) as writers:  # one parameter is always let in
        writers.submit(1000, lambda: None)


def test_the_error_of_a_write_reaches_the_caller_once_nothing_runs_any_more() -> None:
    done = threading.Event()

    def fail() -> None:
        raise pagoda.ConfigError("too large")

    def failing() -> None:
        with Writers(most_bytes=100) as writers:
            writers.submit(50, fail)
            writers.submit(50, done.set)
            for _ in range(3):
                writers.submit(100, lambda: None)

    def interrupted() -> None:
        with Writers(most_bytes=100) as writers:
            writers.submit(50, done.set)
            raise KeyError

    with pytest.raises(pagoda.ConfigError, match="too large"):
        failing()
    with pytest.raises(KeyError):
        interrupted()
    assert done.is_set()


@pytest.mark.parametrize("place", ["ram", "ssd"])
def test_the_order_of_writes_does_not_change_a_bit(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On SSD, neighbours share a page."""

    def weights(name: str) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        with pagoda.deferred_init():
            model = nn.Sequential(*(nn.Linear(50, 70) for _ in range(6)), nn.Linear(70, 50))
        (tmp_path / name).mkdir()
        tiers = {"ssd": tmp_path / name, "host": "200KiB"} if place == "ssd" else {"host": "4MiB"}
        model, optimizer = pagoda.wrap(
            model, pagoda.AdamW(), memory=pagoda.Memory(**tiers, page_size=4096), precision="bf16"
        )
        assert ("ssd" in pagoda.plan_of(model).peak_bytes) == (place == "ssd")
        values = {name: value.clone() for name, value in model.state_dict().items()}
        optimizer.close()
        return values

    class Late(Writers):
        """Writes begin when all have come, the last one first."""

        def __init__(self, most_bytes: int) -> None:
            super().__init__(most_bytes)
            self.calls: list[object] = []

        def submit(self, nbytes: int, write: object) -> None:
            self.calls.append(write)

        def __exit__(self, *error: object) -> None:
            for write in reversed(self.calls):
                super().submit(1, write)
            super().__exit__(*error)

    usual = weights("usual")
    monkeypatch.setattr(construct, "Writers", Late)
    assert all(value.equal(usual[name]) for name, value in weights("late").items())
