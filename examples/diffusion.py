"""A denoising diffusion model of small images, which are made up on the spot.

python examples/diffusion.py [STEPS]
"""

import sys

import torch
from torch import nn
from torch.nn import functional as F

import pagoda

steps = int(sys.argv[1]) if len(sys.argv) > 1 else 200
size, width, batch_size, noise_levels = 16, 32, 16, 50
kept = torch.cumprod(1 - torch.linspace(1e-3, 0.2, noise_levels), 0)  # how much of an image is left at each level


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(width, width, 3, padding=1), nn.Conv2d(width, width, 3, padding=1)
        self.norm, self.level = nn.GroupNorm(4, width), nn.Linear(width, width)

    def forward(self, x, level):
        y = self.first(F.silu(self.norm(x))) + self.level(level)[:, :, None, None]
        return x + self.second(F.silu(y))


class Denoiser(nn.Module):
    """Predicts the noise in an image, [batch, 1, size, size]."""

    def __init__(self):
        super().__init__()
        self.level = nn.Embedding(noise_levels, width)
        self.first, self.last = nn.Conv2d(1, width, 3, padding=1), nn.Conv2d(width, 1, 3, padding=1)
        self.blocks = nn.ModuleList(Residual() for _ in range(4))

    def forward(self, x, level):
        x, level = self.first(x), self.level(level)
        for block in self.blocks:
            x = block(x, level)
        return self.last(x)


def images(generator):
    """Squares of any place and size."""
    made = torch.zeros(batch_size, 1, size, size)
    for image in made:
        top, left, edge = torch.randint(1, size // 2, (3,), generator=generator).tolist()
        image[0, top : top + edge, left : left + edge] = 1.0
    return made * 2 - 1


def sample(model):
    """Images out of noise, by as many forwards as there are levels."""
    x = torch.randn(4, 1, size, size)
    before = torch.cat([torch.ones(1), kept[:-1]])
    for level in reversed(range(noise_levels)):
        noise = model(x, torch.full((4,), level))
        share = kept[level] / before[level]
        x = (x - (1 - share) / (1 - kept[level]).sqrt() * noise) / share.sqrt()
        x = x + (1 - share).sqrt() * torch.randn_like(x) * (level > 0)
    return x


torch.manual_seed(0)
memory = pagoda.Memory(host="700KiB", ssd=".")
model, optimizer = pagoda.wrap(Denoiser(), pagoda.AdamW(lr=2e-3), memory=memory, precision="fp32", max_grad_norm=1.0)
generator = torch.Generator().manual_seed(1)
for step in range(steps):
    clean, noise = images(generator), torch.randn(batch_size, 1, size, size, generator=generator)
    level = torch.randint(noise_levels, (batch_size,), generator=generator)
    share = kept[level][:, None, None, None]
    loss = F.mse_loss(model(share.sqrt() * clean + (1 - share).sqrt() * noise, level), noise)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 10 == 0 or step == steps - 1:
        print(f"step {step}: loss {loss.item():.4f}")
with torch.no_grad():
    print(f"sampled: mean {sample(model).mean().item():.3f}")
optimizer.close()
