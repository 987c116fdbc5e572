"""Turns conversations into tokens with the tokenizer's chat template. The loss counts assistant turns only.

There are three ways to find out which tokens an assistant has written. All conversations of a run use the same one:

- The template has generation markers (`{% generation %}`). Then transformers reports the tokens between them.
- TRL is installed and has a training variant of the template, which has markers. TRL trains with that variant too.
- The template writes the beginning of a conversation in the same way alone as within the whole. Then an assistant's
  turn is what follows the beginning with its generation prompt.
"""

from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np
import numpy.typing as npt

from pagoda.errors import ConfigError
from pagoda.train.records import Document, Message

_ASSISTANT = "assistant"


def trl_version() -> str | None:
    """The version of the installed TRL, or None. Templates, and so tokens, may differ between versions."""
    try:
        return version("trl")
    except PackageNotFoundError:
        return None


class ChatTemplate:
    """A tokenizer's chat template."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._template: str | None = None
        self._marked: bool | None = None
        """Whether the template has generation markers. None until the first conversation."""

    def encode(self, document: Document) -> npt.NDArray[np.int32]:
        """A conversation's tokens, int32 [N]: id for tokens that an assistant has written, ~id for all others.

        Raises ConfigError if there is no template, or if the template refuses the conversation or does not show who
        wrote what.
        """
        if self._marked is None:
            self._choose(document.where)
        said = list(document.messages), list(document.tools) or None
        try:
            ids, trained = self._by_markers(*said) if self._marked else self._by_turns(document.where, *said)
        except ConfigError:
            raise
        except Exception as error:  # templates raise errors of their own, and of Jinja
            raise ConfigError(f"{document.where}: the tokenizer's chat template refuses this: {error}") from error
        return np.where(np.array(trained, dtype=bool), ids, np.invert(ids)).astype(np.int32)

    def prompt(self, messages: list[Message]) -> list[int]:
        """The ids of a conversation that an assistant will continue.

        Raises ConfigError if there is no template, or if it refuses the conversation.
        """
        if self._marked is None:
            self._choose("the prompt")
        try:
            text = self._written(messages, None, prompt=True)
        except Exception as error:  # templates raise errors of their own, and of Jinja
            raise ConfigError(f"the tokenizer's chat template refuses the prompt: {error}") from error
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def _choose(self, where: str) -> None:
        """Decide how to find out which tokens an assistant has written."""
        template = self._tokenizer.chat_template
        if isinstance(template, dict):
            template = template.get("default")
        if not template:
            raise ConfigError(
                f"{where} is a conversation, and the tokenizer has no chat template: put a chat_template.jinja beside "
                "it (that of the model's instruct version), or give plain text"
            )
        marked = "{% generation" in template or "{%- generation" in template
        variant = None if marked else self._variant()
        self._template, self._marked = variant or template, marked or variant is not None

    def _variant(self) -> str | None:
        """TRL's training variant of the template, or None."""
        if trl_version() is None:
            return None
        from trl.chat_template_utils import get_training_chat_template

        try:
            variant: str | None = get_training_chat_template(self._tokenizer)
        except ValueError:  # a template that it does not know
            return None
        return variant

    def _by_markers(self, messages: list[Any], tools: list[Any] | None) -> tuple[list[int], list[int]]:
        found = self._tokenizer.apply_chat_template(
            messages,
            tools=tools,
            chat_template=self._template,
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        return found["input_ids"], found["assistant_masks"]

    def _by_turns(self, where: str, messages: list[Any], tools: list[Any] | None) -> tuple[list[int], list[bool]]:
        text = self._written(messages, tools)
        spans = []
        for index, message in enumerate(messages):
            if message["role"] != _ASSISTANT:
                continue
            before = self._written(messages[:index], tools, prompt=True)
            until = self._written(messages[: index + 1], tools)
            if not (until.startswith(before) and text.startswith(until)):
                raise ConfigError(
                    f"{where} is a conversation, and the tokenizer's chat template does not say which part of it an "
                    f"assistant has written: it writes messages[{index}] in another way at the end than in the middle. "
                    "Put {% generation %} and {% endgeneration %} around that in chat_template.jinja, or install trl, "
                    "which has such variants of many templates"
                )
            spans.append((len(before), len(until)))
        found = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        trained = np.zeros(len(found["input_ids"]), dtype=bool)
        for start, stop in spans:
            # As in transformers with markers: from the token that has the first character to the one that has the
            # last.
            first, last = found.char_to_token(start), found.char_to_token(stop - 1)
            if first is not None and last is not None:
                trained[first : last + 1] = True
        return found["input_ids"], trained.tolist()

    def _written(self, messages: list[Any], tools: list[Any] | None, prompt: bool = False) -> str:
        written: str = self._tokenizer.apply_chat_template(
            messages, tools=tools, chat_template=self._template, tokenize=False, add_generation_prompt=prompt
        )
        return written
