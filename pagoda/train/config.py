"""The configuration of `pagoda train`: frozen dataclasses that the command line, JSON and Python share.

`_FREE_ON_RESUME` lists what a resumed run may change: settings that do not change the bits (such as the split over
tiers and ranks), the length of the run, and what it writes. Each rank reads other batches, so another number of ranks
gives other bits from the same state. With the cosine schedule, another number of steps changes later learning rates.
All other settings must stay as they were in the checkpoint; `check_resumes` names those that differ.
"""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from pagoda.config.decode import decoded
from pagoda.config.reading import Data, Reading, names_of
from pagoda.config.run import StatesConfig
from pagoda.config.settings import flag, require, require_count
from pagoda.errors import ConfigError
from pagoda.forecast.config import SizedRun

if TYPE_CHECKING:
    from pagoda.optim import Rule

_FREE_ON_RESUME = frozenset(
    {"zero_stage", "replicas", "expert_parallel", "tensor_parallel", "pipeline_parallel", "sequence_parallel"}
    | {"save_steps", "save_minutes", "save_total_limit", "save_at_end", "max_steps", "output_dir"}
    | {"resume_from_checkpoint", "plan", "trace", "download", "data", "tokenizer", "cache", "eval_data"}
    | {"dataset_config", "dataset_train_split", "dataset_test_split", "dataset_revision", "dataset_streaming"}
    | {"eval_steps", "max_eval_samples", "early_stopping_patience", "keep_best"}
    | {"report_to"}
    | {"tokens_per_step", "num_train_epochs", "verbose", "config", "speculate"}
    | {"per_device_train_batch_size", "gradient_accumulation_steps"}
)
"""`begin` checks that another batch size or accumulation gives steps of as many sequences. `data` and `tokenizer` may
have moved, because a checkpoint identifies its tokens. Settings under `memory` are free too."""
_LR = 3e-4
_MOST_STEPS = 1 << 31


@dataclass(frozen=True, kw_only=True)
class OptimConfig(StatesConfig):
    """Settings of the optimizer, and its learning rate over the run."""

    learning_rate: float | None = None
    """Peak learning rate. By default 3e-4 for random weights, 2e-5 for all of a pretrained model, 2e-4 for adapters."""
    betas: tuple[float, float] | None = None
    """Decay rates of the first and second moment. By default 0.9 and 0.95 for adamw, else the optimizer's own."""
    eps: float | None = None
    """Added to the root of the second moment. By default the optimizer's own."""
    weight_decay: float | None = None
    """Weight decay. By default 0.1 for adamw, else the optimizer's own."""
    weight_decay_on: Literal["all", "matrices"] = "all"
    """Parameters with weight decay: all, or matrices, those with two or more dimensions (no biases and norms)."""
    warmup_steps: int | None = None
    """Steps of linear warm-up to the peak. By default 3% of the run, or 10% for adapters; at most 100."""
    lr_scheduler_type: Literal["cosine", "constant"] = "cosine"
    """Learning rate after the steps of --warmup-steps: falls along a cosine to its minimum at the last step, or stays
    constant. Both have the warm-up."""
    min_lr_ratio: float = 0.1
    """Minimum learning rate of the cosine, as a share of the peak."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.learning_rate is None or (self.learning_rate > 0 and math.isfinite(self.learning_rate)),
            "learning_rate",
            self.learning_rate,
            "above 0, and finite",
        )
        require(all(0 <= beta < 1 for beta in self.betas or ()), "betas", self.betas, "in [0, 1)")
        require(self.eps is None or self.eps > 0, "eps", self.eps, "above 0")
        decay = self.weight_decay
        require(decay is None or decay >= 0, "weight_decay", decay, "0 or more")
        require_count("warmup_steps", self.warmup_steps or 0, 0)
        require(0 <= self.min_lr_ratio <= 1, "min_lr_ratio", self.min_lr_ratio, "in [0, 1]")

    def build_rule(self, seed: int, optim: str = "adamw") -> "Rule":
        """The library's update rule. `seed` is the seed of its rounding, if it rounds stochastically.

        Raises ConfigError if there is no such optimizer, or if it does not have one of the settings.
        """
        from pagoda.optim.named import rule_from

        given = {"betas": self.betas, "eps": self.eps, "weight_decay": self.weight_decay}
        settings: dict[str, Any] = {
            "lr": self.learning_rate or _LR,
            **{name: v for name, v in given.items() if v is not None},
        }
        if optim == "adamw":
            settings = {"betas": (0.9, 0.95), "weight_decay": 0.1, **settings, "seed": seed}
        return rule_from(optim, self, settings)

    def lr_factor(self, step: int, steps: int) -> float:
        """Share of the peak learning rate at `step` (from 0) of `steps`. A pure function."""
        warmup = self.warmup_steps or 0
        if step < warmup:
            return (step + 1) / warmup
        if self.lr_scheduler_type == "constant":
            return 1.0
        progress = min(1.0, (step - warmup) / max(1, steps - 1 - warmup))
        return self.min_lr_ratio + (1 - self.min_lr_ratio) * 0.5 * (1 + math.cos(math.pi * progress))


@dataclass(frozen=True, kw_only=True)
class TrainConfig(Reading, OptimConfig, SizedRun):
    """Train or fine-tune a language model whose training state may be larger than memory. --model and --data are
    enough: Pagoda chooses everything else, and prints each choice with its reason."""

    model: str
    """A directory with a Hugging Face config.json, or ORG/NAME, its name in the local Hugging Face cache (see
    --download). The run starts from its safetensors files, or from random weights if a directory has none. Or a
    built-in shape, such as llama-15m, qwen3-4b or gpt-LAYERSxHIDDEN, which starts from random weights."""
    download: bool = False
    """Download the --model ORG/NAME from the Hugging Face Hub first, as far as it is not in the cache."""
    data: Annotated[Data | None, tyro.conf.arg(metavar="DATA [DATA ...]")] = None
    """Data to train on, read with Hugging Face's datasets: files, folders, globs in quotes, data sets of the Hub
    (ORG/NAME), or stdlib (the source code of Python's standard library), the default for random weights. Texts, or
    records (JSON Lines, JSON, CSV, Parquet, Arrow, WebDataset) with texts (columns text, content), prompts and
    completions, or conversations (messages, conversations; instruction and output). The loss counts completions, and
    what assistants write."""
    probabilities: tuple[float, ...] = ()
    """Share of the sequences that each of several --data has, 1 in all, as in `datasets.interleave_datasets`: an epoch
    ends once all of them have been read whole, and repeats sequences of the others. By default, each sequence is read
    once."""
    eval_data: Annotated[Data | None, tyro.conf.arg(metavar="DATA [DATA ...]")] = None
    """Data to evaluate on, in the formats of --data. The run prints the loss on it before the first step and every
    --eval-steps steps, and keeps the checkpoint with the lowest."""
    eval_share: float | None = None
    """Share of the sequences of --data to evaluate on. They are not trained on. By default 0.05 for pretrained weights
    without --eval-data, if there are enough sequences."""
    eval_steps: int = 0
    """Steps from one evaluation to the next. 0: a tenth of the run, or more, so that evaluations take at most about a
    tenth of its time."""
    max_eval_samples: int = 0
    """Most sequences in one evaluation. 0: 256, or fewer, so that evaluations take at most about a tenth of the time.
    """
    early_stopping_patience: int = 0
    """Stop after that many evaluations in a row that were not better than the best one. 0: never."""
    keep_best: bool = True
    """Save and keep a checkpoint with the lowest evaluation loss. It is one of --save-total-limit."""
    per_device_train_batch_size: int = 0
    """Sequences per forward pass, on each rank. 0: as many as memory has room for, up to --tokens-per-step."""
    tokens_per_step: int | None = None
    """Most tokens per optimizer step, from which batch size and accumulation are chosen if
    --per-device-train-batch-size is left out. By default 16384, or fewer, so that the epochs give at least 100
    steps."""
    max_steps: int = 0
    """Optimizer steps of the whole run, those before it was resumed included. 0: as many as --num-train-epochs take."""
    num_train_epochs: float | None = None
    """Passes over the data, if --max-steps is left out. By default 3 for conversations, and 1 for texts."""
    seed: int = 0
    """Seed of initialisation, data order and dropout."""
    output_dir: Path | None = None
    """Directory of the run to create, for settings, metrics and checkpoints. By default a new one in runs/."""
    config: Path | None = None
    """File with settings in YAML or JSON, such as the run.yaml of another run. Flags override it."""
    resume_from_checkpoint: str | None = None
    """Continue the run in --output-dir from a checkpoint: last, best (by evaluation), or its name, such as
    checkpoint-100. Later ones are kept under other names. Settings that are not given keep their values. With last, the
    run starts from its first step if it has no checkpoint yet, and if --output-dir has no run yet and --model is given,
    it begins."""
    report_to: tuple[str, ...] = ()
    """Trackers of transformers' trainer that get the metrics too, such as wandb, trackio or mlflow, with its variables
    such as WANDB_PROJECT. tensorboard writes into the run directory."""
    verbose: bool = False
    """Print the reasons for the plan, too. They are in plan.json and in the report as well."""
    save_at_end: bool = True
    """Save a checkpoint after the last step."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tokens_per_step is not None:
            require_count("tokens_per_step", self.tokens_per_step, 1)
        counts = "per_device_train_batch_size", "max_steps", "eval_steps", "max_eval_samples", "early_stopping_patience"
        for name in counts:
            require_count(name, getattr(self, name), 0)
        require(self.max_steps < _MOST_STEPS, "max_steps", self.max_steps, f"below {_MOST_STEPS}")
        require(
            self.num_train_epochs is None or 0 < self.num_train_epochs < math.inf,
            "num_train_epochs",
            self.num_train_epochs,
            "above 0, and finite",
        )
        if self.num_train_epochs is not None and self.max_steps:
            raise ConfigError("give --max-steps or --num-train-epochs, not both")
        require(0 <= (self.eval_share or 0) < 1, "eval_share", self.eval_share, "at least 0, and below 1")
        if self.eval_data is not None and self.eval_share:
            raise ConfigError("give --eval-data, or --eval-share to hold out a part of --data, not both")
        if self.early_stopping_patience and self.eval_share is not None and not self.evaluates:
            raise ConfigError("--early-stopping-patience compares evaluations: give --eval-data or --eval-share")
        if given := self.probabilities:
            right = all(0 < each < 1 for each in given) and math.isclose(sum(given), 1, abs_tol=1e-6)
            require(right, "probabilities", given, "numbers above 0 that add up to 1")
        if self.probabilities and len(self.probabilities) != len(names_of(self.data or ())):
            raise ConfigError("--probabilities has a number for each of several --data: give as many")
        require(0 <= self.seed < 2**32, "seed", self.seed, "from 0 to 4294967295")
        if self.lora_r is not None and self.plan == "search":
            raise ConfigError("--plan search is for the training of all weights: leave it out with --lora-r")
        if self.pipeline_parallel > 1 and self.plan == "search":
            raise ConfigError("--plan search is for whole models: leave it out with --pipeline-parallel")

    @property
    def depends_on_data(self) -> bool:
        """Whether something is left to be chosen that depends on the data."""
        return not all((self.max_length, self.max_steps, self.per_device_train_batch_size)) or self.eval_share is None

    @property
    def evaluates(self) -> bool:
        """Whether the run has data to evaluate on."""
        return self.eval_data is not None or bool(self.eval_share)

    @property
    def most_checkpoints(self) -> int:
        """Number of checkpoints to keep: with evaluations at least two, the last one and the best one. 0: all."""
        return max(self.save_total_limit, 2) if self.save_total_limit and self.evaluates else self.save_total_limit

    def ranks_with_batches(self, ranks: int) -> int:
        """Number of ranks, or of groups of ranks that divide sequences, that have batches of their own, of `ranks` that
        do not divide layers. Raises ConfigError if ranks are left over."""
        if ranks % self.sequence_parallel:
            raise ConfigError(
                f"--sequence-parallel is {self.sequence_parallel}, which does not divide the {ranks} ranks: start "
                f"torchrun with --nproc-per-node {self.sequence_parallel}, or a multiple of it"
            )
        return ranks // self.sequence_parallel

    def settings(self) -> dict[str, Any]:
        """All settings in JSON's types. `from_settings` reads them into an equal configuration."""
        found: dict[str, Any] = json.loads(json.dumps(asdict(self), default=str))
        return found

    @staticmethod
    def from_settings(settings: Any) -> "TrainConfig":
        """The configuration from decoded JSON. Raises ConfigError if a setting is unknown, missing or out of range."""
        return decoded(TrainConfig, settings)

    def check_resumes(self, saved: "TrainConfig", checkpoint: Path) -> None:
        """Check that this configuration can continue from a checkpoint that was saved with the configuration `saved`.

        Raises ConfigError if settings differ that decide the bits of the run. Names each with both values.
        """
        mine, theirs = dict(flat(asdict(self))), dict(flat(asdict(saved)))
        differing = [
            f"{flag(name)} {value} (the checkpoint has {theirs[name]})"
            for name, value in mine.items()
            if value != theirs[name] and name not in _FREE_ON_RESUME and not name.startswith("memory.")
        ]
        if differing:
            raise ConfigError(
                f"cannot resume from {checkpoint} with other settings: {', '.join(differing)}. Leave them out, and put "
                "back what was changed in run.yaml, or start a new run with another --output-dir"
            )


def flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Nested settings as (dotted name, value)."""
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value
