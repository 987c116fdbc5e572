"""`pagoda export`: writes a trained model as a Hugging Face directory."""

from rich.console import Console

from pagoda.config.commands import ExportConfig
from pagoda.console import say
from pagoda.memory.sizes import format_bytes, parse_bytes


def run(config: ExportConfig, console: Console) -> int:
    """Export, and print what was written. Returns the exit code."""
    from pagoda.checkpoint.export import export
    from pagoda.train.run_dir import RunDir, known_as

    checkpoint = RunDir(config.source).named_or_itself(config.checkpoint)
    tokenizer = RunDir(checkpoint.parent.parent).tokenizer_files()
    max_shard_bytes = parse_bytes(config.max_shard_size, "--max-shard-size")
    with console.status(f"Exporting {known_as(checkpoint)}"):
        done = export(
            checkpoint,
            config.out,
            dtype=config.dtype,
            max_shard_bytes=max_shard_bytes,
            merge=config.merge,
            beside=tokenizer,
        )
    line = (
        f"{known_as(checkpoint)} exported to {config.out}: {done.tensors} tensors, {format_bytes(done.nbytes)},"
        f" {str(done.dtype).removeprefix('torch.')}, in {len(done.files)} file{'s' * (len(done.files) > 1)}"
    )
    if tokenizer:
        line += ", with its tokenizer"
    say(console, line)
    return 0
