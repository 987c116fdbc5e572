"""Pagoda: train PyTorch models larger than memory, in pages across GPU, RAM and SSD.

    model, optimizer = pagoda.wrap(model, pagoda.AdamW(lr=3e-4), memory=pagoda.Memory(host="8GiB", ssd="/nvme"))

Names are imported when first used, so that `pagoda --help` need not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pagoda.api import (
        SGD,
        Activations,
        Adafactor,
        Adam,
        AdamW,
        Lion,
        LossScale,
        Memory,
        Mesh,
        MixedPrecision,
        ModelState,
        Muon,
        Optim,
        OptimizerState,
        Split,
        Tiles,
        Updates,
        chunked_loss,
        full_state_dict,
        gathered,
        init,
        load,
        no_decay_groups,
        open_mesh,
        plan_of,
        trainable_state_dict,
        wrap,
    )
    from pagoda.errors import (
        BudgetError,
        CheckpointError,
        ConfigError,
        NonFiniteGradientError,
        PagodaError,
        RankError,
        StorageError,
        UsageError,
    )

__all__ = [
    "SGD",
    "Activations",
    "Adafactor",
    "Adam",
    "AdamW",
    "BudgetError",
    "CheckpointError",
    "ConfigError",
    "Lion",
    "LossScale",
    "Memory",
    "Mesh",
    "MixedPrecision",
    "ModelState",
    "Muon",
    "NonFiniteGradientError",
    "Optim",
    "OptimizerState",
    "PagodaError",
    "RankError",
    "Split",
    "StorageError",
    "Tiles",
    "Updates",
    "UsageError",
    "chunked_loss",
    "full_state_dict",
    "gathered",
    "init",
    "load",
    "no_decay_groups",
    "open_mesh",
    "plan_of",
    "trainable_state_dict",
    "wrap",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'pagoda' has no attribute {name!r}")
    return getattr(import_module("pagoda.errors" if name.endswith("Error") else "pagoda.api"), name)
