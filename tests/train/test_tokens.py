"""What is read from files, how it becomes tokens, and what is refused with which line."""

import bz2
import errno
import gzip
import json
import lzma
import os
import resource
import signal
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import xxhash
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from pagoda.config.reading import DataSettings
from pagoda.errors import ConfigError, StorageError
from pagoda.train import tokens as tokens_module
from pagoda.train.records import Document
from pagoda.train.seen import Seen
from pagoda.train.sources import Source, find
from pagoda.train.tokenizer import Tokenizer, open_tokenizer
from pagoda.train.tokens import About, Tokens, open_tokens
from pagoda.train.trainer import RunTrainer
from tests.text_files import CHATML, TEXT, chats, read, text_of, tokenizer, write_lines, write_pretrained
from tests.tiny import tiny_run, trained, write_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("tokenizer")
    tokenizer(CHATML).save_pretrained(directory)
    return Tokenizer(directory)


def documents_of(tokens: Tokens) -> list[list[int]]:
    return [part.tolist() for part in np.split(tokens.ids, tokens.ends[:-1])]


def test_the_standard_library_is_text_of_this_python_without_its_tests() -> None:
    tokens = open_tokens("stdlib")
    assert tokens.about.files > 100
    assert len(tokens) > 1_000_000
    assert "class OrderedDict" in text_of(tokens)


def test_a_folder_is_read_in_order_without_binaries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "one.txt").write_text("zwei ä drei", encoding="utf-8")
    (tmp_path / "a.txt").write_text("eins")
    (tmp_path / "c.bin").write_bytes(b"a\0b" * 100_000)
    (tmp_path / "d.txt").write_bytes(b"caf\xe9")
    (tmp_path / "small.json").write_text("{}")
    (tmp_path / ".hidden").write_text("secret")
    tokens = open_tokens(str(tmp_path))
    assert text_of(tokens) == "eins\nzwei ä drei\n{}"
    assert tokens.about.files == 3
    assert [(Path(path).name, reason) for path, reason in tokens.about.seen.skipped] == [
        ("c.bin", "not UTF-8 text"),
        ("d.txt", "not UTF-8 text"),
    ]
    assert text_of(open_tokens(f"{tmp_path}/*.txt")) == "eins"
    monkeypatch.chdir(tmp_path / "b")
    assert text_of(open_tokens("../a*")) == "eins"
    assert text_of(open_tokens(f"{tmp_path}/.hid*")) == "secret"
    monkeypatch.setattr("pagoda.train.sources._MOST_WHOLE_BYTES", 200_000)
    with pytest.raises(ConfigError, match=r"c\.bin, line 1: not UTF-8 text"):
        read(tmp_path)


def test_texts_end_with_the_tokenizers_own_end_and_a_long_one_has_the_tokens_of_the_whole(
    model: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is read in pieces that end with a line."""
    monkeypatch.setattr("pagoda.train.sources._SMALL_BYTES", 1000)
    monkeypatch.setattr("pagoda.train.sources._BATCH_ROWS", 7)
    long = "\n".join(line.strip() for line in TEXT.splitlines() if line.strip())
    (tmp_path / "a.txt").write_text(TEXT[:500])
    (tmp_path / "b.txt").write_text(long)
    tokens = open_tokens(str(tmp_path), model)
    plain = tokenizer()
    assert documents_of(tokens) == [[*plain(text)["input_ids"], plain.eos_token_id] for text in (TEXT[:500], long)]
    assert tokens.ids.dtype == np.int16


TEXTS = ["first", "", "zweiter Text ä", "third, with a comma\nand a line"]


def write_as(kind: str, folder: Path, rows: list[dict[str, Any]]) -> Path:
    path = folder / f"data.{kind}"
    data = datasets.Dataset.from_list(rows)
    if kind == "jsonl.gz":
        path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))
    elif kind == "jsonl":
        write_lines(path, rows)
    elif kind == "json":
        path.write_text(json.dumps(rows, indent=1))
    elif kind == "arrow":
        data.save_to_disk(folder / "saved")
        return folder / "saved"
    else:
        getattr(data, f"to_{kind}")(path)
    return path


KINDS = ["jsonl", "jsonl.gz", "json", "csv", "parquet", "arrow"]


def found_in(kind: str, folder: Path, rows: list[dict[str, Any]], model: Tokenizer) -> Tokens:
    folder.mkdir(exist_ok=True)
    return open_tokens(str(write_as(kind, folder, rows)), model)


@pytest.mark.parametrize("kind", KINDS)
def test_texts_and_conversations_are_the_same_in_every_format_and_convention(
    kind: str, model: Tokenizer, tmp_path: Path
) -> None:
    rows = [{"id": number, "content": text} for number, text in enumerate(TEXTS)]
    tokens = found_in(kind, tmp_path / "texts", rows, model)
    plain = tokenizer()
    assert documents_of(tokens) == [[*plain(text)["input_ids"], plain.eos_token_id] for text in TEXTS if text]
    assert not tokens.about.chats
    names = {"user": "human", "assistant": "gpt"}
    said = [[turn for turn in chat if turn["role"] != "system"] for chat in chats(6)]
    conventions: list[list[dict[str, Any]]] = [
        [{"messages": chat} for chat in said],
        [{"conversations": [{"from": names[t["role"]], "value": t["content"]} for t in chat]} for chat in said],
    ]
    if kind == "csv":  # has no lists: questions with answers
        two = [chat[:2] for chat in said]
        conventions = [
            [{"instruction": "Add.", "input": user["content"], "output": it["content"]} for user, it in two],
            [{"instruction": f"Add.\n\n{user['content']}", "output": it["content"]} for user, it in two],
        ]
    found = [found_in(kind, tmp_path / str(number), rows, model) for number, rows in enumerate(conventions)]
    assert found[0].about.chats
    assert documents_of(found[0]) == documents_of(found[1])
    assert found[0].about.fingerprint == found[1].about.fingerprint


def quoted(text: str) -> str:
    """A field of CSV."""
    return '"' + text.replace('"', '""') + '"'


def said(user: str, assistant: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]


TALK = said("hi", "yes")
YES = TALK[1]
CONVERSATIONS: dict[str, tuple[str, Any, list[Any]]] = {
    "a list of messages": ("a.json", TALK, [TALK]),
    "lists of messages": ("a.json", [TALK, TALK[::-1]], [TALK, TALK[::-1]]),
    "lines of messages": ("a.jsonl", f"{json.dumps(TALK)}\n{json.dumps(TALK)}\n", [TALK, TALK]),
    "one line of messages": ("a.jsonl", f"{json.dumps(TALK)}\n", [TALK]),
    "parts of text": ("a.json", [{"messages": [{**YES, "content": [{"type": "text", "text": "y"}, "es"]}]}], [[YES]]),
    "ShareGPT's weight": ("a.json", [[{"from": "gpt", "value": "yes", "weight": 0}]], [[{**YES, "train": False}]]),
    "other names of roles": ("a.json", [[{"role": r, "content": "yes"} for r in ("Assistant", "model")]], [[YES, YES]]),
    "to be trained": ("a.json", [[{**YES, "weight": 1.0, "training": True, "name": "x"}]], [[{**YES, "name": "x"}]]),
    "TRL's prompt and completion": ("a.json", [{"prompt": TALK[:1], "completion": [YES]}], [TALK]),
    "said before": ("a.json", [{"prompt": TALK, "completion": [YES]}], [[TALK[0], {**YES, "train": False}, YES]]),
    "question and answer": ("a.csv", "question,answer\nhi,yes\n", [TALK]),
    "messages as JSON in a table": ("a.csv", "messages\n" + quoted(json.dumps(TALK)) + "\n", [TALK]),
    "a byte-order mark before an array": ("a.json", "\ufeff" + json.dumps([{"messages": TALK}]), [TALK]),
    "a byte-order mark before lines": ("a.jsonl", "\ufeff" + json.dumps({"messages": TALK}) + "\n", [TALK]),
    "columns without a name, as spreadsheets write them": ("a.csv", "text,,\none,,\n", ["one"]),
    "what looks like numbers": (
        "a.tsv",
        "question\tanswer\n1.10\t007\n2.50\t010\n",
        [said("1.10", "007"), said("2.50", "010")],
    ),
    "what looks like nothing": (
        "a.tsv",
        "question\tanswer\nNA\tNone\nnan\tnull\n",
        [said("NA", "None"), said("nan", "null")],
    ),
}


@pytest.mark.parametrize("case", CONVERSATIONS)
def test_a_conversation_or_a_text_is_read_as_it_is_meant(case: str, tmp_path: Path) -> None:
    name, content, meant = CONVERSATIONS[case]
    (tmp_path / name).write_text(content if isinstance(content, str) else json.dumps(content))
    assert [document.text or list(document.messages) for document in read(tmp_path / name)] == meant


def test_lines_end_as_in_any_text_of_python(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"a\r\nb\rc\n")
    assert [document.text for document in read(tmp_path / "a.txt")] == ["a\nb\nc\n"]


def test_every_frame_of_a_compressed_file_is_read(tmp_path: Path) -> None:
    for suffix, module in (("gz", gzip), ("bz2", bz2), ("xz", lzma)):
        path = tmp_path / f"a.txt.{suffix}"
        path.write_bytes(module.compress(b"a\n") + module.compress(b"b\n"))
        assert len(open_tokens(str(path))) == 4


def test_a_folder_of_records_is_a_data_set_whose_splits_datasets_tells_apart(tmp_path: Path) -> None:
    for name in ("train-0.jsonl", "sub/train.jsonl", "test-0.jsonl", "other.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write_lines(tmp_path / name, [{"text": name}])
    (tmp_path / "README.md").write_text("a long text beside them " * 100)
    source = find(str(tmp_path), DataSettings(), "train")
    assert [str(path.relative_to(tmp_path)) for path in source.files] == ["sub/train.jsonl", "train-0.jsonl"]
    assert {Path(path).name for path, _ in source.skipped} == {"README.md", "test-0.jsonl", "other.jsonl"}
    assert text_of(open_tokens(str(tmp_path), split="test")) == "test-0.jsonl"
    with pytest.raises(ConfigError, match=r"has no split 'dev', only train, test: name one, with --dataset-train-sp"):
        find(str(tmp_path), DataSettings(), "dev")
    (tmp_path / "README.md").write_text("---\nconfigs:\n- config_name: more\n  data_files: other.jsonl\n---\n")
    assert [document.text for document in read(tmp_path, dataset_config="more")] == ["other.jsonl"]


def test_tables_among_other_files_are_texts_unless_they_are_most(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text\none\n")
    (tmp_path / "b.py").write_text("pass")
    assert [document.text for document in read(tmp_path)] == ["text\none\n", "pass"]
    (tmp_path / "c.csv").write_text("text\ntwo\n")
    assert [document.text for document in read(tmp_path)] == ["one", "two"]


def test_what_cannot_be_listed_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder's hidden entries, links to folders, and what is no file are not read."""
    folder = tmp_path / "folder"
    for name in ("sub", ".hidden"):
        (folder / name).mkdir(parents=True)
        (folder / name / "b.txt").write_text("two")
    (folder / "a.txt").write_text("one")
    (folder / "gone.txt").symlink_to("nothing")
    (folder / "linked").symlink_to(tmp_path)
    os.mkfifo(folder / "pipe")
    files = (folder / "a.txt", folder / "sub" / "b.txt")
    for name, there in ((folder, files), (folder / "*", files[:1])):
        assert find(str(name), DataSettings(), "train").files == there
    with pytest.raises(ConfigError, match="there is no file in it"):
        find(str(folder / "pipe"), DataSettings(), "train")
    with pytest.raises(ConfigError, match="data '' does not exist"):
        find("", DataSettings(), "train")
    listed = os.scandir

    def scandir(path: str) -> object:
        if Path(path).name == "sub":
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return listed(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(ConfigError, match=r"the folder .*sub cannot be read: Permission denied"):
        find(str(folder), DataSettings(), "train")


def message(**fields: Any) -> bytes:
    """A line with a conversation of one message."""
    return json.dumps({"messages": [{"role": "assistant", "content": "a", **fields}]}).encode()


def with_more(line: bytes, **fields: Any) -> bytes:
    return json.dumps({**json.loads(line), **fields}).encode()


def parquet(**columns: list[str]) -> bytes:
    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.table(columns, schema=pyarrow.schema(dict.fromkeys(columns, "string"))), sink)
    return bytes(sink.getvalue())


BROKEN: dict[str, tuple[str, bytes, str]] = {
    "not JSON": ("a.jsonl", b'{"text": "a"}\n{"text": \n', "line 2: not JSON"),
    "no object": ("a.jsonl", b'{"text": "a"}\n\n[1]\n', "line 3: a list where a record"),
    "no known column": ("a.jsonl", b'{"body": "a", "id": 1}\n', r"columns \(body, id\).*--dataset-text-field"),
    "no text": ("a.jsonl", b'{"text": "a"}\n{"text": 3}\n', "text is of type int, not text.*--dataset-text-field"),
    "no role": ("a.jsonl", b'{"messages": [{"content": "a"}]}\n', r"line 1: messages\[0\] has no role"),
    "no message": ("a.jsonl", b'{"messages": ["a"]}\n', r"line 1: messages\[0\] is a str"),
    "half a character": ("a.jsonl", b'{"text": "a"}\n{"text": "\\ud83d"}\n', "line 2: not Unicode text"),
    "half a character in JSON in a text": ("a.jsonl", b'{"messages": "[\\ud83d]"}\n', "messages is neither a list"),
    "an object over lines": ("a.json", b'{"data": [\n{"text": "a"}]}\n', "or a .json file one list of records"),
    "UTF-16": ("a.txt", "one".encode("utf-16"), "line 1: not UTF-8 text: convert it, as with iconv"),
    "UTF-32": ("a.txt", "one".encode("utf-32"), "line 1: not UTF-8 text: convert it, as with iconv"),
    "lines in UTF-16": ("a.jsonl", '{"text": "a"}\n'.encode("utf-16"), "line 1: not UTF-8 text: convert the file"),
    "lines in Latin-1": ("a.jsonl", '{"text": "é"}\n'.encode("latin-1"), "line 1: not UTF-8 text: convert the file"),
    "records in UTF-16": ("a.csv", "text\none".encode("utf-16"), "cannot be read: 'utf-8' codec can't decode"),
    "messages that are text": ("a.csv", b"messages,id\nhi,1\n", "messages is neither a list of messages nor"),
    "no tools": ("a.jsonl", with_more(message(), tools=3), "line 1: tools is not a list of tools, nor"),
    "broken tools": ("a.jsonl", with_more(message(), tools="a"), "line 1: tools is not a list of tools, nor"),
    "broken array": ("a.json", b'[{"text": "a"},', "a.json cannot be read: (Illegal trailing comma|Expecting value)"),
    "fields too many": ("a.csv", b"text,id\na,1\nb,2,3\n", "cannot be read: .*Expected 2 fields in line 3, saw 3"),
    "an open quote": ("a.csv", b'text,id\na,1\n"b,2\n', "cannot be read: .*EOF inside string"),
    "Parquet without rows": ("a.parquet", parquet(text=[]), "holds no text"),
    "no Parquet": ("a.parquet", b"PAR1 is not enough", "a.parquet cannot be read: Parquet magic bytes"),
    "no Arrow": ("a.arrow", b"\xff\xff\xff\xff\0\0", "a.arrow cannot be read: "),
    "not UTF-8": ("a.txt", b"one\ntwo\ncaf\xe9\n", "line 3: not UTF-8"),
    "NUL": ("a.txt", b"one\nt\0wo\n", "line 2: not UTF-8 text"),
    "empty": ("a.txt", b"", "holds no text"),
    "only empty records": ("a.jsonl", b'{"text": ""}\n', "holds no text"),
    "packed badly": ("a.jsonl.gz", b"no gzip", "cannot be read"),
    "gzip cut short": ("a.txt.gz", gzip.compress(b"text")[:-9], "a.txt.gz cannot be read: Compressed file ended"),
    "bzip2 cut short": ("a.txt.bz2", bz2.compress(b"text")[:-1], "a.txt.bz2 cannot be read: Compressed file ended"),
    "xz cut short": ("a.csv.xz", lzma.compress(b"text\na\n")[:-1], "a.csv.xz cannot be read: Compressed file ended"),
    "xz damaged": ("a.txt.xz", lzma.compress(b"text")[:-20] + bytes(20), "a.txt.xz cannot be read: Corrupt input data"),
    "zstd cut short": ("a.txt.zst", b"", "a.txt.zst cannot be read: Compression type zstd not supported"),
    "an image": (
        "a.jsonl",
        message(content=[{"type": "image"}]),
        r"messages\[0\] has content that is no text: .*image",
    ),
    "a split as a weight": (
        "a.json",
        json.dumps({"train": [{"text": "a"}] * 99}).encode(),
        r"train \[.*\.{3}\]: it is",
    ),
    "no call": ("a.jsonl", message(tool_calls=["look"]), "tool_calls that are not a list of objects"),
    "a single message": ("a.jsonl", b'{"role": "user", "content": "a"}\n', "a single message, where"),
    "no history": ("a.jsonl", b'{"instruction": "a", "output": "b", "history": ["c"]}', "history must be a list of p"),
    "a list of texts": ("a.json", b'[["a", "b"]]', "entry 1: a list where a record"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_what_cannot_be_read_is_refused_with_its_line_and_leaves_no_tokens(
    case: str, model: Tokenizer, tmp_path: Path
) -> None:
    name, content, message = BROKEN[case]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        open_tokens(str(tmp_path / name), model, cache=tmp_path / "cache")
    assert not [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]


def test_a_cache_that_cannot_be_written_is_refused_with_the_remedy(model: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(TEXT)
    with pytest.raises(StorageError, match="--cache"):
        open_tokens(str(tmp_path / "a.txt"), model, cache=tmp_path / "a.txt" / "cache")
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with pytest.raises(
            StorageError, match=r"kept in \S*: \S+ \S+ File too large. They .*another directory with --cache"
        ):
            open_tokens(str(tmp_path / "a.txt"), model, cache=tmp_path / "cache")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        signal.signal(signal.SIGXFSZ, ignored)
    assert not [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]


def test_what_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"bok\.txt' does not exist: give a file"):
        read(tmp_path / "no" / "bok.txt")
    with pytest.raises(ConfigError, match=r"line 1: no column 'body'; it has text"):
        read(write_lines(tmp_path / "a.jsonl", [{"text": "a"}]), dataset_text_field="body")


def test_tokens_are_made_once_and_again_for_other_data_of_the_same_size_and_time(
    model: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"text": TEXT[:100]}])

    def about() -> About:
        return open_tokens(str(path), model, cache=tmp_path / "cache").about

    first = about()
    with monkeypatch.context() as patched:
        patched.setattr(tokens_module, "documents", lambda *_: pytest.fail("read again"))
        assert about() == first
    os.utime(path, ns=(1, 1))
    assert about().fingerprint == first.fingerprint
    write_lines(path, [{"text": TEXT[:99] + "~"}])
    os.utime(path, ns=(1, 1))
    assert about().fingerprint != first.fingerprint


def test_tokens_that_were_made_before_are_described_as_what_is_asked_for_now(model: Tokenizer, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    write_lines(folder / "a.jsonl", [{"text": TEXT[:100]}])
    first, again = (open_tokens(str(name), model, tmp_path / "cache").about for name in (folder, folder / "*.jsonl"))
    assert (first.source, again.source) == (str(folder), str(folder / "*.jsonl"))
    (folder / "README.md").touch()
    later = open_tokens(str(folder), model, tmp_path / "cache").about
    assert [Path(path).name for path, _ in later.seen.skipped] == ["README.md"]
    assert later.fingerprint == first.fingerprint


def test_data_that_change_while_they_are_read_are_refused(
    model: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"text": TEXT[:100]}])

    def documents(*_: object) -> Iterator[Document]:
        write_lines(path, [{"text": TEXT[:101]}])
        yield Document("a", TEXT[:101])

    with monkeypatch.context() as patched:
        patched.setattr(tokens_module, "documents", documents)
        with pytest.raises(ConfigError, match="changed while it was read"):
            open_tokens(str(path), model, cache=tmp_path / "cache")
    assert open_tokens(str(path), model, cache=tmp_path / "cache").about.documents == 1


@pytest.mark.parametrize("name", ["tokens", "ends", "about.json"])
def test_damaged_tokens_are_refused(name: str, model: Tokenizer, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"text": TEXT[:100]}])
    open_tokens(str(path), model, cache=tmp_path / "cache")
    (damaged,) = (tmp_path / "cache").glob(f"*/{name}")
    whole = damaged.read_bytes()
    number = whole.index(b"true") if name == "about.json" else 0  # whether attention ends where a document does
    for content in (whole[:number] + b"null" + whole[number + 4 :], bytes(len(whole)), whole[:-1], b"[" * 9999):
        damaged.write_bytes(content)
        with pytest.raises(ConfigError, match=r"cache/\w+ are damaged.*delete that directory"):
            open_tokens(str(path), model, cache=tmp_path / "cache")


def test_ram_does_not_grow_with_text(model: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What Python holds while it tokenises; the tokens themselves are mapped from the file."""
    peaks = []
    monkeypatch.setattr("pagoda.train.sources._SMALL_BYTES", 1 << 11)
    monkeypatch.setattr("pagoda.train.sources._BATCH_ROWS", 50)
    monkeypatch.setattr(tokens_module, "_BATCH_CHARACTERS", 1 << 12)
    for times in (1, 4):
        path = tmp_path / f"{times}.txt"
        path.write_text(TEXT[:20_000] * times)
        tracemalloc.start()
        tokens = open_tokens(str(path), model, cache=tmp_path / "cache")
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert isinstance(tokens.ids, np.memmap)
    assert peaks[1] < 1.3 * peaks[0]


def test_the_tokenizer_is_the_models_own_or_bytes(tmp_path: Path) -> None:
    assert open_tokenizer(tmp_path, None).name.startswith("bytes")
    assert open_tokenizer(None, None).name.startswith("bytes")
    tokenizer().save_pretrained(tmp_path)
    assert "400 tokens" in open_tokenizer(tmp_path, None).name
    assert open_tokenizer(tmp_path, "bytes").name.startswith("bytes")
    assert "400 tokens" in open_tokenizer(None, str(tmp_path)).name
    with pytest.raises(ConfigError, match="--tokenizer"):
        open_tokenizer(None, str(tmp_path / "missing"))


def test_weights_without_their_tokenizer_are_not_trained_on_bytes(tmp_path: Path) -> None:
    write_pretrained(tmp_path / "bytes", vocab_size=256)
    write_pretrained(tmp_path / "words", vocab_size=400)
    for path in (*tmp_path.glob("*/tokenizer*"), *tmp_path.glob("*/chat_template*"), *tmp_path.glob("*/special*")):
        path.unlink()
    assert open_tokenizer(tmp_path / "bytes", None).name.startswith("bytes")
    assert open_tokenizer(tmp_path / "words", "bytes").name.startswith("bytes")
    with pytest.raises(ConfigError, match=r"words has weights for 400 tokens, and no tokenizer: .*--tokenizer"):
        open_tokenizer(tmp_path / "words", None)


TOKENIZERS = [
    ["tokenizer.json"], ["tokenizer.model"], ["tokenizer_config.json"], ["vocab.json", "merges.txt"], ["vocab.txt"],
    ["spiece.model"], ["sentencepiece.bpe.model"], ["tekken.json"], ["qwen.tiktoken"], ["source.spm"],
]  # fmt: skip


def test_a_tokenizer_that_cannot_be_read_is_never_replaced_by_bytes(tmp_path: Path) -> None:
    write_model(tmp_path)
    for files in TOKENIZERS:
        paths = [tmp_path / name for name in files]
        for path in paths:
            path.touch()
        with pytest.raises(ConfigError, match=rf"tokenizer in {tmp_path} cannot be read.*--tokenizer bytes"):
            open_tokenizer(tmp_path, None)
        for path in paths:
            path.unlink()


def test_special_tokens_of_the_tokenizer_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A text that is read in pieces has them once."""
    monkeypatch.setattr("pagoda.train.sources._SMALL_BYTES", 16)
    monkeypatch.setattr("pagoda.train.sources._BATCH_ROWS", 1)
    made = tokenizer(bos_token="<|im_start|>")
    made.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
    )
    made.save_pretrained(tmp_path)
    (tmp_path / "a.txt").write_text(text := "some text\nof several lines\nin pieces")
    (ids,) = documents_of(open_tokens(str(tmp_path / "a.txt"), Tokenizer(tmp_path)))
    assert ids == [*AutoTokenizer.from_pretrained(tmp_path)(text)["input_ids"], made.eos_token_id]
    assert ids[0] == 1


def test_a_run_reads_data_once_before_its_first_step_and_tokens_only_if_they_were_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    hashed: list[int] = []
    documents, digest = tokens_module.documents, xxhash.xxh3_64_hexdigest

    def counted(source: Source, seen: Seen) -> Iterator[Document]:
        read.append(Path(source.name).name)
        return documents(source, seen)

    def counted_too(content: bytes | memoryview) -> str:
        if isinstance(content, memoryview):
            hashed.append(len(content))
        return digest(content)

    monkeypatch.setattr(tokens_module, "documents", counted)
    monkeypatch.setattr(xxhash, "xxh3_64_hexdigest", counted_too)
    other = tmp_path / "other"
    other.write_text("another text that has a few sequences. " * 20)
    monkeypatch.setattr(RunTrainer, "get_batch_samples", interrupted)
    chosen = dict.fromkeys(("max_steps", "max_length", "per_device_train_batch_size"), 0)
    config = tiny_run(tmp_path, **chosen, eval_data=str(other), cache=tmp_path / "cache")
    for there in (False, True):
        read.clear()
        hashed.clear()
        with pytest.raises(KeyboardInterrupt):
            trained(config)
        assert sorted(read) == ([] if there else ["other", "text"])
        assert len(hashed) == (4 if there else 0)  # tokens and ends


def interrupted(*_: object) -> None:
    raise KeyboardInterrupt
