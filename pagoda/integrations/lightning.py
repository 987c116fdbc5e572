"""Lightning's Trainer and Fabric with training state in pages: `strategy="pagoda"`."""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import cache, partialmethod
from pathlib import Path
from typing import Any, Self

import torch
from lightning.fabric import strategies as fabric
from lightning.fabric.plugins import Precision as FabricPrecision
from lightning.pytorch import strategies as trainer_strategies
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.core.optimizer import _MockOptimizer
from lightning.pytorch.plugins import Precision as TrainerPrecision
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn
from torch.utils._pytree import tree_map

from pagoda.config.training import Precision
from pagoda.errors import CheckpointError, ConfigError, UsageError
from pagoda.integrations.paging import Paging, hand_over, optimizer_of
from pagoda.integrations.states import LazyStateDict, newest, saved
from pagoda.mesh.world import launched
from pagoda.optimizer import PagedOptimizer
from pagoda.prepare.construct import deferred_init
from pagoda.process import temporarily

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
        """Cast floating-point inputs to the dtype in which weights compute, unless autocast does."""
        if self._strategy.paging.autocast:
            return data
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, None: None}[self.said]
        return data if dtype is None else tree_map(lambda each: _cast(each, dtype), data)

    def forward_context(self) -> AbstractContextManager[None]:
        """The context of a module's steps: autocast, if the settings ask for it."""
        context: AbstractContextManager[None] = super().forward_context()
        return self._strategy.paging.autocast_context() if self.said and self._strategy.paging.autocast else context

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


@cache
def _based(kind: Any, on: type) -> Any:
    """A strategy of Pagoda's that is also one of Lightning's."""
    return type(kind.__name__, (kind, on), {"__module__": kind.__module__, "__doc__": kind.__doc__, "kind": kind})


class _Strategy(_Base):  # type: ignore[misc]
    """Base of both strategies. It holds the settings and the optimizer, and saves the state.

    On several devices, a strategy is one of Lightning's for DDP, and on one device one of Lightning's for a single
    device, because Lightning and its users ask for these classes.
    """

    kind: type
    """Pagoda's class of the strategy, without Lightning's."""
    on_one: type
    on_several: type

    def __new__(cls, *_: Any, **__: Any) -> Self:
        """Before Lightning tells the number of devices, there may be several."""
        kind: Any = cls
        made: Self = super().__new__(_based(kind, cls.on_several))
        return made

    def __init__(self, paging: Paging | None = None, **kwargs: Any) -> None:
        self.paging = Paging() if paging is None else paging
        self._paged: PagedOptimizer | None = None
        super().__init__(**kwargs)
        self._backward_sync_control = None  # Fabric's DDP has one

    def _configure_launcher(self) -> None:
        """Lightning calls this once it has told the devices."""
        devices = self.parallel_devices
        if len(devices) * self.num_nodes == 1:
            self.__class__ = _based(self.kind, self.on_one)
            self._root_device, self.global_rank, self.local_rank, self.world_size = devices[0], 0, 0, 1
        super()._configure_launcher()

    def _check_processes(self) -> None:
        """Raises ConfigError if the processes or devices of Lightning are not those with which Pagoda trains."""
        if self.world_size != launched().size:
            raise ConfigError(
                f"Lightning has {self.world_size} processes, and torchrun's environment {launched().size}. Start them "
                "with torchrun, and give Lightning as many devices (and num_nodes)."
            )
        self.paging.check_device(self.root_device)

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
        places = self.optimizer_in_pages._engine.ssd_directories
        with saved(directory, places, self.is_global_zero, self.barrier) as save:
            yield save
            self.optimizer_in_pages.save_checkpoint(save / _STATE)


class PagodaStrategy(_Strategy, trainer_strategies.Strategy):  # type: ignore[misc]
    """A strategy that keeps the training state of a LightningModule in pages::

        Trainer(strategy=PagodaStrategy(paging=Paging(memory=pagoda.Memory(host="8GiB", ssd="/nvme"))), ...)

    `strategy="pagoda"` has the default settings. `configure_optimizers` must return one optimizer, from torch or of any
    class that steps each parameter separately. `precision` is the dtype of weights in forward and backward, with a
    master in fp32; with `Paging(autocast=True)`, that of autocast. Clipping by norm is exact, on any number of ranks;
    DDP is not used.

    Inside `trainer.init_module()` and `configure_model`, parameters take no memory. A checkpoint is a directory. With
    `save_weights_only=True` it is a file in Lightning's own format, and all weights are in RAM while it is written.
    State stays in pages after `fit`, for `test` and further calls of `fit`, until
    `trainer.strategy.optimizer_in_pages.close()`.
    """

    strategy_name = "pagoda"
    on_one = trainer_strategies.SingleDeviceStrategy
    on_several = trainer_strategies.DDPStrategy

    optimizers: Any

    _restored: Path | None = None
    _wrapped: Any = None
    """The last module that was set up."""
    _given: Any = None
    """What the last `configure_optimizers` gave."""

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
        self.accelerator.setup(trainer)
        self._check_processes()
        fits = trainer.state.fn == TrainerFn.FITTING
        if self._wrapped is not self.lightning_module:
            self._paged, self._wrapped = optimizer_of(self.lightning_module), self.lightning_module
        if fits or self._paged is None:
            self._set_up_optimizer(trainer, fits)
        if not fits:
            self._reset_optimizers_and_schedulers()

    def _set_up_optimizer(self, trainer: Any, fits: bool) -> None:
        """Call `configure_optimizers`, and train with what it gives from now on, as each fit of Lightning does."""
        try:
            self.setup_optimizers(trainer)
        except Exception as error:
            if fits:
                raise
            raise ConfigError(
                f"The model is wrapped with its optimizer before {trainer.state.fn.value}(), too, and there "
                f"configure_optimizers raised {error!r}. It may return None if self.trainer.state.fn is not 'fit': the "
                "model is then frozen, and can only be evaluated, with the weights that it has."
            ) from error
        made: list[Any] = [each for each in self.optimizers if not isinstance(each, _MockOptimizer)]
        if len(made) > 1 or (fits and not made):
            raise ConfigError(f"configure_optimizers gave {len(made)} optimizers; Pagoda trains a model with one.")
        module, said = self.lightning_module, self.precision_plugin.said
        if not made:
            self._paged = self.paging.wrap_frozen(module, self.paging.memory, said)
        elif made[0] is not self._given:
            self._paged, self._given = self.paging.take_over(module, made[0], said), made[0]
        for config in self.lr_scheduler_configs:
            hand_over(config.scheduler, self.optimizer_in_pages)
        self.optimizers = [self._paged]

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
        return deferred_init()

    model_sharded_context = tensor_init_context

    def teardown(self) -> None:
        """Tear down everything but the training state."""
        with temporarily(self, _lightning_module=None, _optimizers=[]):
            super().teardown()

    # --- checkpoints ---------------------------------------------------------------------------------------------

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """True: state is loaded into pages."""
        return True

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Empty: `save_checkpoint` writes the optimizer's state."""
        return {}

    def lightning_module_state_dict(self) -> Mapping[str, Any]:
        """The module's state dict, for hooks: `save_checkpoint` writes the model's state."""
        return LazyStateDict(self.lightning_module)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write a checkpoint directory: the state of the model and its optimizer in pieces, and Lightning's file for
        the rest. Without optimizer states, write one file of Lightning's."""
        weights, is_whole = checkpoint["state_dict"], "optimizer_states" in checkpoint
        if isinstance(weights, LazyStateDict):  # no hook of the program has replaced it
            checkpoint["state_dict"] = {} if is_whole else dict(weights)
        if not is_whole:
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        with self._saved(Path(filepath)) as save:
            super().save_checkpoint({**checkpoint, _HAS_STATE: True}, save / _REST, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Load Lightning's part of a checkpoint. Raises CheckpointError if no save in its directory is complete."""
        path = Path(checkpoint_path)
        self._restored = newest([path], self.is_global_zero, self.barrier) if path.is_dir() else None
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
        """Load the optimizer from a checkpoint of another strategy. From one of Pagoda's, `load_model_state_dict` has
        loaded it."""
        if _HAS_STATE not in checkpoint:
            self.optimizer_in_pages.load_state_dict(checkpoint["optimizer_states"][0])


class PagodaFabricStrategy(_Strategy, fabric.Strategy):  # type: ignore[misc]
    """A strategy that keeps the training state of `fabric.setup(model, optimizer)` in pages::

        fabric = Fabric(strategy=PagodaFabricStrategy(paging=Paging(memory=pagoda.Memory(host="8GiB", ssd="/nvme"))))

    It works like `PagodaStrategy`. If the state for `fabric.save` has the optimizer, the checkpoint is a directory, and
    model and optimizer are written in pieces. Inside `fabric.init_module()`, parameters take no memory.
    """

    on_one = fabric.SingleDeviceStrategy
    on_several = fabric.DDPStrategy

    _model: nn.Module | None = None

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
        self._check_processes()
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
        return deferred_init()

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
        save = newest([Path(path)], self.is_global_zero, self.barrier)
        rest = {**self._rest(state), _HAS_STATE: True}
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


for _registry, _kind in (
    (trainer_strategies.StrategyRegistry, PagodaStrategy),
    (fabric.STRATEGY_REGISTRY, PagodaFabricStrategy),
):
    _registry.register("pagoda", _kind, description="Training state in pages over GPU, RAM and SSD")
