"""Baselines: DeepSpeed ZeRO-3 and FSDP2, both with states in RAM, on the same workload in the same run."""

import importlib.util
import os
import socket
import statistics
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from gpu_suite.common import Figures, Machine, Named, drawn_quickly, paged_figures, release, throughput, timed
from training import LR, Workload

Step = Callable[[torch.Tensor], None]


def baselines(machine: Machine) -> Named:
    """Throughput of each that can be had here, and Pagoda's over it; or why it could not be had. As large as their fp32
    states fit RAM."""
    load = replace(machine.workload, layers=machine.sizes.few_layers)
    ours = paged_figures(machine, load, machine.memory(machine.sizes.few))
    yield "pagoda", ours
    for name, (module, build) in {"deepspeed": ("deepspeed", _deepspeed), "fsdp2": ("torch", _fsdp2)}.items():
        if not machine.gpu:
            yield name, {"missing": "needs a GPU"}
        elif importlib.util.find_spec(module) is None:
            yield name, {"missing": f"{module} is not installed"}
        else:
            yield name, _measured(machine, load, build, float(ours["step_s"]))  # type: ignore[arg-type]
        release(machine)


def _measured(machine: Machine, load: Workload, build: Callable[[Machine, Workload], Step], ours_s: float) -> Figures:
    _single_rank(machine)
    try:
        with drawn_quickly():
            step = build(machine, load)
        step_s = statistics.median(timed(machine, step, load))
    except Exception as error:  # out of memory, a version that does not go with this torch: the table says so
        return {"failed": f"{type(error).__name__}: {error}"[:500]}
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    return throughput(load, step_s) | {"pagoda_times_faster": step_s / ours_s}


def _single_rank(machine: Machine) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": "0", "LOCAL_RANK": "0"}
    os.environ["WORLD_SIZE"] = "1"
    torch.cuda.set_device(machine.device)


def _deepspeed(machine: Machine, load: Workload) -> Step:
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": load.batch_size,
        "bf16": {"enabled": True},
        "gradient_clipping": load.clip or 0.0,
        "optimizer": {"type": "AdamW", "params": {"lr": LR}},
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "cpu", "pin_memory": True},
            "offload_param": {"device": "cpu", "pin_memory": True},
            "overlap_comm": True,
        },
    }
    deepspeed.init_distributed("nccl")
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = load.build()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)

    def step(ids: torch.Tensor) -> None:
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()

    return step


def _fsdp2(machine: Machine, load: Workload) -> Step:
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    torch.distributed.init_process_group("cpu:gloo,cuda:nccl")
    policy: dict[str, Any] = {
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16),
        "offload_policy": CPUOffloadPolicy(pin_memory=True),
    }
    model = load.build()
    for module in model.modules():
        if isinstance(module, nn.ModuleList):
            for layer in module:
                fully_shard(layer, **policy)
    fully_shard(model, **policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)

    def step(ids: torch.Tensor) -> None:
        model(input_ids=ids, labels=ids).loss.backward()
        if load.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), load.clip)
        optimizer.step()
        optimizer.zero_grad()

    return step
