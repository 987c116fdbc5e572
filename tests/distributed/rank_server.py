"""Runs scenarios in groups of forked processes: a program for tests, which imports everything once.

It says "ready", then reads one request a line from stdin, as JSON: "ranks" (one is a process that torchrun has not
started), "scenario" (a name in `scenarios`, `divided` or `pipelines`, or "module:name"), "arguments", "out" (a
directory), "timeout_s" and "environment". Each rank calls the scenario, and what it returns goes to `rank-R.pt`; an
error goes to `error-R.txt`. The answer is a line: {"status": each rank's exit status, minus the signal, or null if it
was still running}.

With "restarts", the ranks are those of torchrun's own agent, which starts all of them anew that often when one fails;
the file `agent` has its process, and the answer its status alone.
"""

import faulthandler
import gc
import json
import os
import pkgutil
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from . import divided, pipelines, scenarios


def scenario_of(name: str) -> Callable[..., Any]:
    """The function of this name."""
    if ":" in name:
        return cast(Callable[..., Any], pkgutil.resolve_name(name))
    module = next(each for each in (divided, pipelines, scenarios) if hasattr(each, name))
    return cast(Callable[..., Any], getattr(module, name))


def play(request: dict[str, Any], rank: int, port: int) -> int:
    """In the child: one rank."""
    size = request["ranks"]
    environment: dict[str, Any] = {"GLOO_SOCKET_IFNAME": "lo"}
    if size > 1:
        environment |= {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size}
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    environment |= request.get("environment", {})
    os.environ.update({name: str(value) for name, value in environment.items()})
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    out = Path(request["out"])
    stacks = (out / f"hang-{rank}.txt").open("w")
    faulthandler.dump_traceback_later(request["timeout_s"] - 2, file=stacks)
    try:
        result = scenario_of(request["scenario"])(out, **request["arguments"])
        torch.save(result, out / f"rank-{rank}.pt")
        if dist.is_initialized():
            dist.destroy_process_group()
    except BaseException:
        (out / f"error-{rank}.txt").write_text(traceback.format_exc())
        return 1
    return 0


def play_again(request: dict[str, Any]) -> None:
    """In a child of the agent: one rank, whose environment is torchrun's."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the agent's own handler came along with the fork
    out = Path(request["out"])
    try:
        getattr(scenarios, request["scenario"])(out, **request["arguments"])
        dist.destroy_process_group()
    except BaseException:
        number = f"{os.environ['RANK']}-{os.environ['TORCHELASTIC_RESTART_COUNT']}"
        (out / f"error-{number}.txt").write_text(traceback.format_exc())
        raise


def attend(request: dict[str, Any]) -> int:
    """In the child: what torchrun does."""
    os.setsid()
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    os.environ.update(GLOO_SOCKET_IFNAME="lo", **request.get("environment", {}))
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=request["ranks"],
        run_id="tests",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        max_restarts=request["restarts"],
        start_method="fork",
    )
    try:
        elastic_launch(config, play_again)(request)
    except BaseException:
        (Path(request["out"]) / "error-agent.txt").write_text(traceback.format_exc())
        return 1
    return 0


def attempt_again(request: dict[str, Any]) -> list[int | None]:
    """Fork an agent and wait for it, at most as long as the request says."""
    agent = os.fork()
    if agent == 0:
        os._exit(attend(request))
    (Path(request["out"]) / "agent").write_text(str(agent))
    deadline = time.monotonic() + request["timeout_s"]
    while time.monotonic() < deadline:
        child, ended = os.waitpid(agent, os.WNOHANG)
        if child:
            return [os.waitstatus_to_exitcode(ended)]
        time.sleep(0.01)
    os.killpg(agent, signal.SIGKILL)
    os.waitpid(agent, 0)
    return [None]


def attempt(request: dict[str, Any]) -> list[int | None]:
    """Fork every rank and wait for all, at most as long as the request says."""
    scenario_of(request["scenario"])  # what it imports, all have
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    children = {}
    for rank in range(request["ranks"]):
        child = os.fork()
        if child == 0:
            os._exit(play(request, rank, port))
        children[child] = rank
    status: list[int | None] = [None] * request["ranks"]
    deadline = time.monotonic() + request["timeout_s"]
    while children and time.monotonic() < deadline:
        child, ended = os.waitpid(-1, os.WNOHANG)
        if child:
            status[children.pop(child)] = os.waitstatus_to_exitcode(ended)
        else:
            time.sleep(0.005)
    for child in children:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return status


if __name__ == "__main__":
    torch.set_num_threads(1)
    scenarios.warm_up()
    gc.collect()
    gc.freeze()  # else each process would look through all that was imported
    print("ready", flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        status = attempt_again(request) if "restarts" in request else attempt(request)
        print(json.dumps({"status": status}), flush=True)
