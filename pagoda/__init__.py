"""Pagoda: train PyTorch models larger than memory, in pages across GPU, RAM and SSD.

    model, optimizer = pagoda.wrap(model, pagoda.AdamW(lr=3e-4), memory=pagoda.Memory(host="8GiB", ssd="/nvme"))

Names are imported when first used, so that `pagoda --help` need not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pagoda.api import load as load, plan_of as plan_of, wrap as wrap
    from pagoda.checkpoint.gathered import gathered as gathered
    from pagoda.checkpoint.optimizer_states import OptimizerState as OptimizerState
    from pagoda.checkpoint.resident import resident as resident
    from pagoda.checkpoint.state_dicts import (
        ModelState as ModelState,
        full_state_dict as full_state_dict,
        trainable_state_dict as trainable_state_dict,
    )
    from pagoda.config.memory import Memory as Memory, Split as Split
    from pagoda.config.training import (
        Activations as Activations,
        LossScale as LossScale,
        MixedPrecision as MixedPrecision,
        Tiles as Tiles,
        Updates as Updates,
    )
    from pagoda.errors import (
        BudgetError as BudgetError,
        CheckpointError as CheckpointError,
        ConfigError as ConfigError,
        NonFiniteGradientError as NonFiniteGradientError,
        PagodaError as PagodaError,
        RankError as RankError,
        StorageError as StorageError,
        UsageError as UsageError,
    )
    from pagoda.mesh.mesh import Mesh as Mesh, open_mesh as open_mesh
    from pagoda.optim import (
        SGD as SGD,
        Adafactor as Adafactor,
        Adam as Adam,
        AdamW as AdamW,
        Lion as Lion,
        Muon as Muon,
        Optim as Optim,
        SignSGD as SignSGD,
    )
    from pagoda.optim.param_groups import no_decay_groups as no_decay_groups
    from pagoda.prepare.construct import deferred_init as deferred_init
    from pagoda.prepare.deferred_logits import chunked_loss as chunked_loss
    from pagoda.prepare.sequence_parallel import divide_sequences as divide_sequences

_HOMES = {
    "pagoda.api": "load plan_of wrap",
    "pagoda.checkpoint.gathered": "gathered",
    "pagoda.checkpoint.resident": "resident",
    "pagoda.checkpoint.optimizer_states": "OptimizerState",
    "pagoda.checkpoint.state_dicts": "ModelState full_state_dict trainable_state_dict",
    "pagoda.config.memory": "Memory Split",
    "pagoda.config.training": "Activations LossScale MixedPrecision Tiles Updates",
    "pagoda.prepare.construct": "deferred_init",
    "pagoda.errors": "BudgetError CheckpointError ConfigError NonFiniteGradientError PagodaError RankError "
    "StorageError UsageError",
    "pagoda.prepare.deferred_logits": "chunked_loss",
    "pagoda.prepare.sequence_parallel": "divide_sequences",
    "pagoda.optim": "SGD Adafactor Adam AdamW Lion Muon Optim SignSGD",
    "pagoda.optim.param_groups": "no_decay_groups",
    "pagoda.mesh.mesh": "Mesh open_mesh",
}
"""Module -> the names that users take from it."""
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names.split()}

__all__ = sorted(_HOME_OF)


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return import_module("importlib.metadata").version("pagoda-train")
    if name not in _HOME_OF:
        raise AttributeError(f"module 'pagoda' has no attribute {name!r}")
    return getattr(import_module(_HOME_OF[name]), name)
