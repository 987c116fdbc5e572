"""Two ranks under Pagoda, beside plain DDP and FSDP2 with CPU offload, in the same run.

Each of three kinds trains the same model on the same batches in fresh processes, in turn, for several rounds: one rank,
then two with as many sequences each (weak scaling). Figures, of the slowest or largest rank: seconds of a step (median
over rounds of their medians) and the most resident memory.

    python benchmarks/ranks.py --out benchmarks/results/ranks.json
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from torch import nn

import pagoda
from pagoda.calibrate.meter import cpu_name
from pagoda.memory.heap import keep_freed_memory
from training import LR, Paged, Workload

KINDS = ("pagoda", "ddp", "fsdp2")


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


class Sharded:
    """FSDP2 with CPU offload: fp32 parameters, bf16 compute, gradients reduced in fp32."""

    def __init__(self, workload: Workload) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

        torch.manual_seed(0)
        self.model = workload.build().train()
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        policy: dict[str, Any] = {
            "mesh": mesh,
            "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
            "offload_policy": CPUOffloadPolicy(pin_memory=False),
        }
        for layer in self.model.model.layers:  # type: ignore[union-attr]
            fully_shard(layer, **policy)
        fully_shard(self.model, **policy)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LR, fused=True)
        self.clip = workload.clip

    def step(self, ids: torch.Tensor) -> None:
        self.model(input_ids=ids, labels=ids).loss.backward()
        if self.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()


def train(kind: str, workload: Workload, steps: int) -> dict[str, float]:
    """In a rank: seconds of a step, and MiB of memory."""
    keep_freed_memory()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 or kind == "fsdp2":
        dist.init_process_group("gloo")
    rank = dist.get_rank() if dist.is_initialized() else 0
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if kind == "pagoda":
        trained: Any = Paged(workload, pagoda.Memory(host="2GiB"))
    else:
        trained = {"ddp": DistributedPlain, "fsdp2": Sharded}[kind](workload)
    batches = workload.batches()
    for _ in range(rank):
        next(batches)
    seconds = []
    for _ in range(steps):
        ids = next(batches)
        start = time.perf_counter()
        trained.step(ids)
        if kind == "pagoda":
            trained.optimizer.drain()
        if dist.is_initialized():
            dist.barrier()
        seconds.append(time.perf_counter() - start)
    if kind == "pagoda":
        trained.close()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"step_s": statistics.median(seconds[2:]), "mib": peak / 1024, "mib_of_training": (peak - before) / 1024}


def run(kind: str, ranks: int, arguments: argparse.Namespace) -> dict[str, float]:
    """One round of one kind, in fresh processes."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        command += [__file__, "--rank-of", kind, "--out", folder, "--model", arguments.model]
        command += ["--batch-size", str(arguments.batch_size), "--seq-len", str(arguments.seq_len)]
        command += ["--steps", str(arguments.steps)]
        environment = {**os.environ, "OMP_NUM_THREADS": str(arguments.threads), "GLOO_SOCKET_IFNAME": "lo"}
        subprocess.run(command, check=True, env=environment, capture_output=True, timeout=600)
        by_rank = [json.loads(path.read_text()) for path in Path(folder).glob("*.json")]
    return {key: max(figures[key] for figures in by_rank) for key in by_rank[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="llama-15m")
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1, help="torch threads of a rank")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rank-of", choices=KINDS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    workload = Workload(arguments.model, arguments.batch_size, arguments.seq_len, checkpointing=False)
    if arguments.rank_of:
        figures = train(arguments.rank_of, workload, arguments.steps)
        (arguments.out / f"{os.environ['RANK']}.json").write_text(json.dumps(figures))
        return
    console = Console()
    rounds: dict[str, list[dict[str, float]]] = {}
    for _ in range(arguments.rounds):
        for kind in KINDS:
            for ranks in (1, 2):
                rounds.setdefault(f"{kind} x{ranks}", []).append(run(kind, ranks, arguments))
    result = {
        "machine": cpu_name(),
        "settings": {k: v for k, v in vars(arguments).items() if k not in ("out", "rank_of")},
        "figures": {
            name: {key: statistics.median(each[key] for each in of) for key in of[0]} for name, of in rounds.items()
        },
        "rounds": rounds,
    }
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    for name, figures in result["figures"].items():
        console.print(
            f"{name:>10}: {figures['step_s']:.3f} s a step, {figures['mib_of_training']:,.0f} MiB of training"
        )


if __name__ == "__main__":
    main()
