"""However a run ends, and in whatever phase, nothing is lost: it goes on to the same bits, without a traceback.

Each run is a fork of this process, which has imported everything. A fault comes when the run reaches a phase.
"""

import contextlib
import os
import resource
import shutil
import signal
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pagoda.checkpoint import snapshot
from pagoda.cli.main import main
from pagoda.integrations import checkpoints
from pagoda.optimizer import PagedOptimizer
from pagoda.train import assembly
from pagoda.train.evaluate import Evaluator
from pagoda.train.run_dir import RunDir
from pagoda.train.trainer import RunTrainer
from tests.tiny import write_model, write_text

from .command import digest_of

STEPS = 5
EVERY = 2
PHASES: dict[str, tuple[object, str, Callable[..., bool]]] = {
    "loading": (assembly, "choose_plan", lambda *_: True),
    "before the first step": (assembly, "Progress", lambda *_: True),
    "in the first step": (RunTrainer, "training_step", lambda trainer, *_: trainer.state.global_step == 0),
    "in a later step": (RunTrainer, "training_step", lambda trainer, *_: trainer.state.global_step == 3),
    "in an evaluation": (Evaluator, "measure", lambda _, __, step: step == EVERY),
    "when its files are made": (RunDir, "create", lambda *_: True),
    "in a checkpoint": (snapshot, "write_manifest", lambda _, content: content["extra"]["step"] == EVERY),
    "in the last checkpoint": (snapshot, "write_manifest", lambda _, content: content["extra"]["step"] == STEPS),
    "after the last step": (checkpoints.Checkpoints, "_complete", lambda *_: True),
    "when it closes": (PagedOptimizer, "close", lambda *_: True),
}
"""Phase -> the function that is called then, and which of its calls."""


def kill(*numbers: signal.Signals) -> None:
    """Signals that arrive together."""
    signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    for number in numbers:
        os.kill(os.getpid(), number)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)


def full_output(*descriptors: int) -> None:
    for descriptor in descriptors:
        os.dup2(os.open("/dev/full", os.O_WRONLY), descriptor)


def closed_output() -> None:
    """The reader of the output goes away."""
    reader, writer = os.pipe()
    os.close(reader)
    os.dup2(writer, 1)


def full_disk() -> None:
    """No file can grow for two seconds."""
    unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
    timer = threading.Timer(2.0, resource.setrlimit, (resource.RLIMIT_FSIZE, unlimited))
    timer.daemon = True
    timer.start()


FAULTS: dict[str, Callable[[], None]] = {
    "SIGKILL": lambda: kill(signal.SIGKILL),
    "SIGHUP": lambda: kill(signal.SIGHUP),
    "three signals": lambda: kill(signal.SIGINT, signal.SIGTERM, signal.SIGHUP),
    "a full output": lambda: full_output(1, 2),
    "a reader that goes away": closed_output,
    "a full disk": full_disk,
}
GOES_ON = ("a full output", "a reader that goes away")
"""Faults that do not end a run."""


def strike(phase: str, fault: Callable[[], None]) -> None:
    """Let the fault come once, when the phase is reached."""
    owner, name, when = PHASES[phase]
    real, left = getattr(owner, name), [fault]

    def reached(*args: Any, **settings: Any) -> Any:
        if left and when(*args):
            left.pop()()
        return real(*args, **settings)

    setattr(owner, name, reached)


def in_a_fork(folder: Path, work: Callable[[], int]) -> tuple[int, str]:
    """Exit code of `work` in a fork of this process (negative for a signal), and what it wrote to stderr."""
    errors = folder / "stderr"
    child = os.fork()
    if not child:
        code = 99
        try:
            for number, path in ((1, folder / "stdout"), (2, errors)):
                os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            with contextlib.redirect_stdout(open(1, "w")), contextlib.redirect_stderr(open(2, "w")):
                code = work()
        except BaseException:
            os.write(2, traceback.format_exc().encode())
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), errors.read_text()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], dict[str, Any]]:
    """The flags of a run without its --output-dir, and what it ends with."""
    folder = tmp_path_factory.mktemp("whole")
    model, text = write_model(folder / "model", hidden_size=32, num_hidden_layers=2), write_text(folder / "text")
    flags = f"train --model {model} --data {text} --max-steps {STEPS} --max-length 16"
    flags += " --per-device-train-batch-size 2 --eval-share 0.2"
    flags += f" --eval-steps {EVERY} --save-steps {EVERY} --plan usual --cache {folder / 'cache'}"
    flags += " --memory.host 64MiB --lr-scheduler-type constant"
    assert main([*flags.split(), "--output-dir", str(folder / "run")]) == 0
    return flags.split(), digest_of(folder / "run")


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("phase", PHASES)
def test_a_run_that_ends_in_any_phase_goes_on_to_the_same_bits(
    phase: str, fault: str, whole: tuple[list[str], dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints, "RETRY_S", 0.3)
    flags, expected = whole
    run = tmp_path / "run"

    def struck() -> int:
        strike(phase, FAULTS[fault])
        return main([*flags, "--output-dir", str(run)])

    code, errors = in_a_fork(tmp_path, struck)
    assert "Traceback" not in errors
    assert "Exception ignored" not in errors
    assert code == 0 or fault not in GOES_ON
    if not (run / "config.json").exists():
        shutil.rmtree(run, ignore_errors=True)
        code, errors = in_a_fork(tmp_path, lambda: main([*flags, "--output-dir", str(run)]))
    else:
        again = f"train --resume-from-checkpoint last --output-dir {run}"
        code, errors = in_a_fork(tmp_path, lambda: main(again.split()))
    assert code == 0, errors
    assert digest_of(run) == expected
