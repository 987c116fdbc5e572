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
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np
import numpy.typing as npt

from pagoda.errors import ConfigError
from pagoda.train.records import Document, Message, is_empty
from pagoda.train.seen import Seen

_ASSISTANT = "assistant"
_MARKER = re.compile(r"{%[-+]?\s*generation\s*[-+]?%}")
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
    tools: list[Any] | None = None

    def first(self, count: int) -> "_Chat":
        """Its first messages alone."""
        return replace(self, messages=self.messages[:count])

    def with_content(self, index: int, content: str) -> "_Chat":
        """The conversation, with other content in one of its messages."""
        message = {**self.messages[index], "content": content}
        return replace(self, messages=[*self.messages[:index], message, *self.messages[index + 1 :]])


class ChatTemplate:
    """A tokenizer's chat template."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        own = tokenizer.chat_template
        self._own: str | None = own.get("default") if isinstance(own, dict) else own
        self._template: str | None = None
        """The template of conversations, once it is chosen."""
        self._marked = False
        """Whether it has generation markers."""
        self._uses: dict[tuple[str, str], bool] = {}
        """Role and key of messages, or "" and "tools" -> whether the template uses it."""
        self._added = tokenizer.added_tokens_decoder
        self._ends = {*tokenizer.all_special_ids, *(id_ for id_, token in self._added.items() if token.special)}
        """Ids of the tokens that end a turn."""

    def encode(self, document: Document, seen: Seen) -> npt.NDArray[np.int32]:
        """A conversation's tokens, int32 [N]: id for tokens that an assistant has written, ~id for all others. `seen`
        gets what the template does not use, and remarks.

        Raises ConfigError if there is no template, or if the template refuses the conversation, leaves out what is said
        or does not show who wrote what.
        """
        self._choose(document.where)
        messages = [{k: v for k, v in _with_objects(m).items() if k != "train"} for m in document.messages]
        chat = _Chat(document.where, messages, list(document.tools) or None)
        seen.ignored.update(sorted(self._unused(chat)))
        trained = [m["role"] == _ASSISTANT and m.get("train", True) for m in document.messages]
        text, marked = self._render(chat)
        if self._marked:
            spans: Iterable[Span] = self._marked_turns(chat, trained, marked)
        else:
            spans = self._turns(chat, trained, text, seen.remarks)
        return self._tokens(document.where, text, spans, seen.remarks)

    def prompt(self, messages: list[Message]) -> list[int]:
        """The ids of a conversation that an assistant will continue.

        Raises ConfigError if there is no template, or if it refuses the conversation.
        """
        self._choose("the prompt")
        text, _ = self._render(_Chat("the prompt", messages), prompt=True)
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def ends(self) -> set[int]:
        """The ids of the tokens that the template writes after an assistant's turn, or of the one that begins the next
        message. Empty if there are none."""
        if not self._own:
            return set()
        try:
            texts = [self._render(_PROBE.first(count))[0] for count in (2, 3)]
        except ConfigError:
            return set()
        for text, most in zip(texts, (None, 1), strict=True):
            after = text.partition(_stand_in(1))[2].partition(_stand_in(2))[0]
            ids = self._tokenizer(after, add_special_tokens=False)["input_ids"]
            if found := [id_ for id_ in ids if id_ in self._added][:most]:
                return {*found}
        return set()

    def _choose(self, where: str) -> None:
        """Decide which template to use, and how, unless that is decided."""
        if self._template is not None:
            return
        if not self._own:
            raise ConfigError(
                f"{where} is a conversation, and the tokenizer has no chat template: put a chat_template.jinja next "
                "to it (that of the model's instruct version), or give plain text"
            )
        self._ends |= self.ends()
        marked = _MARKER.search(self._own) is not None
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

    @cached_property
    def _in_parts(self) -> bool:
        """Whether the template takes content as a list of parts, as some models for images and text do."""

        def writes(in_parts: bool) -> bool:
            try:
                text, _ = self._written(_PROBE.first(2), False, in_parts)
            except ConfigError:  # the first conversation shows what is wrong
                return False
            return _stand_in(0) in text and _stand_in(1) in text

        return not writes(False) and writes(True)

    @cached_property
    def _unasked(self) -> str:
        """The generation prompt that the template writes after every conversation, as that of the first Llama 3 does.
        Empty if it writes one only where it is asked for."""
        try:
            plain, asked, whole = (
                self._written(_PROBE.first(count), prompt, self._in_parts)[0]
                for count, prompt in ((1, False), (1, True), (2, False))
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

    def _render(self, chat: _Chat, prompt: bool = False) -> tuple[str, list[Span]]:
        """What the template writes, and which parts of it are between generation markers. Without a generation prompt
        that was not asked for."""
        text, marked = self._written(chat, prompt, self._in_parts)
        return (text if prompt or self._marked else text.removesuffix(self._unasked)), marked

    def _written(self, chat: _Chat, prompt: bool, in_parts: bool) -> tuple[str, list[Span]]:
        """All that the template writes, and which parts of it are between generation markers."""
        from transformers.utils.chat_template_utils import render_jinja_template

        messages = chat.messages
        if in_parts:
            messages = [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in messages]
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

    def _unused(self, chat: _Chat) -> set[str]:
        """Keys of messages, and tools, without which the template writes the same. The first conversation that has one
        shows it for all."""
        always = ("role", "content")
        given = {(m["role"], k) for m in chat.messages for k in m if k not in always and not is_empty(m[k])}
        given |= {("", "tools")} if chat.tools else set()
        for role, key in given - self._uses.keys():
            messages = [{k: v for k, v in m.items() if (m["role"], k) != (role, key)} for m in chat.messages]
            without = _Chat(chat.where, messages, chat.tools if role else None)
            try:
                self._uses[role, key] = self._render(without) != self._render(chat)
            except ConfigError:
                self._uses[role, key] = True
        unused = [pair for pair in given if not self._uses[pair]]
        return {f"messages[].{key} (of role {role})" if role else key for role, key in unused}

    def _marked_turns(self, chat: _Chat, trained: list[bool], marked: list[Span]) -> list[Span]:
        """What is between generation markers, without the messages that are not to be trained."""
        assistants = [index for index, message in enumerate(chat.messages) if message["role"] == _ASSISTANT]
        if all(trained[index] for index in assistants):
            return marked
        if len(marked) != len(assistants):
            raise self._unclear(chat, next(index for index in assistants if not trained[index]))
        return [span for span, index in zip(marked, assistants, strict=True) if trained[index]]

    def _turns(self, chat: _Chat, trained: list[bool], text: str, remarks: Counter[str]) -> Iterator[Span]:
        """What the assistants write whose messages are to be trained."""
        for index, wanted in enumerate(trained):
            if not wanted:
                continue
            last = index == len(chat.messages) - 1
            alone = text if last else self._render(chat.first(index + 1))[0]
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
                before = self._render(chat.first(index), prompt=True)[0]
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
        text, _ = self._render(chat.with_content(index, _stand_in(0)).first(count))
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


def common_prefix_length(one: Sequence[Any], other: Sequence[Any]) -> int:
    """How many elements at the beginning are equal."""
    differing = (at for at, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1])
    return next(differing, min(len(one), len(other)))


def _stand_in(number: int) -> str:
    """A text that stands for a part of a conversation. Nothing else contains it, and templates do not change it."""
    return f"pagodastandin{number}x"


_PROBE = _Chat("", [{"role": role, "content": _stand_in(at)} for at, role in enumerate(("user", _ASSISTANT, "user"))])
"""A conversation that shows what a template does."""


def _with_objects(message: Message) -> Message:
    """The arguments of tool calls as objects, which templates expect and turn into JSON themselves."""
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
