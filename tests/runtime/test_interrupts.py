"""An exception of a signal's handler, at any line of Pagoda's own code: afterwards training goes on as if what it broke
off had not begun. Nothing hangs, and the exception reaches the user's code. Only after updates during backward, or
after a load that was broken off, a checkpoint may have to be loaded.
"""

import dis
import faulthandler
import inspect
import random
import shutil
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

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
    number `at`. `again`: another one follows after so many seconds."""

    def __init__(self, at: int, error: type[BaseException], again: float = 0.0) -> None:
        self.left, self.error, self.again, self.where = at, error, again, ""

    def __enter__(self) -> "Interrupt":
        self.handler, self.before = signal.signal(signal.SIGALRM, self.handle), sys.gettrace()
        look()
        sys.settrace(self.trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self.before)
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, self.handler)

    def handle(self, *_: object) -> None:
        again, self.again = self.again, 0.0
        if again:
            signal.setitimer(signal.ITIMER_REAL, again)
        raise self.error

    def trace(self, frame: FrameType, what: str, _argument: object) -> Any:
        if not _is_ours(frame):
            return None
        # Python handles no signal where it closes a generator, which looks like a call, nor where a `with` block ends.
        code = frame.f_code
        closes = what == "call" and bool(code.co_flags & inspect.CO_GENERATOR)
        ends = _ENDS_BLOCK in code.co_code[frame.f_lasti : frame.f_lasti + 8 : 2]
        if what in ("call", "line") and not (closes or ends):
            self.left -= 1
            if self.left == 0:
                self.where = f"{code.co_filename[len(PACKAGE) :]}:{frame.f_lineno}"
                sys.settrace(None)
                signal.raise_signal(signal.SIGALRM)
        return self.trace


def _is_ours(frame: FrameType) -> bool:
    """Whether a frame runs Pagoda's code, or torch's at the ends of `with torch.no_grad()` there."""
    file, caller = frame.f_code.co_filename, frame.f_back
    if file.endswith("torch/autograd/grad_mode.py") and caller is not None:
        file = caller.f_code.co_filename
    return file.startswith(PACKAGE) and file != interrupts.__file__


class Case(NamedTuple):
    """What is interrupted."""

    place: str
    do: Callable[["Run"], Iterator[None]]
    gap: int
    """How many lines lie between two trials."""
    clips: bool = True
    announced: int | None = None
    update: str = "sync"
    activations: str = "keep"
    again: bool = False
    """Whether a second signal follows shortly after the first."""
    may_load: bool = False
    """Whether a checkpoint may have to be loaded."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.b(torch.tanh(self.a(x)))


class Run:
    """A model in a placement that has taken two steps and is saved."""

    def __init__(self, folder: Path, case: Case) -> None:
        self.folder, self.backwards = folder, case.announced or 1
        torch.manual_seed(0)
        keeps = case.activations == "keep"
        self.repeats = 1 if keeps else 160  # small activations are not offloaded
        model = nn.Sequential(*((nn.Linear(32, 32), nn.Linear(32, 32)) if keeps else (Block(), Block())))
        memory = pagoda.Memory(host="16MiB", unit_limit="5KiB", page_size=4096)
        if case.place != RAM:
            sizes: dict[str, Any] = {"announced": case.announced, "clipping": case.clips, "unit_limit": "5KiB"}
            sizes["activations"] = case.activations
            memory = squeeze(model, case.place, folder / "ssd", precision="fp32", **sizes)
        (folder / "ssd").mkdir(parents=True)
        settings: dict[str, Any] = {
            "precision": "fp32",
            "memory": memory,
            "gradient_accumulation_steps": case.announced,
        }
        settings |= {"max_grad_norm": 1.0 if case.clips else None, "update": case.update}
        if not keeps:
            settings["activations"] = case.activations
        self.model, self.optimizer = pagoda.wrap(model, pagoda.AdamW(lr=1e-2), **settings)
        for batch in BATCHES[:2]:
            self.step(batch)
        self.optimizer.save_checkpoint(folder / "saved")

    def step(self, batch: torch.Tensor) -> None:
        for _ in range(self.backwards):
            self.model(batch.repeat(self.repeats, 1)).square().mean().backward()
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
        assert "Load a checkpoint" in said or "applied during backward" in said, said
        self.optimizer.load_checkpoint(self.folder / "saved")
        self.step(BATCHES[3])
        return self.state(), True


# What is interrupted. Each `yield` is the end of one thing that is done as a whole or not at all.


def save(run: Run) -> Iterator[None]:
    run.optimizer.save_checkpoint(run.folder / "another")
    yield


def load(run: Run) -> Iterator[None]:
    run.optimizer.load_checkpoint(run.folder / "saved")
    yield


def read(run: Run) -> Iterator[None]:
    with pagoda.gathered(run.model):
        pass
    with pagoda.resident(run.model), torch.no_grad():
        run.model(BATCHES[0])
    run.optimizer.state_dict()
    for entry in run.optimizer.state.values():
        entry["exp_avg"].sum()
    run.model[0].weight.sum()
    yield


def step(run: Run) -> Iterator[None]:
    run.step(BATCHES[2])
    yield


def steps(run: Run) -> Iterator[None]:
    for batch in BATCHES[:3]:
        run.step(batch)
        yield


def write(run: Run) -> Iterator[None]:
    """Writes to weights and states."""
    first, *_, last = run.model.parameters()
    with pagoda.gathered(run.model, modify=True):
        for param in run.model.parameters():
            param.data.mul_(0.5)
    yield
    with torch.no_grad():
        last.add_(1.0)
    yield
    run.optimizer.state[first]["exp_avg"].mul_(3.0)
    yield
    run.optimizer.state[last] = {}
    yield
    run.step(BATCHES[1])
    yield
    run.optimizer.load_state_dict(run.optimizer.state_dict())
    yield


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error, its cause, the cause of that, and so on."""
    while error is not None:
        yield error
        error = error.__cause__


def change(run: Run) -> Iterator[None]:
    """A step with gradients that are read, multiplied, added to, set and clipped."""
    params = [*run.model.parameters()]
    for batch in BATCHES[:2]:
        run.model(batch).square().mean().backward()
        for param in params:
            assert param.grad is not None
            param.grad.mul_(0.3).add_(1e-3)
    params[0].grad = params[0].grad * 3
    torch.nn.utils.clip_grad_norm_(params, 0.1)
    run.optimizer.clip_grad_norm_(0.05)
    run.optimizer.step()
    run.optimizer.zero_grad(set_to_none=False)
    run.optimizer.zero_grad()
    yield


@contextmanager
def _no_hang() -> Iterator[None]:
    faulthandler.dump_traceback_later(HANG_S, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def wholes(folder: Path, case: Case) -> list[State]:
    """The states after each thing that is done as a whole, and one more step."""
    found: list[State] = []
    while True:
        run = Run(folder / f"whole{len(found)}", case)
        count = sum(1 for _ in zip(range(len(found)), case.do(run), strict=False))
        run.step(BATCHES[3])
        if count < len(found):
            run.optimizer.close()
            return found
        found.append(run.state())
        run.optimizer.close()


def interrupted(run: Run, case: Case, at: int) -> tuple[int, bool]:
    """Interrupt a run at a line. Returns how much has been done as a whole, and whether it came so far."""
    # torch's load_state_dict() catches an Exception, and tells of it in words only.
    error, done = KeyboardInterrupt if at % 2 or case.do is load else TimeoutError, 0
    interrupt = Interrupt(at, error, random.Random(at).uniform(1e-5, 1e-3) if case.again else 0.0)
    try:
        with interrupt:
            for _ in case.do(run):
                done += 1
    except BaseException as raised:  # TimeoutError may be taken for a file's
        if not any(isinstance(each, error) for each in causes(raised)):
            raise
    else:
        assert not interrupt.where, f"line {at}, {interrupt.where}: the exception was lost"
    return done, bool(interrupt.where)


def check(folder: Path, case: Case, lines: Iterator[int]) -> Counter[str]:
    """Interrupt something at some of its lines, in a new run for each. Returns how often each end came."""
    expected = wholes(folder, case)
    ends: Counter[str] = Counter()
    for at in lines:
        run = Run(folder / str(at), case)
        with _no_hang():
            done, came = interrupted(run, case, at)
            found, loaded = run.go_on()
            if (folder / str(at) / "another").exists():  # whole, with the states of before
                run.optimizer.load_checkpoint(folder / str(at) / "another")
                run.step(BATCHES[3])
                assert_equal(run.state(), expected[0])
            run.optimizer.close()
        shutil.rmtree(folder / str(at))  # thousands of runs would fill a drive
        if not came:
            break
        ends["loaded" if loaded else "went on"] += 1
        # One that comes when all has been done leaves it done.
        undone = loaded or all(torch.equal(found[name], value) for name, value in expected[done].items())
        assert_equal(found, expected[0 if loaded else done if undone else done + 1])
    assert case.may_load or not ends["loaded"]
    return ends


CASES = {
    "RAM": Case(RAM, step, 449),
    "moments on SSD": Case(HOST_WEIGHTS, step, 859, clips=False),
    "all on SSD": Case(ALL_ON_SSD, step, 1433, announced=2),
    "updates during backward": Case(ARENA_ALL_ON_SSD, step, 1229, clips=False, announced=2, may_load=True),
    "an arena": Case(ARENA, step, 1031),
    "saving": Case(ALL_ON_SSD, save, 307),
    "loading": Case(RAM, load, 521, may_load=True),
    "reading": Case(ARENA, read, 1409),
    "values of gradients": Case(ALL_ON_SSD, change, 3001),
    "writing": Case(ALL_ON_SSD, write, 2803),
    "asynchronous updates": Case(RAM, steps, 1511, update="async"),
    "offloaded activations": Case(ALL_ON_SSD, step, 1511, activations="offload"),
    "a second signal": Case(ALL_ON_SSD, step, 977, again=True),
}


@pytest.mark.inline
@pytest.mark.parametrize("name", CASES)
def test_after_an_interrupt_training_goes_on_with_the_states_of_the_last_step(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    ends = check(tmp_path, case, iter(range(random.Random(name).randrange(1, case.gap), 1 << 20, case.gap)))
    assert ends.total() > 2


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_after_an_interrupt_at_any_line_training_goes_on(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    assert check(tmp_path, case, iter(range(1, 1 << 20, max(1, case.gap // 50)))).total() > 100


def close(run: Run) -> Iterator[None]:
    run.optimizer.close()
    yield


@pytest.mark.parametrize("gap", [211, pytest.param(7, marks=pytest.mark.slow)])
def test_an_optimizer_whose_close_is_interrupted_can_be_closed(gap: int, tmp_path: Path) -> None:
    """Then no thread is left."""
    case, before = Case(ALL_ON_SSD, close, gap), {*threading.enumerate()}
    for at in range(1, 1 << 20, gap):
        run = Run(tmp_path / str(at), case)
        with _no_hang():
            _, came = interrupted(run, case, at)
            run.optimizer.close()
        assert not {*threading.enumerate()} - before
        with pytest.raises(pagoda.UsageError, match="closed"):
            run.model(BATCHES[0])
        if not came:
            break
    assert at > 3 * gap


@pytest.mark.slow
@pytest.mark.parametrize("place", [RAM, ALL_ON_SSD, ARENA, ARENA_ALL_ON_SSD])
def test_after_a_signal_at_a_random_time_training_goes_on(place: str, tmp_path: Path) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before, generator = signal.signal(signal.SIGALRM, interrupt), random.Random(place)
    try:
        for number in range(500):
            case = Case(place, steps, 0, bool(number % 2), None if number % 3 else 2)
            run = Run(tmp_path / str(number), case)
            with _no_hang():
                try:
                    while True:  # Python loses what a handler raises in the callback of a weak reference
                        signal.setitimer(signal.ITIMER_REAL, generator.uniform(0.0001, 0.02))
                        for _ in range(20):
                            run.step(BATCHES[2])
                except KeyboardInterrupt:
                    pass
                _, loaded = run.go_on()
                assert not loaded or (case.announced and not case.clips)
                thread = threading.Thread(target=run.step, args=(BATCHES[0],))
                thread.start()  # no lock is left to this thread
                thread.join()
                run.optimizer.close()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
