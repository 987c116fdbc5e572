"""The process takes what the plan said it would: peak resident memory against the ledger, in fresh processes.

What a step needs beside pages is bounded by a formula, not by a measurement:

- activations: every layer saves, per token, at most `4 * hidden + 2 * intermediate` numbers of 4 bytes (what enters its
  norm and its linear layers, what leaves them, and the activation), and the loss keeps 6 copies of the logits in fp32;
- gradients between autograd and their extents: two of the largest parameter in bf16, the one just computed and
  the one on its way.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

MIB = 1 << 20
TOKENS = 16
VOCABULARY = 1024
SLACK_SHARE, SLACK_BYTES = 0.05, 64 * MIB

SCRIPT = """
import ctypes, gc, json, sys
import torch
from torch import nn
import pagoda

shape, memory, tokens, vocabulary = json.loads(sys.argv[1])

class Layer(nn.Module):
    def __init__(self, hidden, intermediate):
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.up, self.down = nn.Linear(hidden, intermediate), nn.Linear(intermediate, hidden)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))

def build(layers, hidden, intermediate):
    with pagoda.deferred_init():
        blocks = (Layer(hidden, intermediate) for _ in range(layers))
        return nn.Sequential(nn.Embedding(vocabulary, hidden), *blocks, nn.Linear(hidden, vocabulary))

def train(model, memory):
    model, optimizer = pagoda.wrap(model, pagoda.AdamW(lr=1e-4), memory=pagoda.Memory(**memory), max_grad_norm=1.0)
    for _ in range(2):
        ids = torch.randint(vocabulary, (tokens,))
        nn.functional.cross_entropy(model(ids).float(), ids).backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.synchronize()
    return model, optimizer

def status(name):
    for line in open("/proc/self/status"):
        if line.startswith(name):
            return int(line.split()[1]) * 1024

# Compile what the measured run needs, in the same tiers.
small = {"host": "2MiB" if "ssd" in memory else "16MiB", "unit_limit": "128KiB", "page_size": "4KiB"}
_, optimizer = train(build(4, 64, 64), {**memory, **small})
optimizer.close()
model = build(**shape)
del optimizer
gc.collect()
ctypes.CDLL("libc.so.6").malloc_trim(0)
open("/proc/self/clear_refs", "w").write("5")
before = status("VmRSS")
assert status("VmHWM") - before < 1 << 20, "the kernel keeps the old peak"
model, optimizer = train(model, memory)
plan = pagoda.plan_of(model)
print(json.dumps({
    "grown": status("VmHWM") - before,
    "ledger": plan.peak_bytes.get("host", 0) + plan.peak_bytes.get("device", 0),
    "used": optimizer.stats.peak_bytes.get("host", 0) + optimizer.stats.peak_bytes.get("device", 0),
    "ssd": plan.peak_bytes.get("ssd", 0),
    "state": plan.parameters * 14,
    "largest": max(slot.param.numel for unit in plan.units for slot in unit.slots),
}))
optimizer.close()
"""


def activations(layers: int, hidden: int, intermediate: int) -> int:
    """Bytes, by the formula above."""
    return 4 * TOKENS * (layers * (4 * hidden + 2 * intermediate) + 6 * VOCABULARY)


def measure(shape: dict[str, int], **memory: str | int) -> SimpleNamespace:
    """Bytes of one run, and elements of its largest parameter: what `SCRIPT` prints."""
    settings = json.dumps([shape, memory, TOKENS, VOCABULARY])
    # Poison writes to all memory at once, which is the very thing that is measured here.
    environment = {**os.environ, "PAGODA_POISON": "0"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, settings], capture_output=True, text=True, timeout=300, env=environment
    )
    assert done.returncode == 0, done.stderr
    return SimpleNamespace(**json.loads(done.stdout.splitlines()[-1]))


def allowed(shape: dict[str, int], run: SimpleNamespace) -> float:
    gradients = 2 * 2 * run.largest
    return run.ledger * (1 + SLACK_SHARE) + SLACK_BYTES + activations(**shape) + gradients


@pytest.mark.slow
def test_peak_memory_with_everything_in_ram_is_the_ledger_and_activations() -> None:
    shape = {"layers": 12, "hidden": 512, "intermediate": 1536}
    run = measure(shape, host="4GiB")
    assert run.ssd == 0
    assert run.used <= run.ledger
    assert run.grown <= allowed(shape, run)
    assert run.grown >= run.state, "a measurement below what is certainly touched measures something else"


def test_peak_memory_with_everything_on_ssd_is_the_ledger_and_activations(on_drive: Path) -> None:
    """And beside the ledger less than a tenth of the state, the construction of the model included."""
    shape = {"layers": 24, "hidden": 512, "intermediate": 1536}
    run = measure(shape, host="51MiB", ssd=str(on_drive), unit_limit="8MiB", page_size="1MiB")
    assert run.ssd >= run.state
    assert run.used <= run.ledger < run.state / 10
    assert run.grown <= min(allowed(shape, run), run.ledger + run.state / 10)
