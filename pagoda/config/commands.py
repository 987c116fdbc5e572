"""What the other commands are asked for: `pagoda export`, `generate`, `report`, `calibrate`, `inspect` and `gc`."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import tyro

from pagoda.config.memory import Memory


@dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """Write a trained model as a Hugging Face directory, for transformers' from_pretrained; of a run with adapters, a
    directory of the adapter for peft's PeftModel.from_pretrained."""

    source: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN_DIR|CHECKPOINT")]
    """Directory of a run, or of a checkpoint."""
    out: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="OUT")]
    """Directory to write; must not exist. It appears complete or not at all."""
    checkpoint: str = "last"
    """Of a run: last, best (by evaluation), or the name of a checkpoint, such as step-000100."""
    dtype: Literal["bf16", "fp32"] | None = None
    """Weights as bf16, or the fp32 master. By default as the model computed with them."""
    max_shard_size: Annotated[str, tyro.conf.arg(metavar="SIZE")] = "5GiB"
    """Most bytes of tensors in a file."""
    merge: bool = False
    """Of a run with adapters: write the whole model, its weights with what the adapter adds."""


@dataclass(frozen=True, kw_only=True)
class GenerateConfig:
    """Let a trained model write, its weights in pages."""

    source: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN_DIR|MODEL_DIR")]
    """Directory of a run, or a Hugging Face directory, such as `pagoda export` writes."""
    prompt: str
    """What it goes on with; of a chat, what the user says."""
    checkpoint: str = "last"
    """Of a run: last, best (by evaluation), or the name of a checkpoint, such as step-000100."""
    tokens: int = 128
    """Most tokens to write."""
    draw: bool = False
    """Draw tokens, at temperature 0.8, instead of taking the most likely ones."""
    seed: int = 0
    """Of the draws."""
    chat: bool | None = None
    """Write the prompt with the tokenizer's chat template. By default if it has one."""
    memory: Memory = field(default_factory=Memory)
    """Where the weights may live."""


@dataclass(frozen=True, kw_only=True)
class ReportConfig:
    """Write a run, or a plan, as one page of HTML that needs nothing else: curves, lanes, memory, units, settings."""

    source: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN_DIR|PLAN")]
    """Directory of a run, which may still go on, or a file that `pagoda plan --json` wrote."""
    out: Path | None = None
    """File to write. By default report.html in the run's directory, or beside the plan with its name."""
    live: bool = False
    """Serve the page on this machine instead, as the run goes on, until Ctrl-C."""
    port: int = 8787
    """Of --live."""


@dataclass(frozen=True, kw_only=True)
class CalibrateConfig:
    """Measure this machine, in under a minute, for `pagoda plan --hardware auto`. Under torchrun, collectives too."""

    ssd: Path | None = None
    """Existing directory on the SSD to measure, which takes 4 GiB for a while; nothing stays in it."""
    out: Path | None = None
    """File to write. By default hardware.json in the user's cache directory, where `--hardware auto` looks."""


@dataclass(frozen=True, kw_only=True)
class InspectConfig:
    """Show what a directory keeps: the page stores on an SSD, with their commits and space; or checkpoints."""

    directory: Annotated[Path, tyro.conf.Positional]
    """Directory that --memory.ssd named, a run's directory, or a checkpoint."""
    verify: bool = False
    """Read everything and report what is not as it was written; then the exit code is 1."""


@dataclass(frozen=True, kw_only=True)
class GcConfig:
    """List the pages that SSD directories keep for checkpoints that are not where they were saved, and empty stores;
    then delete them, if you agree."""

    directories: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="DIR")]
    """Directories that --memory.ssd named; those of ranks below them are included. Name all the drives of a run."""
    keep: Annotated[tuple[Path, ...], tyro.conf.arg(metavar="PATH")] = ()
    """Where checkpoints or runs are that were moved: the pages of every checkpoint below are kept."""
    yes: bool = False
    """Delete without asking."""
