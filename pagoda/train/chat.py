"""Turns conversations into tokens with the tokenizer's chat template. The loss counts what assistants write.

What an assistant writes, its *turn*, is a part of the text that the template gives for the whole conversation:

- If the template has generation markers (`{% generation %}`), it is what they enclose. If TRL is installed and has a
  training variant of the template, which has markers, that variant is used, as TRL trains with it.
- Otherwise it is what the template adds to a conversation that ends with this message: all that comes after the earlier
  messages and the generation prompt. Some templates write a turn differently once others follow: Qwen3's leaves out its
  reasoning. The model does not write such a turn, so the loss does not count it.

A turn ends with a token that tells the model to stop. If a template without markers writes none, the token that begins
the next message takes its place, or at the end of the conversation the end-of-sequence token.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from pagoda.errors import ConfigError
from pagoda.train.records import Document, Message, is_empty
from pagoda.train.seen import Seen

_ASSISTANT = "assistant"
_REASONING = ("reasoning_content", "thinking", "reasoning")
"""The names under which transformers gives a template what an assistant thinks."""
_REWRITTEN = (
    "Not counted: {count:,} turns of assistants, which the chat template writes differently once others follow. To "
    "train them, split conversations so that each ends with such a turn, or put generation markers into "
    "chat_template.jinja"
)
_ENDED = (
    "Added to {count:,} conversations: the tokenizer's end-of-sequence token, because the chat template writes "
    "nothing after their last turn"
)
_ENDLESS = (
    "No end: after {count:,} turns of assistants, the loss counts no token that lets the model learn to stop. Let "
    "chat_template.jinja write one, within the generation markers if it has any"
)

Span = tuple[int, int]
"""A part of a text: its first character, and the one after its last."""


def trl_version() -> str | None:
    """The version of the installed TRL, or None. Templates, and so tokens, may differ between versions."""
    try:
        return version("trl")
    except PackageNotFoundError:
        return None


@dataclass(frozen=True)
class _Chat:
    """A conversation as a template gets it."""

    where: str
    messages: list[Message]
    tools: list[Any] | None

    def with_content(self, index: int, content: str) -> list[Message]:
        """The messages, with other content in one of them."""
        message = {**self.messages[index], "content": content}
        if isinstance(self.messages[index]["content"], list):
            message = _with_parts(message)
        return [*self.messages[:index], message, *self.messages[index + 1 :]]


class ChatTemplate:
    """A tokenizer's chat template."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        own = tokenizer.chat_template
        self._own: str | None = own.get("default") if isinstance(own, dict) else own
        self._template: str | None = None
        """The template of conversations, once it is chosen."""
        self._marked = False
        """Whether the template has generation markers."""
        self._ways: dict[Any, Callable[[Message], Message]] = {}
        """Form of a conversation -> the function that prepares its messages for the template."""
        self._uses: dict[tuple[str, str], bool] = {}
        """Role and key of messages -> whether the template uses it."""
        self._added = tokenizer.added_tokens_decoder
        self._ends = {*tokenizer.all_special_ids, *(id_ for id_, token in self._added.items() if token.special)}
        """Ids of the tokens that end a turn."""

    def encode(self, document: Document, seen: Seen) -> npt.NDArray[np.int32]:
        """A conversation's tokens, int32 [N]: id for tokens that an assistant has written, ~id for all others. `seen`
        gets the keys of messages that the template does not use, and remarks.

        Raises ConfigError if there is no template, or if the template refuses the conversation, leaves out a part of it
        or does not show who wrote what.
        """
        if self._template is None:
            self._choose(document.where)
        chat = self._as_written(document)
        seen.ignored.update(sorted(self._unused(chat)))
        trained = [m["role"] == _ASSISTANT and m.get("train", True) for m in document.messages]
        text, marked = self._render(chat, chat.messages)
        if self._marked:
            spans: Iterable[Span] = self._marked_turns(chat, trained, text, marked)
        else:
            spans = self._turns(chat, trained, text, seen.remarks)
        return self._tokens(document.where, text, spans, seen.remarks)

    def prompt(self, messages: list[Message]) -> list[int]:
        """The ids of a conversation that an assistant will continue.

        Raises ConfigError if there is no template, or if it refuses the conversation.
        """
        if self._template is None:
            self._choose("the prompt")
        text, _ = self._render(_Chat("the prompt", messages, None), messages, prompt=True)
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def ends(self) -> set[int]:
        """The ids of the tokens that the template writes after an assistant's turn, or of the one that begins the next
        message. Empty if there are none."""
        if not self._own:
            return set()
        turns = enumerate(("user", _ASSISTANT, "user"))
        messages: list[Message] = [{"role": role, "content": _stand_in(number)} for number, role in turns]
        try:
            texts = [self._render(_Chat("", messages, None), messages[:count])[0] for count in (2, 3)]
        except ConfigError:
            return set()
        for text, most in zip(texts, (None, 1), strict=True):
            after = text.partition(_stand_in(1))[2].partition(_stand_in(2))[0]
            ids = self._tokenizer(after, add_special_tokens=False)["input_ids"]
            if found := [id_ for id_ in ids if id_ in self._added][:most]:
                return {*found}
        return set()

    def _choose(self, where: str) -> None:
        """Decide which template to use."""
        if not self._own:
            raise ConfigError(
                f"{where} is a conversation, and the tokenizer has no chat template: put a chat_template.jinja next "
                "to it (that of the model's instruct version), or give plain text"
            )
        self._ends |= self.ends()
        marked = _has_markers(where, self._own)
        variant = None if marked else self._variant()
        self._template, self._marked = variant or self._own, marked or variant is not None

    def _variant(self) -> str | None:
        """TRL's training variant of the template, or None."""
        if trl_version() is None:
            return None
        from trl.chat_template_utils import get_training_chat_template

        try:
            variant: str | None = get_training_chat_template(self._tokenizer)
        except Exception:  # a template that it does not know; it also tries the template, which may raise anything
            return None
        return variant

    def _render(self, chat: _Chat, messages: list[Message], prompt: bool = False) -> tuple[str, list[Span]]:
        """What the template writes, and which parts of it are between generation markers. Without a generation prompt
        that was not asked for."""
        text, marked = self._written(chat, messages, prompt)
        return (text if prompt or self._marked else text.removesuffix(self._unasked)), marked

    @cached_property
    def _unasked(self) -> str:
        """The generation prompt that the template writes after every conversation, as that of the first Llama 3 does.
        Empty if it writes one only where it is asked for."""
        user, assistant = ({"role": role, "content": _stand_in(at)} for at, role in enumerate(("user", _ASSISTANT)))
        chat = _Chat("", [user], None)
        try:
            plain, asked, whole = (
                self._written(chat, messages, prompt)[0]
                for messages, prompt in (([user], False), ([user], True), ([user, assistant], False))
            )
            before, _, after = whole.partition(_stand_in(1))
            found = self._tokenizer(after, add_special_tokens=False, return_offsets_mapping=True)
        except (ConfigError, NotImplementedError):  # `encode` refuses them
            return ""
        if plain != asked or before.rstrip() != plain.rstrip():
            return ""
        # The first added token ends the turn.
        places = zip(found["input_ids"], found["offset_mapping"], strict=True)
        end = next((stop for id_, (_, stop) in places if id_ in self._added), len(after))
        rest = after[end:].lstrip()
        return rest if plain.endswith(rest) else ""

    def _written(self, chat: _Chat, messages: list[Message], prompt: bool) -> tuple[str, list[Span]]:
        """What the template writes, and which parts of it are between generation markers."""
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            texts, marked = render_jinja_template(
                [messages],
                tools=chat.tools,
                chat_template=self._template or self._own,
                return_assistant_tokens_mask=self._marked,
                add_generation_prompt=prompt,
                **self._tokenizer.special_tokens_map,
            )
        except Exception as error:  # templates raise errors of their own, and of Jinja
            raise ConfigError(f"{chat.where}: the tokenizer's chat template refuses this: {error}") from error
        return texts[0], marked[0] if self._marked else []

    def _as_written(self, document: Document) -> _Chat:
        """The conversation in the first of three forms in which the template writes all of it: with the arguments of
        tool calls as objects, as they were read, or with content as a list of parts.

        Raises ConfigError if it writes none of them.
        """
        messages = [{name: part for name, part in m.items() if name != "train"} for m in document.messages]
        tools = list(document.tools) or None
        form = bool(tools), *((m["role"], *(n for n in m if m[n]), len(m.get("tool_calls", ()))) for m in messages)
        chat = _Chat(document.where, messages, tools)
        if form not in self._ways:
            self._ways[form] = self._way(chat)
        return _Chat(document.where, [self._ways[form](message) for message in messages], tools)

    def _way(self, chat: _Chat) -> Callable[[Message], Message]:
        """How to prepare the messages of a conversation. Raises as `_as_written`."""
        problems: list[tuple[int, ConfigError]] = []
        for way in (_with_objects, _as_read, _with_parts):
            try:
                left_out = self._left_out(chat, way)
            except ConfigError as error:
                problems.append((len(chat.messages), error))
                continue
            if not left_out:
                return way
            problem = ConfigError(
                f"{chat.where}: the tokenizer's chat template leaves out {left_out[0]}: leave it out of the data, "
                "or put a chat_template.jinja that writes it next to the tokenizer"
            )
            problems.append((len(left_out), problem))
        raise min(problems, key=lambda problem: problem[0])[1]

    def _unused(self, chat: _Chat) -> set[str]:
        """Keys of messages without which the template writes the same. The first conversation with messages of this
        role and key shows it for all."""
        always = ("role", "content")
        pairs = {(m["role"], k) for m in chat.messages for k in m if k not in always and not is_empty(m[k])}
        for role, key in pairs - self._uses.keys():
            without = [{k: v for k, v in m.items() if (m["role"], k) != (role, key)} for m in chat.messages]
            try:
                self._uses[role, key] = self._render(chat, without) != self._render(chat, chat.messages)
            except ConfigError:
                self._uses[role, key] = True
        return {f"messages[].{key} (of role {role})" for role, key in pairs if not self._uses[role, key]}

    def _left_out(self, chat: _Chat, way: Callable[[Message], Message]) -> list[str]:
        """The parts of a conversation that the template does not write."""
        replaced: list[Message] = []
        parts: dict[str, str] = {}
        for index, message in enumerate(chat.messages):
            # Templates leave out the reasoning of earlier turns, which the model does not see again.
            thoughts = [name for name in _REASONING if message.get(name)] if message is chat.messages[-1] else []
            message = {**message}
            for name in ("content", *thoughts[:1]):
                if message.get(name):
                    message[name] = _stand_in(len(parts))
                    parts[message[name]] = f"messages[{index}].{name}, of role {message['role']!r}"
            if calls := message.get("tool_calls"):
                names = [_stand_in(len(parts) + at) for at in range(len(calls))]
                message["tool_calls"] = [_renamed(call, name) for call, name in zip(calls, names, strict=True)]
                parts |= dict.fromkeys(names, f"messages[{index}].tool_calls")
            replaced.append(way(message))
        text, _ = self._render(chat, replaced)
        left_out = [part for name, part in parts.items() if name not in text]
        if chat.tools and text == self._render(_Chat(chat.where, [], None), replaced)[0]:
            left_out.append("the tools")
        return left_out

    def _marked_turns(self, chat: _Chat, trained: list[bool], text: str, marked: list[Span]) -> list[Span]:
        """What is between generation markers, without the messages that are not to be trained."""
        for index, message in enumerate(chat.messages):
            if message["role"] != _ASSISTANT or trained[index]:
                continue
            before = self._render(chat, chat.messages[:index])[0] if index else ""
            until = self._render(chat, chat.messages[: index + 1])[0]
            start, stop = len(before), len(until) - 1
            if not (text.startswith(before) and text.startswith(until)):
                _, found, after = self._around(chat, index, len(chat.messages))
                if not (found and text.endswith(after)):
                    raise self._unclear(chat, index)
                start = stop = len(text) - len(after)
            if message["content"] and not any(first <= stop and last >= start for first, last in marked):
                raise self._unclear(chat, index)
            marked = [(first, last) for first, last in marked if first > stop or last < start]
        return marked if any(trained) else []

    def _turns(self, chat: _Chat, trained: list[bool], text: str, remarks: Counter[str]) -> Iterator[Span]:
        """What the assistants write whose messages are to be trained."""
        for index, wanted in enumerate(trained):
            if not wanted:
                continue
            last = index == len(chat.messages) - 1
            alone = text if last else self._render(chat, chat.messages[: index + 1])[0]
            start = self._start(chat, index, alone)
            if text.startswith(alone):
                yield start, len(alone)
            elif (span := self._found_again(chat, index, alone[start:], text)) is not None:
                yield span
            else:
                remarks[_REWRITTEN] += 1

    def _start(self, chat: _Chat, index: int, alone: str) -> int:
        """Where a turn starts in `alone`, the text of a conversation that ends with it: after the generation prompt, or
        at its content if the template writes no such prompt."""
        if index:
            try:
                before = self._render(chat, chat.messages[:index], prompt=True)[0]
            except ConfigError:  # the template may refuse a beginning
                before = alone + "."
            if alone.startswith(before):
                return len(before)
        beginning, found, _ = self._around(chat, index, index + 1)
        if not found:
            raise self._unclear(chat, index)
        return common_prefix_length(alone, beginning)

    def _found_again(self, chat: _Chat, index: int, turn: str, text: str) -> Span | None:
        """Where a turn is in the text of a conversation that continues, or None if the template writes it differently
        there. `turn` is what it writes if the conversation ends with the turn."""
        _, found, at_end = self._around(chat, index, index + 1)
        _, again, after = self._around(chat, index, len(chat.messages))
        if not (found and again and turn.endswith(at_end) and text.endswith(after)):
            raise self._unclear(chat, index)
        own, stop = turn[: len(turn) - len(at_end)], len(text) - len(after)
        if not text[:stop].endswith(own):
            return None
        # It includes the tokens that follow it both here and at the end of a conversation.
        ends, goes_on = (self._tokenizer(each, add_special_tokens=False) for each in (at_end, after))
        same = common_prefix_length(ends["input_ids"], goes_on["input_ids"])
        return stop - len(own), stop + (ends.token_to_chars(same - 1).end if same else 0)

    def _around(self, chat: _Chat, index: int, count: int) -> tuple[str, str, str]:
        """What the template writes before the content of a message, the stand-in for the content, and what it writes
        after it, given the first `count` messages. The stand-in is empty unless the template writes it exactly once."""
        text, _ = self._render(chat, chat.with_content(index, _stand_in(0))[:count])
        return text.partition(_stand_in(0)) if text.count(_stand_in(0)) == 1 else (text, "", "")

    def _unclear(self, chat: _Chat, index: int) -> ConfigError:
        return ConfigError(
            f"{chat.where} is a conversation, and the tokenizer's chat template does not say which part of it an "
            f"assistant has written in messages[{index}]. Put {{% generation %}} and {{% endgeneration %}} around that "
            "in chat_template.jinja"
            + ", or install trl, which has such variants of many templates"
            * (not trl_version())
        )

    def _tokens(self, where: str, text: str, spans: Iterable[Span], remarks: Counter[str]) -> npt.NDArray[np.int32]:
        """The tokens of a text, of which the loss counts those that have a character in one of the spans."""
        try:
            found = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        except NotImplementedError as error:
            raise ConfigError(
                f"{where} is a conversation, and {type(self._tokenizer).__name__} does not say which characters a "
                "token stands for: give a tokenizer with a tokenizer.json"
            ) from error
        ids, places = list(found["input_ids"]), np.array(found["offset_mapping"], dtype=np.int64).reshape(-1, 2)
        blank = [not text[start:stop].strip() for start, stop in places]
        counted = np.zeros(len(ids), dtype=bool)
        for start, stop in spans:
            inside = np.flatnonzero((places[:, 1] > start) & (places[:, 0] < stop))
            if not len(inside):
                continue
            counted[inside[0] : inside[-1] + 1] = True
            end, after = int(inside[-1]), int(inside[-1]) + 1
            while end > inside[0] and blank[end]:
                end -= 1
            while after < len(blank) and blank[after]:
                after += 1
            if ids[end] in self._ends:
                continue
            if not self._marked and after < len(blank) and ids[after] in self._added:
                counted[end : after + 1] = True
            elif not self._marked and after == len(blank) and self._tokenizer.eos_token_id is not None:
                ids, counted = [*ids, self._tokenizer.eos_token_id], np.append(counted, True)
                remarks[_ENDED] += 1
            else:
                remarks[_ENDLESS] += 1
        return np.where(counted, ids, np.invert(ids)).astype(np.int32)


def _has_markers(where: str, template: str) -> bool:
    """Whether a template has generation markers, in any spacing."""
    from jinja2 import Environment, TemplateSyntaxError

    try:
        parts = [(kind, value) for _, kind, value in Environment().lex(template) if kind != "whitespace"]
    except TemplateSyntaxError as error:
        raise ConfigError(f"{where}: the tokenizer's chat template is not valid Jinja: {error}") from error
    return any(before[0] == "block_begin" and value == "generation" for before, (_, value) in pairwise(parts))


def common_prefix_length(one: Sequence[Any], other: Sequence[Any]) -> int:
    """How many elements at the beginning are equal."""
    differing = (at for at, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1])
    return next(differing, min(len(one), len(other)))


def _stand_in(number: int) -> str:
    """A text that stands for a part of a conversation. Nothing else contains it, and templates do not change it."""
    return f"pagodastandin{number}x"


def _renamed(call: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The call with another function name."""
    return {**call, "function": {**call["function"], "name": name}} if "function" in call else {**call, "name": name}


def _as_read(message: Message) -> Message:
    return message


def _with_parts(message: Message) -> Message:
    """Content as a list of parts, as some models for images and text expect it."""
    return {**message, "content": [{"type": "text", "text": message["content"]}]}


def _with_objects(message: Message) -> Message:
    """The arguments of tool calls as objects, which most templates expect and turn into JSON themselves."""
    calls = []
    for call in message.get("tool_calls", ()):
        function = call.get("function", call)
        try:
            arguments = json.loads(function.get("arguments", ""))
        except (TypeError, ValueError, RecursionError):  # an object already, or not JSON
            calls.append(call)
            continue
        function = {**function, "arguments": arguments}
        calls.append({**call, "function": function} if "function" in call else function)
    return {**message, "tool_calls": calls} if calls else message
