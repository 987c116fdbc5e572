"""Lightning's Trainer and Fabric with training state in pages: `strategy="pagoda"`."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partialmethod
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import Precision as FabricPrecision
from lightning.fabric.strategies import STRATEGY_REGISTRY as FABRIC_STRATEGIES, DDPStrategy as FabricDDP
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.plugins import Precision as TrainerPrecision
from lightning.pytorch.strategies import DDPStrategy as TrainerDDP, StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn
from torch.utils._pytree import tree_map

from pagoda.config.training import Precision
from pagoda.errors import CheckpointError, ConfigError, UsageError
from pagoda.integrations.paging import Paging, hand_over
from pagoda.integrations.states import Saves
from pagoda.optimizer import PagedOptimizer
from pagoda.prepare.construct import init

_PRECISIONS: dict[str, Precision | None] = {
    "32-true": None,
    "bf16-true": "bf16",
    "bf16-mixed": "bf16",
    "16-mixed": "fp16",
}
_REST, _STATE = "rest.ckpt", "state"
"""In a save: the file with what Lightning saves in addition to the model and its optimizer, and their directory."""
_HAS_STATE = "pagoda"
"""Key in that file: True if the state is in that directory, and not in the file."""


_Base: Any = object
"""For mypy: base of classes that use attributes of Lightning's classes."""


class _Pages(_Base):  # type: ignore[misc]
    """Base of both precision plugins. It casts inputs to the dtype of the weights and scales the loss."""

    def __init__(self, strategy: "PagodaStrategy | PagodaFabricStrategy", said: str) -> None:
        if said not in _PRECISIONS:
            raise ConfigError(f"precision is {said!r}; with Pagoda, use one of {', '.join(_PRECISIONS)}.")
        self._strategy = strategy
        self.said = _PRECISIONS[said]

    def convert_input(self, data: Any) -> Any:
        """Cast floating-point inputs to the dtype in which weights compute."""
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, None: None}[self.said]
        return data if dtype is None else tree_map(lambda each: _cast(each, dtype), data)

    def pre_backward(self, tensor: torch.Tensor, module: Any) -> torch.Tensor:
        """Return the loss to call `backward` on."""
        loss = super().pre_backward(tensor, module)
        return self._strategy.optimizer_in_pages.scale(tensor if loss is None else loss)


class _TrainerPages(_Pages, TrainerPrecision):  # type: ignore[misc]
    def clip_grad_by_norm(self, optimizer: Any, clip_val: float) -> None:
        self._strategy.optimizer_in_pages.clip_grad_norm_(clip_val)


class _FabricPages(_Pages, FabricPrecision):  # type: ignore[misc]
    def convert_output(self, data: Any) -> Any:
        """Cast floating-point outputs to torch's default dtype, as Fabric's own 16-bit plugins do."""
        return data if self.said is None else tree_map(lambda each: _cast(each, torch.get_default_dtype()), data)


class _Strategy(_Base):  # type: ignore[misc]
    """Base of both strategies. It holds the settings and the optimizer, and saves the state."""

    def __init__(self, paging: Paging | None = None, **kwargs: Any) -> None:
        self.paging = Paging() if paging is None else paging
        self._paged: PagedOptimizer | None = None
        super().__init__(**kwargs)
        self._backward_sync_control = None  # Fabric's DDP has one

    @property
    def optimizer_in_pages(self) -> PagedOptimizer:
        """The optimizer that `pagoda.wrap` returned. Raises UsageError before the model is wrapped."""
        if self._paged is None:
            raise UsageError("The model is not wrapped yet. It is wrapped when training or evaluation begins.")
        return self._paged

    @contextmanager
    def _saved(self, directory: Path) -> Iterator[Path]:
        """Save all state in a new directory, and yield it. After the block, which writes the other files there, older
        saves are deleted."""
        if directory.is_file():
            raise CheckpointError(
                f"{directory} is a file, and a checkpoint in pages is a directory: save to another path."
            )
        with Saves(directory).new(self.is_global_zero, self.broadcast, self.barrier) as save:
            yield save
            self.optimizer_in_pages.save_checkpoint(save / _STATE)


class PagodaStrategy(_Strategy, TrainerDDP):  # type: ignore[misc]
    """A strategy that keeps the training state of a LightningModule in pages::

        Trainer(strategy=PagodaStrategy(paging=Paging(memory=pagoda.Memory(host="8GiB", ssd="/nvme"))), ...)

    `strategy="pagoda"` has the default settings. `configure_optimizers` must return one optimizer, from torch or of any
    class that steps each parameter separately. `precision` is the dtype of weights in forward and backward, with a
    master in fp32; autocast is not used. Clipping by norm is exact, on any number of ranks; DDP is not used.

    Inside `trainer.init_module()` and `configure_model`, parameters take no memory. A checkpoint is a directory. With
    `save_weights_only=True` it is a file in Lightning's own format, and all weights are in RAM while it is written.
    State stays in pages after `fit`, for `test` and further calls of `fit`, until
    `trainer.strategy.optimizer_in_pages.close()`.
    """

    strategy_name = "pagoda"

    optimizers: Any

    _restored: Path | None = None

    @property
    def precision_plugin(self) -> Any:
        """Pagoda's plugin for the Trainer's precision."""
        return TrainerPrecision() if self._precision_plugin is None else self._precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Any) -> None:
        self._precision_plugin = None if plugin is None else _TrainerPages(self, plugin.precision)

    # --- the model and its optimizer -----------------------------------------------------------------------------

    def setup(self, trainer: Any) -> None:
        """Wrap the model with the optimizer from its `configure_optimizers`."""
        for callback in trainer.callbacks:
            if isinstance(callback, StochasticWeightAveraging | WeightAveraging):
                raise ConfigError(
                    f"{type(callback).__name__} copies weights that are not in memory: leave it out, and average them "
                    "inside pagoda.gathered, as examples/ema.py does."
                )
        if self.world_size == 1:  # as a DDPStrategy, it would get a distributed sampler, with another order
            trainer._accelerator_connector.use_distributed_sampler = False
        self.accelerator.setup(trainer)
        self.paging.check_device(self.root_device)
        self.setup_optimizers(trainer)
        made: list[Any] = self.optimizers
        if len(made) != 1:
            raise ConfigError(f"configure_optimizers gave {len(made)} optimizers; Pagoda wraps a model with one.")
        if self._paged is None:
            said = self.precision_plugin.said
            self._paged = self.paging.take_over(self.lightning_module, made[0], said)
        for config in self.lr_scheduler_configs:
            hand_over(config.scheduler, self._paged)
        self.optimizers = [self._paged]
        if trainer.state.fn != TrainerFn.FITTING:
            self._reset_optimizers_and_schedulers()

    def model_to_device(self) -> None:
        """Do nothing: `wrap` has placed the model."""

    def _forward_of(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the module as its forward, so that it can use all of the module's parameters."""
        module = self.lightning_module
        return self._forward_redirection(module, module, method, *args, **kwargs)

    training_step = partialmethod(_forward_of, "training_step")
    validation_step = partialmethod(_forward_of, "validation_step")
    test_step = partialmethod(_forward_of, "test_step")
    predict_step = partialmethod(_forward_of, "predict_step")

    def tensor_init_context(self, empty_init: bool | None = None) -> AbstractContextManager[None]:
        """Context in which parameters take no memory. `wrap` creates them in their homes."""
        return init()

    model_sharded_context = tensor_init_context

    def teardown(self) -> None:
        """Tear down everything but the training state."""
        mine: Any = self
        module, optimizers = mine._lightning_module, mine._optimizers
        mine._lightning_module, mine._optimizers = None, []
        try:
            super().teardown()
        finally:
            mine._lightning_module, mine._optimizers = module, optimizers

    # --- checkpoints ---------------------------------------------------------------------------------------------

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """True: state is loaded into pages."""
        return True

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Empty: `save_checkpoint` writes the optimizer's state."""
        return {}

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Empty: `save_checkpoint` writes the model's state."""
        return {}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write a checkpoint directory: the state of the model and its optimizer in pieces, and Lightning's file for
        the rest. Without optimizer states, write one file of Lightning's."""
        if "optimizer_states" not in checkpoint:
            checkpoint["state_dict"] = self.lightning_module.state_dict()
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        with self._saved(Path(filepath)) as save:
            super().save_checkpoint({**checkpoint, _HAS_STATE: True}, save / _REST, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Load Lightning's part of a checkpoint. Raises CheckpointError if no save in its directory is complete."""
        path = Path(checkpoint_path)
        self._restored = Saves(path).newest() if path.is_dir() else None
        loaded: dict[str, Any] = super().load_checkpoint(
            path if self._restored is None else self._restored / _REST, weights_only
        )
        return loaded

    def load_model_state_dict(self, checkpoint: Any, strict: bool = True) -> None:
        """Load all state, or only the weights if the checkpoint has nothing else."""
        if _HAS_STATE in checkpoint:
            assert self._restored is not None, "Lightning loads a checkpoint before it restores from it"
            self.optimizer_in_pages.load_checkpoint(self._restored / _STATE)
        else:
            super().load_model_state_dict(checkpoint, strict)

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        """Do nothing: `load_model_state_dict` has loaded the optimizer."""


class PagodaFabricStrategy(_Strategy, FabricDDP):  # type: ignore[misc]
    """A strategy that keeps the training state of `fabric.setup(model, optimizer)` in pages::

        fabric = Fabric(strategy=PagodaFabricStrategy(paging=Paging(memory=pagoda.Memory(host="8GiB", ssd="/nvme"))))

    It works like `PagodaStrategy`. If the state for `fabric.save` has the optimizer, the checkpoint is a directory, and
    model and optimizer are written in pieces. Inside `fabric.init_module()`, parameters take no memory.
    """

    _model: nn.Module | None = None

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any] | None:
        """Settings of the sampler that divides data over ranks. None on one rank, which keeps the loader's own."""
        return None if self.world_size == 1 else super().distributed_sampler_kwargs

    @property
    def precision(self) -> Any:
        """Pagoda's plugin for Fabric's precision."""
        return FabricPrecision() if self._precision is None else self._precision

    @precision.setter
    def precision(self, plugin: Any) -> None:
        self._precision = None if plugin is None else _FabricPages(self, plugin.precision)

    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[torch.optim.Optimizer], scheduler: Any = None
    ) -> tuple[nn.Module, list[torch.optim.Optimizer], Any]:
        """Wrap a model with its optimizer."""
        if len(optimizers) != 1 or self._paged is not None:
            raise ConfigError("Pagoda's strategy takes one model with one optimizer: fabric.setup(model, optimizer).")
        self.paging.check_device(self.root_device)
        self._paged = self.paging.take_over(module, optimizers[0], self.precision.said)
        self._model = module
        if scheduler is not None:
            hand_over(scheduler, self._paged)
        return module, [self._paged], scheduler

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Raises ConfigError, because a model is wrapped together with its optimizer."""
        raise ConfigError("Pagoda wraps a model with its optimizer: fabric.setup(model, optimizer).")

    def module_to_device(self, module: nn.Module) -> None:
        """Do nothing: `wrap` places the model."""

    def module_init_context(self, empty_init: bool | None = None) -> AbstractContextManager[Any]:
        """Context in which parameters take no memory. `wrap` creates them in their homes."""
        return init()

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Any,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> torch.Tensor:
        """Clip by a norm. Returns the norm before clipping."""
        if norm_type != 2:
            clipped: torch.Tensor = super().clip_gradients_norm(
                module, optimizer, max_norm, norm_type, error_if_nonfinite
            )
            return clipped
        return torch.tensor(self.optimizer_in_pages.clip_grad_norm_(max_norm))

    def save_checkpoint(
        self, path: Any, state: dict[str, Any], storage_options: Any = None, filter: dict[str, Any] | None = None
    ) -> None:
        """Write a directory if the state has the optimizer, otherwise a file, with all weights in RAM."""
        rest = self._rest(state)
        if len(rest) == len(state):
            super().save_checkpoint(path, state, storage_options, filter)
            return
        if filter:
            raise ConfigError("A filter cannot leave out parts of a checkpoint in pages: save it without one.")
        with self._saved(Path(path)) as save:
            super().save_checkpoint(save / _REST, {**rest, _HAS_STATE: True}, storage_options)

    def load_checkpoint(
        self, path: Any, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> Any:
        """Load a checkpoint that `save_checkpoint` wrote."""
        if not Path(path).is_dir() or not isinstance(state, dict):
            return super().load_checkpoint(path, state, strict, weights_only=weights_only)
        save, rest = Saves(Path(path)).newest(), {**self._rest(state), _HAS_STATE: True}
        remainder = super().load_checkpoint(save / _REST, rest, strict, weights_only=weights_only)
        self.optimizer_in_pages.load_checkpoint(save / _STATE)
        del rest[_HAS_STATE]
        state.update(rest)
        return remainder

    def _rest(self, state: dict[str, Any]) -> dict[str, Any]:
        """The entries of a state without optimizer and model. If the optimizer is not in it, the state itself."""
        paged = (self._paged, self._model)
        if not any(each is self._paged for each in state.values()):
            return state
        return {name: each for name, each in state.items() if not any(each is one for one in paged)}


def _cast(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value


StrategyRegistry.register("pagoda", PagodaStrategy, description="Training state in pages over GPU, RAM and SSD")
FABRIC_STRATEGIES.register("pagoda", PagodaFabricStrategy, description="Training state in pages over GPU, RAM and SSD")
