"""The commands of README.md and of the tutorials run as printed, and print the lines that the pages show.

`tests/test_docs.py` runs the Python blocks and looks at flags. This runs the shell blocks: `make test-all`.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.text_files import chats, write_lines, write_pretrained

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs" / "tutorials").glob("*.md"))]
STANDS_FOR = {
    "HuggingFaceTB/SmolLM2-135M-Instruct --download": "my-model",
    "/mnt/nvme/pages": "pages",
    "make demo": f"{sys.executable} {ROOT / 'examples' / 'demo.py'}",
    "--nproc-per-node 8": "--nproc-per-node 2",
    "--model llama-1b --max-steps 100": "--model llama-15m --max-steps 3",
}
"""What the reader has -> what there is here: no Hub, no GPUs, two cores."""
NOT_HERE = ("git clone", "cd ", "make ", "source ", "pip ", "hf ", "torchrun --nproc-per-node 2 my_script.py")
"""Beginnings of the commands that set a machine up, or run a file of the reader's."""
SPREAD = 0.05
"""The largest share by which a loss or a size may differ from the one that is shown, on another CPU and with other
packages."""


def blocks(page: Path) -> Iterator[tuple[list[str], list[str]]]:
    """The commands of each shell block of a page, and the lines of the text block after it, if there is one before
    the next block of another kind."""
    found = re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    for number, (language, text) in enumerate(found):
        if language == "sh":
            for name, stands in STANDS_FOR.items():
                text = text.replace("\\\n", " ").replace(name, stands)
            after = found[number + 1] if number + 1 < len(found) else ("", "")
            commands = [line.split("  #")[0] for line in text.splitlines()]
            yield [line for line in commands if not line.startswith(NOT_HERE)], shown(after)


def shown(block: tuple[str, str]) -> list[str]:
    """The lines that a text block shows; `...` stands for others."""
    language, text = block
    return [line for line in text.splitlines() if line.strip(" .[]")] if language == "text" else []


def skeleton(line: str) -> str:
    """A line without its figures, its frames and its spaces, and without the lane that compute waited for."""
    line = re.sub(r"no stalls|stalls \d+% \(\w+\)", "stalls", line)
    return re.sub(r"[\d.,:%+-]+|[^\w\s]|\s", "", line)


def figures(line: str) -> list[float]:
    """The losses of a line, and its sizes in bytes: what is nearly the same on every machine, except a budget."""
    if "budget" in line:
        return []
    found = re.findall(r"loss ([\d.]+)|([\d.]+) -> ([\d.]+)|([\d,.]+) [KMGT]iB", line)
    return [float(figure.replace(",", "")) for groups in found for figure in groups if figure]


def is_printed(line: str, output: list[str]) -> bool:
    """Whether a shown line is among those printed: the same words, and losses and sizes that differ by `SPREAD` at
    most. `[...]` stands for any text."""
    parts = [re.escape(skeleton(part)) for part in line.split("[...]")]
    alike = [other for other in output if re.fullmatch(".*".join(parts), skeleton(other))]
    return any(figures(other) == pytest.approx(figures(line), rel=SPREAD) for other in alike)


@pytest.fixture
def reader(tmp_path: Path) -> Path:
    """A directory with the files that the pages name."""
    write_pretrained(tmp_path / "my-model", hidden_size=64, num_hidden_layers=4, max_position_embeddings=2048)
    write_lines(tmp_path / "chats.jsonl", [{"messages": messages} for messages in chats(240)])
    (tmp_path / "corpus").mkdir()
    text = (Path(os.__file__).parent / "typing.py").read_text()
    write_lines(tmp_path / "corpus" / "some.jsonl", [{"text": part} for part in text.split("\n\n\n")])
    (tmp_path / "held-out.txt").write_text((Path(os.__file__).parent / "ast.py").read_text()[:20_000])
    (tmp_path / "pages").mkdir()
    return tmp_path


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_commands_of_a_page_print_what_it_shows(page: Path, reader: Path) -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "COLUMNS": "100", "HF_HUB_OFFLINE": "1"}
    for commands, lines in blocks(page):
        output: list[str] = []
        for command in commands:
            done = subprocess.run(
                ["bash", "-c", command], cwd=reader, env=environment, capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
            output += (done.stdout + done.stderr).splitlines()
        if commands:
            missing = [line for line in lines if not is_printed(line, output)]
            assert not missing, "\n".join([*commands, "does not print", *missing, "but", *output])


def test_a_line_that_is_not_printed_is_found() -> None:
    output = ["step 1/12  loss 10.5271  205 tokens/s  stalls 1% (d2h)  0:00:14 left", "┃ weight ┃ 29.75 MiB ┃"]
    output += ["- Same bits: all 20 losses (5.50 -> 2.82) are those of the run in RAM."]
    assert is_printed("step 1/12  loss 10.4  86 tokens/s  stalls 7% (d2h)  0:00:21 left", output)
    assert is_printed("│ weight │ 31 MiB │", output)
    assert is_printed("step 1/12  loss 10.5 [...] left", output)
    assert not is_printed("step 1/12  loss 9.1  205 tokens/s  stalls 1% (d2h)  0:00:14 left", output)
    assert not is_printed("│ moment │ 31 MiB │", output)
    assert not is_printed("│ weight │ 33 MiB │", output)
    assert is_printed("- Same bits: all 20 losses (5.48 -> 2.90) are those of the run in RAM.", output)
    assert not is_printed("- Same bits: all 20 losses (5.50 -> 5.40) are those of the run in RAM.", output)
