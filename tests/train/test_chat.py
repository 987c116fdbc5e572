"""Conversations have the tokens and the loss that transformers and TRL give them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trl
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from trl.chat_template_utils import get_training_chat_template, has_generation_markers

from pagoda.errors import ConfigError
from pagoda.train.chat import ChatTemplate
from pagoda.train.records import Document
from pagoda.train.seen import Seen
from tests.text_files import CHATML, MARKED, chats, tokenizer

TEMPLATES = Path(trl.__file__).parent / "chat_templates"


def with_template(name: str) -> PreTrainedTokenizerFast:
    own = {"chatml": CHATML, "marked": MARKED}
    made = tokenizer(own.get(name) or (TEMPLATES / f"{name}.jinja").read_text())
    made.add_special_tokens({"bos_token": "<s>"})
    return made


def mine(made: PreTrainedTokenizerFast, messages: list[dict[str, str]]) -> tuple[list[int], list[int]]:
    ids = ChatTemplate(made).encode(Document("a line", messages=tuple(messages)), Seen())
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


HEAD = "{% for m in messages %}<|im_start|>{{ m.role }}\n"
PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
REWRITES = (  # as Qwen3's of April 2025: thoughts are in the last turn only, where there is always a place for them
    HEAD + "{% if m.role == 'assistant' %}{% set parts = m.content.split('</think>') %}{% if loop.last %}<think>"
    "{{ parts[0].split('<think>')[-1] if parts|length > 1 }}</think>{% endif %}{{ parts[-1] }}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}" + PROMPT
)
NEXT_ROLE = HEAD + "{{ m.content }}{% endfor %}" + PROMPT  # as GLM-4's
PLAIN = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }} {% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
LAST_END = (  # as GPT-OSS's: another token ends the last turn
    HEAD + "{{ m.content }}{{ '<|endoftext|>' if loop.last else '<|im_end|>' }}{% endfor %}" + PROMPT
)
UNASKED = HEAD + "{{ m.content }}<|im_end|>\n{% endfor %}{{ '<|im_start|>assistant\n' }}"  # as Llama 3's first one
PREFILLED = (  # as DeepSeek-R1's: what a prompt begins is not written afterwards
    HEAD + "{{ m.content | trim }}<|im_end|>{% endfor %}" + PROMPT.replace("{% endif %}", "<think>{% endif %}")
)
PARTS = (  # as SmolVLM's: content is a list of parts
    HEAD
    + "{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}<|im_end|>{% endfor %}"
    + PROMPT
)
CALLS = (
    "{{ tools | tojson if tools }}" + HEAD + "{{ m.reasoning_content }}{{ m.content }}{% for c in m.tool_calls %}"
    "{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}<|im_end|>{% endfor %}" + PROMPT
)


def talk(*contents: str, first: str = "user") -> list[dict[str, Any]]:
    """Messages of a user and an assistant in turn."""
    roles = ["user", "assistant"] if first == "user" else ["assistant", "user"]
    return [{"role": roles[at % 2], "content": content} for at, content in enumerate(contents)]


def counted(template: str, messages: list[dict[str, Any]], **more: Any) -> tuple[list[str], list[str]]:
    """The parts of a conversation that the loss counts, and the remarks."""
    made = tokenizer(template)
    seen = Seen()
    ids = ChatTemplate(made).encode(Document("a line", messages=tuple(messages), **more), seen)
    edges = np.flatnonzero(np.diff(ids >= 0)) + 1
    parts = [made.decode(part) for part in np.split(ids, edges) if part[0] >= 0]
    return parts, [remark.partition(":")[0] for remark in seen.remarks]


TWO = talk("hi", "yes", "and", "no")
THOUGHTS = talk("hi", "<think>a</think>yes", "and", "<think>b</think>no")
COUNTED: dict[str, tuple[str, list[dict[str, Any]], list[str], list[str]]] = {
    "chatml": (CHATML, TWO, ["yes<|im_end|>\n", "no<|im_end|>\n"], []),
    "two turns of an assistant": (
        CHATML, [*TWO[:2], *TWO[1:2]], ["yes<|im_end|>\n", "yes<|im_end|>\n"], []
    ),
    "an empty turn": (CHATML, talk("hi", "", "and", "no"), ["<|im_end|>\n", "no<|im_end|>\n"], []),
    "white space around a turn": (CHATML, talk("hi", " yes\n"), [" yes\n<|im_end|>\n"], []),
    "an assistant begins": (
        CHATML, talk("yes", "and", "no", first="assistant"), ["yes<|im_end|>\n", "no<|im_end|>\n"], []
    ),
    "the next role ends a turn": (NEXT_ROLE, TWO, ["yes<|im_start|>", "no<|endoftext|>"], ["Added to {count"]),
    "nothing ends a turn": (PLAIN, TWO, [" yes ", " no <|endoftext|>"], ["No end", "Added to {count"]),
    "the last turn ends otherwise": (LAST_END, TWO, ["yes<|im_end|>", "no<|endoftext|>"], []),
    "the prompt is not in the conversation": (PREFILLED, TWO, ["yes<|im_end|>", "no<|im_end|>"], []),
    "a prompt that is always there": (UNASKED, TWO, ["yes<|im_end|>\n", "no<|im_end|>\n"], []),
    "such a prompt, and two turns": (UNASKED, [*TWO[:2], TWO[3]], ["yes<|im_end|>\n", "no<|im_end|>\n"], []),
    "a list of parts": (PARTS, TWO, ["yes<|im_end|>", "no<|im_end|>"], []),
    "earlier turns are rewritten": (REWRITES, THOUGHTS, ["<think>b</think>no<|im_end|>\n"], ["Not counted"]),
    "rewritten, with a turn of the same words before": (
        REWRITES, talk("no", "no", "no", "no"), ["<think></think>no<|im_end|>\n"], ["Not counted"]
    ),
    "a user speaks last": (LAST_END, TWO[:3], ["yes<|im_end|>"], []),
    "emoji": (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
        "{% else %}{{ m.content }}{% endif %}<|im_end|>{% endfor %}",
        talk("hi", "yes 👩‍👧"), ["yes 👩‍👧"], ["No end"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", COUNTED)
def test_the_loss_counts_what_an_assistant_writes_with_the_token_that_ends_it(case: str) -> None:
    template, messages, parts, remarks = COUNTED[case]
    assert counted(template, messages) == (parts, remarks)


def test_a_conversation_has_no_prompt_that_was_not_asked_for() -> None:
    chat = ChatTemplate(tokenizer(UNASKED))
    asked = tokenizer().decode(chat.prompt(TWO[:3]))
    ids = chat.encode(Document("a line", messages=tuple(TWO)), Seen())
    whole = tokenizer().decode(np.where(ids < 0, ~ids, ids))
    assert (asked.count("<|im_start|>"), whole.count("<|im_start|>")) == (4, 4)
    assert whole.startswith(asked)


def test_a_model_stops_where_the_template_ends_a_turn() -> None:
    names = (CHATML, MARKED, UNASKED, NEXT_ROLE, LAST_END, PLAIN, None)
    found = [ChatTemplate(tokenizer(name)).ends() for name in names]
    end, start, turn = tokenizer().convert_tokens_to_ids(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    assert found == [{turn}, {turn}, {turn}, {start}, {end}, set(), set()]


@pytest.mark.parametrize("left", ["{%", "{%-", "{%+", "{% \n"])
@pytest.mark.parametrize("right", ["%}", "-%}", "\n %}"])
def test_generation_markers_are_seen_in_any_spacing(left: str, right: str) -> None:
    marked = (
        f"{{# {{% generation %}} #}}{HEAD}{left}generation{right}{{{{ m.content }}}}{{% endgeneration %}}{{% endfor %}}"
    )
    assert counted(marked, talk("hi", "yes")) == (["hi", "yes"], ["No end"])


def test_a_turn_counts_although_the_tokenizer_joins_or_drops_its_last_character() -> None:
    raw = Tokenizer(models.WordLevel({"<|im_end|>": 0, "yes": 1, "hi": 2, "user": 3, "assistant": 4}, unk_token="hi"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|im_end|>")
    made.chat_template = "{% for m in messages %}{{ m.role }} {{ m.content }} <|im_end|> \n{% endfor %}"
    made.chat_template += "{% if add_generation_prompt %}assistant {% endif %}"
    assert mine(made, talk("hi", "yes", "hi", "yes ")) == ([3, 2, 0, 4, 1, 0] * 2, [0, 0, 0, 0, 1, 1] * 2)


@pytest.mark.parametrize("template", [CHATML, MARKED, LAST_END, REWRITES, PARTS])
def test_a_message_that_is_not_to_be_trained_is_not_counted(template: str) -> None:
    messages = talk("hi", "yes", "and", "no")
    messages[1]["train"] = False
    (only,), remarks = counted(template, messages)
    assert "no<|" in only
    assert not remarks
    messages[3]["train"] = False
    assert counted(template, messages) == ([], [])


def test_a_tool_call_is_written_with_its_arguments_as_an_object_and_its_tools() -> None:
    call = {"type": "function", "function": {"name": "look", "arguments": '{"where": "Rome"}'}}
    messages = [*talk("hi", ""), {"role": "tool", "content": "sun"}, {"role": "assistant", "content": "sunny"}]
    messages[1]["tool_calls"] = [call]
    parts, _ = counted(CALLS, messages, tools=({"name": "look"},))
    assert parts == ['look{"where": "Rome"}<|im_end|>', "sunny<|im_end|>"]


def test_what_the_template_does_not_use_is_reported() -> None:
    more = {"tool_calls": [{"function": {"name": "look", "arguments": {}}}], "reasoning_content": "as"}
    messages = ({"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes", **more})
    document = Document("a line", messages=messages, tools=({"name": "look"},))
    for template, unused in (
        (CHATML, {f"messages[].{key} (of role assistant)" for key in more} | {"tools"}),
        (CALLS, set()),
    ):
        seen = Seen()
        ChatTemplate(tokenizer(template)).encode(document, seen)
        assert seen.ignored.keys() == unused


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "has no chat template: put a chat_template.jinja"),
        (CHATML.replace("message.content", "message.content + message.content"), "does not say which part.*generation"),
        (MARKED + "{{ raise_exception('no such role') }}", "a line: .*refuses this: no such role"),
        ("{{ 'a }}", "a line: .*refuses this: .*"),
        (CALLS.replace("{{ m.content }}", "{{ m.content if m.role == 'user' }}"), "does not say which part"),
    ],
)
def test_a_template_that_cannot_be_used_is_refused_with_the_remedy(template: str | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        mine(tokenizer(template), talk("yes", "and", "no", first="assistant"))
