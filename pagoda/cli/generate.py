"""`pagoda generate`: what a trained model writes."""

from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console

from pagoda.config.commands import GenerateConfig
from pagoda.errors import ConfigError


def run(config: GenerateConfig, console: Console) -> int:
    """Prints what the model writes after the prompt, and returns the exit code."""
    from pagoda.checkpoint.export import export
    from pagoda.checkpoint.model_config import ADAPTER
    from pagoda.checkpoint.reader import Checkpoint
    from pagoda.train.run_dir import RunDir

    run_dir = RunDir(config.source)
    if not run_dir.checkpoints.is_dir():
        if not (config.source / "config.json").is_file():
            raise ConfigError(f"{config.source} is neither a run nor a Hugging Face directory")
        _generate(config, config.source, config.source, console)
        return 0
    checkpoint = run_dir.named(config.checkpoint).path
    with Checkpoint(checkpoint, all_pages=False) as opened:
        merge = ADAPTER in (opened.manifest.get("model") or {})
    with TemporaryDirectory(prefix=".generate-", dir=run_dir.path) as folder:
        model = Path(folder, "model")
        with console.status(f"Reading {checkpoint}"):
            export(checkpoint, model, merge=merge)
        _generate(config, model, run_dir.tokenizer, console)
    return 0


def _generate(config: GenerateConfig, directory: Path, tokenizer_directory: Path, console: Console) -> None:
    from pagoda.api import load, wrap
    from pagoda.optim import AdamW
    from pagoda.train.generate import continued
    from pagoda.train.tokenizer import open_tokenizer

    tokenizer = open_tokenizer(tokenizer_directory if tokenizer_directory.is_dir() else None, None)
    model = load(directory).requires_grad_(False)
    model, optimizer = wrap(model, AdamW(), memory=config.memory)
    try:
        chat = tokenizer.chats if config.chat is None else config.chat
        seed = config.seed if config.draw else None
        text = continued(model, tokenizer, config.prompt, chat=chat, tokens=config.tokens, seed=seed)
    finally:
        optimizer.close()
    console.print(text if chat else config.prompt + text, soft_wrap=True, highlight=False, markup=False)
