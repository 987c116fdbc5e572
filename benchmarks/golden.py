"""Golden states: a hash of the losses and the final state of some seventy ways to train, to compare two commits.

    python benchmarks/golden.py record golden.json      # at the commit to start from
    python benchmarks/golden.py compare golden.json     # at the commit to check, on the same machine
    python benchmarks/golden.py record one.json --only "llama*"

A rebuilding of the core must give the same hashes, bit for bit. Models come from `tests/zoo.py`, and both commits need
the same ones. Otherwise the script uses the public API and the checkpoint's safetensors files. Where arguments of
`wrap` have other names, each commit runs its own copy. Every case runs in a process of its own, on one thread, with the
poison debug mode on. Cases of one `group` differ in where state lives, or in how many ranks hold it, and must agree
with each other too.
"""

import argparse
import fnmatch
import hashlib
import json
import os
import shutil
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

os.environ |= {"PAGODA_POISON": "1", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}

import torch
from safetensors import safe_open
from torch import nn

import pagoda

sys.path.append(str(Path(__file__).parents[1] / "tests"))
zoo: Any = import_module("zoo")
PAGE, UNIT = 4096, "128KiB"
MODELS = {
    "llama": partial(zoo.llama, 8),
    "gpt2": partial(zoo.gpt2, 8),
    "t5": partial(zoo.t5, 5, dropout=0.1),
    "mixtral": partial(zoo.mixtral, 4),
    "conv": partial(zoo.ConvNet, blocks=8),
}
RULES = {
    "adamw": lambda: pagoda.AdamW(lr=1e-2, weight_decay=0.1),
    "adamw-bf16": lambda: pagoda.AdamW(lr=1e-2, weight_decay=0.1, moments="bf16"),
    "adamw-8bit": lambda: pagoda.AdamW(lr=1e-2, weight_decay=0.1, moments="8bit"),
    "adam": lambda: pagoda.Adam(lr=1e-2),
    "sgd": lambda: pagoda.SGD(lr=1e-1, momentum=0.9),
    "lion": lambda: pagoda.Lion(lr=1e-3),
    "adafactor": lambda: pagoda.Adafactor(lr=1e-2, beta1=0.9),
    "muon": lambda: pagoda.Muon(lr=1e-2),
    "adagrad": lambda: pagoda.Optim(torch.optim.Adagrad, lr=1e-2),
}


@dataclass(frozen=True)
class Case:
    """One way to train."""

    group: str
    """Cases of one group give the same hash."""
    model: str = "llama"
    memory: str = "ram"
    """ram; moments (on SSD); ssd (all of it); arena (a separate memory for compute); arena-ssd."""
    rule: str = "adamw"
    clip: float | None = 0.5
    accumulation: int = 1
    announced: bool = False
    frozen: bool = False
    checkpointing: bool = False
    scaled: bool = False
    """The loss is scaled by the optimizer (fp16)."""
    ranks: int = 1
    mesh: dict[str, Any] = field(default_factory=dict)
    split: dict[str, Any] = field(default_factory=dict)
    resume: bool = False
    """Save after half of the steps and go on in a new process."""
    steps: int = 4
    wrap: dict[str, Any] = field(default_factory=dict)


def cases() -> dict[str, Case]:
    found: dict[str, Case] = {}

    def add(placements: str, group: str, **settings: Any) -> None:
        for memory in placements.split():
            found[f"{group}, {memory}"] = Case(group, memory=memory, **settings)

    everywhere = "ram moments ssd arena arena-ssd"
    add(everywhere, "llama, clipped")
    add(everywhere, "gpt2, during backward", model="gpt2", clip=None, accumulation=2, announced=True)
    add(everywhere, "conv, partly frozen", model="conv", accumulation=2, frozen=True)
    add(everywhere, "t5, checkpointing", model="t5", checkpointing=True)
    add("ram ssd arena-ssd", "fp32", wrap={"precision": "fp32"})
    add("ram ssd", "fp16", scaled=True, wrap={"precision": "fp16"})
    add(
        "ram ssd", "fp32 gradients", accumulation=2, wrap={"precision": pagoda.MixedPrecision("bf16", gradients="fp32")}
    )
    for rule in ("adam", "sgd", "lion", "adafactor", "muon", "adagrad", "adamw-bf16", "adamw-8bit"):
        add("ram ssd", rule, rule=rule)
    for policy in ("recompute", "offload", "recompute+offload", "auto"):
        add("ssd arena-ssd", f"activations {policy}", model="gpt2", wrap={"activations": policy})
    add(
        "ram ssd",
        "batch tiles",
        accumulation=1,
        wrap={"tiles": pagoda.Tiles(batch_tiles=2), "activations": "recompute"},
    )
    add("ram ssd", "operator tiles", wrap={"tiles": pagoda.Tiles(tile_limit=8192)})
    add("ram ssd arena", "experts", model="mixtral")
    add("ram ssd", "expert tiles", model="mixtral", wrap={"tiles": pagoda.Tiles(tile_limit=2 * 3 * 64 * 96 * 2)})
    add("moments ssd arena arena-ssd", "speculation", announced=True, steps=6)
    add("ram moments ssd arena", "async", wrap={"update": "async"}, steps=6)
    add("ram ssd", "async, predicted", wrap={"update": pagoda.Updates("async", predict=True)}, steps=6)
    add("ssd", "async, resumed", wrap={"update": "async"}, resume=True, steps=6)
    add("ram ssd", "2 ranks, async", ranks=2, wrap={"update": "async"}, steps=6)
    add("arena", "updates on the device", split={"device_update_share": 0.5})
    add("arena", "homes on the device", split={"device_home_share": 1.0})
    add("ram ssd arena-ssd", "resumed", resume=True)
    for stage in (1, 2, 3):
        add("ram", f"2 ranks, stage {stage}", ranks=2, mesh={"stage": stage})
        add("ram", f"4 ranks, stage {stage}", ranks=4, mesh={"stage": stage}, wrap={"precision": "fp32"})
    add("ssd arena-ssd", "2 ranks on ssd", ranks=2)
    add("moments", "2 ranks, stage 2, moments", ranks=2, mesh={"stage": 2})
    add("ram", "2 ranks, during backward", ranks=2, clip=None, announced=True)
    add("ram", "2 ranks, muon", ranks=2, rule="muon")
    add("ram", "2 ranks, adafactor", ranks=2, rule="adafactor")
    add("ram", "4 ranks, replicas", ranks=4, mesh={"replicas": 2})
    add("ram ssd", "2 ranks, experts", model="mixtral", ranks=2, mesh={"expert_parallel": 2})
    add("ssd", "2 ranks, resumed", ranks=2, resume=True)
    return found


def budget(case: Case, parameters: int, refused: Any, ssd: Path) -> pagoda.Memory:
    """The least memory of its kind, as refusals name it; and the weights, where only moments are on SSD."""
    sizes: dict[str, Any] = {"page_size": PAGE, "unit_limit": UNIT, "host": "64MiB"}
    sizes["ssd_checkpoints"] = 0  # everything into the checkpoint's own files, which are hashed
    if case.split:
        sizes["split"] = pagoda.Split(**case.split)
    if case.memory != "ram" and case.memory != "arena":
        sizes["ssd"] = f"{ssd}:256MiB"
    if case.memory.startswith("arena"):
        least = refused(pagoda.Memory(**sizes, device="cpu:4KiB")) * (4 if case.split else 1)
        sizes["device"] = f"cpu:{least // PAGE * 9 // 8 * PAGE}"
    if "ssd" in sizes:
        least = refused(pagoda.Memory(**{**sizes, "host": PAGE}))
        itemsize = 4 if case.wrap.get("precision") == "fp32" else 2
        copies = 3 if "async" in case.group else 1
        sizes["host"] = least + (parameters * itemsize * copies * 11 // 10 if case.memory == "moments" else 0)
    return pagoda.Memory(**sizes)


def wrapped(case: Case, out: Path) -> tuple[nn.Module, Any]:
    def build() -> nn.Module:
        torch.manual_seed(0)
        model = MODELS[case.model]()
        for param in [*model.parameters()][2::3] if case.frozen else []:
            param.requires_grad_(False)
        if case.checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return model.train()

    settings = {
        "max_grad_norm": case.clip,
        "gradient_accumulation_steps": case.accumulation if case.announced else None,
        **case.wrap,
    }
    if case.ranks > 1:
        settings["mesh"] = pagoda.open_mesh(**case.mesh)

    def refused(memory: pagoda.Memory) -> int:
        try:
            pagoda.wrap(build(), RULES[case.rule](), memory=memory, **{"precision": "bf16", **settings})
        except pagoda.BudgetError as error:
            return error.needed_bytes or 0
        raise AssertionError(f"{memory} is enough")

    ssd = out / "ssd"
    ssd.mkdir(exist_ok=True)
    parameters = sum(p.numel() for p in build().parameters())
    return pagoda.wrap(
        build(), RULES[case.rule](), memory=budget(case, parameters, refused, ssd), **{"precision": "bf16", **settings}
    )


def train(case: Case, rank: int, out: Path, first: int, last: int) -> list[str]:
    """Run steps [first, last) and save; the losses of this rank, as hex."""
    model, optimizer = wrapped(case, out)
    on_ssd = pagoda.plan_of(model).bytes.get("ssd", {})
    assert bool(on_ssd) == (case.memory in ("moments", "ssd", "arena-ssd")), on_ssd
    assert ("weight" in on_ssd) == case.memory.endswith("ssd"), on_ssd
    torch.manual_seed(2 + rank)
    if first:
        optimizer.load_checkpoint(out / f"step-{first}")
    generator = torch.Generator().manual_seed(1)
    losses = []
    for step in range(last):
        for part in range(case.accumulation * case.ranks):
            data = zoo.batch(case.model, generator)
            if step < first or part % case.ranks != rank:
                continue
            loss = zoo.loss_of(model(**data))
            of_step = loss / case.accumulation * (30.0 if step % 3 == 2 else 1.0)
            (optimizer.scale(of_step) if case.scaled else of_step).backward()
            losses.append(float(loss.item()).hex())
        if step >= first:
            optimizer.step()
            optimizer.zero_grad()
            losses.append(str(optimizer.stats.grad_norm))
    optimizer.save_checkpoint(out / f"step-{last}", wait=True)
    optimizer.close()
    return losses


def digest(losses: list[list[str]], checkpoint: Path) -> str:
    """One hash of the losses and of every tensor that the checkpoint's files hold."""
    told = hashlib.sha256(json.dumps(losses).encode())
    for path in sorted(checkpoint.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in sorted(file.keys()):
                tensor = file.get_tensor(name)
                told.update(f"{path.name} {name} {tensor.dtype} {list(tensor.shape)}".encode())
                told.update(tensor.contiguous().flatten().view(torch.uint8).numpy())
    return told.hexdigest()[:32]


def fork(case: Case, out: Path, first: int, last: int) -> list[list[str]]:
    """Run every rank in a process of its own; their losses."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    children = []
    for rank in range(case.ranks):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                if case.ranks > 1:
                    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(case.ranks)}
                    os.environ |= {"LOCAL_WORLD_SIZE": str(case.ranks), "MASTER_PORT": str(port)}
                    os.environ["MASTER_ADDR"] = "127.0.0.1"
                losses = train(case, rank, out, first, last)
                (out / f"losses-{rank}.json").write_text(json.dumps(losses))
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        children.append(child)
    ended = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    if any(ended):
        raise RuntimeError(f"ranks ended with {ended}")
    return [json.loads((out / f"losses-{rank}.json").read_text()) for rank in range(case.ranks)]


def hash_of(case: Case) -> str:
    out = Path(tempfile.mkdtemp(prefix="golden-"))
    try:
        if not case.resume:
            return digest(fork(case, out, 0, case.steps), out / f"step-{case.steps}")
        half = case.steps // 2
        losses = fork(case, out, 0, half) + fork(case, out, half, case.steps)
        return digest(losses, out / f"step-{case.steps}")
    finally:
        shutil.rmtree(out)


def hashes(pattern: str) -> Iterator[tuple[str, Case, str]]:
    torch.set_num_threads(1)
    for name, case in cases().items():
        if fnmatch.fnmatch(name, pattern):
            started = time.perf_counter()
            try:
                found = hash_of(case)
            except RuntimeError as error:
                found = f"failed: {error}"
            print(f"{name:40} {found}  {time.perf_counter() - started:.1f} s", file=sys.stderr, flush=True)
            yield name, case, found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("action", choices=["record", "compare"])
    parser.add_argument("file", type=Path)
    parser.add_argument("--only", default="*", help="a pattern of names, such as 'llama*'")
    arguments = parser.parse_args()
    found: dict[str, str] = {}
    groups: dict[str, str] = {}
    wrong = []
    for name, case, value in hashes(arguments.only):
        found[name] = value
        if groups.setdefault(case.group, value) != value:
            wrong.append(f"{name}: other bits than the rest of its group")
        if value.startswith("failed"):
            wrong.append(f"{name}: {value}")
    if arguments.action == "record":
        arguments.file.write_text(json.dumps(found, indent=1) + "\n")
    else:
        golden = json.loads(arguments.file.read_text())
        differ = [name for name, value in found.items() if golden.get(name) != value]
        wrong += [f"{name}: {found[name]}, recorded {golden.get(name)}" for name in differ]
    print("\n".join([*wrong, f"{len(found)} cases, {len(wrong)} wrong"]))
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
