"""What the benchmarks train: one workload under plain PyTorch, with everything in one memory, and under Pagoda.

Both do the same arithmetic: bf16 weights and an fp32 master, or all in fp32; fused AdamW; the same gradient
checkpointing and clipping.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import pagoda
from pagoda.config.training import ActivationMode, Precision
from pagoda.models import build_model
from pagoda.models.lora import LoraConfig, add_adapters

LR = 1e-4
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Workload:
    """A model, and the tokens of a step."""

    model: str
    batch_size: int
    seq_len: int
    clip: float | None = 1.0
    checkpointing: bool = True
    layers: int | None = None
    """Instead of the model's own."""
    micro_batches: int = 1
    """Of a step; each has its part of the sequences."""
    precision: Precision = "bf16"
    """Of weights and compute."""
    lora_rank: int | None = None
    """Adapters of this rank train over frozen weights; None: all weights train."""

    @property
    def dtype(self) -> torch.dtype:
        """Of weights and compute."""
        return torch.float32 if self.precision == "fp32" else torch.bfloat16

    @property
    def tokens(self) -> int:
        return self.batch_size * self.seq_len

    def build(self, checkpointing: bool = False) -> nn.Module:
        model = build_model(self.model, seq_len=self.seq_len, gradient_checkpointing=checkpointing, layers=self.layers)
        return model if self.lora_rank is None else add_adapters(model, LoraConfig(lora_r=self.lora_rank))

    def batches(self, device: torch.device = CPU) -> Iterator[torch.Tensor]:
        """Random tokens, the same ones every time."""
        generator = torch.Generator().manual_seed(0)
        while True:
            yield torch.randint(256, (self.batch_size, self.seq_len), generator=generator).to(device)


def llama(vocab: int, hidden: int, ffn: int, layers: int, **more: Any) -> Any:
    """A LlamaForCausalLM of these sizes, with heads of 64."""
    from transformers import LlamaConfig, LlamaForCausalLM

    heads = hidden // 64
    sizes = {"vocab_size": vocab, "hidden_size": hidden, "intermediate_size": ffn, "num_hidden_layers": layers}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=heads, use_cache=False, **more))


class Trainer:
    """Something that trains a workload, one step at a time."""

    model: nn.Module
    micro_batches = 1

    def backward(self, ids: torch.Tensor) -> torch.Tensor:
        """Forward and backward of each micro-batch; the mean of the losses."""
        losses = []
        for part in ids.chunk(self.micro_batches):
            loss = self.model(input_ids=part, labels=part).loss / self.micro_batches
            loss.backward()
            losses.append(loss.detach())
        return torch.stack(losses).sum()

    def step(self, ids: torch.Tensor) -> torch.Tensor:
        """Forward, backward and update; the loss."""
        raise NotImplementedError

    def drain(self) -> None:
        """Wait for what the last step has left to do."""

    def save(self, folder: Path) -> None:
        """Write a checkpoint, by the means that its authors recommend."""
        raise NotImplementedError

    def load(self, folder: Path) -> None:
        """Read it back."""
        raise NotImplementedError

    def close(self) -> None:
        """Give back files and threads."""


class Plain(Trainer):
    """Plain PyTorch, everything in the memory of one device."""

    def __init__(
        self,
        workload: Workload,
        device: torch.device = CPU,
        optimizer: Callable[[list[torch.Tensor]], torch.optim.Optimizer] | None = None,
    ) -> None:
        """`optimizer` makes another one than torch's fused AdamW, of the master."""
        torch.manual_seed(0)
        model = workload.build(workload.checkpointing)
        master = None
        if workload.precision != "fp32":
            trained = (p for p in model.parameters() if p.requires_grad)
            master = [p.detach().to(device, copy=True).requires_grad_() for p in trained]
        self.model = model.to(device, workload.dtype).train()
        self.params: list[torch.Tensor] = [p for p in self.model.parameters() if p.requires_grad]
        self.master = self.params if master is None else master
        self.optimizer = optimizer(self.master) if optimizer else torch.optim.AdamW(self.master, lr=LR, fused=True)
        self.clip, self.micro_batches = workload.clip, workload.micro_batches

    def step(self, ids: torch.Tensor) -> torch.Tensor:
        """The loss, on the device."""
        loss = self.backward(ids)
        apart = self.master is not self.params
        for master, param in zip(self.master, self.params, strict=True):
            assert param.grad is not None
            if apart:
                master.grad, param.grad = param.grad.float(), None
        if self.clip is not None:
            nn.utils.clip_grad_norm_(self.master, self.clip)
        self.optimizer.step()
        with torch.no_grad():
            for master, param in zip(self.master, self.params, strict=True):
                if apart:
                    param.copy_(master)
                master.grad = None
        return loss

    def save(self, folder: Path) -> None:
        folder.mkdir()
        torch.save({"master": self.master, "optimizer": self.optimizer.state_dict()}, folder / "state.pt")

    def load(self, folder: Path) -> None:
        state = torch.load(folder / "state.pt", mmap=True)
        self.optimizer.load_state_dict(state["optimizer"])
        with torch.no_grad():
            for master, param, value in zip(self.master, self.params, state["master"], strict=True):
                param.copy_(master.copy_(value))


class Paged(Trainer):
    """The same model under Pagoda."""

    def __init__(
        self,
        workload: Workload,
        memory: pagoda.Memory,
        speculate: bool = True,
        rule: pagoda.AdamW | None = None,
        activations: ActivationMode | None = None,
        mesh: pagoda.Mesh | None = None,
    ) -> None:
        """By default blocks are recomputed where the workload checkpoints."""
        torch.manual_seed(0)
        self.micro_batches = workload.micro_batches
        with pagoda.deferred_init():
            model = workload.build()
        self.model, self.optimizer = pagoda.wrap(
            model.train(),
            rule or pagoda.AdamW(lr=LR),
            memory=memory,
            precision=workload.precision,
            max_grad_norm=workload.clip,
            gradient_accumulation_steps=workload.micro_batches,
            update=pagoda.Updates(speculate=speculate),
            activations=activations or ("recompute" if workload.checkpointing else "keep"),
            mesh=mesh,
        )

    def step(self, ids: torch.Tensor) -> torch.Tensor:
        """The loss, on the device."""
        loss = self.backward(ids)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def drain(self) -> None:
        self.optimizer.synchronize()

    def save(self, folder: Path) -> None:
        self.optimizer.save_checkpoint(folder)

    def load(self, folder: Path) -> None:
        self.optimizer.load_checkpoint(folder)

    def close(self) -> None:
        self.optimizer.close()
