"""Every key of a record is read, refused by name, or reported as ignored."""

import json
from pathlib import Path
from typing import Any

import pytest

from pagoda.config.reading import DataSettings
from pagoda.errors import ConfigError
from pagoda.train.seen import Seen
from pagoda.train.tokenizer import Tokenizer
from pagoda.train.tokens import open_tokens
from tests.text_files import CHATML, read, tokenizer, write_lines

USER, YES = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}
SYSTEM = {"role": "system", "content": "Be brief."}
TALK = [USER, YES]
TOOLS = [{"type": "function", "function": {"name": "look"}}]
CHAT, ASKED, PROMPTED = (
    {"messages": TALK},
    {"instruction": "hi", "output": "yes"},
    {"prompt": [USER], "completion": [YES]},
)
QUESTION, TEXT = {"question": "hi", "answer": "yes"}, {"text": "hi"}
LEFT_OUT: list[Any] = []

KEYS: dict[str, tuple[Any, list[Any] | str]] = {
    "weight 1 of messages": ({**CHAT, "weight": 1}, TALK),
    "weight 0 of messages": ({**CHAT, "weight": 0}, LEFT_OUT),
    "train false of messages": ({**CHAT, "train": False}, LEFT_OUT),
    "weight 0 of a text": ({**TEXT, "weight": 0.0}, LEFT_OUT),
    "train of a text": ({**TEXT, "train": True}, "hi"),
    "train false of a question": ({**QUESTION, "train": "False"}, LEFT_OUT),
    "half a weight of a record": ({**CHAT, "weight": 0.5}, "!has the weight 0.5: it is counted"),
    "a weight in words": ({**TEXT, "train": "perhaps"}, "!has the train 'perhaps': it is counted"),
    "weight 0 of a message": ({"messages": [USER, {**YES, "weight": 0}]}, [USER, {**YES, "train": False}]),
    "train false of a message": ({"messages": [USER, {**YES, "train": False}]}, [USER, {**YES, "train": False}]),
    "half a weight of a message": ({"messages": [{**YES, "weight": 0.5}]}, "!has the weight 0.5: it is counted"),
    "system of messages": ({**CHAT, "system": "Be brief."}, [SYSTEM, *TALK]),
    "system of an instruction": ({**ASKED, "system": "Be brief."}, [SYSTEM, *TALK]),
    "system of a prompt": ({**PROMPTED, "system": "Be brief."}, [SYSTEM, *TALK]),
    "tools of messages": ({**CHAT, "tools": TOOLS}, TALK),
    "tools of a prompt": ({**PROMPTED, "tools": json.dumps(TOOLS)}, TALK),
    "tool_calls of a message": ({"messages": [{**YES, "tool_calls": TOOLS}]}, [{**YES, "tool_calls": TOOLS}]),
    "history of an instruction": ({**ASKED, "history": [["hi", "yes"]]}, [*TALK, *TALK]),
    "history of a question": ({**QUESTION, "history": [["hi", "yes"]]}, [*TALK, *TALK]),
    "no history": ({**CHAT, "history": [], "tools": "[]", "system": None, "tool_calls": None}, TALK),
    "input": ({**ASKED, "input": "there"}, [{**USER, "content": "hi\n\nthere"}, YES]),
}  # fmt: skip


@pytest.mark.parametrize("key", KEYS)
def test_a_key_with_a_meaning_is_honoured_or_refused_by_name(key: str, tmp_path: Path) -> None:
    record, meant = KEYS[key]
    path, seen = tmp_path / "a.json", Seen()
    path.write_text(json.dumps([record]))
    if isinstance(meant, str) and meant.startswith("!"):
        with pytest.raises(ConfigError, match=meant[1:]):
            read(path, seen)
        return
    found = read(path, seen)
    assert [each.text or [*each.messages] for each in found] == ([meant] if meant else [])
    assert sum(seen.left_out.values()) == (not meant)
    assert not seen.ignored
    assert [*found[0].tools] == (TOOLS if "tools of" in key else []) if found else True


def test_every_key_that_nothing_reads_is_reported(tmp_path: Path) -> None:
    tokenizer(CHATML).save_pretrained(tmp_path)
    rows: list[Any] = [
        {**CHAT, "id": 1, "text": "hi", "empty": None},
        {"messages": [{**USER, "name": "Bob"}, {**YES, "reasoning": "", "end": False}], "id": 2},
        {"messages": [{**USER, "content": [{"type": "text", "text": "hi", "cache": 1}]}, YES]},
        {**QUESTION, "input": "there"},
        {**TEXT, "content": "hi", "instruction": "hi", "loss": 0.3, "system": "Be brief."},
        {**CHAT, "functions": TOOLS, "tool_calls": TOOLS, "history": [["hi", "yes"]]},
        [USER, {**YES, "end": True}],
    ]
    tokens = open_tokens(str(write_lines(tmp_path / "a.jsonl", rows)), Tokenizer(tmp_path), tmp_path / "cache")
    ignored = {
        "id": 2, "text": 1, "messages[].name (of role user)": 1, "messages[].end (of role assistant)": 2,
        "input": 1,
        "content": 1, "instruction": 1, "loss": 1, "system": 1,
        "functions": 1, "tool_calls": 1, "history": 1,
    }  # fmt: skip
    assert tokens.about.seen.ignored == ignored
    assert tokens.about.seen.formats == {"messages": 5, "question and answer": 1, "text": 1}
    (line,) = [line for line in tokens.about.seen.lines() if line.startswith("Keys that are ignored: ")]
    assert all(f"{name} {count}" in line for name, count in ignored.items())


def test_a_key_that_the_template_uses_is_not_reported(tmp_path: Path) -> None:
    tokenizer(CHATML.replace("{{ message.role }}", "{{ message.name or message.role }}")).save_pretrained(tmp_path)
    data = write_lines(tmp_path / "a.jsonl", [{"messages": [{**USER, "name": "Bob"}, YES]}])
    assert not open_tokens(str(data), Tokenizer(tmp_path), tmp_path / "cache").about.seen.ignored


def test_what_is_left_out_is_counted_with_its_reason_and_the_names_of_unknown_roles(tmp_path: Path) -> None:
    tokenizer(CHATML).save_pretrained(tmp_path)
    other = [{**USER, "role": "narrator"}, USER]
    rows = [
        CHAT,
        *[{**CHAT, "weight": 0}] * 4,
        {"messages": other},
        {"messages": [USER, {**YES, "train": 0}]},
        TEXT | {"text": ""},
    ]
    tokens = open_tokens(str(write_lines(tmp_path / "a.jsonl", rows)), Tokenizer(tmp_path), tmp_path / "cache")
    lines = "\n".join(tokens.about.seen.lines())
    assert "Left out 4 records: its weight says so" in lines
    assert "line 4; ...)" in lines
    assert "line 5" not in lines
    assert "Left out 1 record: no assistant speaks. Its roles: narrator, user" in lines
    assert "Left out 1 record: no message of its assistant is to be trained on" in lines
    assert "Left out 1 record: it is empty" in lines
    assert "Unknown: narrator" in lines
    assert tokens.about.documents == 1


BAD = [b"{", b'{"body": 1}', b'{"messages": [{"content": "a"}]}', b'{"messages": [{"x": 1}, {"content": "a"}]}', b"[1]"]


def test_records_that_cannot_be_read_are_left_out_on_request_with_their_lines(tmp_path: Path) -> None:
    refuses = "{% if messages[0].role != 'user' %}{{ raise_exception('ask first') }}{% endif %}"
    tokenizer(refuses + CHATML).save_pretrained(tmp_path)
    lines = [*BAD, json.dumps(CHAT).encode(), json.dumps({"messages": [YES]}).encode(), b"\xff"]
    data = tmp_path / "a.jsonl"
    data.write_bytes(b"\n".join(lines))
    model = Tokenizer(tmp_path)
    with pytest.raises(ConfigError, match="line 1: not JSON"):
        open_tokens(str(data), model, tmp_path / "cache")
    tokens = open_tokens(str(data), model, tmp_path / "cache", DataSettings(skip_bad=True))
    assert (tokens.about.documents, sum(tokens.about.seen.left_out.values())) == (1, 7)
    shown = "\n".join(tokens.about.seen.lines())
    for reason in (
        "not JSON",
        "none of its columns (body)",
        "has no role",
        "a list where a record",
        "template refuses",
    ):
        assert reason in shown
    assert "Left out 2 records: messages[0] has no role" in shown
    assert "a.jsonl, line 3; " in shown
