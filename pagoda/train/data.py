"""Byte-level text and its order: which bytes a training step reads, as a pure function of seed and step.

The text is one array of bytes; each byte is a token (ids 0 to 255). It is cut into consecutive windows of
`seq_len` bytes (twice as many for a model that reads a text and says how it goes on); the last incomplete one is left
out. An epoch visits every window once, in an order keyed by (seed, epoch). Sample number
g = ((step * accumulation_steps + index) * ranks + rank) * batch_size + row is window g % windows of epoch
g // windows: of each forward pass, ranks have consecutive rows of the batch that one rank would have. So a resumed run
needs only the number of steps done (`first_step`, `first_sample` where it has other ranks than before), and the order
never depends on a library's random generator, the batch that came before, or where memory lies.
"""

import hashlib
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from pagoda.errors import ConfigError

STDLIB = "stdlib"
VOCABULARY = 256
"""Token ids that byte-level text uses."""

_RECORDS = {
    ".arrow": "Arrow",
    ".feather": "Arrow",
    ".parquet": "Parquet",
    ".jsonl": "JSON Lines",
    ".ndjson": "JSON Lines",
}
"""Formats of data sets: a folder that has any of them is a data set."""
_COMPRESSED = frozenset({".gz", ".bz2", ".xz", ".zst", ".lz4"})
_TABLES = {".json": "JSON", ".csv": "CSV", ".tsv": "CSV"}
"""Formats that also lie about among text, such as source code: a data set where most of the text is of them."""
_STDLIB_SKIPPED = frozenset({"site-packages", "dist-packages", "test", "tests", "__pycache__"})
_FEISTEL_ROUNDS = 6


@dataclass(frozen=True)
class Skipped:
    """A file of the folder that is not part of the text."""

    path: Path
    reason: str


@dataclass(frozen=True, eq=False)
class ByteText:
    """A text held in RAM as bytes, uint8 [N], read once."""

    source: str
    tokens: npt.NDArray[np.uint8]
    files: int
    skipped: tuple[Skipped, ...] = ()

    @staticmethod
    def open(source: str) -> "ByteText":
        """Reads `"stdlib"` (the running Python's standard library, without its tests), a file, or a folder.

        Files are joined by a newline in the order of their relative paths. A folder's hidden entries are
        ignored; files that are not UTF-8 text are left out and listed in `skipped`.

        Raises:
            ConfigError: the path does not exist, a single file is not text, there is no text at all, or it is a data
                set whose text is in fields of records: Arrow, Parquet, JSON Lines, or mostly JSON or CSV.
        """
        if source == STDLIB:
            root = Path(sysconfig.get_path("stdlib"))
            paths = (p for p in root.rglob("*.py") if not _STDLIB_SKIPPED & set(p.relative_to(root).parts))
            return _read(source, root, paths)
        path = Path(source)
        if not path.exists():
            raise ConfigError(f"data {source!r} does not exist: give a text file, a folder of text files, or 'stdlib'")
        if path.is_file():
            return _read(source, path.parent, [path])
        visible = (p for p in path.rglob("*") if not any(part.startswith(".") for part in p.relative_to(path).parts))
        return _read(source, path, visible)

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the bytes: a resumed run checks that it reads the text it started with."""
        return hashlib.blake2b(self.tokens.data, digest_size=16).hexdigest()


@dataclass(frozen=True, eq=False, kw_only=True)
class Batches:
    """The batches of a run: windows of one text in a keyed order (see the module's docstring).

    Raises:
        ConfigError: the text is shorter than one window.
    """

    text: ByteText
    batch_size: int
    """Sequences per forward pass of one rank, B."""
    seq_len: int
    """Tokens per sequence, T."""
    accumulation_steps: int = 1
    """Forward passes per optimizer step."""
    seed: int = 0
    continued: bool = False
    """Inputs are the first half of a window of 2T bytes, labels the second: T5's prefix objective (arXiv 1910.10683,
    section 3.2.1), for models of an encoder and a decoder."""
    rank: int = 0
    ranks: int = 1
    first_step: int = 0
    """Step that begins with `first_sample`."""
    first_sample: int = 0

    def __post_init__(self) -> None:
        if len(self.text) < self.window_bytes:
            raise ConfigError(
                f"data {self.text.source!r} holds {len(self.text)} bytes, less than one sequence of"
                f" {self.window_bytes}: use a longer text or a smaller --seq-len"
            )

    @property
    def window_bytes(self) -> int:
        """Bytes of a window."""
        return self.seq_len * (2 if self.continued else 1)

    @property
    def windows(self) -> int:
        """Windows in the text: the samples of one epoch."""
        return len(self.text) // self.window_bytes

    @property
    def tokens_per_step(self) -> int:
        """Tokens one optimizer step reads, on all ranks."""
        return self.samples_per_step * self.window_bytes

    @property
    def samples_per_step(self) -> int:
        """Sequences one optimizer step reads, on all ranks."""
        return self.batch_size * self.accumulation_steps * self.ranks

    def samples_before(self, step: int) -> int:
        """Sequences that the steps before one have read, counted from 0."""
        return self.first_sample + (step - self.first_step) * self.samples_per_step

    def window_indices(self, step: int, index: int = 0) -> npt.NDArray[np.int64]:
        """The windows, int64 [B], of forward pass `index` of optimizer step `step` (both counted from 0)."""
        first = self.samples_before(step) + (index * self.ranks + self.rank) * self.batch_size
        epochs, positions = np.divmod(np.arange(first, first + self.batch_size), self.windows)
        result = np.empty(self.batch_size, dtype=np.int64)
        for epoch in np.unique(epochs):
            rows = epochs == epoch
            result[rows] = _permuted(positions[rows], self.windows, (self.seed, int(epoch)))
        return result

    def batch(self, step: int, index: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns (input_ids, labels), both int64 [B, T], of forward pass `index` of step `step` (from 0).

        Labels equal the inputs, as causal models shift them inside the loss, unless they continue them.
        """
        starts = self.window_indices(step, index)[:, None] * self.window_bytes
        ids = torch.from_numpy(self.text.tokens[starts + np.arange(self.window_bytes)].astype(np.int64))
        return (ids[:, : self.seq_len], ids[:, self.seq_len :]) if self.continued else (ids, ids.clone())


def _read(source: str, root: Path, paths: Iterable[Path]) -> ByteText:
    """Reads `paths`, sorted by their path under `root`, into one array."""
    joined = bytearray()
    files = 0
    skipped: list[Skipped] = []
    tables: dict[Path, int] = {}
    for path in sorted((p for p in paths if p.is_file()), key=lambda p: p.relative_to(root).as_posix()):
        if source != STDLIB and (kind := _format(path, _RECORDS)):
            raise _data_set(source, path, kind)
        try:
            content = path.read_bytes()
        except OSError as error:
            skipped.append(Skipped(path, error.strerror or type(error).__name__))
            continue
        if reason := _not_text(content):
            skipped.append(Skipped(path, reason))
            continue
        if not content:
            continue
        if joined:
            joined += b"\n"
        joined += content
        files += 1
        if _format(path, _TABLES):
            tables[path] = len(content)
    if 2 * sum(tables.values()) > len(joined):
        largest = max(tables, key=lambda path: tables[path])
        raise _data_set(source, largest, _format(largest, _TABLES))
    if not joined:
        why = "; ".join(f"{s.path.name}: {s.reason}" for s in skipped[:3])
        raise ConfigError(
            f"data {source!r} holds no text{f' ({why})' if why else ''}:"
            " give a file or folder with UTF-8 text, or 'stdlib'"
        )
    return ByteText(source, np.frombuffer(joined, dtype=np.uint8), files, tuple(skipped))


def _format(path: Path, formats: dict[str, str]) -> str:
    """The format among these that a file's name says, compressed or not; "" for none."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in _COMPRESSED:
        suffixes.pop()
    return formats.get(suffixes[-1], "") if suffixes else ""


def _data_set(source: str, path: Path, kind: str) -> ConfigError:
    return ConfigError(
        f"data {source!r} is a data set of records ({path.name} is {kind}), and `pagoda train` reads plain text: it "
        "would train on the format around the text in their fields. Write the text to a file, and give that to "
        "--data. With Hugging Face datasets: d = load_from_disk(DIR), or load_dataset('json', data_files=FILE, "
        "split='train') ('csv' and 'parquet' likewise); then open('text.txt', 'w').writelines(t + '\\n' for t in "
        "d['text'])"
    )


def _not_text(content: bytes) -> str | None:
    """Why `content` is not text, or None if it is."""
    if b"\0" in content:
        return "binary (holds NUL bytes)"
    try:
        content.decode("utf-8")
    except UnicodeDecodeError:
        return "not UTF-8"
    return None


def _permuted(positions: npt.NDArray[np.int64], size: int, key: tuple[int, int]) -> npt.NDArray[np.int64]:
    """Where a keyed permutation of range(size) sends `positions`, without a table of `size` entries.

    A Feistel network permutes the smallest range of an even number of bits that holds `size`; what falls
    outside range(size) goes through again until it is inside ("cycle walking"), which keeps it a permutation.
    """
    half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    mask = np.uint64((1 << int(half)) - 1)
    seed, epoch = (np.array([part], dtype=np.uint64) for part in key)
    salt = _mixed(_mixed(seed) ^ epoch)
    round_keys = [_mixed(salt + np.uint64(i)) for i in range(_FEISTEL_ROUNDS)]
    values = positions.astype(np.uint64)
    outside = np.ones(len(values), dtype=bool)
    while outside.any():
        left, right = values[outside] >> half, values[outside] & mask
        for round_key in round_keys:
            left, right = right, left ^ (_mixed(right ^ round_key) & mask)
        values[outside] = left << half | right
        outside = values >= np.uint64(size)
    return values.astype(np.int64)


def _mixed(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finaliser of splitmix64 (Steele, Lea and Flood, 2014), elementwise modulo 2**64."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ values >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ values >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return values ^ values >> np.uint64(31)
