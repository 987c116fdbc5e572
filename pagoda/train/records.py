"""Turns a row of a data set into a document: a text, a prompt with its completion, or a conversation.

The row's columns show which it is. What a row says about its training is honoured; columns that nothing reads are
counted. In tables, lists may be JSON.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from reprlib import repr as short
from typing import Any, TypeAlias, TypeGuard

from pagoda.errors import ConfigError
from pagoda.train.seen import ROLES, Seen, first

_TEXTS = ("text", "content", "txt", "xml")
_CONVERSATIONS = ("messages", "conversations", "conversation")
_PAIRS = {"prompt": "completion", "instruction": "output", "question": "answer"}
"""Columns with a question -> with its answer."""
_KNOWN = f"{', '.join(_TEXTS)}; {', '.join(_CONVERSATIONS)}; {'; '.join(map(' and '.join, _PAIRS.items()))}"
_ROLES = {
    **{role: role for role in ROLES},
    **{"human": "user", "gpt": "assistant", "chatgpt": "assistant", "observation": "tool"},
    **dict.fromkeys(("model", "bot", "chatbot", "ai"), "assistant"),
}
"""Names of roles in data sets, in lower case -> the names in chat templates."""
_WEIGHTS = ("weight", "train", "training", "loss")
"""Names under which messages, and with the first two also rows, say whether they are to be trained on."""
_TRAINED = {"0": False, "0.0": False, "false": False, "1": True, "1.0": True, "true": True}

Message: TypeAlias = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Document:
    """A text, a piece of a long one, a prompt with its completion, or a conversation."""

    where: str
    """File and line, or data set and row, for error messages."""
    text: str = ""
    prompt: str = ""
    """The text before `text`, which the loss does not count."""
    messages: tuple[Message, ...] = ()
    """With role, content (a text), `train` (False if the loss is not to count it), and what else a template may use."""
    tools: tuple[Any, ...] = ()
    begins: bool = True
    """Whether a text begins here. False for later pieces of a long text."""
    ends: bool = True


def read_row(row: Any, where: str, column: str | None, seen: Seen) -> Document | None:
    """The document in a row, or None if it is left out. `column` has the text or the conversation; by default it is the
    first one with a known name. `seen` gets the counts of what is in the row.

    Raises ConfigError, without the place, if no column is known, or if one has neither text nor messages.
    """
    if are_messages(row):
        row = {"messages": row}
    if not isinstance(row, Mapping):
        raise ConfigError(f"a {type(row).__name__} where a record with columns should be")
    left = {str(name): value for name, value in row.items() if not is_empty(value)}  # what is read is taken out
    weights = [name for name in _WEIGHTS[:2] if name in left and name != column]
    if not all(_is_trained(left.pop(name), f"it has the {name}") for name in weights):
        seen.leave_out(f"its {' and '.join(weights)} says so", where)
        return None
    names = _columns(left, row, column)
    if names is None:
        seen.leave_out("it is empty", where)
        return None
    value = left.pop(names[0])
    if len(names) == 2:
        parts = _pair(left, names[0], value, left.pop(names[1]))
    elif isinstance(value, str) and names[0] not in _CONVERSATIONS:
        if column is None and "role" in left:
            raise ConfigError("a single message, where a record or a list of messages should be")
        parts = {"text": value}
    elif (turns := _listed(value)) is not None:
        parts = _conversation(left, _messages(names[0], turns))
    else:
        kind = type(value).__name__
        raise ConfigError(f"{names[0]} is of type {kind}, not text. Name another with --dataset-text-field")
    try:  # JSON may have one half of a surrogate pair
        json.dumps(parts, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"not Unicode text: {error.object[error.start]!r} is half of a surrogate pair") from error
    document = Document(where, **parts)
    seen.formats[" and ".join(names)] += 1
    seen.roles.update(message["role"] for message in document.messages)
    seen.ignored.update(left.keys())
    return document


def are_messages(value: Any) -> TypeGuard[list[Any]]:
    """Whether a value is a list of messages."""
    keys = {"role", "from"}
    return isinstance(value, list) and bool(value) and all(isinstance(v, Mapping) and keys & {*v} for v in value)


def is_empty(value: Any) -> bool:
    """Whether a column has no value in a row. In tables, lists may be JSON."""
    return value is None or value in ("", "[]") or (isinstance(value, list | tuple | dict) and not value)


def _columns(left: Mapping[str, Any], row: Mapping[str, Any], column: str | None) -> tuple[str, ...] | None:
    """The column, or the two columns, that make the document of a row, whose values that are not empty are `left`. None
    if the ones that are known are empty. Raises ConfigError if none is known."""
    if column is not None:
        known: list[tuple[str, ...]] = [(column,)]
    else:
        lists = [name for name in _CONVERSATIONS if is_empty(row.get(name)) or _listed(row[name]) is not None]
        known = [*((name,) for name in (*lists, *_TEXTS)), *_PAIRS.items()]
    here = [names for names in known if {*names} <= row.keys()]
    if not here:
        columns = first([*map(str, row)], between=", ")
        if column is not None:
            raise ConfigError(f"no column {column!r}; it has {columns}. Correct --dataset-text-field")
        if unread := [name for name in _CONVERSATIONS if name in row]:
            raise ConfigError(f"{unread[0]} is neither a list of messages nor the JSON of one")
        why = f"none of its columns ({columns}) is known to hold text or a conversation ({_KNOWN})"
        raise ConfigError(f"{why}. Name the column with --dataset-text-field")
    return next((names for names in here if {*names} <= left.keys()), None)


def _pair(left: dict[str, Any], asked: str, question: Any, answer: Any) -> dict[str, Any]:
    """A question with its answer. TRL's prompt and completion are texts, or lists of messages; of both, the loss counts
    the completion alone. All others are what a user and an assistant say."""
    before, after = _listed(question), _listed(answer)
    if asked == "prompt" and are_messages(before) and are_messages(after):
        given = [{**m, "train": False} if m["role"] == "assistant" else m for m in _messages(asked, before)]
        return _conversation(left, [*given, *_messages(_PAIRS[asked], after)])
    more = left.pop("input", "") if asked == "instruction" else ""
    history = _listed(left.pop("history", ())) if asked != "prompt" else []
    if history is None or any(not isinstance(turn, list | tuple) or len(turn) != 2 for turn in history):
        raise ConfigError("history must be a list of pairs of texts")
    turns = [*chain(*history), question, more, answer]
    if bad := [part for part in turns if not isinstance(part, str)]:
        raise ConfigError(f"{asked} and {_PAIRS[asked]} have {short(bad[0])}, not text")
    if asked == "prompt":
        return {"prompt": question, "text": answer}
    turns[-3:] = [f"{question}\n\n{more}" if more else question, answer]
    roles = ("user", "assistant")
    return _conversation(left, [{"role": roles[at % 2], "content": turn} for at, turn in enumerate(turns)])


def _conversation(left: dict[str, Any], messages: list[Message]) -> dict[str, Any]:
    """A conversation, with the system prompt and the tools that its row may have."""
    tools = _listed(left.pop("tools", ()))
    if tools is None:
        raise ConfigError("tools is not a list of tools, nor its JSON")
    if isinstance(left.get("system"), str) and messages[0]["role"] not in ("system", "developer"):
        messages = [{"role": "system", "content": left.pop("system")}, *messages]
    return {"messages": tuple(messages), "tools": tuple(tools)}


def _messages(column: str, turns: list[Any]) -> list[Message]:
    return [_message(turn, f"{column}[{number}]") for number, turn in enumerate(turns)]


def _message(turn: Any, which: str) -> Message:
    """A message with role and content. ShareGPT's names are translated."""
    if not isinstance(turn, Mapping):
        raise ConfigError(f"{which} is a {type(turn).__name__}, not a message with role and content")
    message = {key: value for key, value in turn.items() if value is not None}
    if "from" in message and "value" in message:
        message = {"role": message.pop("from"), "content": message.pop("value"), **message}
    role, calls = message.get("role"), message.get("tool_calls", [])
    if not isinstance(role, str):
        raise ConfigError(f"{which} has no role: a message has role and content, or from and value")
    if not isinstance(calls, list | tuple) or not all(isinstance(call, Mapping) for call in calls):
        raise ConfigError(f"{which} has tool_calls that are not a list of objects with a function")
    weights = [_is_trained(message.pop(name), f"{which} has the {name}") for name in _WEIGHTS if name in message]
    message |= {"role": _ROLES.get(role.lower(), role), "content": _content(message.get("content", ""), which)}
    return message if all(weights) else {**message, "train": False}


def _content(content: Any, which: str) -> str:
    """The text of a message. Parts of text are joined."""
    parts = content if isinstance(content, list | tuple) else [content]
    texts: list[Any] = [part.get("text") if isinstance(part, Mapping) else part for part in parts]
    if any(not isinstance(text, str) for text in texts):
        raise ConfigError(f"{which} has content that is no text: {short(content)}. Leave such messages out")
    return "".join(texts)


def _is_trained(value: Any, what: str) -> bool:
    """Whether a message or a row with this weight is to be trained on. Raises ConfigError if that is unclear."""
    if (word := str(value).strip().lower()) not in _TRAINED:
        raise ConfigError(f"{what} {short(value)}: it is counted (1, true) or not (0, false)")
    return _TRAINED[word]


def _listed(value: Any) -> list[Any] | None:
    """A list, which may be JSON, as in tables. None for anything else."""
    if isinstance(value, str) and value.lstrip()[:1] == "[":
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return None
    return list(value) if isinstance(value, list | tuple) else None
