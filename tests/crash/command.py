"""A command line of `pagoda` in a process of its own: a scenario for ranks/rank_server.py."""

import contextlib
import ctypes
import io
import json
import os
import resource
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import xxhash

from pagoda.checkpoint.reader import BUFFERS, SavedCheckpoint
from pagoda.cli.main import main
from pagoda.integrations import checkpoints
from pagoda.memory.arena import tensor_bytes
from pagoda.memory.identity import STATE
from pagoda.train.metrics import read_metrics
from pagoda.train.run_dir import RunDir
from pagoda.train.trainer import RunTrainer

from .world import PAGED, start_in

LIMITS = {resource.RLIMIT_AS: 32 << 30, resource.RLIMIT_FSIZE: 1 << 30}
"""Bytes that a forged number may make a process ask for."""
PATIENCE_S, RETRY_S = 0.5, 0.05
"""How long a run tries to write its last checkpoint to a disk that fails for good, and how often."""


def state_of(path: Path) -> str:
    """A hash of all that a checkpoint says of the state."""
    found = xxhash.xxh3_128()
    with SavedCheckpoint(path) as checkpoint:
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
    return {"state": state_of(RunDir(run).latest().state), "metrics": lines}


def say_what_is_restored(said: Path) -> None:
    """From now on a run that goes on from a checkpoint writes down its hash and that of the state, before any step."""
    load = RunTrainer._load_optimizer_and_scheduler

    def loaded(trainer: RunTrainer, checkpoint: str | None) -> None:
        load(trainer, checkpoint)
        if checkpoint is None:
            return
        with tempfile.TemporaryDirectory() as folder:
            trainer.passes.optimizer.save_checkpoint(f"{folder}/again")
            hashes = [state_of(Path(checkpoint) / STATE), state_of(Path(folder) / "again")]
        said.with_suffix(".partial").write_text(json.dumps(hashes))
        said.with_suffix(".partial").rename(said)

    RunTrainer._load_optimizer_and_scheduler = loaded


def run_line(out: Path, args: list[str], run: str | None, record: list[Any] | None, restored: bool) -> dict[str, Any]:
    """Run a command line; what it prints goes to the files `out` and `err`.

    Returns its exit status and, where it trains in the directory `run` and succeeds, the digest of that. `record` has
    the arguments of `recorder_start` in recorder.c. With `restored`, the file of that name gets the hashes of the
    checkpoint that the run went on from and of the state that it then had.
    """
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(out / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    for limit, most in LIMITS.items():
        resource.setrlimit(limit, (most, most))
    if record is not None:
        root, log, first, last, error = record
        recorder = ctypes.CDLL(os.environ["LD_PRELOAD"])
        recorder.recorder_start.argtypes = [ctypes.c_char_p] * 2 + [ctypes.c_long] * 2 + [ctypes.c_int]
        recorder.recorder_start(root.encode(), log.encode(), first, last, error)
    checkpoints.PATIENCE_S, checkpoints.RETRY_S = PATIENCE_S, RETRY_S
    if restored:
        say_what_is_restored(out / "restored")
    try:
        status = main(args)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
        status = 1
    digest = digest_of(Path(run)) if status == 0 and run is not None else None
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    return {"status": status, "digest": digest}


def warm_up() -> None:
    """Import, compile and trace what every command line needs."""
    with tempfile.TemporaryDirectory() as path, contextlib.redirect_stdout(io.StringIO()):
        start, run = start_in(Path(path)), f"{path}/run"
        (Path(path) / "ssd0").mkdir()
        assert main([*start, "--output-dir", f"{path}/ram"]) == 0
        assert main([*start, *PAGED, "--memory.ssd", f"{path}/ssd0", "--output-dir", run, "--max-steps", "2"]) == 0
        resume = f"train --resume-from-checkpoint last --output-dir {run} --max-steps 3"
        assert main(resume.split()) == 0
        assert main(["export", run, f"{path}/exported"]) == 0
        assert main(["inspect", run, "--verify"]) == 0
        digest_of(Path(run))
