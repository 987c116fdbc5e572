"""How data are read, and cut into sequences: the settings that `pagoda train` and `pagoda data` have in common."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pagoda.config.settings import Settings, require, require_count


@dataclass(frozen=True, kw_only=True)
class Reading(Settings):
    """How data are read, and cut into sequences."""

    model: str
    column: str | None = None
    """Column of the records with the text or the messages. By default the first one with a known name."""
    skip_bad: bool = False
    """Leave out records that cannot be read, and list them with their reasons, instead of refusing the data."""
    tokenizer: str | None = None
    """Directory of the tokenizer, or bytes: each byte is a token. By default the tokenizer in the model's directory,
    or bytes if it has none. Pretrained weights need a tokenizer, unless their vocabulary is that of bytes."""
    cache: Path | None = None
    """Directory that keeps tokenized data, 2 or 4 bytes a token, for this run and others. By default one in the user's
    cache directory."""
    seq_len: int = 0
    """Tokens per sequence. 0: 1024 for texts, or what most conversations fit in; at most what the model has positions
    for."""
    packing: Literal["on", "off"] = "on"
    """Whether a sequence has as many whole conversations as fit, which do not see each other, or only one."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_count("seq_len", self.seq_len, 0)
        require(self.seq_len != 1, "seq_len", self.seq_len, "at least 2 (a token and the next)")

    @property
    def packs(self) -> bool:
        """Whether a sequence may have several conversations."""
        return self.packing == "on"
