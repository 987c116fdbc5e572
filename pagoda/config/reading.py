"""How data are read, and cut into sequences: the settings that `pagoda train` and `pagoda data` have in common."""

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from pagoda.config.settings import Settings, require, require_count
from pagoda.errors import ConfigError

Data: TypeAlias = str | tuple[str, ...]
"""A name of data, or several, whose documents follow one another."""


def names_of(data: Data) -> tuple[str, ...]:
    """Each of the names."""
    return (data,) if isinstance(data, str) else data


@dataclass(frozen=True, kw_only=True)
class DataSettings(Settings):
    """What is read of data."""

    dataset_text_field: str | None = None
    """Column of the records with the text or the messages. By default the first one with a known name."""
    skip_bad: bool = False
    """Leave out records that cannot be read, and list them with their reasons, instead of refusing the data."""
    dataset_config: str | None = None
    """Subset of a data set of the Hugging Face Hub or of a folder, as in `load_dataset(name, config)`."""
    dataset_train_split: str = "train"
    """Split of --data that is read, if it is a data set of the Hub or a folder with files of records."""
    dataset_test_split: str = "test"
    """The same of --eval-data."""
    dataset_revision: str | None = None
    """Branch, tag or commit of a data set of the Hub. By default its main branch."""
    dataset_streaming: bool = False
    """Read a data set of the Hub while it is tokenized, and store nothing but the tokens. By default it is downloaded
    into the cache of datasets."""


@dataclass(frozen=True, kw_only=True)
class Reading(DataSettings):
    """How data are read, and cut into sequences."""

    model: str
    tokenizer: str | None = None
    """Directory of the tokenizer, or bytes: each byte is a token. By default the tokenizer in the model's directory,
    or bytes if it has none. Pretrained weights need a tokenizer, unless their vocabulary is that of bytes."""
    cache: Path | None = None
    """Directory that keeps tokenized data, 2 or 4 bytes a token, for this run and others. By default one in the user's
    cache directory."""
    max_length: int = 0
    """Tokens per sequence. 0: 1024 for texts, or what most conversations fit in; at most what the model has positions
    for."""
    packing: bool = True
    """Put as many whole conversations into a sequence as fit. They do not see each other. --no-packing: only one."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_count("max_length", self.max_length, 0)
        require(self.max_length != 1, "max_length", self.max_length, "at least 2 (a token and the next)")


def check_split(name: str, split: str, splits: Collection[str]) -> None:
    """Raises ConfigError if a data set has no split of this name."""
    if split not in splits:
        raise ConfigError(
            f"data {name!r} has no split {split!r}, only {', '.join(splits)}: name one, with "
            "--dataset-train-split or --dataset-test-split"
        )
