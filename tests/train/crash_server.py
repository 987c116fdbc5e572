"""Trains in forked processes and kills them: a program for tests, which imports everything once.

It says "ready", then reads one request a line from stdin, as JSON, and answers each with a line: {"status": exit
status, or minus the signal}. A request has "kill_after" (seconds from the fork to SIGKILL, or null), "slow_s" (seconds
that every piece of a checkpoint takes longer to write), "train" (a TrainConfig as JSON) and "echo" (where to save what
was restored, before any step; or null).
"""

import io
import json
import os
import signal
import sys
import time
import traceback
from dataclasses import replace
from typing import Any

import torch
import transformers.models.llama.modeling_llama  # noqa: F401
from rich.console import Console

from pagoda.checkpoint.tensors import TensorWriter
from pagoda.optim import AdamW
from pagoda.optim.kernels import warm_up
from pagoda.train import TrainConfig
from pagoda.train.loop import _Loop, run
from pagoda.train.run_dir import RunCheckpoint, RunDir


def do(request: dict[str, Any]) -> int:
    """In the child: what is asked; returns the exit status."""
    if request["slow_s"]:
        slow_down(TensorWriter, "write", request["slow_s"])
    try:
        train(TrainConfig.from_json(json.dumps(request["train"])), request["echo"])
    except Exception:
        traceback.print_exc()
        return 1
    return 0


def slow_down(kind: type, method: str, seconds: float) -> None:
    """Let every call of a method take longer."""
    real = getattr(kind, method)

    def slowly(*args: Any) -> Any:
        time.sleep(seconds)
        return real(*args)

    setattr(kind, method, slowly)


def train(config: TrainConfig, echo: str | None) -> None:
    """Train, or go on with what is there."""
    restore = _Loop.restore

    def restored(self: _Loop, checkpoint: RunCheckpoint) -> None:
        restore(self, checkpoint)
        self.optimizer.save_checkpoint(echo)  # type: ignore[arg-type]

    if echo is not None:
        _Loop.restore = restored  # type: ignore[method-assign]
    run(replace(config, resume=RunDir(config.out).checkpoints.exists()), Console(file=io.StringIO()))


def attempt(request: dict[str, Any]) -> int:
    """Fork, do, kill; returns how the child ended."""
    child = os.fork()
    if child == 0:
        os._exit(do(request))
    deadline = None if request["kill_after"] is None else time.monotonic() + request["kill_after"]
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        if deadline is not None and time.monotonic() >= deadline:
            os.kill(child, signal.SIGKILL)
            deadline = None
        time.sleep(0.0005)


if __name__ == "__main__":
    torch.set_num_threads(1)
    warm_up(AdamW(), "bf16")
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps({"status": attempt(json.loads(line))}), flush=True)
