"""Ranks under Pagoda, beside plain DDP and FSDP2, with CPU offload and without: seconds of a step, memory of a
rank, and what it sends.

Weak scaling: Pagoda in each ZeRO stage and the others train the same model on the same batches in fresh processes, in
turn: one rank, then several with as many sequences each; with few tokens a step, where moving weights and gradients is
most of it, and with many. Sent: collectives of the last step, and bytes that a rank had for others in them. Memory:
Pagoda on one, two and four ranks, by its ledger and as resident memory that training adds. The model is one whose state
outweighs its activations. Figures are of the slowest or largest rank: seconds of a step (median over rounds of their
medians), most resident memory, and what is left of it when a step has ended.

    python benchmarks/two_ranks.py --out benchmarks/results/ranks.json --docs docs/ranks.md

`--part memory` or `--part speed` does one of them and keeps the other's figures; `--part docs` only writes the tables.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from rich.console import Console
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import pagoda
from marks import write_between_marks
from pagoda.calibrate.meter import cpu_name
from pagoda.process import keep_freed_memory, restart_spinning_briefly
from script import write
from training import LR, Paged, Trainer, Workload

STAGES: dict[str, Literal[1, 2, 3]] = {"stage 3": 3, "stage 2": 2, "stage 1": 1}
NAMES = {**{kind: f"Pagoda, {kind}" for kind in STAGES}, "ddp": "DDP", "fsdp2": "FSDP2"}
NAMES["fsdp2-offload"] = "FSDP2, CPU offload"
SHOWN = {kind: name for kind, name in NAMES.items() if kind != "fsdp2-offload"}
"""Those on the page; the file of results has all."""
ON_ONE = ("stage 3", "ddp", "fsdp2-offload")
"""Kinds of one rank, which has nothing to share out."""
TOKENS_AND_STEPS = ((64, 7), (512, 4))
"""Tokens of a rank and step, and steps of a round, one after the other; the first two of each are not counted."""
RANKS_OF_MEMORY = (1, 2, 4)
STATE = ("weight", "weight_low", "exp_avg", "exp_avg_sq")
"""Lines of the ledger that are 12 bytes a parameter on one rank."""


class DistributedPlain:
    """DDP in bf16 with an fp32 master on each rank; the whole state everywhere."""

    def __init__(self, workload: Workload) -> None:
        torch.manual_seed(0)
        model = workload.build()
        self.master = [p.detach().clone().requires_grad_() for p in model.parameters()]
        self.module = model.to(torch.bfloat16).train()
        several = dist.is_initialized()
        self.model = nn.parallel.DistributedDataParallel(self.module) if several else self.module
        self.optimizer = torch.optim.AdamW(self.master, lr=LR, fused=True)
        self.clip = workload.clip

    def step(self, ids: torch.Tensor) -> None:
        self.model(input_ids=ids, labels=ids).loss.backward()
        params = list(self.module.parameters())
        for master, param in zip(self.master, params, strict=True):
            assert param.grad is not None
            master.grad, param.grad = param.grad.float(), None
        if self.clip is not None:
            nn.utils.clip_grad_norm_(self.master, self.clip)
        self.optimizer.step()
        with torch.no_grad():
            for master, param in zip(self.master, params, strict=True):
                param.copy_(master)
                master.grad = None


class Sharded(Trainer):
    """FSDP2, with CPU offload or without: fp32 parameters, gradients reduced in fp32, compute in bf16 or fp32."""

    def __init__(self, workload: Workload, offload: bool) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

        torch.manual_seed(0)
        self.model = workload.build(workload.checkpointing).train()
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        policy: dict[str, Any] = {
            "mesh": mesh,
            "mp_policy": MixedPrecisionPolicy(param_dtype=workload.dtype, reduce_dtype=torch.float32),
        }
        if offload:
            policy["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
        blocks = next(module for module in self.model.modules() if isinstance(module, nn.ModuleList))
        for block in blocks:
            fully_shard(block, **policy)
        fully_shard(self.model, **policy)
        trained = [param for param in self.model.parameters() if param.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=LR, fused=True)
        self.clip, self.micro_batches = workload.clip, workload.micro_batches

    def step(self, ids: torch.Tensor) -> torch.Tensor:
        loss = self.backward(ids)
        if self.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def save(self, folder: Path) -> None:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        checkpoint.save({"model": model, "optimizer": optimizer}, checkpoint_id=folder)  # type: ignore[attr-defined]

    def load(self, folder: Path) -> None:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        checkpoint.load({"model": model, "optimizer": optimizer}, checkpoint_id=folder)  # type: ignore[attr-defined]
        set_state_dict(self.model, self.optimizer, model_state_dict=model, optim_state_dict=optimizer)


class Sent:
    """Counts torch's collectives on tensors, and the bytes that this rank has for others in them."""

    def __init__(self) -> None:
        self.messages = self.nbytes = 0
        others = dist.get_world_size() - 1

        def counted(name: str, mine: Callable[..., int]) -> None:
            do = getattr(dist, name)

            def call(*arguments: Any, **options: Any) -> Any:
                self.messages += 1
                self.nbytes += mine(*arguments, *(v for v in options.values() if isinstance(v, torch.Tensor)))
                return do(*arguments, **options)

            setattr(dist, name, call)

        for gather, scatter in (("into_tensor", "tensor"), ("single", "single")):  # torch has renamed them
            if hasattr(dist, f"all_gather_{gather}"):
                counted(f"all_gather_{gather}", lambda _, given, *__, **___: given.nbytes * others)
                counted(f"reduce_scatter_{scatter}", lambda out, *_, **__: out.nbytes * others)
        counted("all_reduce", lambda both, *_: 2 * both.nbytes * others // (others + 1))

    def take(self) -> tuple[int, int]:
        found, self.messages, self.nbytes = (self.messages, self.nbytes), 0, 0
        return found


def sent_of(trained: Any) -> tuple[int, int]:
    """The same of Pagoda's collectives, so far."""
    together = trained.optimizer._engine.collectives if isinstance(trained, Paged) else None
    groups = getattr(together, "groups", {}).values()
    return sum(group.messages for group in groups), sum(group.sent_bytes for group in groups)


def resident(field: str) -> int:
    """Bytes of this process that are resident (VmRSS), or most that were (VmHWM)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def train(kind: str, model: str) -> dict[str, dict[str, float]]:
    """In a rank: by tokens of a step, seconds of a step and bytes of memory."""
    keep_freed_memory()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 or kind.startswith("fsdp2"):
        dist.init_process_group("gloo")
    rank = dist.get_rank() if dist.is_initialized() else 0
    workload = Workload(model, 1, max(tokens for tokens, _ in TOKENS_AND_STEPS), checkpointing=False)
    workload.build()  # imports, and whatever else building a model leaves, are nobody's
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
    before = resident("VmRSS")
    if kind in STAGES:
        trained: Any = Paged(workload, pagoda.Memory(host="2GiB"), mesh=pagoda.open_mesh(stage=STAGES[kind]))
    else:
        trained = DistributedPlain(workload) if kind == "ddp" else Sharded(workload, kind == "fsdp2-offload")
    sent = Sent() if dist.is_initialized() and kind not in STAGES else None
    found: dict[str, dict[str, float]] = {}
    for tokens, steps in TOKENS_AND_STEPS:
        batches = replace(workload, seq_len=tokens).batches()
        for _ in range(rank):
            next(batches)
        seconds = [timed_step(kind, trained, next(batches)) for _ in range(steps - 1)]
        before_last = sent.take() if sent is not None else sent_of(trained)
        seconds.append(timed_step(kind, trained, next(batches)))
        messages, sent_bytes = sent.take() if sent is not None else sent_of(trained)
        if sent is None:
            messages, sent_bytes = messages - before_last[0], sent_bytes - before_last[1]
        figures = found[str(tokens)] = {
            "step_s": statistics.median(seconds[2:]),
            "peak_bytes": resident("VmHWM") - before,
            "kept_bytes": resident("VmRSS") - before,
            "parameters": sum(p.numel() for p in trained.model.parameters()),
            "messages": messages,
            "sent_bytes": sent_bytes,
        }
        if kind in STAGES:
            plan = pagoda.plan_of(trained.model)
            state = sum(plan.bytes["host"][state] for state in STATE)
            figures |= {"ledger_bytes": plan.peak_bytes["host"], "state_bytes": state}
    if kind in STAGES:
        trained.close()
    return found


def timed_step(kind: str, trained: Any, ids: torch.Tensor) -> float:
    """Seconds until every rank has ended a step, its updates included."""
    start = time.perf_counter()
    trained.step(ids)
    if kind in STAGES:
        trained.optimizer.synchronize()
    if dist.is_initialized():
        dist.barrier()
    return time.perf_counter() - start


def run(kind: str, ranks: int, arguments: argparse.Namespace) -> dict[str, dict[str, float]]:
    """One round of one kind, in fresh processes, as torchrun would start them; by tokens of a step."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    shared |= {"OMP_NUM_THREADS": arguments.threads, "GLOO_SOCKET_IFNAME": "lo"}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--rank-of", kind, "--out", folder, "--model", arguments.model]
        environments = [{**os.environ, **{k: str(v) for k, v in shared.items()}} for _ in range(ranks)]
        for rank, environment in enumerate(environments):
            environment |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        processes = [subprocess.Popen(command, env=environment) for environment in environments]
        ended = [process.wait() for process in processes]
        if any(ended):
            raise RuntimeError(f"{kind} on {ranks} ranks failed")
        by_rank = [json.loads(path.read_text()) for path in Path(folder).glob("*.json")]
    return {
        tokens: {key: max(figures[tokens][key] for figures in by_rank) for key in of_tokens}
        for tokens, of_tokens in by_rank[0].items()
    }


def speed(arguments: argparse.Namespace) -> dict[str, Any]:
    """Weak scaling of all kinds, by tokens of a rank and step."""
    rounds: dict[str, dict[str, list[dict[str, float]]]] = {}
    for _ in range(arguments.rounds):
        for kind, ranks in ((kind, ranks) for ranks in (1, *arguments.ranks) for kind in arguments.kinds):
            if ranks > 1 or kind in ON_ONE:
                for tokens, figures in run(kind, ranks, arguments).items():
                    rounds.setdefault(tokens, {}).setdefault(f"{kind} x{ranks}", []).append(figures)
    medians = {
        tokens: {name: {key: statistics.median(each[key] for each in of) for key in of[0]} for name, of in by.items()}
        for tokens, by in rounds.items()
    }
    return {"figures": medians, "rounds": rounds}


def memory(arguments: argparse.Namespace, known: dict[str, dict[str, float]]) -> dict[str, Any]:
    """Pagoda's memory on several numbers of ranks, with the fewest tokens; `known` is what `speed` has found."""
    tokens = str(TOKENS_AND_STEPS[0][0])
    return {
        f"x{ranks}": known.get(f"stage 3 x{ranks}") or run("stage 3", ranks, arguments)[tokens]
        for ranks in RANKS_OF_MEMORY
    }


def tables(result: dict[str, Any]) -> str:
    """The figures as Markdown."""
    settings = result["settings"]
    parameters = next(iter(result["memory"].values()))["parameters"]
    lines = [
        f"{result['machine']}, one core a rank ({result['cores']} cores), {settings['model']} "
        f"({parameters / 1e6:.1f} M parameters).",
        "",
        "| tokens a rank and step | ranks | | step | memory of a rank | sent by a rank |",
        "|---|---|---|---|---|---|",
    ]
    for tokens, figures in result["speed"]["figures"].items():
        for ranks in settings["ranks"]:
            for kind, name in SHOWN.items():
                if (one := figures.get(f"{kind} x{ranks}")) is not None:
                    cells = [f"{one['step_s']:.2f} s", f"{one['peak_bytes'] / 2**20:,.0f} MiB"]
                    sent = f"{one['sent_bytes'] / 2**20:,.0f} MiB" if one["messages"] else "-"
                    lines.append("| " + " | ".join([tokens, str(ranks), name, *cells, sent]) + " |")
    sizes = (f"{figures['ledger_bytes'] / 2**20:,.0f} MiB" for figures in result["memory"].values())
    lines += ["", f"The plans of 1, 2 and 4 ranks have {', '.join(sizes)}; state is divided by the number of ranks."]
    return "\n".join(lines)


def main() -> None:
    restart_spinning_briefly()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="gpt-16x512")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1, help="torch threads of a rank")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="numbers of ranks beside one")
    parser.add_argument("--kinds", nargs="+", default=[*NAMES], choices=[*NAMES])
    parser.add_argument("--part", choices=("all", "speed", "memory", "docs"), default="all")
    parser.add_argument("--docs", type=Path, help="where to write the tables")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rank-of", choices=list(NAMES), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank_of:
        figures = train(arguments.rank_of, arguments.model)
        (arguments.out / f"{os.environ['RANK']}.json").write_text(json.dumps(figures))
        return
    result: dict[str, Any] = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
    if arguments.part != "docs":
        settings = {key: getattr(arguments, key) for key in ("model", "rounds", "threads", "ranks", "kinds")}
        settings["tokens_and_steps"] = [list(pair) for pair in TOKENS_AND_STEPS]
        if result.get("settings") != settings:  # figures of another shape go
            result = {"settings": settings}
        result |= {"machine": cpu_name(), "cores": os.cpu_count()}
        if arguments.part in ("all", "speed"):
            result["speed"] = speed(arguments)
        if arguments.part in ("all", "memory"):
            fewest = str(TOKENS_AND_STEPS[0][0])
            known = result.get("speed", {}).get("figures", {}).get(fewest, {})
            result["memory"] = memory(arguments, known)
        write(arguments.out, result)
    if {"speed", "memory"} <= result.keys():
        Console().print(tables(result), soft_wrap=True, highlight=False, markup=False)
        if arguments.docs is not None:
            write_between_marks(arguments.docs, "two_ranks.py", tables(result))


if __name__ == "__main__":
    main()
