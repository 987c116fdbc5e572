"""The configuration of a run: frozen dataclasses that the command line, JSON and Python share.

What a resumed run may change: `steps`, `out`, `checkpoint_every`, `keep_checkpoints`, `save_at_end`, `trace`, `plan`,
`speculate`, `zero_stage`, `replicas`, `expert_parallel` and everything under `memory` (any split over tiers gives the
same bits), the number of ranks (the state is the same, but each step reads another batch), and `data` if its bytes are
the same (a moved file). Everything else decides the bits of the run and stays as the run was started; `check_resumes`
names what differs.
With the cosine schedule, other `steps` mean other learning rates from there on.
"""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pagoda.errors import ConfigError
from pagoda.models.lora import LoraConfig
from pagoda.plan.activations import ActivationMode
from pagoda.plan.batch_tiles import BatchTiles
from pagoda.settings import MemoryConfig, PlanMode, StatesConfig, check_batch_tiles, check_tile_limit, flag, require
from pagoda.train.decode import decoded

if TYPE_CHECKING:
    from pagoda.optim import Rule

_FREE_ON_RESUME = frozenset(
    {
        "steps",
        "out",
        "checkpoint_every",
        "keep_checkpoints",
        "save_at_end",
        "data",
        "resume",
        "plan",
        "trace",
        "trace_step",
        "speculate",
        "zero_stage",
        "replicas",
        "expert_parallel",
    }
)


@dataclass(frozen=True, kw_only=True)
class OptimConfig(StatesConfig):
    """Settings of the optimizer, and its learning rate over the run."""

    lr: float = 3e-4
    """Peak learning rate."""
    betas: tuple[float, float] | None = None
    """Decay rates of the first and second moment. By default 0.9 and 0.95 for adamw, else the optimizer's own."""
    eps: float | None = None
    """Added to the root of the second moment. By default the optimizer's own."""
    weight_decay: float | None = None
    """Weight decay. By default 0.1 for adamw, else the optimizer's own."""
    decay: Literal["all", "matrices"] = "all"
    """Which parameters are decayed: all, or those of two or more dimensions, which leaves out biases and norms."""
    warmup_steps: int = 0
    """Steps of linear warm-up to the peak."""
    schedule: Literal["cosine", "constant"] = "cosine"
    """Learning rate after warm-up: down a cosine to its minimum at the last step, or constant."""
    min_lr_ratio: float = 0.1
    """Minimum learning rate of the cosine, as a share of the peak."""

    def __post_init__(self) -> None:
        require(self.lr > 0 and math.isfinite(self.lr), "optim.lr", self.lr, "must be above 0")
        require(all(0 <= beta < 1 for beta in self.betas or ()), "optim.betas", self.betas, "must be in [0, 1)")
        require(self.eps is None or self.eps > 0, "optim.eps", self.eps, "must be above 0")
        decay = self.weight_decay
        require(decay is None or decay >= 0, "optim.weight_decay", decay, "must be 0 or more")
        require(self.warmup_steps >= 0, "optim.warmup_steps", self.warmup_steps, "must be 0 or more")
        require(0 <= self.min_lr_ratio <= 1, "optim.min_lr_ratio", self.min_lr_ratio, "must be in [0, 1]")

    def build(self, seed: int, optimizer: str = "adamw") -> "Rule":
        """The library's update rule; `seed` is that of its rounding, if any.

        Raises:
            ConfigError: there is no such optimizer, or it has not one of the settings.
        """
        from pagoda.optim.named import parsed_options, rule_named

        given = {"betas": self.betas, "eps": self.eps, "weight_decay": self.weight_decay}
        settings: dict[str, Any] = {"lr": self.lr, **{name: v for name, v in given.items() if v is not None}}
        if optimizer == "adamw":
            settings = {"betas": (0.9, 0.95), "weight_decay": 0.1, **settings, "moments": self.moments, "seed": seed}
        else:
            require(self.moments == "fp32", "optim.moments", self.moments, "is for adamw")
        return rule_named(optimizer, settings | parsed_options(self.options))

    def lr_factor(self, step: int, steps: int) -> float:
        """Share of the peak learning rate at `step` (from 0) of `steps`: a pure function, with no state."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        if self.schedule == "constant":
            return 1.0
        progress = min(1.0, (step - self.warmup_steps) / max(1, steps - 1 - self.warmup_steps))
        return self.min_lr_ratio + (1 - self.min_lr_ratio) * 0.5 * (1 + math.cos(math.pi * progress))


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Train a language model whose training state may be larger than memory."""

    model: str
    """Built-in shape (llama-15m, llama-110m, llama-215m, llama-1b, llama-3b, llama-5b, llama-8b, gpt2,
    gpt2-medium, gpt2-large, gpt2-xl, gpt-LAYERSxHIDDEN, and mixtures of experts: mixtral-15m, mixtral-120m, mixtral-1b,
    mixtral-8x7b, qwen3-moe-15m, qwen3-moe-30b, t5-moe-15m, t5-moe-120m, t5-moe-1b), which starts from random weights,
    or a directory with a Hugging Face config.json, which starts from the safetensors files beside it, or without any
    from random weights."""
    data: str = "stdlib"
    """Byte-level text: stdlib (Python's own standard library), a file, or a folder of text files."""
    steps: int
    """Optimizer steps in all, counted from the start of the run even when it is resumed."""
    batch_size: int
    """Sequences per forward pass, on each rank."""
    seq_len: int
    """Tokens per sequence. A T5's encoder reads as many, and its decoder predicts as many that follow."""
    accumulation_steps: int = 1
    """Forward and backward passes per optimizer step."""
    precision: Literal["bf16", "fp16", "fp32"] = "bf16"
    """Precision of weights and gradients in forward and backward; the master weights are fp32 either way. fp16 scales
    the loss, by a factor that adapts itself, and skips steps whose gradients are not finite."""
    gradients: Literal["bf16", "fp32"] | None = None
    """What gradients are accumulated in; by default the precision of the weights."""
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    optimizer: str = "adamw"
    """adamw, adam, sgd, lion, adafactor, muon, a class of torch.optim (Adagrad), or MODULE:CLASS of any other."""
    optim: OptimConfig = field(default_factory=OptimConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    clip_grad_norm: float | None = 1.0
    """Largest global norm of the gradient, or None for no clipping."""
    speculate: bool | None = None
    """With clipping or fp16, update under backward as if nothing would be clipped or overflow, and redo that where
    something does: the same bits. By default for state on SSD, where there is room to keep the old state, and for
    state in RAM where --plan search finds that faster; True gives the copies of weights that this takes in RAM
    precedence over other state there, and copies state in RAM too; False does without."""
    update: Literal["sync", "async"] = "sync"
    """async: forward and backward do not wait for updates, whose results lag by some steps. For state on an SSD that is
    slower than compute. Changes the algorithm, so a run is no longer a function of its settings."""
    max_staleness: int = 1
    """With async, the most steps whose gradients may be missing in the weights that a forward reads."""
    zero_stage: Literal[1, 2, 3] = 3
    """Under torchrun, what the ranks share out: the optimizer's state (1), gradients too (2), weights too (3)."""
    replicas: int = 1
    """Under torchrun, whole copies of the state: each is shared out over ranks / replicas consecutive ranks."""
    expert_parallel: int = 1
    """Under torchrun, of a mixture of experts: ranks over which the experts of each layer are divided."""
    activations: ActivationMode = "recompute"
    """What becomes of each layer's activations between forward and backward. keep: they stay. recompute: only the
    layer's inputs stay. offload: they go to RAM, from a GPU, or to SSD, and come back. recompute+offload: the inputs
    go. auto: as many as fit beside the pages stay, and the rest is offloaded as far as transfers keep up, or
    recomputed; a forecast takes all to be recomputed."""
    chunked_loss: bool | None = None
    """Compute the loss without ever holding all logits, at the price of one more product with the output layer. By
    default where all logits would be the peak of activations. Rounds otherwise than the usual loss."""
    batch_tiles: BatchTiles | None = None
    """Run each layer in so many micro-batches, or as many as "auto" finds useful, so that weights move once for the
    whole batch: give --batch-size what --accumulation-steps would have added up."""
    tile_limit: str | None = None
    """Linear layers and embeddings whose weights take more bytes than this (such as 256MiB) become tiles that are
    fetched one after another, which rounds differently from whole layers. Experts are fetched one by one without it;
    with it, as many at a time as it allows."""
    seed: int = 0
    """Seed of initialisation, data order and dropout."""
    out: Path
    """Run directory, created: config.json, metrics.jsonl, checkpoints."""
    resume: bool = False
    """Continue the run in --out from its last checkpoint that is whole, or from the beginning if it has none yet;
    settings not given are those of the run."""
    checkpoint_every: int = 0
    """Save a checkpoint every so many steps; 0: only at the end, and when the run is interrupted."""
    save_at_end: bool = True
    """Save a checkpoint after the last step."""
    keep_checkpoints: int = 2
    """Checkpoints to keep: older ones are deleted once a new one is complete. State on SSD is then kept in place, not
    copied, and takes this many times more room there. 0: delete none, and copy."""
    plan: PlanMode | None = None
    """usual: the planner's first choice. search: the fastest of several plans, by simulation on this machine as
    `pagoda calibrate` measured it; any plan gives the same bits. By default search where the machine has been
    measured, else usual, and usual on several ranks."""
    trace: Path | None = None
    """Write what compute and every lane did in one step as JSON for Perfetto or chrome://tracing, in the form of
    `pagoda plan --trace`."""
    trace_step: int = 3
    """Which step, counted from the first that this command runs; the third is the first in steady state."""

    def __post_init__(self) -> None:
        for name in (
            "steps",
            "batch_size",
            "seq_len",
            "accumulation_steps",
            "trace_step",
            "replicas",
            "expert_parallel",
        ):
            require(getattr(self, name) >= 1, name, getattr(self, name), "must be at least 1")
        require(self.seq_len >= 2, "seq_len", self.seq_len, "must be at least 2 (a token and the next)")
        require(0 <= self.seed < 2**32, "seed", self.seed, "must be from 0 to 4294967295")
        check_batch_tiles(self.batch_tiles)
        check_tile_limit(self.tile_limit)
        if self.lora.rank is not None:
            self._check_adapters()
        require(self.max_staleness >= 0, "max_staleness", self.max_staleness, "must be 0 or more")
        require(self.keep_checkpoints >= 0, "keep_checkpoints", self.keep_checkpoints, "must be 0 or more")
        require(self.checkpoint_every >= 0, "checkpoint_every", self.checkpoint_every, "must be 0 or more")
        if self.clip_grad_norm is not None:
            require(self.clip_grad_norm > 0, "clip_grad_norm", self.clip_grad_norm, "must be above 0, or None")

    def _check_adapters(self) -> None:
        """Raises ConfigError for what cannot be had together with adapters."""
        if self.plan == "search":
            raise ConfigError("--plan search plans the training of all weights: leave it out with --lora.rank")
        if self.tile_limit is not None:
            raise ConfigError("--lora.rank adapts whole layers: leave out --tile-limit")

    @property
    def kept_on_ssd(self) -> int:
        """Checkpoints that state on SSD has spare pages for: none where a run saves only when it ends, which copies."""
        return self.keep_checkpoints if self.checkpoint_every else 0

    def to_json(self) -> str:
        """The configuration as indented JSON; `from_json` reads it back to an equal one."""
        return json.dumps(asdict(self), indent=2, default=str) + "\n"

    @staticmethod
    def from_json(text: str) -> "TrainConfig":
        """Reads what `to_json` wrote.

        Raises:
            ConfigError: not JSON, or a setting is unknown, missing or out of range.
        """
        try:
            settings = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"the configuration is not JSON: {error}") from error
        return TrainConfig.from_settings(settings)

    @staticmethod
    def from_settings(settings: Any) -> "TrainConfig":
        """As `from_json`, of JSON that is decoded already."""
        return decoded(TrainConfig, settings)

    def check_resumes(self, started: "TrainConfig") -> None:
        """Checks that this configuration continues the run that was started with `started`.

        Raises:
            ConfigError: a setting differs that decides the bits of the run; names each with both values.
        """
        if differing := self.differing(started, "the run"):
            raise ConfigError(
                f"cannot resume {started.out} with other settings: {', '.join(differing)}. Leave them out"
                " to keep the run's own, or start a new run with another --out"
            )

    def differing(self, other: "TrainConfig", whose: str) -> list[str]:
        """The settings that decide the bits of a run and differ from those of `other`, each with both values."""
        mine, theirs = dict(_flat(asdict(self))), dict(_flat(asdict(other)))
        return [
            f"{flag(name)} {value} ({whose} has {theirs[name]})"
            for name, value in mine.items()
            if value != theirs[name] and name not in _FREE_ON_RESUME and not name.startswith("memory.")
        ]


def _flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Nested settings as (dotted name, value)."""
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value
