"""Accelerate with training state in pages: its `Accelerator` wraps the models that it prepares."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import accelerate
import torch
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import convert_file_size_to_int
from torch import nn

from pagoda.checkpoint.state import is_paged
from pagoda.config.training import Precision
from pagoda.errors import CheckpointError, ConfigError
from pagoda.integrations.paging import Paging, hand_over
from pagoda.integrations.states import LazyStateDict, delete_save, exported_into, has_save, newest, numbered, saved
from pagoda.mesh.world import launched
from pagoda.optimizer import PagedOptimizer
from pagoda.process import temporarily

PRECISIONS: dict[str, Precision | None] = {"no": None, "bf16": "bf16", "fp16": "fp16"}
"""What Accelerate calls mixed precision -> the precision to wrap with, or None for that of the model's dtype."""


def _state(at: int) -> str:
    """The name of the checkpoint of a paged model in a save, by its number."""
    return "state" if at == 0 else f"state_{at}"


def adopt(accelerator: Any, model: nn.Module, optimizer: PagedOptimizer) -> None:
    """Make an accelerator use a wrapped model as it is, without moving it and without DDP and autocast."""
    model._is_accelerate_prepared = True  # type: ignore[assignment]
    if optimizer.scales_loss:
        # In place of a GradScaler. Pagoda's step does everything else, and the scale is in Pagoda's checkpoints.
        accelerator.scaler = SimpleNamespace(
            scale=optimizer.scale, state_dict=dict, load_state_dict=lambda state_dict: None
        )


class _Prepared(AcceleratedOptimizer):  # type: ignore[misc]
    @property
    def step_was_skipped(self) -> bool:
        """Whether gradients overflowed in fp16, so that schedulers wait, too."""
        return bool(self.optimizer.step_was_skipped)


class Accelerator(accelerate.Accelerator):  # type: ignore[misc]
    """An `accelerate.Accelerator` whose `prepare` puts models and their optimizers in pages::

        accelerator = Accelerator(paging=Paging(memory=pagoda.Memory(host="8GiB", ssd="/nvme")))
        model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

    The optimizer is from torch, or of any other class that steps each parameter separately. It must not have any state
    yet. `mixed_precision` is the dtype of weights in forward and backward, with a master in fp32; with
    `Paging(autocast=True)`, that of autocast.
    On several ranks, Pagoda divides the state; DDP is not used.

    `save_state` and `load_state` write and read the exact state of models in pieces, together with Accelerate's own
    files. Hooks of the program on saving and loading get every model, and the exact state is loaded after they ran.

    Raises ConfigError for settings that cannot be combined with paging, and BudgetError like `wrap`.
    """

    def __init__(self, *args: Any, paging: Paging | None = None, mixed_precision: Any = None, **kwargs: Any) -> None:
        self.paging = Paging() if paging is None else paging
        said = mixed_precision or os.environ.get("ACCELERATE_MIXED_PRECISION", "no")  # which accelerate launch sets
        self._said = str(getattr(said, "value", said))
        if self._said not in PRECISIONS:
            raise ConfigError(f"mixed_precision is {self._said!r}; use one of {', '.join(PRECISIONS)}.")
        self._paged: list[tuple[nn.Module, AcceleratedOptimizer]] = []
        self._saving = False
        super().__init__(*args, mixed_precision="no", **kwargs)
        if any(getattr(self.state, name, None) is not None for name in ("deepspeed_plugin", "fsdp_plugin")):
            raise ConfigError("Pagoda divides state over ranks by itself: leave out DeepSpeed and FSDP.")
        if self.state.dynamo_plugin.backend.value.lower() not in ("no", "none"):
            raise ConfigError(
                "Accelerate would compile the whole model: leave out dynamo, and compile blocks before prepare."
            )
        if self.num_processes != launched().size:
            raise ConfigError(
                f"Accelerate has {self.num_processes} processes, and torchrun's environment {launched().size}. Start "
                "them with torchrun; on CPUs, also use Accelerator(cpu=True) or set ACCELERATE_USE_CPU=1."
            )
        self.paging.check_device(self.device)

    @property
    def mixed_precision(self) -> str:
        """The dtype in which prepared models compute, as the argument of the constructor names it."""
        return self._said

    def prepare(self, *args: Any, device_placement: Any = None) -> Any:
        """Like Accelerate's `prepare`, but each model is wrapped with the optimizer that has its parameters."""
        args_now: list[Any] = list(args)
        for at, optimizer in enumerate(args):
            if not isinstance(optimizer, torch.optim.Optimizer) or isinstance(optimizer, AcceleratedOptimizer):
                continue
            stepped = {id(param) for group in optimizer.param_groups for param in group["params"]}
            models = [m for m in args if isinstance(m, nn.Module) and stepped <= {id(p) for p in m.parameters()}]
            if len(models) != 1:
                raise ConfigError("Pass each optimizer to prepare together with the one model whose parameters it has.")
            args_now[at] = self._page(models[0], optimizer)
            for scheduler in args:
                if getattr(scheduler, "optimizer", None) is optimizer:
                    hand_over(scheduler, args_now[at].optimizer)
        return super().prepare(*args_now, device_placement=device_placement)

    def _page(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> AcceleratedOptimizer:
        models = [each for each, _ in self._paged]
        number = next((number for number, each in enumerate(models) if each is model), len(models))
        paged = self.paging.of_model(number).take_over(model, optimizer, PRECISIONS[self._said])
        if paged.scales_loss and number:
            raise ConfigError("An accelerator can scale the loss of only one model: with several models, use bf16.")
        adopt(self, model, paged)
        prepared = _Prepared(paged, device_placement=False)
        prepared._is_accelerate_prepared = True
        self._paged[number : number + 1] = [(model, prepared)]
        return prepared

    def free_memory(self, *objects: Any) -> Any:
        """Like Accelerate's. It forgets the paged models, too, but does not close their optimizers."""
        self._paged = []
        return super().free_memory(*objects)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        """Like Accelerate's. If `parameters` are all parameters of a paged model, the norm is that of all ranks."""
        params: list[Any] = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        of_models = {id(param) for param in params if is_paged(param)}
        for _, optimizer in self._paged:
            stepped = {id(param) for group in optimizer.param_groups for param in group["params"]}
            trained = {id(param) for param in params if param.requires_grad}
            if norm_type == 2 and trained == stepped and trained <= of_models:
                return torch.tensor(optimizer.optimizer.clip_grad_norm_(max_norm))
        return super().clip_grad_norm_(params, max_norm, norm_type)

    def save_model(
        self,
        model: nn.Module,
        save_directory: Any,
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Like Accelerate's, but a paged model is written in pieces, and only as safetensors: otherwise ConfigError is
        raised."""
        if not self._is_in_pages(model):
            super().save_model(model, save_directory, max_shard_size, safe_serialization)
            return
        if not safe_serialization:
            raise ConfigError(
                "A model in pages can be written only as safetensors: leave out safe_serialization=False."
            )
        limit = convert_file_size_to_int(max_shard_size)
        with exported_into(Path(save_directory), model, max_shard_bytes=limit, own_names=True):
            pass

    def save_state(self, output_dir: Any = None, *args: Any, **kwargs: Any) -> str:
        """Like Accelerate's, but the state of paged models is written in pieces. All files are in a directory
        `pagoda` of `output_dir`. An older save is deleted once the new one is complete and on the disk."""
        self._agree("accelerator.save_state()")
        project = self.project_configuration
        automatic = project.automatic_checkpoint_naming
        outer = self._next_directory() if automatic else Path(output_dir)
        with (
            temporarily(project, automatic_checkpoint_naming=False),
            temporarily(self, _saving=True, _optimizers=self._optimizers_in_ram),
            saved(outer, self._places, self.is_main_process, self.wait_for_everyone) as save,
            self._last(self.register_save_state_pre_hook, self._drop_paged),
        ):
            super().save_state(str(save), *args, **kwargs)
            for at, (_, optimizer) in enumerate(self._paged):
                optimizer.optimizer.save_checkpoint(save / _state(at))
        if automatic and self.is_main_process and project.total_limit is not None:
            for directory in self._automatic()[: -project.total_limit]:
                delete_save(directory, self._places)
        return str(outer)

    def load_state(self, input_dir: Any = None, *args: Any, **kwargs: Any) -> None:
        """Like Accelerate's, but the state of paged models is read in pieces. Loads the last save that is complete and
        not damaged, and warns of later ones. Raises CheckpointError if there is none."""
        if input_dir is None and not self.project_configuration.automatic_checkpoint_naming:
            raise ConfigError("Name the directory to load, or set automatic_checkpoint_naming in ProjectConfiguration.")
        self._agree("accelerator.load_state()")
        outers = [Path(input_dir).expanduser()] if input_dir is not None else self._automatic()
        save = newest(outers, self.is_main_process, self.wait_for_everyone)
        with (
            temporarily(self, _optimizers=self._optimizers_in_ram),
            self._last(self.register_load_state_pre_hook, self._load_paged),
        ):
            super().load_state(str(save), *args, **kwargs)

    def _agree(self, what: str) -> None:
        """All ranks are at this point. Raises UsageError if some go on with training instead: else they would wait for
        this rank in Accelerate's own collectives, and it for them, for ever."""
        for _, optimizer in self._paged:
            optimizer.optimizer._engine.of_all_ranks(what, None)

    def _load_paged(self, models: list[nn.Module], directory: str) -> None:
        for at, (_, optimizer) in enumerate(self._paged):
            optimizer.optimizer.load_checkpoint(Path(directory, _state(at)))
        models[:] = [model for model in models if not self._is_in_pages(model)]

    def _drop_paged(self, _models: list[nn.Module], weights: list[Any], _directory: str) -> None:
        self._agree("the end of hooks on saving, which must not read a model on one rank alone (under is_main_process)")
        weights[:] = [each for each in weights if not isinstance(each, LazyStateDict)]

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> Any:
        """Like Accelerate's. While state is saved, that of a paged model is read only if a hook looks at it."""
        if self._saving and not unwrap and self._is_in_pages(model):
            return LazyStateDict(model)
        return super().get_state_dict(model, unwrap)

    def _is_in_pages(self, model: nn.Module) -> bool:
        return any(model is paged for paged, _ in self._paged)

    def _automatic(self) -> list[Path]:
        """The directories that Accelerate has named, oldest first."""
        return numbered(self._checkpoints, "checkpoint_")

    def _next_directory(self) -> Path:
        directory = self._checkpoints / f"checkpoint_{self.save_iteration}"
        if has_save(directory):
            raise CheckpointError(f"{directory} exists already. Set project_configuration.iteration to another number.")
        return directory

    @property
    def _places(self) -> list[Path]:
        """The SSD directories of all paged models."""
        return [path for _, optimizer in self._paged for path in optimizer.optimizer._engine.ssd_directories]

    @property
    def _checkpoints(self) -> Path:
        return Path(self.project_dir, "checkpoints")

    @contextmanager
    def _last(self, register: Callable[..., Any], hook: Callable[..., None]) -> Iterator[None]:
        """Context in which a hook on saving or loading comes after those of the program, which see every model."""
        handle = register(hook)
        try:
            yield
        finally:
            handle.remove()

    @property
    def _optimizers_in_ram(self) -> list[Any]:
        """Those that Accelerate saves and loads."""
        return [each for each in self._optimizers if not isinstance(each.optimizer, PagedOptimizer)]
