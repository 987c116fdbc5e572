"""The settings of a Trainer that decide the bits of a run. A run that is resumed must have the same."""

from pathlib import Path
from typing import Any

from pagoda.checkpoint.directory import read_manifest
from pagoda.errors import ConfigError

_FIXED = (
    *("seed", "data_seed", "full_determinism", "train_sampling_strategy", "dataloader_drop_last"),
    *("optim", "optim_args"),
    *("learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm"),
    *("lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "warmup_ratio"),
    *("label_smoothing_factor", "neftune_noise_alpha", "average_tokens_across_devices", "ignore_data_skip"),
)
"""Arguments that a resumed run would ignore, or with which it would go on otherwise. `max_steps` and
`num_train_epochs` may grow."""
_SETTINGS, _SAMPLES, _LENGTH = "trainer", "samples_per_step", "train_dataset"


def record(trainer: Any) -> dict[str, Any]:
    """What a checkpoint says of a trainer, for `check_resumes`."""
    args, data = trainer.args, trainer.train_dataset
    each = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
    settings = {name: _plain(getattr(args, name)) for name in _FIXED if hasattr(args, name)}
    length = len(data) if hasattr(data, "__len__") else None
    return {_SETTINGS: settings, _SAMPLES: each, _LENGTH: length}


def check_resumes(trainer: Any, state: Path) -> None:
    """Raises ConfigError if a trainer differs from the one that saved a checkpoint, in what decides the bits of a run.
    Raises CheckpointError if the checkpoint cannot be read."""
    saved, mine = read_manifest(state).get("extra", {}), record(trainer)
    if _SETTINGS not in saved:
        return
    before, now = saved[_SETTINGS], mine[_SETTINGS]
    changed = sorted(name for name in before.keys() & now.keys() if before[name] != now[name])
    differing = [f"{name} was {before[name]} and is {now[name]}" for name in changed]
    if saved[_LENGTH] != mine[_LENGTH]:
        differing.append(f"train_dataset had {saved[_LENGTH]} samples and has {mine[_LENGTH]}")
    if saved[_SAMPLES] != mine[_SAMPLES]:
        passes, rest = divmod(saved[_SAMPLES], trainer.args.per_device_train_batch_size * trainer.args.world_size)
        keeps = f" (gradient_accumulation_steps={passes} keeps them)" if passes and not rest else ""
        differing.append(f"a step had {saved[_SAMPLES]} samples and has {mine[_SAMPLES]}{keeps}")
    if differing:
        raise ConfigError(
            f"{state.parent} was saved with other settings, and the run would go on with other results: "
            f"{', '.join(differing)}. Give them as they were; for other settings, begin a run from its weights "
            "(pagoda export)."
        )


def _plain(value: Any) -> Any:
    """A value that JSON can keep."""
    return value if value is None or isinstance(value, bool | int | float) else str(getattr(value, "value", value))
