"""Files of records. A record is a text or a conversation.

A record is a JSON object, or a row of CSV, Parquet or Arrow. Its columns show which it is: a text, or a conversation
(`messages`, ShareGPT's `conversations`, or a question with its answer, as Alpaca's `instruction`, `input`, `output` and
`history`). In JSON, a list of messages is a conversation too. In tables, lists may be JSON. Records that cannot be read
are refused with file, line and reason, or left out if the user asks for that.
"""

import bz2
import codecs
import csv
import errno
import gzip
import io
import json
import lzma
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias

from pagoda.errors import ConfigError, needed

RECORDS = {".arrow": "arrow", ".feather": "arrow", ".parquet": "parquet", ".jsonl": "json", ".ndjson": "json"}
"""Formats that always hold records. A folder that contains any of them is a data set."""
TABLES = {".json": "json", ".csv": "csv", ".tsv": "csv"}
"""Formats that also occur among source code. They hold records if they are named, or make up most of a folder."""
_COMPRESSED = frozenset({".gz", ".bz2", ".xz", ".zst", ".lz4"})
_MOST_LISTED = 12
_TEXTS = ("text", "content")
_CONVERSATIONS = ("messages", "conversations", "conversation")
_PAIRS = {"instruction": "output", "prompt": "completion", "question": "answer"}
"""Columns with a question -> with its answer."""
_ROLES = {
    **{role: role for role in ("system", "developer", "user", "assistant", "tool")},
    **{"human": "user", "gpt": "assistant", "chatgpt": "assistant", "observation": "tool"},
    **dict.fromkeys(("model", "bot", "chatbot", "ai"), "assistant"),
}
"""Names of roles in data sets, in lower case -> the names in chat templates."""
_WEIGHTS = ("weight", "train", "training", "loss")
"""Names under which messages say whether they are to be trained on: 0 and false, or 1 and true."""

Message: TypeAlias = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Document:
    """A text, a piece of a long one, or a conversation."""

    where: str
    """File and line or row, for error messages."""
    text: str = ""
    messages: tuple[Message, ...] = ()
    """With role, content (a text), `train` (False if the loss is not to count it), and what else a template may use."""
    tools: tuple[Any, ...] = ()
    begins: bool = True
    """Whether a text begins here. False for later pieces of a long text."""
    ends: bool = True
    columns: tuple[str, ...] = ()
    """The columns that were read, of a record."""
    unread: tuple[str, ...] = ()
    """Its other columns."""


def read_records(
    path: Path, column: str | None, read: Callable[[int], None], leave_out: Callable[[ConfigError], None] | None = None
) -> Iterator[Document]:
    """The documents of a file of records. `column` has the text or the conversation; by default it is the first column
    with a known name. `read` is called with the number of bytes read since its last call.

    Raises ConfigError for a line or row that cannot be read, with the reason. With `leave_out`, calls that instead, and
    goes on with the next row.
    """
    kind, size, done = (RECORDS | TABLES)[suffix(path)], path.stat().st_size, 0
    rows = _json_rows(path) if kind == "json" else _csv_rows(path) if kind == "csv" else _columnar_rows(path, kind)
    for where, row, position in rows:
        try:
            document = _document_of(row, where, column)
        except ConfigError as error:
            if leave_out is None:
                raise
            leave_out(error)
        else:
            yield document
        if done < position <= size:
            read(position - done)
            done = position
    read(size - done)


def _document_of(row: Any, where: str, column: str | None) -> Document:
    """The document of a row, which may be the error of reading it."""
    if isinstance(row, ConfigError):
        raise row
    if isinstance(row, list) and row and all(map(_is_message, row)):
        row = {"messages": row}
    if not isinstance(row, Mapping):
        raise ConfigError(f"{where}: a {type(row).__name__} where a record with columns should be")
    document = _document(row, where, column)
    _check_unicode(document)
    unread = (str(name) for name, value in row.items() if name not in document.columns and value not in (None, ""))
    return replace(document, unread=tuple(unread))


def _json_rows(path: Path) -> Iterator[tuple[str, Any, int]]:
    """Each row, or the error of reading it, with its place and the bytes read so far. The file has lines of JSON, or
    one array, which is read whole. An array of messages is one row."""
    with opened(path) as file:
        lines = (line for line in file if line.strip())
        first, second = next(lines, b"").removeprefix(codecs.BOM_UTF8).strip(), next(lines, None)
    # Lines may be arrays, too. The first line of an array over several lines does not end it.
    if first[:1] == b"[" and (second is None or not _is_json(first)):
        try:
            with opened(path) as file:
                entries = json.load(file)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{path}: not JSON: {error}") from error
        if entries and all(map(_is_message, entries)):
            yield str(path), entries, 0
            return
        for number, entry in enumerate(entries, 1):
            yield f"{path}, entry {number}", entry, 0
        return
    position = 0
    with opened(path) as file:
        for number, line in enumerate(file, 1):
            position += len(line)
            where = f"{path}, line {number}"
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                row = ConfigError(f"{where}: not JSON: {error}. Each line must be one record")
            yield where, row, position


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def _is_message(entry: Any) -> bool:
    """Whether an entry of a list is a message, and not a record."""
    return isinstance(entry, Mapping) and any(
        entry.keys() >= names for names in ({"role", "content"}, {"from", "value"})
    )


def _csv_rows(path: Path) -> Iterator[tuple[str, Any, int]]:
    with opened(path) as file:
        lines = io.TextIOWrapper(file, encoding="utf-8-sig", newline="")
        csv.field_size_limit(1 << 30)
        reader = csv.DictReader(lines, delimiter="\t" if suffix(path) == ".tsv" else ",", strict=True)
        try:
            for row in reader:
                where = f"{path}, line {reader.line_num}"
                few = None in row or None in row.values()
                fields = f"{where}: not as many fields as the {len(reader.fieldnames or ())} of the header"
                yield where, ConfigError(fields) if few else row, 0
        except (csv.Error, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}, line {reader.line_num + 1}: not CSV: {error}") from error


def _columnar_rows(path: Path, kind: str) -> Iterator[tuple[str, Any, int]]:
    datasets = needed("datasets", f"{path} is {kind}, which needs datasets: pip install 'pagoda-train[train]'")
    try:
        rows = datasets.load_dataset(kind, data_files=[str(path)], split="train", streaming=True)
        for number, row in enumerate(rows, 1):
            yield f"{path}, row {number}", row, 0
    except Exception as error:  # pyarrow and datasets have many kinds of errors for damaged files
        said = str(error.__cause__ or error).splitlines()[:1] or [type(error).__name__]
        raise ConfigError(f"{path} cannot be read as {kind}: {said[0]}") from error


def _document(row: Mapping[str, Any], where: str, column: str | None) -> Document:
    """The document in a row. Raises ConfigError if no column is known, or if a column has neither text nor messages."""
    if column is not None and column not in row:
        raise ConfigError(f"{where}: no column {column!r}; it has {_names(row)}. Correct --column")
    conversations = [name for name in _CONVERSATIONS if _listed(row.get(name)) is not None]
    known = [*([] if column is None else [column]), *conversations, *(name for name in _TEXTS if name in row)]
    if known:
        name, value = known[0], row[known[0]]
        if name in _CONVERSATIONS or (name == column and isinstance(value, list | tuple)):
            return _conversation(row, name, _messages(value, name, where), where)
        if column is None and "role" in row:
            raise ConfigError(
                f"{where}: a single message, where a record or a list of messages should be: put the messages of a "
                f"conversation into one record, or read {name} as texts with --column {name}"
            )
        if not isinstance(value, str | None):
            raise ConfigError(f"{where}: {name} is a {type(value).__name__}, not text. Name another with --column")
        return Document(where, value or "", columns=(name,))
    for asked, answered in _PAIRS.items():
        if asked in row and answered in row:
            return _pair(row, asked, answered, where)
    pairs = (f"{asked} and {answered}" for asked, answered in _PAIRS.items())
    raise ConfigError(
        f"{where}: none of its columns ({_names(row)}) is known to hold text ({', '.join(_TEXTS)}) or a conversation "
        f"({'; '.join([', '.join(_CONVERSATIONS), *pairs])}). Name the column with --column"
    )


def _conversation(row: Mapping[str, Any], column: str, messages: list[Message], where: str, *more: str) -> Document:
    """A conversation, with the system prompt and the tools that its row may have. `more`: other columns of it."""
    system, tools = row.get("system") or "", row.get("tools") or ()
    if not isinstance(system, str):
        raise ConfigError(f"{where}: system is a {type(system).__name__}, not text")
    if system and messages and messages[0]["role"] in ("system", "developer"):
        if messages[0]["content"] != system:
            raise ConfigError(f"{where}: has a system message and another one in the column system: leave out one")
    elif system and messages:
        messages = [{"role": "system", "content": system}, *messages]
    listed = _listed(tools)
    if listed is None:
        what = "not JSON" if isinstance(tools, str) else f"a {type(tools).__name__}"
        raise ConfigError(f"{where}: tools is {what}, not a list of tools")
    columns = column, *more, "system", "tools"
    return Document(where, messages=tuple(messages), tools=tuple(listed), columns=columns)


def _messages(turns: Any, column: str, where: str) -> list[Message]:
    """The messages in a column."""
    listed = _listed(turns)
    if listed is None:
        raise ConfigError(f"{where}: {column} is a {type(turns).__name__}, not a list of messages")
    return [_message(turn, f"{where}: {column}[{number}]") for number, turn in enumerate(listed)]


def _listed(value: Any) -> list[Any] | None:
    """A list, which may be JSON, as in tables. None for anything else."""
    if isinstance(value, str):
        value = json.loads(value) if value.lstrip()[:1] == "[" and _is_json(value.encode()) else None
    return list(value) if isinstance(value, list | tuple) else None


def _message(turn: Any, where: str) -> Message:
    """A message with role and content. ShareGPT's names are translated."""
    if not isinstance(turn, Mapping):
        raise ConfigError(f"{where} is a {type(turn).__name__}, not a message with role and content")
    message = {key: value for key, value in turn.items() if value is not None}
    if "from" in message and "value" in message:
        message = {"role": message.pop("from"), "content": message.pop("value"), **message}
    role = message.get("role")
    if not isinstance(role, str):
        raise ConfigError(f"{where} has no role: a message has role and content, or from and value")
    if "function_call" in (role, *message):
        raise ConfigError(f"{where} has a function_call: give an assistant's message with tool_calls")
    calls = message.get("tool_calls", [])
    if not isinstance(calls, list | tuple) or not all(isinstance(_function(call), Mapping) for call in calls):
        raise ConfigError(f"{where} has tool_calls that are not a list of objects with a function")
    message["role"] = _ROLES.get(role.lower(), role)
    message["content"] = _content(message.get("content", ""), where)
    if not _trained(message, where):
        message["train"] = False
    return message


def _function(call: Any) -> Any:
    """The function of a tool call, which may be the call itself."""
    return call.get("function", call) if isinstance(call, Mapping) else None


def _content(content: Any, where: str) -> str:
    """The text of a message. Parts of text are joined."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise ConfigError(f"{where} has a {type(content).__name__} as content")
    texts = []
    for part in content:
        text = part.get("text") if isinstance(part, Mapping) and part.get("type", "text") == "text" else part
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise ConfigError(
                f"{where} has content of type {kind}: only text can be trained on. Leave such messages out"
            )
        texts.append(text)
    return "".join(texts)


def _trained(message: Message, where: str) -> bool:
    """Whether a message is to be trained on. Removes what says so."""
    trained = True
    for name in _WEIGHTS:
        if name not in message:
            continue
        value = message.pop(name)
        if not isinstance(value, bool | int | float) or value not in (0, 1):
            raise ConfigError(f"{where} has the {name} {value!r}: a message is counted (1, true) or not (0, false)")
        if value is True and message["role"] != "assistant":
            raise ConfigError(
                f"{where} has the {name} {value} and the role {message['role']!r}: the loss counts what assistants "
                f"write. Leave {name} out"
            )
        trained &= bool(value)
    return trained


def _pair(row: Mapping[str, Any], asked: str, answered: str, where: str) -> Document:
    """A question with its answer: each a text, or for TRL's prompt and completion, a list of messages. Of what was said
    before the answer, nothing is trained."""
    question, answer, more = row[asked], row[answered], row.get("input") or ""
    if asked == "prompt" and (_listed(question) is not None or _listed(answer) is not None):
        before = _messages(question, asked, where)
        before = [{**said, "train": False} if said["role"] == "assistant" else said for said in before]
        return _conversation(row, asked, [*before, *_messages(answer, answered, where)], where, answered)
    alpaca = asked == "instruction"
    history = _listed(row.get("history") or ()) if alpaca else []
    if history is None or any(not isinstance(turn, list | tuple) or len(turn) != 2 for turn in history):
        raise ConfigError(f"{where}: history must be a list of pairs, each of an instruction and an output")
    parts = [question, answer, *(more if alpaca else "",), *chain(*history)]
    if not all(isinstance(part, str) for part in parts):
        raise ConfigError(f"{where}: {asked}, {answered}{', input and history' * alpaca} must be text")
    if alpaca and more:
        question = f"{question}\n\n{more}"
    messages: list[Message] = []
    for said, answered_so in (*history, (question, answer)):
        messages += [{"role": "user", "content": said}, {"role": "assistant", "content": answered_so}]
    return _conversation(row, asked, messages, where, answered, *("input", "history") * alpaca)


def opened(path: Path) -> Any:
    """Open a file to read bytes. Decompresses it if its name says that it is compressed.

    Raises OSError for text in UTF-16. Reading raises it if the file is damaged or cut short.
    """
    file = _unpacked(path)
    if file.peek(2)[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
        file.close()
        raise OSError(errno.EILSEQ, "it is UTF-16: convert it, as with iconv -f UTF-16 -t UTF-8")
    return file


def _unpacked(path: Path) -> io.BufferedReader:
    kind = path.suffix.lower()
    if kind not in _COMPRESSED:
        return path.open("rb")
    if kind not in (".zst", ".lz4"):
        return io.BufferedReader(_Unpacked({".gz": gzip, ".bz2": bz2, ".xz": lzma}[kind].open(path)))
    pyarrow = needed("pyarrow", f"{path} needs pyarrow to be unpacked: pip install 'pagoda-train[train]'")
    packed = pyarrow.OSFile(str(path))
    return io.BufferedReader(_Unpacked(pyarrow.CompressedInputStream(packed, {".zst": "zstd", ".lz4": "lz4"}[kind])))


class _Unpacked(io.RawIOBase):
    """A compressed file, whose every error is an OSError."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            content = self._file.read(len(buffer))
        except Exception as error:  # each format has its own errors
            raise OSError(f"it cannot be unpacked, or is cut short: {error}") from error
        buffer[: len(content)] = content
        return len(content)

    def close(self) -> None:
        self._file.close()
        super().close()


def suffix(path: Path) -> str:
    """The suffix that names a file's format, without the suffix of its compression."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in _COMPRESSED:
        suffixes.pop()
    return suffixes[-1] if suffixes else ""


def _check_unicode(document: Document) -> None:
    """Raises ConfigError if a text cannot be encoded. JSON may write one half of a surrogate pair."""
    try:
        document.text.encode()
        json.dumps([document.messages, document.tools], ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError as error:
        half = error.object[error.start]
        raise ConfigError(f"{document.where}: not Unicode text: {half!r} is half of a surrogate pair") from error


def _names(row: Mapping[str, Any]) -> str:
    names = [str(name) for name in row]
    return ", ".join(names[:_MOST_LISTED]) + (", ..." if len(names) > _MOST_LISTED else "")
