"""The systems that train side by side: each with its authors' recommended settings, and the environment it needs."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import torch
import torch.distributed as dist

import pagoda
from peer_suite.environments import Environment
from training import LR, Paged, Plain, Trainer, Workload
from two_ranks import Sharded

BETAS, EPS, WEIGHT_DECAY = (0.9, 0.999), 1e-8, 0.01
"""AdamW's, the defaults of torch."""
LARGEST_PARAMETER = 50_000_000
"""Elements of a buffer of DeepSpeed, which has to hold the largest parameter."""


@dataclass(frozen=True)
class System:
    """A row of the tables."""

    label: str
    settings: str
    build: Callable[[Workload, Path], Trainer]
    """Makes it; the directory is on the SSD and its own."""
    environment: Environment | None = None
    """None: nothing has to be installed."""
    ram_bytes: float = 16
    """Of a parameter, roughly: where the search for the largest model begins."""


class DeepSpeed(Trainer):
    """ZeRO stage 3 on one rank, with states in RAM or on NVMe."""

    def __init__(self, workload: Workload, folder: Path, optimizer: str, weights: str) -> None:
        import deepspeed
        import torch._dynamo  # it cannot be imported while DeepSpeed replaces torch's constructors

        one_rank()
        self.micro_batches = workload.micro_batches
        self.config = self.settings(workload, folder, optimizer, weights)
        deepspeed.init_distributed("gloo")
        torch.manual_seed(0)
        adapters = nullcontext() if workload.lora_rank is None else adapters_of_the_weights_type()
        with adapters, deepspeed.zero.Init(config_dict_or_path=self.config):
            model: Any = workload.build(workload.checkpointing)
        for module in model.modules():  # built in parts, they are not what transformers initialises
            with deepspeed.zero.GatheredParameters(list(module.parameters(recurse=False)), modifier_rank=0):
                model._init_weights(module)
        self.engine: Any = deepspeed.initialize(
            model=model.train(), model_parameters=model.parameters(), config=self.config
        )[0]

    @staticmethod
    def settings(workload: Workload, folder: Path, optimizer: str, weights: str) -> dict[str, object]:
        """DeepSpeed's configuration: bf16 with an fp32 master, or fp32; fp32 moments; pages of NVMe as its tutorial has
        them."""
        nvme = {"nvme_path": str(folder), "buffer_count": 5}
        zero: dict[str, object] = {
            "stage": 3,
            "contiguous_gradients": True,
            "overlap_comm": True,
            "offload_optimizer": {"device": optimizer, "pin_memory": False, **(nvme if optimizer == "nvme" else {})},
            "offload_param": {"device": weights, "pin_memory": False},
        }
        if weights == "nvme":
            zero["offload_param"] = {"device": "nvme", **nvme, "buffer_size": LARGEST_PARAMETER}
        adamw = {"lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": WEIGHT_DECAY}
        return {
            "train_micro_batch_size_per_gpu": workload.batch_size // workload.micro_batches,
            "gradient_accumulation_steps": workload.micro_batches,
            "bf16": {"enabled": workload.precision == "bf16"},
            "gradient_clipping": workload.clip or 0.0,
            "optimizer": {"type": "AdamW", "params": adamw},
            "zero_optimization": zero,
            "aio": {"block_size": 1 << 20, "queue_depth": 8, "thread_count": 2, "overlap_events": True},
        }

    def step(self, ids: torch.Tensor) -> torch.Tensor:
        losses = []
        for part in ids.chunk(self.micro_batches):
            loss = self.engine(input_ids=part, labels=part).loss
            self.engine.backward(loss)
            self.engine.step()
            losses.append(loss.detach())
        return torch.stack(losses).mean()

    def save(self, folder: Path) -> None:
        self.engine.save_checkpoint(str(folder))

    def load(self, folder: Path) -> None:
        self.engine.load_checkpoint(str(folder))


@contextmanager
def adapters_of_the_weights_type() -> Iterator[None]:
    """peft makes adapters in the type of the weights, and not new parameters in fp32, which DeepSpeed has not
    partitioned. peft is imported before DeepSpeed replaces torch's constructors."""
    import peft

    with patch("peft.get_peft_model", partial(peft.get_peft_model, autocast_adapter_dtype=False)):
        yield


def one_rank() -> None:
    """torch.distributed with this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]


def sharded(workload: Workload, _: Path) -> Trainer:
    one_rank()
    return Sharded(workload, offload=True)


def torchao(workload: Workload, _: Path) -> Trainer:
    from torchao.optim import CPUOffloadOptimizer

    return Plain(workload, optimizer=lambda master: CPUOffloadOptimizer(master, torch.optim.AdamW, lr=LR, fused=True))


def bitsandbytes(workload: Workload, _: Path) -> Trainer:
    from bitsandbytes.optim import PagedAdamW32bit  # type: ignore[attr-defined]

    warnings.filterwarnings("error", "Paged optimizers are not supported")  # it would be plain PyTorch's row again
    return Plain(workload, optimizer=lambda master: PagedAdamW32bit(master, lr=LR, eps=EPS, weight_decay=WEIGHT_DECAY))


def deepspeed(
    optimizer: Literal["cpu", "nvme"], weights: Literal["cpu", "nvme"]
) -> Callable[[Workload, Path], Trainer]:
    return lambda workload, folder: DeepSpeed(workload, folder, optimizer, weights)


def paged(share: float | None) -> Callable[[Workload, Path], Trainer]:
    """Pagoda with RAM for weights, gradients and a share of the other state; None: for little. Of all other state there
    is RAM for a fifth more, and no SSD."""

    def build(workload: Workload, folder: Path) -> Trainer:
        if share is None:
            host = int(1.25 * least(workload, folder))
        else:
            itemsize = workload.dtype.itemsize
            with pagoda.deferred_init():
                params = [*workload.build().parameters()]
            weights = itemsize * sum(p.numel() for p in params)
            trained = sum(p.numel() for p in params if p.requires_grad)
            other = trained * (8 if itemsize == 4 else 10)  # moments, and the master's lower half
            beside = 72 << 20  # pages and buffers of updates
            host = int(1.02 * (weights + trained * itemsize + share * other)) + beside
        return Paged(workload, pagoda.Memory(host=host, ssd=str(folder) if share is None or share < 1 else None))

    return build


def least(workload: Workload, folder: Path) -> int:
    """The least bytes of RAM with which Pagoda trains a workload on SSD."""
    try:
        Paged(workload, pagoda.Memory(host=1 << 10, ssd=str(folder))).close()
    except pagoda.BudgetError as refusal:
        if refusal.needed_bytes is not None:
            return refusal.needed_bytes
    raise RuntimeError("Pagoda did not refuse 1 KiB of RAM")


def without_checkpointing(workload: Workload, _: Path) -> Trainer:
    return Plain(replace(workload, checkpointing=False))


DEEPSPEED = Environment(
    "deepspeed",
    (
        "deepspeed==0.19.8",
        "einops==0.8.2",
        "hjson==3.1.0",
        "msgpack==1.2.4",
        "ninja==1.13.2",
        "psutil==7.2.2",
        "py-cpuinfo==9.0.0",
        "pydantic==2.14.3",
        "pydantic-core==2.50.4",
    ),
    variables={"DS_ACCELERATOR": "cpu", "RANK": "0", "LOCAL_RANK": "0", "LOCAL_SIZE": "1", "WORLD_SIZE": "1"},
    prepare="""
from deepspeed.ops.op_builder import cpu

needed = [cpu.CPUAdamBuilder(), cpu.ShareMemCommBuilder(), cpu.PinMemoryBuilder()]
if cpu.AsyncIOBuilder().is_compatible():  # it needs libaio; without it, NVMe's rows have the error
    needed.append(cpu.AsyncIOBuilder())
for builder in needed:
    builder.load(verbose=False)
""",
)
TORCHAO = Environment("torchao", ("torchao==0.18.0",))
BITSANDBYTES = Environment("bitsandbytes", ("bitsandbytes==0.50.2",))

PLAIN = "plain-checkpointing"
"""What the others are compared with."""
SYSTEMS: dict[str, System] = {
    PLAIN: System(
        "plain PyTorch, checkpointing",
        "everything in RAM; fused AdamW",
        lambda workload, _: Plain(workload),
    ),
    "plain": System("plain PyTorch, activations kept", "everything in RAM; fused AdamW", without_checkpointing),
    "fsdp2-offload": System(
        "FSDP2, CPU offload",
        "fully_shard of each layer, fp32 parameters, CPUOffloadPolicy; fused AdamW",
        sharded,
    ),
    "deepspeed-cpu": System(
        "DeepSpeed ZeRO-3, CPU offload",
        "offload_optimizer and offload_param to cpu; DeepSpeedCPUAdam",
        deepspeed("cpu", "cpu"),
        DEEPSPEED,
    ),
    "deepspeed-nvme-states": System(
        "DeepSpeed ZeRO-3, optimizer states on NVMe",
        "offload_optimizer to nvme, offload_param to cpu; aio in blocks of 1 MiB, queue depth 8, 2 threads",
        deepspeed("nvme", "cpu"),
        DEEPSPEED,
    ),
    "deepspeed-nvme-all": System(
        "DeepSpeed ZeRO-3, all on NVMe",
        "offload_optimizer and offload_param to nvme; aio in blocks of 1 MiB, queue depth 8, 2 threads",
        deepspeed("nvme", "nvme"),
        DEEPSPEED,
    ),
    "torchao": System("torchao CPUOffloadOptimizer", "over fused AdamW", torchao, TORCHAO),
    "bitsandbytes": System("bitsandbytes PagedAdamW", "32 bits", bitsandbytes, BITSANDBYTES),
    "pagoda-ram": System("Pagoda, all in RAM", "Memory(host=...) above what the state takes", paged(1.2)),
    "pagoda-half": System(
        "Pagoda, part of the moments on SSD", "RAM for weights, gradients and half of the rest", paged(0.5)
    ),
    "pagoda-moments": System("Pagoda, moments on SSD", "RAM for weights and gradients", paged(0.0)),
    "pagoda-ssd": System("Pagoda, all on SSD", "1.25 times the least RAM that it accepts", paged(None), ram_bytes=0.5),
}
