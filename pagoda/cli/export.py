"""`pagoda export`: a trained model as a Hugging Face directory."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.console import Console

from pagoda.memory.sizes import format_bytes, parse_bytes


@dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """Write a trained model as a Hugging Face directory, for transformers' from_pretrained; of a run with adapters, a
    directory of the adapter for peft's PeftModel.from_pretrained."""

    source: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN_DIR|CHECKPOINT")]
    """Directory of a run, for its last checkpoint, or of a checkpoint."""
    out: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="OUT")]
    """Directory to write; must not exist. It appears complete or not at all."""
    dtype: Literal["bf16", "fp32"] | None = None
    """Weights as bf16, or the fp32 master. By default as the model computed with them."""
    max_shard_size: Annotated[str, tyro.conf.arg(metavar="SIZE")] = "5GiB"
    """Most bytes of tensors in a file."""
    merge: bool = False
    """Of a run with adapters: write the whole model, its weights with what the adapter adds."""


def run_export(config: ExportConfig, console: Console) -> int:
    """Exports, says what was written, and returns the exit code."""
    from pagoda.checkpoint.export import export
    from pagoda.train.run_dir import RunDir

    run = RunDir(config.source)
    checkpoint = run.latest().path if run.checkpoints.is_dir() else config.source
    max_shard_bytes = parse_bytes(config.max_shard_size, "--max-shard-size")
    with console.status(f"Exporting {checkpoint}"):
        done = export(checkpoint, config.out, dtype=config.dtype, max_shard_bytes=max_shard_bytes, merge=config.merge)
    line = (
        f"{checkpoint} exported to {config.out}: {done.tensors} tensors, {format_bytes(done.nbytes)},"
        f" {str(done.dtype).removeprefix('torch.')}, in {len(done.files)} file{'s' * (len(done.files) > 1)}"
    )
    console.print(line, soft_wrap=True, highlight=False)
    return 0
