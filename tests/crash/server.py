"""Runs command lines of `pagoda` in forked processes: a program for tests, which imports and compiles everything once.

It answers each line of JSON from stdin with one: {"status": exit status, minus a signal, or null for a process that
ran past the limit and was killed; "digest": what `digest_of` says, where asked for; "restored": where asked for, the
hashes of the checkpoint that a run went on from and of the state that it then had}. A request has "args", "output"
(prefix of the files for stdout and stderr), "digest" (a run's directory, or null), "kill_after" (seconds from the fork
to SIGKILL, or null), "restored" (whether to say that), and "record": null, or the arguments of `recorder_start` in
recorder.c, which is preloaded here.
"""

import contextlib
import ctypes
import gc
import io
import json
import os
import resource
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

from pagoda.process import spin_briefly

spin_briefly()

import torch  # noqa: E402
import xxhash  # noqa: E402

from pagoda.checkpoint.reader import BUFFERS, Checkpoint  # noqa: E402
from pagoda.cli.main import main  # noqa: E402
from pagoda.memory.arena import tensor_bytes  # noqa: E402
from pagoda.train.metrics import read_metrics  # noqa: E402
from pagoda.train.run_dir import RunCheckpoint, RunDir  # noqa: E402
from pagoda.train.session import Session  # noqa: E402

LIMIT_S = 60
MOST_MEMORY, MOST_FILE = 32 << 30, 1 << 30
"""Bytes that a forged number may make a process ask for."""


def state_of(path: Path) -> str:
    """A hash of all that a checkpoint says of the state."""
    found = xxhash.xxh3_128()
    with Checkpoint(path) as checkpoint:
        for state in (*checkpoint.states, BUFFERS):
            for name, spec in sorted(checkpoint.specs(state).items()):
                values = checkpoint.tensors[state][name].whole().reshape(-1)
                found.update(f"{state} of {name}: {spec}".encode())
                found.update(tensor_bytes(values))
        rest = {key: checkpoint.manifest[key] for key in ("steps", "param_groups", "rng")}
        found.update(json.dumps(rest, sort_keys=True).encode())
    return found.hexdigest()


def digest_of(run: Path) -> dict[str, Any]:
    """The bits of a run: the state in its last checkpoint, and its metrics but for times."""
    lines = [(m["step"], m["loss"], m["grad_norm"], m["lr"]) for m in read_metrics(run / "metrics.jsonl")]
    return {"state": state_of(RunDir(run).latest().path), "metrics": lines}


def say_what_is_restored(said: Path) -> None:
    """From now on a run that goes on from a checkpoint writes down its hash and that of the state, before any step."""
    restore = Session.restore

    def restored(session: Session, checkpoint: RunCheckpoint) -> None:
        restore(session, checkpoint)
        with tempfile.TemporaryDirectory() as folder:
            session.optimizer.save_checkpoint(f"{folder}/again")
            hashes = [state_of(checkpoint.path), state_of(Path(folder) / "again")]
        said.with_suffix(".partial").write_text(json.dumps(hashes))
        said.with_suffix(".partial").rename(said)

    Session.restore = restored  # type: ignore[method-assign]


def child(request: dict[str, Any]) -> int:
    """In the child: what is asked; returns the exit status."""
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{request['output']}.{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, MOST_MEMORY))
    resource.setrlimit(resource.RLIMIT_FSIZE, (MOST_FILE, MOST_FILE))
    recorder = ctypes.CDLL(os.environ["LD_PRELOAD"])
    recorder.recorder_start.argtypes = [ctypes.c_char_p] * 2 + [ctypes.c_long] * 2 + [ctypes.c_int]
    if request["record"] is not None:
        root, log, first, last, error = request["record"]
        recorder.recorder_start(root.encode(), log.encode(), first, last, error)
    if request["restored"]:
        say_what_is_restored(Path(f"{request['output']}.restored"))
    try:
        status = main(request["args"])
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
        status = 1
    if status == 0 and request["digest"] is not None:
        digest = digest_of(Path(request["digest"]))
        Path(f"{request['output']}.digest").write_text(json.dumps(digest))
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    return status


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Fork, do, and wait."""
    said = {name: Path(f"{request['output']}.{name}") for name in ("digest", "restored")}
    for path in said.values():
        path.unlink(missing_ok=True)
    process = os.fork()
    if process == 0:
        status = 1
        try:
            status = child(request)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)

    def kill(*_: object) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.kill(process, signal.SIGKILL)

    signal.signal(signal.SIGALRM, kill)
    signal.setitimer(signal.ITIMER_REAL, request["kill_after"] or LIMIT_S)
    began = time.monotonic()
    _, ended = os.waitpid(process, 0)
    signal.alarm(0)
    status: int | None = os.waitstatus_to_exitcode(ended)
    if status == -signal.SIGKILL and time.monotonic() - began >= LIMIT_S:
        status = None
    answers = {name: json.loads(path.read_text()) if path.exists() else None for name, path in said.items()}
    return {"status": status, **answers}


def warm_up(start: list[str], ssd: list[str]) -> None:
    """Import, compile and trace what every child needs."""
    with tempfile.TemporaryDirectory() as path, contextlib.redirect_stdout(io.StringIO()):
        (Path(path) / "ssd0").mkdir()
        run = f"{path}/run"
        assert main([*start, "--out", f"{path}/ram"]) == 0
        assert main([*start, *ssd, "--memory.ssd", f"{path}/ssd0", "--out", run, "--steps", "2"]) == 0
        assert main(["train", "--resume", "--out", run, "--steps", "3"]) == 0
        assert main(["export", run, f"{path}/exported"]) == 0
        assert main(["inspect", run, "--verify"]) == 0
        digest_of(Path(run))


if __name__ == "__main__":
    torch.set_num_threads(1)
    for module in (torch.cuda.random, torch.xpu.random, torch.mtia):
        module._lazy_call = lambda *_, **__: None  # else every seed formats stack traces, which takes longest of all
    warm_up(*json.loads(sys.argv[1]))
    gc.collect()
    gc.freeze()
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), flush=True)
