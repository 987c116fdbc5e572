"""Pagoda: train PyTorch models larger than memory, in pages across GPU, RAM and SSD.

model, optimizer = pagoda.wrap(model, pagoda.AdamW(lr=3e-4), memory=pagoda.Memory(host="8GiB", ssd="/nvme"))
"""

from pagoda.api import AdamW, Memory, gathered, init, plan_of, wrap
from pagoda.errors import (
    BudgetError,
    CheckpointError,
    ConfigError,
    NonFiniteGradientError,
    PagodaError,
    StorageError,
    UsageError,
)

__all__ = [
    "AdamW",
    "BudgetError",
    "CheckpointError",
    "ConfigError",
    "Memory",
    "NonFiniteGradientError",
    "PagodaError",
    "StorageError",
    "UsageError",
    "gathered",
    "init",
    "plan_of",
    "wrap",
]
