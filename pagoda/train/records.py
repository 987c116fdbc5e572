"""Files of records. A record is a text or a conversation.

A record is a JSON object, or a row of CSV, Parquet or Arrow. Its columns show which it is: a text, or a conversation
(`messages`, ShareGPT's `conversations`, or a question with its answer, as Alpaca's `instruction`, `input`, `output` and
`history`). In JSON, a list of messages is a conversation too. In tables, lists may be JSON. What a record says about
its training is honoured; keys that nothing reads are counted, and never left out in silence. Records that cannot be
read are refused, or left out on request, with file, line and reason.
"""

import bz2
import codecs
import csv
import errno
import gzip
import io
import json
import lzma
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from reprlib import repr as short
from typing import Any, TypeAlias

from pagoda.errors import ConfigError, needed
from pagoda.train.seen import ROLES, Seen

RECORDS = {".arrow": "arrow", ".feather": "arrow", ".parquet": "parquet", ".jsonl": "json", ".ndjson": "json"}
"""Formats that always hold records. A folder that contains any of them is a data set."""
TABLES = {".json": "json", ".csv": "csv", ".tsv": "csv"}
"""Formats that also occur among source code. They hold records if they are named, or make up most of a folder."""
_COMPRESSED = frozenset({".gz", ".bz2", ".xz", ".zst", ".lz4"})
_OTHER_UNICODE = {
    "UTF-32": (codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE),
    "UTF-16": (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE),
}
"""Encodings -> how their files begin. UTF-32 is first, because one of its marks begins like one of UTF-16."""
_MOST_LISTED = 12
_BATCH_ROWS = 1024
"""Rows of Parquet that are read at a time."""
_TEXTS = ("text", "content")
_CONVERSATIONS = ("messages", "conversations", "conversation")
_PAIRS = {"instruction": "output", "prompt": "completion", "question": "answer"}
"""Columns with a question -> with its answer."""
_ROLES = {
    **{role: role for role in ROLES},
    **{"human": "user", "gpt": "assistant", "chatgpt": "assistant", "observation": "tool"},
    **dict.fromkeys(("model", "bot", "chatbot", "ai"), "assistant"),
}
"""Names of roles in data sets, in lower case -> the names in chat templates."""
_WEIGHTS = ("weight", "train", "training", "loss")
"""Names under which messages, and with the first two also records, say whether they are to be trained on."""
_NOT_COUNTED, _COUNTED = ("0", "0.0", "false"), ("1", "1.0", "true")
"""What they say, in lower case. In tables, all is text."""
_OF_CONVERSATIONS = ("system", "tools", "history", "tool_calls")
"""Columns of conversations, which texts do not have."""
_MISPLACED = {
    "history": "it belongs to an instruction, a prompt or a question that is text. Put its turns into the messages",
    "tool_calls": "they belong to a message of an assistant. Put them there",
    "functions": "give tools, a list of objects with a function",
}
"""Columns that a conversation does not have -> what to do with them."""

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


def read_records(
    path: Path, seen: Seen, read: Callable[[int], None], column: str | None = None, skip_bad: bool = False
) -> Iterator[Document]:
    """The documents of a file of records.

    Args:
      seen: gets the counts of what was read and left out.
      read: is called with the number of bytes read since its last call.
      column: has the text or the conversation; by default it is the first column with a known name.
      skip_bad: whether records that cannot be read are left out.

    Raises ConfigError for a line or row that cannot be read, with the reason.
    """
    kind, size, done = (RECORDS | TABLES)[suffix(path)], path.stat().st_size, 0
    rows = _json_rows(path) if kind == "json" else _csv_rows(path) if kind == "csv" else _columnar_rows(path, kind)
    for where, row, position in rows:
        try:
            document = _document(row, where, column, seen)
        except ConfigError as error:
            if not skip_bad:
                raise ConfigError(f"{error}. Or leave out what cannot be read, with --skip-bad") from error
            seen.leave_out(error, where)
        else:
            if document is not None:
                yield document
        if done < position <= size:
            read(position - done)
            done = position
    read(size - done)


def _json_rows(path: Path) -> Iterator[tuple[str, Any, int]]:
    """Each row, or why it cannot be read, with its place and the bytes read so far. The file has lines of JSON, or one
    array, which is read whole. An array of messages is one row."""
    with opened(path) as file:
        lines = (line for line in file if line.strip())
        first, second = next(lines, b"").removeprefix(codecs.BOM_UTF8).strip(), next(lines, None)
    # Lines may be arrays, too. The first line of an array over several lines does not end it.
    if first[:1] == b"[" and (second is None or not _is_json(first)):
        try:
            with opened(path) as file:
                entries = _parsed(file.read())
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
                row = _parsed(line)
            except (ValueError, RecursionError) as error:
                remedy = "Each line must be one record" + ", or the file one list of records" * (second is not None)
                row = ConfigError(f"{where}: not JSON: {error}. {remedy}")
            yield where, row, position


def _parsed(text: bytes | str) -> Any:
    """A value in JSON. Raises ValueError, also for an object that has a key twice, of which Python would drop one."""
    return json.loads(text, object_pairs_hook=_of_pairs)


def _of_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError(f"an object has the key {_twice(key for key, _ in pairs)!r} twice")
    return found


def _twice(names: Iterable[str]) -> str | None:
    """A name that occurs more than once, or None."""
    return next((name for name, count in Counter(names).items() if count > 1), None)


def _is_json(text: bytes | str) -> bool:
    try:
        _parsed(text)
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
            if (name := _twice(name for name in reader.fieldnames or () if name)) is not None:
                raise ConfigError(f"{path}, line 1: two columns have the name {name!r}: rename one")
            for row in reader:
                where = f"{path}, line {reader.line_num}"
                found: Any = row
                if None in row or None in row.values():
                    fields = len(reader.fieldnames or ())
                    found = ConfigError(f"{where}: not as many fields as the {fields} of the header")
                yield where, found, 0
        except (csv.Error, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}, line {reader.line_num + 1}: not CSV: {error}") from error


def _columnar_rows(path: Path, kind: str) -> Iterator[tuple[str, Any, int]]:
    datasets = needed("datasets", f"{path} is {kind}, which needs datasets: pip install 'pagoda-train[train]'")
    try:
        # By default, a batch is the first row group, which may be large, or empty and then refused.
        how = {"batch_size": _BATCH_ROWS} if kind == "parquet" else {}
        rows = datasets.load_dataset(kind, data_files=[str(path)], split="train", streaming=True, **how)
        for number, row in enumerate(rows, 1):
            yield f"{path}, row {number}", row, 0
    except Exception as error:  # pyarrow and datasets have many kinds of errors for damaged files
        said = str(error.__cause__ or error).splitlines()[:1] or [type(error).__name__]
        raise ConfigError(f"{path} cannot be read as {kind}: {said[0]}") from error


def _document(row: Any, where: str, column: str | None, seen: Seen) -> Document | None:
    """The document in a row, or None if it is left out. Counts what is in the row.

    Raises ConfigError if no column is known, or if a column has neither text nor messages.
    """
    if isinstance(row, ConfigError):
        raise row
    if isinstance(row, list) and row and all(map(_is_message, row)):
        row = {"messages": row}
    if not isinstance(row, Mapping):
        raise ConfigError(f"{where}: a {type(row).__name__} where a record with columns should be")
    left = {**row}  # what is read is taken out
    weights = [name for name in _WEIGHTS[:2] if name != column and not is_empty(row.get(name))]
    counted = [_is_counted(left.pop(name), f"{where} has the {name}", "record") for name in weights]
    if not all(counted):
        seen.leave_out(f"its {' and '.join(weights)} says so", where)
        return None
    name, document = _read(left, where, column)
    if not (document.text or document.messages):
        seen.leave_out("it is empty", where)
        return None
    _check_unicode(document)
    seen.formats[name] += 1
    seen.roles.update(message["role"] for message in document.messages)
    seen.ignored.update(str(name) for name, value in left.items() if not is_empty(value))
    return document


def is_empty(value: Any) -> bool:
    """Whether a column has no value in a row. In tables, lists may be JSON."""
    return value is None or value in ("", "[]") or (isinstance(value, list | tuple | dict) and not value)


def _read(row: dict[str, Any], where: str, column: str | None) -> tuple[str, Document]:
    """The column or columns that make a row's document, and the document. Takes what it reads out of the row."""
    if column is not None and column not in row:
        raise ConfigError(f"{where}: no column {column!r}; it has {_names(row)}. Correct --column")
    conversations = [name for name in _CONVERSATIONS if _listed(row.get(name)) is not None]
    known = [*([] if column is None else [column]), *conversations, *(name for name in _TEXTS if name in row)]
    if known:
        name, value = known[0], row[known[0]]
        if name in _CONVERSATIONS or (name == column and isinstance(value, list | tuple)):
            return name, _conversation(row, _messages(row, name, where), where)
        if column is None:
            _check_is_text(row, name, where)
        if not isinstance(value, str | None):
            raise ConfigError(f"{where}: {name} is a {type(value).__name__}, not text. Name another with --column")
        del row[name]
        return name, Document(where, value or "")
    for asked, answered in _PAIRS.items():
        if asked in row and answered in row:
            return f"{asked} and {answered}", _pair(row, asked, answered, where)
    pairs = (f"{asked} and {answered}" for asked, answered in _PAIRS.items())
    raise ConfigError(
        f"{where}: none of its columns ({_names(row)}) is known to hold text ({', '.join(_TEXTS)}) or a conversation "
        f"({'; '.join([', '.join(_CONVERSATIONS), *pairs])}). Name the column with --column"
    )


def _check_is_text(row: Mapping[str, Any], name: str, where: str) -> None:
    """Raises ConfigError if it is not clear that a row with a text in column `name` is nothing but a text."""
    if "role" in row:
        raise ConfigError(
            f"{where}: a single message, where a record or a list of messages should be: put the messages of a "
            f"conversation into one record, or read {name} as texts with --column {name}"
        )
    if more := [each for each in _OF_CONVERSATIONS if not is_empty(row.get(each))]:
        raise ConfigError(
            f"{where}: {name} is a text, which has no {' or '.join(more)}: give messages, or read {name} alone with "
            f"--column {name}"
        )


def _conversation(row: dict[str, Any], messages: list[Message], where: str) -> Document:
    """A conversation, with the system prompt and the tools that its row may have."""
    system, tools = row.pop("system", None) or "", row.pop("tools", None) or ()
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
    for name, remedy in _MISPLACED.items():
        if not is_empty(row.get(name)):
            raise ConfigError(f"{where} has the column {name}: {remedy}")
    return Document(where, messages=tuple(messages), tools=tuple(listed))


def _messages(row: dict[str, Any], column: str, where: str) -> list[Message]:
    """The messages in a column. Takes them out of the row, but for keys of parts of contents, which nothing reads."""
    turns = row.pop(column)
    listed = _listed(turns)
    if listed is None:
        raise ConfigError(f"{where}: {column} is a {type(turns).__name__}, not a list of messages")
    messages = [_message(turn, f"{where}: {column}[{number}]") for number, turn in enumerate(listed)]
    contents = [turn["content"] for turn in listed if isinstance(turn.get("content"), list | tuple)]
    keys = (key for content in contents for part in content if isinstance(part, Mapping) for key in part)
    row |= {f"{column}[].content[].{key}": True for key in keys if key not in ("type", "text")}
    return messages


def _listed(value: Any) -> list[Any] | None:
    """A list, which may be JSON, as in tables. None for anything else."""
    if isinstance(value, str):
        value = _parsed(value) if value.lstrip()[:1] == "[" and _is_json(value) else None
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
        trained &= _is_counted(value, f"{where} has the {name}", "message")
        if value is True and message["role"] != "assistant":
            raise ConfigError(
                f"{where} has the {name} {value} and the role {message['role']!r}: the loss counts what assistants "
                f"write. Leave {name} out"
            )
    return trained


def _is_counted(value: Any, what: str, kind: str) -> bool:
    """Whether a message or a record with this weight is to be trained on. Raises ConfigError if that is unclear."""
    word = str(value).strip().lower()
    if word not in (*_COUNTED, *_NOT_COUNTED):
        raise ConfigError(f"{what} {short(value)}: a {kind} is counted (1, true) or not (0, false)")
    return word in _COUNTED


def _pair(row: dict[str, Any], asked: str, answered: str, where: str) -> Document:
    """A question with its answer: each a text, or for TRL's prompt and completion, a list of messages. The loss counts
    no message of a prompt."""
    if asked == "prompt" and (_listed(row[asked]) is not None or _listed(row[answered]) is not None):
        before = _messages(row, asked, where)
        before = [{**message, "train": False} if message["role"] == "assistant" else message for message in before]
        return _conversation(row, [*before, *_messages(row, answered, where)], where)
    question, answer = row.pop(asked), row.pop(answered)
    more = row.pop("input", None) or "" if asked == "instruction" else ""
    history = _listed(row.pop("history", None) or ())
    if history is None or any(not isinstance(turn, list | tuple) or len(turn) != 2 for turn in history):
        raise ConfigError(f"{where}: history must be a list of pairs, each of {asked} and {answered}")
    parts = [(asked, question), (answered, answer), ("input", more), *(("history", part) for part in chain(*history))]
    for name, part in parts:
        if not isinstance(part, str):
            raise ConfigError(f"{where}: {name} is {short(part)}, not text")
    if more:
        question = f"{question}\n\n{more}"
    messages: list[Message] = []
    for user, assistant in (*history, (question, answer)):
        messages += [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]
    return _conversation(row, messages, where)


def opened(path: Path) -> Any:
    """Open a file to read bytes. Decompresses it if its name says that it is compressed.

    Raises OSError for text in UTF-16 or UTF-32. Reading raises it if the file is damaged or cut short.
    """
    file = _unpacked(path)
    beginning = file.peek(4)[:4]
    for name, marks in _OTHER_UNICODE.items():
        if beginning.startswith(marks):
            file.close()
            raise OSError(errno.EILSEQ, f"it is {name}: convert it, as with iconv -f {name} -t UTF-8")
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
