"""Turns documents into tokens, with the tokenizer in the model's directory or as bytes."""

import hashlib
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import numpy.typing as npt

from pagoda.checkpoint.pretrained import weight_files
from pagoda.errors import ConfigError
from pagoda.memory.files import read_regular
from pagoda.models.build import configuration, import_transformers
from pagoda.models.gguf import gguf_in
from pagoda.train.chat import ChatTemplate, common_prefix_length, trl_version
from pagoda.train.records import Document, Message
from pagoda.train.seen import Seen

BYTES = "bytes"
VOCABULARY = 256
"""Number of token ids if text is read as bytes."""
_FILES = (
    *("*tokenizer*", "vocab*.json", "vocab*.txt", "merges.txt", "*.model", "*.spm", "*.tiktoken", "tekken.json"),
    *("special_tokens_map.json", "added_tokens.json", "chat_template*", "*.codes", "normalizer.json"),
)
"""The files of a Hugging Face directory that may belong to a tokenizer."""
_BESIDE = ("additional_chat_templates", "*processor*.json")
"""What else users of an exported model read: a folder of chat templates, and settings for images and sound."""

Encoded = npt.NDArray[np.int32]
"""The tokens of a document: id for each token that the loss counts, ~id (below 0) for all others."""


def tokenizer_files(directory: Path) -> list[Path]:
    """The files of a directory that belong to a tokenizer, sorted by name."""
    return sorted({path for pattern in _FILES for path in directory.glob(pattern) if path.is_file()})


def has_tokenizer(path: Path) -> bool:
    """Whether there is a tokenizer in a directory, or in a GGUF file that is there or is the path."""
    return gguf_in(path) is not None or bool(tokenizer_files(path))


class Tokenizer:
    """A tokenizer of transformers. Texts get the tokenizer's own special tokens, and end with its end-of-sequence
    token.

    Raises ConfigError if it cannot be read.
    """

    name: str
    """Its name in messages."""
    vocabulary: int
    """Every id is below this number."""
    key: str
    """Differs between tokenizers that may give different tokens."""
    files: Sequence[Path] = ()
    """The files from which it was read and others beside them, for exports."""
    chats: bool = False
    """Whether it has a chat template."""
    separates: bool = True
    """Whether attention and loss end at the end of a document. Documents of bytes are not separated."""
    end: list[int] | None = None
    """Ids that end a text or a turn, or None."""

    def __init__(self, directory: Path) -> None:
        transformers = import_transformers()
        file = gguf_in(directory)
        where, of_file = (directory, {}) if file is None else (file.parent, {"gguf_file": file.name})
        try:
            tokenizer: Any = transformers.AutoTokenizer.from_pretrained(
                str(where), local_files_only=True, trust_remote_code=False, **of_file
            )
        except Exception as error:  # one of several libraries reports a broken file
            said = str(error).strip().splitlines()[:1] or [type(error).__name__]
            raise ConfigError(
                f"the tokenizer in {directory} cannot be read: {said[0]}. Copy all files of the tokenizer again, or "
                "read text as bytes with --tokenizer bytes, which a pretrained model does not know"
            ) from error
        tokenizer.model_max_length = 1 << 62  # rows are cut to --max-length, so that no text is too long
        self._tokenizer = tokenizer
        self._before, self._after = _specials(tokenizer)
        self._chat = ChatTemplate(tokenizer)
        # Conversations end turns with a token of their own, which may differ from the one that ends a text.
        self.end = sorted({*self._after[-1:], *self._chat.ends()}) or None
        self.name = f"{type(tokenizer).__name__} of {directory}, {len(tokenizer):,} tokens"
        self.vocabulary = max(tokenizer.get_vocab().values(), default=-1) + 1
        digest = hashlib.blake2b(str(trl_version()).encode(), digest_size=16)
        if file is not None:  # the run directory gets the files that such a tokenizer is saved as
            self._folder = TemporaryDirectory(prefix="pagoda-tokenizer-")
            directory = Path(self._folder.name)
            tokenizer.save_pretrained(directory)
        files = tokenizer_files(directory)
        self.files = [*files, *(path for pattern in _BESIDE for path in sorted(directory.glob(pattern)))]
        self.chats = bool(tokenizer.chat_template)
        for path in files:
            digest.update(path.name.encode() + b"\0" + read_regular(path))
        self.key = digest.hexdigest()

    def encode(self, documents: Sequence[Document], seen: Seen, *, first: bool) -> list[Encoded]:
        """The tokens of each document. `first`: these are the first documents of the data. `seen` gets the keys of
        messages that the chat template does not use, and remarks.

        Raises ConfigError for a conversation that the template refuses.
        """
        if any(document.messages for document in documents):
            return [self._chat.encode(d, seen) if d.messages else self._texts([d])[0] for d in documents]
        return self._texts(documents)

    def prompt(self, text: str | list[Message], chat: bool) -> list[int]:
        """The ids of a text to continue, or with `chat` of a user's message or of messages.

        Raises ConfigError if there is no chat template.
        """
        if chat:
            return self._chat.prompt([{"role": "user", "content": text}] if isinstance(text, str) else text)
        return [*self._before, *self._tokenizer(text, add_special_tokens=False)["input_ids"]]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, without special tokens."""
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True)
        return text

    def written(self, ids: Sequence[int]) -> str:
        """The text of ids, with special tokens."""
        text: str = self._tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        return text

    def nbytes(self, ids: Sequence[int]) -> int:
        """Bytes of UTF-8 in the text of ids, without special tokens."""
        return len(self.decode(ids).encode())

    def marked(self, ids: npt.NDArray[np.int64], counted: npt.NDArray[np.bool_]) -> str:
        """The text of ids [N], with special tokens and with « and » around what the loss counts."""
        edges = [0, *(np.flatnonzero(np.diff(counted)) + 1).tolist(), len(ids)]
        until = [self.written(ids[:edge].tolist()) for edge in edges]
        parts = (after[len(before) :] for before, after in pairwise(until))
        return "".join(f"«{part}»" if counted[at] else part for at, part in zip(edges, parts, strict=False))

    def _texts(self, documents: Sequence[Document]) -> list[Encoded]:
        """As TRL tokenizes them: a completion begins where the tokens differ from those of the prompt alone."""
        encoded = []
        prompts = iter(self._ids([document.prompt for document in documents if document.prompt]))
        for document, ids in zip(documents, self._ids([d.prompt + d.text for d in documents]), strict=True):
            found = [*self._before * document.begins, *ids, *self._after * document.ends]
            asked = len(self._before) + common_prefix_length(next(prompts), ids) if document.prompt else 0
            encoded.append(np.array([*(~id_ for id_ in found[:asked]), *found[asked:]], dtype=np.int32))
        return encoded

    def _ids(self, texts: list[str]) -> list[list[int]]:
        if not texts:
            return []
        off = {"add_special_tokens": False, "return_attention_mask": False, "return_token_type_ids": False}
        found: list[list[int]] = self._tokenizer(texts, **off)["input_ids"]
        return found


class ByteTokenizer(Tokenizer):
    """Each byte of UTF-8 is a token, and a line feed comes between texts."""

    name = "bytes of UTF-8 (ids 0 to 255)"
    vocabulary = VOCABULARY
    key = BYTES
    separates = False

    def __init__(self) -> None:
        """There is nothing to read."""

    def encode(self, documents: Sequence[Document], seen: Seen, *, first: bool) -> list[Encoded]:
        encoded = []
        for document in documents:
            if document.messages:
                raise ConfigError(
                    f"{document.where} is a conversation, and there is no tokenizer to write it with: give --tokenizer "
                    "DIR, or put the tokenizer's files into the model's directory"
                )
            before = ("\n" if document.begins and not first else "") + document.prompt
            first = False
            ids = np.frombuffer((before + document.text).encode(), np.uint8).astype(np.int32)
            ids[: len(before.encode()) if document.prompt else 0] ^= -1
            encoded.append(ids)
        return encoded

    def prompt(self, text: str | list[Message], chat: bool) -> list[int]:
        if chat:
            raise ConfigError("the tokenizer is bytes, which has no chat template: give the prompt as it is")
        assert isinstance(text, str), "messages are a chat"
        return list(text.encode())

    def written(self, ids: Sequence[int]) -> str:
        return self.decode(ids)

    def nbytes(self, ids: Sequence[int]) -> int:
        return len(ids)  # a piece of a text may begin or end within a character

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(id_ for id_ in ids if id_ < VOCABULARY).decode(errors="replace")


def open_tokenizer(directory: Path | None, asked: str | None) -> Tokenizer:
    """The tokenizer that `--tokenizer` names, or the one in the model's directory, or bytes if there is none.

    Raises ConfigError if the directory that was asked for has no tokenizer, or if it cannot be read. Raises it too if
    there is none next to weights that were not trained on bytes.
    """
    if asked == BYTES:
        return ByteTokenizer()
    if asked is not None:
        directory = Path(asked)
        if not directory.is_dir() or not tokenizer_files(directory):
            raise ConfigError(f"--tokenizer {asked} is not a directory with the files of a tokenizer, nor 'bytes'")
    if directory is not None and has_tokenizer(directory):
        return Tokenizer(directory)
    if directory is not None and weight_files(directory):
        known = getattr(configuration(str(directory)).get_text_config(), "vocab_size", None)
        if known != VOCABULARY:
            raise ConfigError(
                f"{directory} has weights for {known} tokens, and no tokenizer: put the files of its tokenizer there, "
                "or name their directory with --tokenizer. Weights that were trained on bytes need --tokenizer bytes"
            )
    return ByteTokenizer()


def _specials(tokenizer: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The ids before and after each text: those that the tokenizer adds itself, and the end-of-sequence token."""
    probe = "a"
    bare: list[int] = tokenizer(probe, add_special_tokens=False)["input_ids"]
    whole: list[int] = tokenizer(probe)["input_ids"]
    starts = [at for at in range(len(whole) - len(bare) + 1) if whole[at : at + len(bare)] == bare]
    before, after = (whole[: starts[0]], whole[starts[0] + len(bare) :]) if starts else ([], [])
    end = tokenizer.eos_token_id
    if end is not None and after[-1:] != [end]:
        after = [*after, end]
    return tuple(before), tuple(after)
