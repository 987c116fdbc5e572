"""A signal ends a run in good order, and says at once what will happen."""

import signal
import threading
from collections.abc import Iterator

import pytest

from pagoda import signals
from pagoda.signals import first_signal

KINDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@pytest.fixture
def usual() -> Iterator[list[int]]:
    """What a second signal does: it is noted here."""
    noted: list[int] = []
    before = {kind: signal.signal(kind, lambda number, _: noted.append(number)) for kind in KINDS}
    yield noted
    for kind, handler in before.items():
        signal.signal(kind, handler)


def send(*kinds: signal.Signals) -> None:
    """Send signals that arrive together, as those of a terminal and of torchrun."""
    signal.pthread_sigmask(signal.SIG_BLOCK, kinds)
    for kind in kinds:
        signal.pthread_kill(threading.main_thread().ident or 0, kind)  # not to the process: another thread may take it
    signal.pthread_sigmask(signal.SIG_UNBLOCK, kinds)


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_signal_is_answered_at_once_and_a_later_one_has_its_usual_effect(
    kind: signal.Signals, usual: list[int], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(signals, "_TOGETHER_S", -1.0)
    with first_signal(lambda name: f"{name} came") as received:
        send(kind)
        assert capfd.readouterr().err == f"\npagoda: {kind.name} came\n"
        send(signal.SIGTERM)
        assert (received, usual) == ([kind], [signal.SIGTERM])
    send(kind)
    assert usual == [signal.SIGTERM, kind]


def test_signals_that_arrive_together_are_one(usual: list[int], capfd: pytest.CaptureFixture[str]) -> None:
    with first_signal(lambda name: f"{name} came") as received:
        send(*KINDS)
        send(signal.SIGINT)
    assert (len(received), usual) == (1, [])
    assert capfd.readouterr().err.count("came") == 1


def test_a_signal_that_is_ignored_stays_ignored(usual: list[int]) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with first_signal(lambda name: "") as received:
        send(signal.SIGHUP)
    assert received == []
