"""A critic whose gradient with respect to its inputs is kept near 1, as in WGAN-GP: backward runs through backward.

python examples/gradient_penalty.py [STEPS]
"""

import sys

import torch
from torch import nn

import pagoda

steps = int(sys.argv[1]) if len(sys.argv) > 1 else 50

torch.manual_seed(0)
critic = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
critic, optimizer = pagoda.wrap(
    critic, pagoda.AdamW(lr=3e-3, betas=(0.5, 0.9)), memory=pagoda.Memory(host="1MiB", ssd="."), precision="fp32"
)
for step in range(steps):
    real, fake = torch.randn(32, 16) + 1, torch.randn(32, 16)
    share = torch.rand(32, 1)
    between = (share * real + (1 - share) * fake).requires_grad_()
    (gradient,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
    penalty = (gradient.norm(dim=1) - 1).square().mean()
    loss = critic(fake).mean() - critic(real).mean() + 10 * penalty
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 10 == 0 or step == steps - 1:
        print(f"step {step}: loss {loss.item():.3f}, gradient penalty {penalty.item():.3f}")
optimizer.close()
