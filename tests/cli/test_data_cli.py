"""`pagoda data` says what `pagoda train` reads."""

import re
from pathlib import Path

import pytest

from pagoda.cli.main import main
from tests.text_files import CHATML, chats, write_lines, write_pretrained


def lines_of(args: list[str], capsys: pytest.CaptureFixture[str]) -> list[str]:
    assert main(args) == 0
    return capsys.readouterr().out.splitlines()


def test_what_it_reports_is_what_train_reads_and_reports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_pretrained(tmp_path / "model", CHATML)
    rows = [{"messages": chat, "id": number} for number, chat in enumerate(chats(6))]
    extra = [{"messages": chats(1)[0], "weight": 0}, {"messages": [{"role": "narrator", "content": "hi"}]}, {"body": 1}]
    data = write_lines(tmp_path / "a.jsonl", [*rows, *extra])
    read = ["--model", str(model), "--cache", str(tmp_path / "cache"), "--skip-bad"]
    shown = lines_of(["data", str(data), *read], capsys)
    text = "\n".join(shown)
    for expected in (
        r"Data: .*a\.jsonl, 6 conversations in 1 file, [\d,]+ tokens, of which the loss counts \d+%",
        r"Lengths in tokens: \d+ at least, \d+ in the median, \d+ at the 95th percentile, \d+ at most",
        r"Records: messages 7",
        r"Roles: user 12; assistant 12; system 2; narrator 1\. Unknown: narrator; the loss does not count them",
        r"Keys that are ignored: id 6",
        r"Left out 1 record: its weight says so \(.*line 7\)",
        r"Left out 1 record: no assistant speaks\. Its roles: narrator \(.*line 8\)",
        r"Left out 1 record: none of its columns \(body\).*line 9\)",
        r"Chosen: --max-length \d+: \d+% of conversations have as many tokens or fewer",
        r"Sequences: \d+ of \d+ tokens, \d+% padding",
        r"«It is .*<\|im_end\|>",
    ):
        assert re.search(expected, text), expected
    run = f"--output-dir {tmp_path / 'run'} --max-steps 1 --no-save-at-end --memory.host 64MiB"
    trained = lines_of(["train", *read, "--data", str(data), *run.split()], capsys)
    assert [line for line in shown if line not in trained] == []


def test_what_does_not_fit_into_a_sequence_is_counted_and_what_cannot_be_read_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write_pretrained(tmp_path / "model", CHATML)
    data = write_lines(tmp_path / "a.jsonl", [{"messages": chat} for chat in chats(3)])
    read = ["--model", str(model), "--cache", str(tmp_path / "cache"), "--max-length", "64"]
    assert "2 of 3 conversations have more than --max-length 64 tokens" in "\n".join(
        lines_of(["data", str(data), *read], capsys)
    )
    write_lines(data, [{"messages": [{"content": "hi"}]}])
    assert main(["data", str(data), *read]) == 2
    assert re.fullmatch(r"pagoda: .*line 1: messages\[0\] has no role: .*\n", capsys.readouterr().err)
    (text := tmp_path / "a.txt").write_text("some text " * 50)
    (more := tmp_path / "b.txt").write_text("some text " * 40)
    said = "\n".join(lines_of(["data", str(text), str(more), "--model", "llama-15m", *read[2:]], capsys))
    assert "Lengths" not in said
    assert "2 documents in 2 files, 901 tokens" in said
    assert "Left out the last 5 tokens, less than a sequence" in said
