"""Runs scenarios in groups of forked processes: a program for tests, which imports everything once.

It is given the number of a socket to which processes that run tests connect, and ends when none is connected any more.
A request is a line of JSON: "ranks" (one is a process that torchrun has not started), "scenario" (a name in
`scenarios`, `divided` or `pipelines`, or "module:name"), "arguments", "out" (a directory), "timeout_s" and
"environment". Each rank calls the scenario, and what it returns goes to `rank-R.pt`; an error goes to `error-R.txt`.
The answer is a line: each rank's exit status, minus the signal, or null if it was still running.

With "restarts", the ranks are those of torchrun's own agent, which starts all of them anew that often when one fails;
the file `agent` has its process, and the answer its status alone.
"""

import faulthandler
import gc
import json
import os
import pkgutil
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from forked import fork
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from . import divided, pipelines, scenarios
from .ranks import seed_no_accelerators


@cache
def prepare(module: str) -> None:
    """Import and compile once what scenarios of a module need."""
    getattr(import_module(module), "warm_up", lambda: None)()
    gc.collect()
    gc.freeze()  # else each process would look through all that was imported


def scenario_of(name: str) -> Callable[..., Any]:
    """The function of this name."""
    if ":" in name:
        return pkgutil.resolve_name(name)
    return getattr(next(module for module in (divided, pipelines, scenarios) if hasattr(module, name)), name)


def play(request: dict[str, Any], name: str) -> int:
    """In a rank, whose environment is torchrun's; returns the exit status."""
    out = Path(request["out"])
    try:
        result = scenario_of(request["scenario"])(out, **request["arguments"])
        torch.save(result, out / f"rank-{name}.pt")
        if dist.is_initialized():
            dist.destroy_process_group()
    except BaseException:
        (out / f"error-{name}.txt").write_text(traceback.format_exc())
        return 1
    return 0


def be_rank(request: dict[str, Any], port: int, rank: int) -> int:
    """In the child: one rank."""
    size, environment = request["ranks"], {}
    if size > 1:
        environment |= {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size}
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    environment |= request["environment"]
    os.environ.update({name: str(value) for name, value in environment.items()})
    with Path(request["out"], f"hang-{rank}.txt").open("w") as stacks:
        if request["timeout_s"] > 2:
            faulthandler.dump_traceback_later(request["timeout_s"] - 2, file=stacks)
        return play(request, str(rank))


def play_again(request: dict[str, Any]) -> None:
    """In a child of the agent: one rank."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the agent's own handler came along with the fork
    if play(request, f"{os.environ['RANK']}-{os.environ['TORCHELASTIC_RESTART_COUNT']}"):
        raise SystemExit(1)


def be_agent(request: dict[str, Any]) -> int:
    """In the child: what torchrun does."""
    Path(request["out"], "agent").write_text(str(os.getpid()))
    os.environ.update(request["environment"])
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
        Path(request["out"], "error-agent.txt").write_text(traceback.format_exc())
        return 1
    return 0


def attempt(request: dict[str, Any], asker: socket.socket) -> list[int | None]:
    """Fork every rank, or an agent, and wait for all, at most as long as the request says, or as someone asks."""
    with socket.socket() as place:
        place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # rank 0 may listen there, and nobody else gets it
        place.bind(("127.0.0.1", 0))
        port = place.getsockname()[1]
        works = [partial(be_rank, request, port, rank) for rank in range(request["ranks"])]
        return ended([partial(be_agent, request)] if "restarts" in request else works, request["timeout_s"], asker)


def has_left(asker: socket.socket) -> bool:
    """Whether the process that asked is connected no more."""
    return bool(select.select([asker], [], [], 0)[0]) and not asker.recv(1, socket.MSG_PEEK)


def ended(works: list[Callable[[], int]], timeout_s: float, asker: socket.socket) -> list[int | None]:
    """Do each work in a process of its own; how each ended."""
    children = {}
    for number, work in enumerate(works):
        child = os.fork()
        if child == 0:
            os.setsid()
            os._exit(work())
        children[child] = number
    status: list[int | None] = [None] * len(works)
    deadline = time.monotonic() + timeout_s
    while children and time.monotonic() < deadline and not has_left(asker):
        child, ended = os.waitpid(-1, os.WNOHANG)
        if child:
            status[children.pop(child)] = os.waitstatus_to_exitcode(ended)
        else:
            time.sleep(0.005)
    for child in children:
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return status


def serve(listener: socket.socket) -> None:
    """Until nobody is connected any more: each request has a process of its own, which answers it."""
    askers: dict[socket.socket, Any] = {}

    def answer(request: dict[str, Any], asker: socket.socket) -> None:
        listener.close()
        asker.sendall(json.dumps(attempt(request, asker)).encode() + b"\n")

    while True:
        with suppress(ChildProcessError):
            os.waitpid(-1, os.WNOHANG)  # one that has answered
        for ready in select.select([listener, *askers], [], [])[0]:
            if ready is listener:
                asker, _ = listener.accept()
                askers[asker] = asker.makefile()
            elif line := askers[ready].readline():
                request = json.loads(line)
                module, named, _ = request["scenario"].partition(":")
                with suppress(Exception):  # which the ranks will meet again, and report
                    prepare(module if named else scenarios.__name__)
                fork(partial(answer, request, ready))
            else:
                del askers[ready]
        if not askers:
            return


if __name__ == "__main__":
    torch.set_num_threads(1)
    gc.set_threshold(20_000)  # as in the tests' own processes
    seed_no_accelerators()
    serve(socket.socket(fileno=int(sys.argv[1])))
