"""The tokens of a data set. They are computed once, and kept as memory-mapped files in a cache directory.

`tokens` has every token of every document, in order: id, or ~id if the loss does not count it, in 16 or 32 bits. `ends`
has the end of each document, int64. `about.json` has all other facts, and a hash of each of the three. The directory's
name is a hash of what decides the tokens: names, sizes and times of the files, or the revision of a data set on the
Hub; the tokenizer; the column. The directory appears complete or not at all. So data are read once, to be tokenized.
Tokens that another command has written are read when they are opened, to compare the hashes.
"""

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import xxhash
from filelock import FileLock
from rich.console import Console

from pagoda.checkpoint.directory import committed
from pagoda.config.reading import Data, DataSettings, Reading, names_of
from pagoda.errors import ConfigError, StorageError
from pagoda.memory.files import open_regular, read_regular, sync_descriptor, write_durably
from pagoda.memory.json_forms import whole, with_hash
from pagoda.models.build import is_encoder_decoder, model_directory
from pagoda.simulate.hardware import hardware_file
from pagoda.train.records import Document
from pagoda.train.seen import Seen
from pagoda.train.sources import Source, documents, find
from pagoda.train.tokenizer import ByteTokenizer, Encoded, Tokenizer, open_tokenizer

_FORMAT = 12
_TOKENS, _ENDS, _ABOUT = "tokens", "ends", "about.json"
_USUAL = DataSettings()
_BATCH_CHARACTERS, _BATCH_DOCUMENTS = 1 << 20, 1024
"""Documents are tokenised in batches of at most this size. Larger batches take more RAM; smaller ones leave cores
idle."""


@dataclass(kw_only=True)
class About:
    """Facts about the tokens of a data set. Complete once the tokens are written."""

    source: str
    tokenizer: str
    itemsize: int
    """Bytes of a token in the file."""
    tokens: int = 0
    targets: int = 0
    """Number of tokens that the loss counts."""
    documents: int = 0
    parts: list[int] = field(default_factory=list)
    """The end of each source of several, in tokens."""
    files: int
    """0 for data sets of the Hub."""
    chats: bool = False
    """Whether documents are conversations."""
    whole: bool = False
    """Whether documents are conversations, or prompts with their completions, which are kept whole."""
    separates: bool
    """Whether attention and loss end at the end of a document."""
    most: int = 0
    """The largest id plus one."""
    seen: Seen
    """What was read, and what was left out and why."""
    fingerprint: str = ""
    """Hash of tokens and ends. A resumed run uses it to check that it reads the same data."""


@dataclass(frozen=True, eq=False)
class Tokens:
    """The tokens of a data set, mapped into memory."""

    about: About
    ids: npt.NDArray[Any]
    """Signed integers [tokens]: id, or ~id if the loss does not count the token."""
    ends: npt.NDArray[np.int64]
    """The end of each document, [documents]."""
    key: str = ""
    """The name of their cache entry."""

    def __len__(self) -> int:
        return len(self.ids)


class DataSets:
    """The data sets of a command. Each is opened once, because its tokens are then read whole.

    Raises ConfigError for a model that does not predict the next token.
    """

    def __init__(self, config: Reading, console: Console) -> None:
        if is_encoder_decoder(config.model):
            raise ConfigError(
                f"model {config.model!r} has an encoder and a decoder, and data are texts and conversations for models "
                "that predict the next token: train it with pagoda.integrations.transformers.Seq2SeqTrainer"
            )
        self._config, self._console = config, console
        self._opened: dict[tuple[Data, str], Tokens] = {}

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Raises ConfigError."""
        return open_tokenizer(model_directory(self._config.model), self._config.tokenizer)

    def open(self, data: Data, split: str, key: str | None = None) -> Tokens:
        """The tokens of --data or --eval-data, of a split of its data sets. `key` is that of its tokens, if another
        rank has opened it. Raises like `open_tokens`."""
        if (data, split) not in self._opened:
            how = self._config.cache, self._config, split, self._console, key
            self._opened[data, split] = open_tokens(data, self.tokenizer, *how)
        return self._opened[data, split]


def open_tokens(
    data: Data,
    tokenizer: Tokenizer | None = None,
    cache: Path | None = None,
    settings: DataSettings = _USUAL,
    split: str = "train",
    console: Console | None = None,
    key: str | None = None,
) -> Tokens:
    """The tokens of `--data`. They are computed now if they are not in the cache.

    Progress is shown on `console`. Without a tokenizer, tokens are bytes. If there is an entry `key` in the cache, its
    tokens are taken, and the data are not read.

    Raises ConfigError if the data cannot be read or contains no text, and StorageError if the cache cannot be written.
    """
    tokenizer = tokenizer or ByteTokenizer()
    sources = [find(name, settings, split) for name in names_of(data)]
    root = cache or hardware_file().parent / "tokens"
    place, written = root / (key or ""), False
    if key is None or not place.exists():
        before = [source.key() for source in sources]
        facts = [_FORMAT, before, settings.dataset_text_field, settings.skip_bad, tokenizer.key, np.little_endian]
        place = root / xxhash.xxh3_128_hexdigest(json.dumps(facts).encode())
    if not place.exists():
        try:
            root.mkdir(parents=True, exist_ok=True)
            lock = place.with_suffix(".lock")
            os.close(open_regular(lock, os.O_RDWR | os.O_CREAT))  # FileLock would empty a file that is linked there
            with FileLock(lock):
                if not place.exists():
                    with committed(place) as folder:
                        _Writer(folder, sources, tokenizer).write(console or Console(quiet=True))
                        if [source.key() for source in sources] != before:
                            raise ConfigError(f"data {data!r} changed while it was read: try again once it is written")
                    written = True
        except OSError as error:
            raise StorageError(
                f"the tokens of {data!r} cannot be kept in {root}: {error.__cause__ or error}. They take 2 to 4 bytes "
                "each; name another directory with --cache"
            ) from error
    return _opened(place, sources, tokenizer, check=not written)


def _opened(place: Path, sources: Sequence[Source], tokenizer: Tokenizer, check: bool) -> Tokens:
    """Map the files of a cache entry. They may have been written for other names of the same files.

    Raises ConfigError if they are damaged. With `check`, reads them whole for that.
    """
    try:
        facts = whole(read_regular(place / _ABOUT))
        known = About(**{**facts, "seen": Seen(**facts["seen"])})
        ids = _mapped(place / _TOKENS, f"int{8 * known.itemsize}", known.tokens)
        ends = _mapped(place / _ENDS, "int64", known.documents)
        if check and known.fingerprint != "".join(xxhash.xxh3_64_hexdigest(content.data) for content in (ids, ends)):
            raise ValueError("not those that were written")
    except (OSError, ValueError) as error:
        raise ConfigError(f"the tokens in {place} are damaged ({error}): delete that directory") from error
    known.source, known.tokenizer = _named(sources), tokenizer.name
    known.seen.skipped = [*_skipped(sources), *known.seen.skipped]
    return Tokens(known, ids, ends, place.name)


def _mapped(path: Path, dtype: str, count: int) -> npt.NDArray[Any]:
    with os.fdopen(open_regular(path), "rb") as file:
        return np.memmap(file, dtype=dtype, mode="r", shape=(count,))


def _named(sources: Sequence[Source]) -> str:
    return ", ".join(source.name for source in sources)


def _skipped(sources: Sequence[Source]) -> list[tuple[str, str]]:
    return [skipped for source in sources for skipped in source.skipped]


class _Writer:
    """Writes the tokens of sources, one after another, into a directory."""

    def __init__(self, folder: Path, sources: Sequence[Source], tokenizer: Tokenizer) -> None:
        self._folder, self._sources, self._tokenizer = folder, sources, tokenizer
        self._hashes = xxhash.xxh3_64(), xxhash.xxh3_64()
        self._about = About(
            source=_named(sources),
            tokenizer=tokenizer.name,
            itemsize=2 if tokenizer.vocabulary <= 1 << 15 else 4,
            files=sum(len(source.files) for source in sources),
            separates=tokenizer.separates,
            seen=Seen(),
        )

    def write(self, console: Console) -> None:
        """Tokenise all documents, and show the progress. Raises ConfigError if there is no text."""
        doing = f"Tokenising {self._about.source}"
        with (
            console.status(doing) as status,
            (self._folder / _TOKENS).open("xb") as tokens,
            (self._folder / _ENDS).open("xb") as ends,
        ):
            for source in self._sources:
                for batch in _batches(documents(source, self._about.seen)):
                    self._write_batch(batch, tokens, ends)
                    status.update(f"{doing}: {self._about.documents:,} documents and conversations")
                self._about.parts.append(self._about.tokens)
            for file in (tokens, ends):
                file.flush()
                sync_descriptor(file.fileno(), self._folder)
        about = self._about
        if not about.documents:
            why = "; ".join(replace(about.seen, skipped=[*_skipped(self._sources), *about.seen.skipped]).lines())
            raise ConfigError(
                f"data {about.source!r} holds no text{f' ({why})' if why else ''}: give a file or folder "
                "with UTF-8 text or records, or 'stdlib'"
            )
        about.files -= len(about.seen.skipped)
        about.fingerprint = "".join(digest.hexdigest() for digest in self._hashes)
        facts = with_hash({**vars(about), "seen": vars(about.seen)})
        write_durably(self._folder / _ABOUT, json.dumps(facts, indent=1).encode())

    def _write_batch(self, batch: list[Document], tokens: BinaryIO, ends: BinaryIO) -> None:
        about = self._about
        kept: list[Encoded] = []
        stops: list[int] = []
        for document, ids in self._encoded(batch):
            counted = int(np.count_nonzero(ids >= 0))
            if (document.messages or document.prompt) and not counted:
                about.seen.leave_out(_untrained(document), document.where)
                continue
            about.chats |= bool(document.messages)
            about.whole |= bool(document.messages or (document.prompt and about.separates))
            kept.append(ids)
            about.tokens += len(ids)
            about.targets += counted
            if document.ends:
                stops.append(about.tokens)
        if not kept:
            return
        joined = np.concatenate(kept)
        about.most = max(about.most, int(np.maximum(joined, ~joined).max()) + 1) if len(joined) else about.most
        about.documents += len(stops)
        written = joined.astype(f"int{8 * about.itemsize}"), np.array(stops, np.int64)
        for file, content, digest in zip((tokens, ends), written, self._hashes, strict=True):
            digest.update(content.data)
            file.write(content.data)

    def _encoded(self, batch: list[Document]) -> Iterator[tuple[Document, Encoded]]:
        """Documents with their tokens. With `skip_bad`, conversations that the chat template refuses are left out."""
        one_by_one = self._sources[0].settings.skip_bad and any(document.messages for document in batch)
        for some in ([document] for document in batch) if one_by_one else [batch]:
            try:
                encoded = self._tokenizer.encode(some, self._about.seen, first=not self._about.tokens)
            except ConfigError as error:
                if not one_by_one:
                    raise
                self._about.seen.leave_out(error, some[0].where)
            else:
                yield from zip(some, encoded, strict=True)


def _batches(found: Iterator[Document]) -> Iterator[list[Document]]:
    """Documents to tokenise together. Leaves out empty ones."""
    batch: list[Document] = []
    characters = 0
    for document in found:
        if not (document.text or document.messages):
            continue
        batch.append(document)
        characters += len(document.prompt) + len(document.text)
        if characters >= _BATCH_CHARACTERS or len(batch) >= _BATCH_DOCUMENTS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _untrained(document: Document) -> str:
    """Why the loss counts nothing in a conversation, or of a completion."""
    if not document.messages:
        return "its completion has no token of its own"
    roles = [message["role"] for message in document.messages]
    if "assistant" not in roles:
        return f"no assistant speaks. Its roles: {', '.join(dict.fromkeys(roles))}"
    if not any(message["role"] == "assistant" and message.get("train", True) for message in document.messages):
        return "no message of its assistant is to be trained on"
    return "the chat template writes none of its assistant's turns as the model would"
