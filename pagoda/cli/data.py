"""`pagoda data`: what `pagoda train` would read from data, with an example."""

from dataclasses import replace

from rich.console import Console

from pagoda.config.commands import DataConfig
from pagoda.console import say


def run(config: DataConfig, console: Console) -> int:
    """Print what is read, ignored, left out and cut, and an example. Returns the exit code."""
    from pagoda.mesh.mesh import open_mesh
    from pagoda.train.data import Rows
    from pagoda.train.defaults import sequence_length
    from pagoda.train.inputs import example, opened_tokens, sequences
    from pagoda.train.tokens import DataSets

    data = DataSets(config, console)
    tokens = opened_tokens(config.data, config.dataset_train_split, data, open_mesh(), console)
    if not config.max_length:
        length, why = sequence_length(config, tokens)
        config = replace(config, max_length=length)
        say(console, f"Chosen: --max-length {length}: {why}")
    rows = Rows.of(tokens, config.max_length, config.packing)
    say(console, *sequences(rows), *example(rows, data.tokenizer))
    return 0
