"""Whether every mode runs: a few steps of a tiny model in each. What fails is told, and the rest goes on."""

import tempfile
import traceback
from collections.abc import Mapping
from typing import Any

import torch

import pagoda
from gpu_suite.common import Machine, Named, deterministic, release
from pagoda.models import build_model
from pagoda.optim import Rule

_STEPS, _LINES = 4, 6
_ALL_UPDATES, _HALF = pagoda.Split(device_update_share=1.0), pagoda.Split(device_update_share=0.5)
_SAME_BITS: Mapping[str, dict[str, Any]] = {
    "few leases": {},
    "homes": {"split": pagoda.Split(device_home_share=1.0), "device": "40MiB"},
    "updates": {"split": _ALL_UPDATES, "device": "60MiB"},
    "updates and homes": {
        "split": pagoda.Split(device_update_share=0.5, device_home_share=1.0),
        "device": "60MiB",
    },
    "ssd": {"host": "30MiB", "ssd": True},
    "recompute": {"activations": "recompute"},
    "offload": {"activations": "offload"},
    "recompute+offload": {"activations": "recompute+offload"},
    "auto": {"activations": "auto"},
    "second placement": {"adapt_after": 2, "device": "60MiB"},
}
"""Modes with the same losses."""
_OTHERS: Mapping[str, dict[str, Any]] = {
    "without clipping": {"max_grad_norm": None},
    "two passes": {"passes": 2},
    "fp32 gradients": {"precision": pagoda.MixedPrecision("bf16", "fp32"), "passes": 2},
    "fp16": {"precision": "fp16"},
    "fp32": {"precision": "fp32"},
    "asynchronous": {"update": "async"},
    "8-bit moments": {"rule": pagoda.AdamW(moments="8bit"), "split": _HALF, "device": "60MiB"},
    "Adafactor": {"rule": pagoda.Adafactor(), "split": _HALF, "device": "60MiB"},
    "Muon": {"rule": pagoda.Muon()},
    "a class of torch": {"rule": pagoda.Optim(torch.optim.NAdam, lr=1e-3)},
}


def modes(machine: Machine) -> Named:
    """The losses of each mode, and whether those that must be equal are. Raises RuntimeError if a mode fails."""
    losses, failed = {}, []
    for name, settings in {**_SAME_BITS, **_OTHERS}.items():
        try:
            with deterministic():
                losses[name] = _train(machine, **settings)
            yield name, losses[name]
        except Exception:
            failed.append(name)
            said = traceback.format_exc(limit=-_LINES)
            yield name, {"failed": said}
            if "CUDA error" in said:  # no call to CUDA succeeds after it
                break
        release(machine)
    yield "same", len({tuple(losses[name]) for name in _SAME_BITS if name in losses}) == 1
    if failed:
        raise RuntimeError(f"modes that failed: {', '.join(failed)}")


def _train(
    machine: Machine,
    rule: Rule | None = None,
    device: str = "26MiB",
    host: str = "256MiB",
    ssd: bool = False,
    split: pagoda.Split | None = None,
    adapt_after: int | None = None,
    passes: int = 1,
    **settings: Any,
) -> list[float]:
    """The loss of each step."""
    torch.manual_seed(0)
    with pagoda.deferred_init():
        model = build_model("gpt-2x64", seq_len=32)
    with tempfile.TemporaryDirectory(dir=machine.ssd) as directory:
        memory = pagoda.Memory(
            device=device if machine.gpu else f"cpu:{device}",
            host=host,
            ssd=f"{directory}:2GiB" if ssd else None,
            split=split,
            adapt_after=adapt_after,
        )
        given: dict[str, Any] = {"precision": "bf16", "max_grad_norm": 1.0, "activations": "keep", **settings}
        model, optimizer = pagoda.wrap(
            model.train(), rule or pagoda.AdamW(lr=1e-3), memory=memory, gradient_accumulation_steps=passes, **given
        )
        try:
            ids = torch.randint(256, (2, 32), generator=torch.Generator().manual_seed(0)).to(machine.device)
            losses = []
            for _ in range(_STEPS):
                for _ in range(passes):
                    loss = model(input_ids=ids, labels=ids).loss
                    optimizer.scale(loss).backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(float(loss.detach()))
            return losses
        finally:
            optimizer.close()
