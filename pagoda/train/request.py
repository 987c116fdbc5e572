"""The flags of `pagoda train`: a configuration in which settings may be left open. They are chosen before the run."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagoda.config.decode import decoded
from pagoda.config.settings import require, require_count
from pagoda.errors import ConfigError
from pagoda.train.config import TrainConfig

_NOT_SETTINGS = ("out", "resume", "checkpoint", "trace", "trace_step")
"""Arguments that belong to one command. They are not copied to another run."""


@dataclass(frozen=True, kw_only=True)
class TrainRequest(TrainConfig):
    """Train or fine-tune a language model whose training state may be larger than memory. --model and --data are
    enough: Pagoda chooses everything else, and prints each choice with its reason."""

    batch_size: int | None = None  # type: ignore[assignment]
    """Sequences per forward pass, on each rank. By default as many as memory has room for, up to --tokens-per-step."""
    seq_len: int | None = None  # type: ignore[assignment]
    """Tokens per sequence. By default 1024 for texts, or what most conversations fit in; at most what the model has
    positions for. In a T5, of the encoder's input and of the decoder's output each."""
    tokens_per_step: int = 16384
    """Tokens per optimizer step. If --batch-size is left out, batch size and accumulation are chosen to give about as
    many."""
    steps: int | None = None  # type: ignore[assignment]
    """Optimizer steps of the whole run, those before it was resumed included. By default as many as --epochs take."""
    epochs: float | None = None
    """Passes over the data, if --steps is left out. By default 3 for conversations, and 1 for texts."""
    eval_share: float | None = None  # type: ignore[assignment]
    """Share of the sequences of --data to evaluate on. They are not trained on. By default 0.05 for pretrained weights
    without --eval-data, if there are enough sequences."""
    out: Path | None = None  # type: ignore[assignment]
    """Run directory to create, for settings, metrics and checkpoints. By default a new one in runs/."""
    config: Path | None = None
    """File with settings in YAML or JSON, such as the run.yaml of another run. Flags override it."""

    def __post_init__(self) -> None:
        """Check the settings that only a request has. `with_choices` makes a `TrainConfig`, which checks all others.

        Raises ConfigError if a value is out of range.
        """
        for name, least in (("batch_size", 1), ("seq_len", 2), ("steps", 1)):
            if getattr(self, name) is not None:
                require_count(name, getattr(self, name), least)
        require(self.epochs is None or self.epochs > 0, "epochs", self.epochs, "above 0")
        require(self.tokens_per_step > 0, "tokens_per_step", self.tokens_per_step, "above 0")
        if self.epochs is not None and self.steps is not None:
            raise ConfigError("give --steps or --epochs, not both")

    def with_choices(self, **choices: Any) -> TrainConfig:
        """The configuration with the chosen settings. Raises ConfigError if a value is out of range."""
        return TrainConfig(**self.shared(TrainConfig) | choices)

    @staticmethod
    def like(config: TrainConfig, **changes: Any) -> "TrainRequest":
        """The request that leaves nothing of a configuration open."""
        return TrainRequest(**config.shared(TrainConfig) | changes)

    @staticmethod
    def read(path: Path) -> "TrainRequest":
        """Read a file of settings.

        Raises ConfigError if it cannot be read, or if a setting in it is unknown or has the wrong type.
        """
        try:
            settings = _yaml(path.read_text())
        except OSError as error:
            raise ConfigError(f"--config {path} cannot be read: {error.strerror}") from error
        except ValueError as error:
            raise ConfigError(f"--config {path} is not YAML: {error}") from error
        if isinstance(settings, Mapping):
            settings = {name: value for name, value in settings.items() if name != "hash"}
        try:
            return decoded(TrainRequest, settings)
        except ConfigError as error:
            raise ConfigError(f"--config {path}: {error}") from error


def settings_as_yaml(config: TrainConfig) -> str:
    """All settings of a run except its directory, in the format that `TrainRequest.read` reads."""
    import yaml

    settings = {k: v for k, v in config.settings().items() if k not in _NOT_SETTINGS}
    text: str = yaml.safe_dump(settings, sort_keys=False, allow_unicode=True)
    return text


def _yaml(text: str) -> Any:
    """Parse YAML in which 2e-5 is a number. Raises ValueError."""
    import yaml

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        """YAML 1.1 with the number format of YAML 1.2."""

    number = re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$")
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", number, list("-+.0123456789"))
    try:
        return yaml.load(text, Loader=Loader)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from error
