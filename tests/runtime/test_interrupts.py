"""An exception of a signal's handler, at any line of Pagoda's own code: afterwards training goes on as if the step had
not begun, or a checkpoint loads. Nothing hangs, and the exception reaches the user's code.
"""

import dis
import faulthandler
import inspect
import random
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn
from zoo import ALL_ON_SSD, ARENA, ARENA_ALL_ON_SSD, HOST_WEIGHTS, assert_equal, squeeze

import pagoda
from pagoda import interrupts
from pagoda.interrupts import look

PACKAGE = str(Path(pagoda.__file__).parent)
RAM = "ram"
HANG_S = 100
BATCHES = torch.randn(4, 4, 32, generator=torch.Generator().manual_seed(0))
State = dict[str, torch.Tensor]


_ENDS_BLOCK = bytes([dis.opmap["LOAD_CONST"]] * 3)
"""The first instructions of the end of a `with` block: its `__exit__` is called with None three times."""


class Interrupt:
    """Sends this thread a signal, whose handler raises an error, at the line of Pagoda's code that it comes to as
    number `at`."""

    def __init__(self, at: int, error: type[BaseException]) -> None:
        self.left, self.error, self.where = at, error, ""

    def __enter__(self) -> "Interrupt":
        self.handler, self.before = signal.signal(signal.SIGALRM, self.handle), sys.gettrace()
        look()
        sys.settrace(self.trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self.before)
        signal.signal(signal.SIGALRM, self.handler)

    def handle(self, *_: object) -> None:
        raise self.error

    def trace(self, frame: FrameType, what: str, _argument: object) -> Any:
        if not frame.f_code.co_filename.startswith(PACKAGE) or frame.f_code.co_filename == interrupts.__file__:
            return None
        # Python handles no signal where it closes a generator, which looks like a call, nor where a `with` block ends.
        code = frame.f_code
        closes = what == "call" and bool(code.co_flags & inspect.CO_GENERATOR)
        ends = code.co_code[frame.f_lasti : frame.f_lasti + 6 : 2] == _ENDS_BLOCK
        if what in ("call", "line") and not (closes or ends):
            self.left -= 1
            if self.left == 0:
                self.where = f"{frame.f_code.co_filename[len(PACKAGE) :]}:{frame.f_lineno}"
                sys.settrace(None)
                signal.raise_signal(signal.SIGALRM)
        return self.trace


class Case:
    """A model in a placement that has taken two steps and is saved."""

    def __init__(self, folder: Path, place: str, clips: bool, announced: int | None) -> None:
        self.folder, self.backwards = folder, announced or 1
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
        memory = pagoda.Memory(host="16MiB", unit_limit="5KiB", page_size=4096)
        if place != RAM:
            settings = {"precision": "fp32", "announced": announced, "clipping": clips, "unit_limit": "5KiB"}
            memory = squeeze(model, place, folder / "ssd", **settings)
        (folder / "ssd").mkdir(parents=True)
        clip = 1.0 if clips else None
        settings = {"precision": "fp32", "memory": memory, "clip_grad_norm": clip, "accumulation_steps": announced}
        self.model, self.optimizer = pagoda.wrap(model, pagoda.AdamW(lr=1e-2), **settings)
        for batch in BATCHES[:2]:
            self.step(batch)
        self.optimizer.save_checkpoint(folder / "saved")

    def step(self, batch: torch.Tensor) -> None:
        for _ in range(self.backwards):
            self.model(batch).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> State:
        return {name: value.clone() for name, value in self.model.state_dict().items()}

    def go_on(self) -> tuple[State, bool]:
        """Training goes on, or else a checkpoint is loaded: the state after one more step, and whether it was."""
        try:
            self.optimizer.zero_grad()
            self.step(BATCHES[3])
            return self.state(), False
        except (pagoda.StorageError, pagoda.UsageError) as error:
            said = str(error)
        assert "Load a checkpoint" in said or "applied during backward" in said
        self.optimizer.load_checkpoint(self.folder / "saved")
        self.step(BATCHES[3])
        return self.state(), True


def save(case: Case) -> None:
    case.optimizer.save_checkpoint(case.folder / "another")


def load(case: Case) -> None:
    case.optimizer.load_checkpoint(case.folder / "saved")


def read(case: Case) -> None:
    with pagoda.gathered(case.model):
        pass
    with pagoda.resident(case.model), torch.no_grad():
        case.model(BATCHES[0])
    case.optimizer.state_dict()


def step(case: Case) -> None:
    case.step(BATCHES[2])


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error, its cause, the cause of that, and so on."""
    while error is not None:
        yield error
        error = error.__cause__


def change(case: Case) -> None:
    """A step with gradients that are read, multiplied, added to, set and clipped."""
    params = [*case.model.parameters()]
    for batch in BATCHES[:2]:
        case.model(batch).square().mean().backward()
        for param in params:
            assert param.grad is not None
            param.grad.mul_(0.3).add_(1e-3)
    params[0].grad = params[0].grad * 3
    torch.nn.utils.clip_grad_norm_(params, 0.1)
    case.optimizer.step()
    case.optimizer.zero_grad(set_to_none=False)
    case.optimizer.zero_grad()


@contextmanager
def _no_hang() -> Iterator[None]:
    faulthandler.dump_traceback_later(HANG_S, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def check(
    folder: Path, place: str, clips: bool, announced: int | None, do: Callable[[Case], None], lines: Iterator[int]
) -> Counter[str]:
    """Interrupt something at some of its lines, in a new case for each. Returns how often each end came."""
    expected = []
    for taken in (False, True):
        case = Case(folder / f"expected{taken}", place, clips, announced)
        if taken:
            do(case)
        case.step(BATCHES[3])
        expected.append(case.state())
        case.optimizer.close()
    ends: Counter[str] = Counter()
    for at in lines:
        error = (KeyboardInterrupt, TimeoutError)[at % 2]
        case = Case(folder / str(at), place, clips, announced)
        interrupt = Interrupt(at, error)
        with _no_hang():
            try:
                with interrupt:
                    do(case)
            except BaseException as raised:  # TimeoutError may be taken for a file's
                if not any(isinstance(each, error) for each in causes(raised)):
                    raise
            else:
                assert not interrupt.where, f"line {at}, {interrupt.where}: the exception was lost"
            found, loaded = case.go_on()
            case.optimizer.close()
        if not interrupt.where:
            break
        ends["loaded" if loaded else "went on"] += 1
        # One that comes when all has been done leaves the step taken.
        taken = not loaded and any(not torch.equal(found[n], v) for n, v in expected[0].items())
        assert_equal(found, expected[taken])
    return ends


CASES = {
    "RAM": (RAM, True, None, step, 449),
    "moments on SSD": (HOST_WEIGHTS, False, None, step, 859),
    "all on SSD": (ALL_ON_SSD, True, 2, step, 1433),
    "updates during backward": (ARENA_ALL_ON_SSD, False, 2, step, 1229),
    "an arena": (ARENA, True, None, step, 1031),
    "saving": (ALL_ON_SSD, True, None, save, 307),
    "loading": (RAM, True, None, load, 521),
    "reading": (ARENA, True, None, read, 809),
    "values of gradients": (ALL_ON_SSD, True, None, change, 3001),
}
"""Placement, whether it clips, announced backwards, what is interrupted, and how many lines lie between two trials."""


@pytest.mark.inline
@pytest.mark.parametrize("name", CASES)
def test_after_an_interrupt_training_goes_on_or_a_checkpoint_loads(name: str, tmp_path: Path) -> None:
    place, clips, announced, do, gap = CASES[name]
    ends = check(
        tmp_path, place, clips, announced, do, iter(range(random.Random(name).randrange(1, gap), 1 << 20, gap))
    )
    print(name, ends)
    assert ends.total() > 2


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_after_an_interrupt_at_any_line_training_goes_on_or_a_checkpoint_loads(name: str, tmp_path: Path) -> None:
    place, clips, announced, do, gap = CASES[name]
    assert check(tmp_path, place, clips, announced, do, iter(range(1, 1 << 20, max(1, gap // 50)))).total() > 100


@pytest.mark.slow
@pytest.mark.parametrize("place", [RAM, ALL_ON_SSD, ARENA, ARENA_ALL_ON_SSD])
def test_after_a_signal_at_a_random_time_training_goes_on_or_a_checkpoint_loads(place: str, tmp_path: Path) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before, generator = signal.signal(signal.SIGALRM, interrupt), random.Random(place)
    try:
        for number in range(500):
            case = Case(tmp_path / str(number), place, bool(number % 2), None if number % 3 else 2)
            with _no_hang():
                try:
                    signal.setitimer(signal.ITIMER_REAL, generator.uniform(0.0001, 0.02))
                    while True:
                        case.step(BATCHES[2])
                except KeyboardInterrupt:
                    pass
                case.go_on()
                thread = threading.Thread(target=case.step, args=(BATCHES[0],))
                thread.start()  # no lock is left to this thread
                thread.join()
                case.optimizer.close()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
