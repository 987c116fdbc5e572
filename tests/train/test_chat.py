"""Conversations have the tokens and the loss that transformers and TRL give them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trl
from transformers import PreTrainedTokenizerFast
from trl.chat_template_utils import get_training_chat_template, has_generation_markers

from pagoda.errors import ConfigError
from pagoda.train.chat import ChatTemplate
from pagoda.train.records import Document
from tests.text_files import CHATML, MARKED, chats, tokenizer

TEMPLATES = Path(trl.__file__).parent / "chat_templates"


def with_template(name: str) -> PreTrainedTokenizerFast:
    own = {"chatml": CHATML, "marked": MARKED}
    made = tokenizer(own.get(name) or (TEMPLATES / f"{name}.jinja").read_text())
    made.add_special_tokens({"bos_token": "<s>"})
    return made


def mine(made: PreTrainedTokenizerFast, messages: list[dict[str, str]]) -> tuple[list[int], list[int]]:
    ids = ChatTemplate(made).encode(Document("a line", messages=tuple(messages)))
    return np.where(ids < 0, ~ids, ids).tolist(), (ids >= 0).astype(int).tolist()


def trls(made: PreTrainedTokenizerFast, messages: list[dict[str, str]]) -> tuple[list[int], list[int]]:
    """As `SFTTrainer` prepares a data set with `assistant_only_loss`."""
    template = None if has_generation_markers(made.chat_template) else get_training_chat_template(made)
    found: Any = made.apply_chat_template(
        messages, chat_template=template, return_dict=True, return_assistant_tokens_mask=True
    )
    return found["input_ids"], found["assistant_masks"]


@pytest.mark.parametrize("name", ["marked", "qwen2_5", "llama3", "gemma", "phi3", "qwen3"])
def test_tokens_and_loss_are_those_of_trl(name: str) -> None:
    made = with_template(name)
    for chat in chats(9):
        messages = [turn for turn in chat if turn["role"] != "system" or name != "gemma"]
        expected = trls(made, messages)
        assert 0 < sum(expected[1]) < len(expected[1])
        assert mine(made, messages) == expected


def test_a_template_without_markers_has_the_loss_of_the_same_one_with_them() -> None:
    plain, marked = with_template("chatml"), with_template("marked")
    for chat in chats(6):
        assert mine(plain, chat) == mine(marked, chat)


NO_TURNS = "{% for message in messages %}{{ loop.revindex }}{{ message.content }}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "has no chat template: put a chat_template.jinja"),
        (NO_TURNS, "does not say which part.*generation"),
        (MARKED + "{{ raise_exception('no such role') }}", "a line: .*refuses this: no such role"),
    ],
)
def test_a_template_that_cannot_be_used_is_refused_with_the_remedy(template: str | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        mine(tokenizer(template), chats(1)[0])
