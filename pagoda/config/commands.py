"""The settings of `pagoda data`, `dpo` and TRL's other scripts, `export`, `generate`, `report`, `calibrate`, `inspect`
and `gc`."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import tyro

from pagoda.config.memory import Memory
from pagoda.config.reading import Reading
from pagoda.config.run import Moments
from pagoda.config.settings import Settings, require, require_count
from pagoda.config.training import ActivationMode, UpdateMode
from pagoda.errors import ConfigError

TEMPERATURE = 0.8
"""Of sampling, unless another one is given."""


@dataclass(frozen=True, kw_only=True)
class DataConfig(Reading):
    """Say what `pagoda train` would read from data, ignore and leave out. That is: formats, roles, lengths, the share
    of tokens that the loss counts, keys that nothing reads, what is left out or cut and why, and one example."""

    data: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="DATA")]
    """Files, folders, globs in quotes, data sets of the Hugging Face Hub, or stdlib, as in --data of `pagoda train`."""
    model: str
    """The model that `pagoda train` would train, which gives the tokenizer and the longest sequence: a Hugging Face
    directory, ORG/NAME in the local Hugging Face cache, or a built-in shape."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.data:
            raise ConfigError("DATA is missing: name a file or folder, without a flag")


@dataclass(frozen=True, kw_only=True)
class ScriptConfig(Settings):
    """What Pagoda adds to the flags of one of TRL's scripts."""

    script: ClassVar[str]
    """TRL's name of the script."""
    trainer: ClassVar[str]
    """The trainer that the script uses."""
    memory: Memory = field(default_factory=Memory)
    """Where training state may live, and how much of it. On a GPU, pages take half of its free memory by default."""
    optimizer: str | None = None
    """adamw, adam, sgd, signsgd, lion, adafactor, muon, a class of torch.optim (Adagrad), or MODULE:CLASS for any other
    class. By default the one that TRL's --optim names. The learning rate is TRL's; AdamW has its other settings too."""
    moments: Moments = "fp32"
    """Format of AdamW's moments: fp32, or bf16 or 8bit, which change the algorithm."""
    activations: ActivationMode | None = None
    """What happens to activations: keep, recompute, offload, recompute+offload or auto, as for `pagoda train`. It
    replaces TRL's --gradient_checkpointing, which by default recomputes them."""
    update: UpdateMode = "sync"
    """sync: forward reads weights with all earlier updates. async: they lack the last step's, which changes results."""
    autocast: bool = False
    """With TRL's --bf16: compute under autocast with weights and gradients in fp32, as TRL does. By default they are in
    bf16 with an fp32 master, which moves half of the bytes."""
    skip_non_finite: bool = False
    """Skip a step whose gradients are NaN or infinite, with a warning. By default it ends the run."""
    export: bool = False
    """Write the whole model into each checkpoint, for from_pretrained. The end of the run always writes it into
    --output_dir."""
    save_minutes: float = 0.0
    """Also save a checkpoint if so many minutes have passed since the last one. 0: only as --save_steps says."""
    others: Annotated[tuple[str, ...], tyro.conf.Suppress] = ()
    """The flags that are TRL's."""


@dataclass(frozen=True, kw_only=True)
class ReferringConfig(ScriptConfig):
    """What Pagoda adds to a script that has a reference model."""

    reference: Memory = field(default_factory=Memory)
    """Where the weights of the reference model may live. By default it has a quarter of each size in `memory`, which
    the trained model then lacks, and directories of its own in those of memory.ssd."""


@dataclass(frozen=True, kw_only=True)
class DpoConfig(ReferringConfig):
    """Train a model on pairs of a better and a worse answer (DPO) as `trl dpo` does, with its state in pages."""

    script, trainer = "dpo", "DPOTrainer"


@dataclass(frozen=True, kw_only=True)
class GrpoConfig(ReferringConfig):
    """Train a model on rewards of what it writes (GRPO) as `trl grpo` does, with its state in pages."""

    script, trainer = "grpo", "GRPOTrainer"


@dataclass(frozen=True, kw_only=True)
class KtoConfig(ReferringConfig):
    """Train a model on answers that are marked good or bad (KTO) as `trl kto` does, with its state in pages."""

    script, trainer = "kto", "KTOTrainer"


@dataclass(frozen=True, kw_only=True)
class RewardConfig(ScriptConfig):
    """Train a reward model on pairs of a better and a worse answer as `trl reward` does, with its state in pages."""

    script, trainer = "reward", "RewardTrainer"


@dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """Write a trained model as a Hugging Face directory, for transformers' from_pretrained. For a run with adapters,
    write the adapter, for peft's PeftModel.from_pretrained."""

    source: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN_DIR|CHECKPOINT")]
    """Directory of a run, or of a checkpoint."""
    out: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="OUT")]
    """Directory to write. It must not exist, and it appears complete or not at all."""
    checkpoint: str = "last"
    """For a run: last, best (by evaluation; without evaluations, the last), or the name of a checkpoint, such as
    checkpoint-100."""
    dtype: Literal["bf16", "fp32"] | None = None
    """bf16, or fp32 for the master weights. By default the precision in which the model computed."""
    max_shard_size: Annotated[str, tyro.conf.arg(metavar="SIZE")] = "5GiB"
    """Size of the largest safetensors file."""
    merge: bool = False
    """For a run with adapters: add the adapter's changes to the weights, and write the whole model."""


@dataclass(frozen=True, kw_only=True)
class GenerateConfig:
    """Generate text with a trained model and print it, in the precision of its run or directory. The weights are in
    pages."""

    source: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN_DIR|MODEL_DIR")]
    """Directory of a run, or a Hugging Face directory, such as `pagoda export` writes, or ORG/NAME, its name in the
    local Hugging Face cache."""
    prompt: tuple[str, ...]
    """Text to continue. In a chat: what the user says, or what user and assistant have said in turn, each in quotes."""
    system: str | None = None
    """System prompt of a chat."""
    checkpoint: str = "last"
    """For a run: last, best (by evaluation; without evaluations, the last), or the name of a checkpoint, such as
    checkpoint-100."""
    max_new_tokens: int = 128
    """Most tokens to generate. Fewer if the model has no more positions."""
    do_sample: bool = False
    """Sample tokens, instead of taking the most likely ones."""
    temperature: float = TEMPERATURE
    """With --do-sample: logits are divided by it. Lower ones make likely tokens more likely."""
    top_p: float = 1.0
    """With --do-sample: sample from the most likely tokens whose probabilities add up to this (nucleus sampling)."""
    seed: int = 0
    """Seed of --do-sample."""
    chat: bool | None = None
    """Format the prompt with the tokenizer's chat template. By default, for a run, if its data were conversations;
    otherwise if there is a template."""
    memory: Memory = field(default_factory=Memory)
    """Where the weights may live."""
    tile_limit: Annotated[str | int | None, tyro.conf.arg(metavar="SIZE")] = None
    """Linear layers and embeddings whose weights take more bytes than this (such as 256MiB) are fetched in tiles. By
    default as in the run. Adapters are then merged into the weights."""

    def __post_init__(self) -> None:
        require_count("max_new_tokens", self.max_new_tokens, 1)
        require(0 < self.temperature < math.inf, "temperature", self.temperature, "above 0, and finite")
        require(0 < self.top_p <= 1, "top_p", self.top_p, "above 0, and at most 1")
        require(0 <= self.seed < 2**32, "seed", self.seed, "from 0 to 4294967295")
        require(len(self.prompt) % 2 == 1, "prompt", self.prompt, "what user and assistant say, ending with the user")


@dataclass(frozen=True, kw_only=True)
class ReportConfig:
    """Write a report of a run as one HTML file: losses, lanes, tiers, reasons."""

    source: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN_DIR")]
    """Directory of a run, finished or not."""
    out: Path | None = None
    """File to write. By default report.html in the run's directory."""


@dataclass(frozen=True, kw_only=True)
class CalibrateConfig:
    """Measure this machine, in about a minute, for `pagoda plan` and for the search of `pagoda train`. Under torchrun,
    also measure communication between the ranks."""

    ssd: Path | None = None
    """Existing directory on the SSD to measure. 4 GiB are written there and deleted afterwards."""
    out: Path | None = None
    """File to write. By default hardware.json in the user's cache directory, where `--hardware auto` looks."""


@dataclass(frozen=True, kw_only=True)
class InspectConfig:
    """List the contents of a run, of a checkpoint, or of a directory that was given as --memory.ssd."""

    directory: Annotated[Path, tyro.conf.Positional]
    """A run's directory, a checkpoint, or a directory that was given as --memory.ssd."""
    verify: bool = False
    """Read everything and report what is damaged. The exit code is 1 if something is."""


@dataclass(frozen=True, kw_only=True)
class GcConfig:
    """List pages in SSD directories whose checkpoints are no longer where they were saved, and page stores without
    checkpoints. Ask, then delete them."""

    directories: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="DIR")]
    """Directories that were given as --memory.ssd. Directories of ranks below them are included. Name all the drives of
    a run."""
    keep: Annotated[tuple[Path, ...], tyro.conf.arg(metavar="PATH")] = ()
    """New place of checkpoints or runs that you moved. The pages of every checkpoint at or below it are kept."""
    yes: bool = False
    """Delete without asking."""
