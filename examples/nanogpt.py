"""A training loop in the manner of nanoGPT. The five lines that Pagoda changes end with `# Pagoda`.

python examples/nanogpt.py [STEPS] [FILE]
"""

import math
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import pagoda  # Pagoda

steps = int(sys.argv[1]) if len(sys.argv) > 1 else 200
text = torch.tensor(list(Path(sys.argv[2] if len(sys.argv) > 2 else torch.__file__).read_bytes()))
batch_size, micro_batches, learning_rate, warmup, grad_clip = 4, 2, 1e-3, 10, 1.0


@dataclass
class Config:
    vocabulary: int = 256
    length: int = 64
    layers: int = 4
    heads: int = 4
    width: int = 128


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.heads = config.heads
        self.norm_1, self.norm_2 = nn.LayerNorm(config.width), nn.LayerNorm(config.width)
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)
        self.mlp = nn.Sequential(
            nn.Linear(config.width, 4 * config.width), nn.GELU(), nn.Linear(4 * config.width, config.width)
        )

    def forward(self, x):  # [batch, length, width]
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm_1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, length, width)
        x = x + self.out(y)
        return x + self.mlp(self.norm_2(x))


class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.positions = nn.Embedding(config.length, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        for param in self.parameters():
            if param.ndim == 2:
                nn.init.normal_(param, std=0.02)

    def forward(self, ids, targets):
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x)).float()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def batch():
    at = torch.randint(len(text) - Config.length - 1, (batch_size,))
    both = torch.stack([text[i : i + Config.length + 1] for i in at])
    return both[:, :-1], both[:, 1:]


def rate(step):
    if step < warmup:
        return learning_rate * (step + 1) / warmup
    return learning_rate * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


torch.manual_seed(1337)
model = GPT(Config())
memory = pagoda.Memory(host="6MiB", ssd=".")  # Pagoda
rule = pagoda.AdamW(lr=learning_rate, betas=(0.9, 0.95))  # Pagoda
groups = pagoda.no_decay_groups(model, 0.1)  # as nanoGPT's configure_optimizers: matrices decay, vectors do not
model, optimizer = pagoda.wrap(model, rule, param_groups=groups, memory=memory)  # Pagoda
scaler = torch.amp.GradScaler(enabled=False)

for step in range(steps):
    for group in optimizer.param_groups:
        group["lr"] = rate(step)
    for _ in range(micro_batches):
        loss = model(*batch()) / micro_batches
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    if step % 10 == 0 or step == steps - 1:
        print(f"step {step}: loss {loss.item() * micro_batches:.3f}, gradient norm {norm:.2f}")
optimizer.close()  # Pagoda
