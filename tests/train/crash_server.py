"""Trains in forked processes and kills them: a program for tests, which imports everything once.

It says "ready", then reads one request a line from stdin, as JSON, and answers each with a line: {"status": exit
status, or minus the signal}. A request has "config" (a TrainConfig as JSON), "kill_after" (seconds from the fork to
SIGKILL, or null) and "slow_s" (seconds that every write to a checkpoint takes longer).
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
from pagoda.train.loop import run
from pagoda.train.run_dir import RunDir


def train(request: dict[str, Any]) -> int:
    """In the child: train, or go on with what is there."""
    write, slow_s = TensorWriter.write, request["slow_s"]

    def slowly(self: TensorWriter, name: str, piece: int, data: memoryview) -> None:
        time.sleep(slow_s)
        write(self, name, piece, data)

    if slow_s:
        TensorWriter.write = slowly  # type: ignore[method-assign]
    config = TrainConfig.from_json(json.dumps(request["config"]))
    resume = RunDir(config.out).checkpoints.exists()
    try:
        run(replace(config, resume=resume), Console(file=io.StringIO()))
    except Exception:
        traceback.print_exc()
        return 1
    return 0


def attempt(request: dict[str, Any]) -> int:
    """Fork, train, kill; returns how the child ended."""
    child = os.fork()
    if child == 0:
        os._exit(train(request))
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
