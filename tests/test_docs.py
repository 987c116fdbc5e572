"""The pages are true: their code runs, their links lead somewhere, their flags and files exist."""

import contextlib
import io
import re
import runpy
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import tyro
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

import pagoda
from pagoda.cli.main import COMMANDS, main, parse
from pagoda.config.commands import ScriptConfig
from tests.checkpoint.test_dequantize import mxfp4
from tests.test_house import HOUSE
from tests.text_files import chats, write_lines, write_pretrained

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
RUNNABLE = [ROOT / "README.md", *sorted((DOCS / "tutorials").glob("*.md"))]
FOREIGN_FLAGS = {"--nproc-per-node", "--max-restarts", "--local-dir", "--help-verbose"}
"""Those of torchrun, hf and tyro."""
every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def blocks(page: Path, language: str) -> list[str]:
    """The fenced blocks of a page in one language."""
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


def without_blocks(page: Path) -> str:
    """The text of a page, without its fenced blocks."""
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and MkDocs make them."""
    headings = re.findall(r"^#+ (.+)$", without_blocks(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def commands(page: Path) -> Iterator[list[str]]:
    """The arguments of each `pagoda` command in a page's shell blocks."""
    for block in blocks(page, "sh") + blocks(page, "bash"):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if words[:1] == ["torchrun"] and "pagoda" in words:
                words = words[words.index("pagoda") :]
            if words[:1] == ["pagoda"]:
                yield words[1:]


def flags_of(config: type) -> set[str]:
    """The flags of a subcommand, with those of TRL's script."""
    shown = io.StringIO()
    with pytest.raises(SystemExit), contextlib.redirect_stdout(shown):
        tyro.cli(config, args=["--help"], console_outputs=True)
    found = set(re.findall(r"--[a-z][a-z0-9.-]*[a-z0-9]", shown.getvalue()))
    if issubclass(config, ScriptConfig):
        from pagoda.integrations.trl import parser_of

        found |= {name for action in parser_of(config.script)._actions for name in action.option_strings} | {"--config"}
    return found


def losses_in(text: str) -> list[float]:
    """The losses of the steps that a text shows."""
    return [float(loss) for loss in re.findall(r"^step \d+: loss ([\d.]+)", text, re.MULTILINE)]


@pytest.fixture(scope="module")
def flags() -> dict[str, set[str]]:
    """Subcommand -> its flags."""
    return {command.name: flags_of(command.config) for command in COMMANDS}


@pytest.mark.parametrize("page", [page for page in RUNNABLE if blocks(page, "python")], ids=lambda page: page.stem)
@pytest.mark.inline
def test_the_code_of_a_page_runs(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "page.py"
    script.write_text("\n".join(blocks(page, "python")))
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(script), run_name="__main__")
    losses, shown = map(losses_in, (capsys.readouterr().out, "\n".join(blocks(page, "text"))))
    assert not losses or losses[-1] < 0.9 * losses[0], "the model of the page learns"
    if "manual_seed" in script.read_text():
        assert losses == pytest.approx(shown or losses, rel=0.02), "the page shows what it prints"


FEATURES = ["long-sequences", "moe", "precision", "checkpoint", "optimizers"]
"""Pages of features, whose code takes the reader's model."""


def reader(code: str) -> dict[str, Any]:
    """What the reader has: `model`, `batch`, `rule`, `memory` and imports; in the current directory, the models
    that the code names."""
    torch.manual_seed(0)
    small: dict[str, Any] = {"vocab_size": 256, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    llama = LlamaConfig(**{**small, "num_hidden_layers": 8}, intermediate_size=64, use_cache=False)
    experts = MixtralConfig(**small, intermediate_size=32, num_local_experts=4, num_key_value_heads=2)
    if "DIR" in code:
        LlamaForCausalLM(llama).save_pretrained("DIR")
    if "base" in code:
        MixtralForCausalLM(experts).save_pretrained("base")
    if "gpt-oss-20b" in code:
        mxfp4(Path("gpt-oss-20b"))
    tokens = torch.randint(90, (2, 32), generator=torch.Generator().manual_seed(0))
    return {
        **{"pagoda": pagoda, "torch": torch, "dcp": dcp, "peft": pytest.importorskip("peft")},
        **{"AutoModelForCausalLM": AutoModelForCausalLM, "BitsAndBytesConfig": BitsAndBytesConfig},
        "model": LlamaForCausalLM(llama),
        "batch": {"input_ids": tokens, "labels": tokens},
        "rule": pagoda.AdamW(lr=1e-2),
        "memory": pagoda.Memory(device="cpu:4MiB", host="64MiB"),
    }


@pytest.mark.inline
@pytest.mark.parametrize(
    ("page", "number"),
    [(page, number) for page in FEATURES for number, _ in enumerate(blocks(DOCS / f"{page}.md", "python"))],
)
def test_the_code_of_the_page_of_a_feature_trains(
    page: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = blocks(DOCS / f"{page}.md", "python")[number]
    if "BitsAndBytes" in code:
        pytest.importorskip("bitsandbytes")
    monkeypatch.chdir(tmp_path)
    names = reader(code)
    if "requires_grad_(True)" in code:
        names["model"].model.layers.requires_grad_(False)
    if "pagoda.wrap(" not in code:
        names["model"], names["optimizer"] = pagoda.wrap(
            names["model"], names["rule"], memory=names["memory"], precision="bf16"
        )
    for ours, here in {
        "ranks=2": "ranks=1",
        '"/nvme"': '"."',
        "LoraConfig(...)": 'LoraConfig(target_modules=["q_proj"])',
    }.items():
        code = code.replace(ours, here)
    exec(code, names)
    model, optimizer, losses = names["model"], names["optimizer"], []
    for group in optimizer.param_groups:
        group["lr"] = 1e-2
    for _ in range(4):
        loss = model(**names["batch"]).loss
        optimizer.scale(loss).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    optimizer.close()
    assert losses[-1] < losses[0]


@every_page
def test_links_lead_somewhere(page: Path) -> None:
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", without_blocks(page)):
        path, _, anchor = target.partition("#")
        if target.startswith(("http:", "https:")):
            continue
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or (anchor and not anchor.startswith("pagoda.") and anchor not in anchors(file)):
            broken.append(target)
    assert not broken


@every_page
def test_pages_of_the_site_link_to_pages_of_the_site(page: Path) -> None:
    if DOCS in page.parents:
        outside = [link for link in re.findall(r"\]\(([^)#\s]+)", without_blocks(page)) if "://" not in link]
        assert all((page.parent / link).resolve().is_relative_to(DOCS) for link in outside)


@every_page
def test_commands_have_flags_that_exist(page: Path, flags: dict[str, set[str]]) -> None:
    for words in commands(page):
        used = {word.partition("=")[0] for word in words if re.match(r"--[a-z]", word)}
        assert used <= flags[words[0]], words


@pytest.mark.parametrize("page", RUNNABLE, ids=lambda page: page.stem)
def test_commands_of_the_tutorials_are_understood(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for words in commands(page):
        if "--resume-from-checkpoint" not in words:
            command, _ = parse(words)
            assert command.name == words[0]


@every_page
def test_flags_in_the_text_exist(page: Path, flags: dict[str, set[str]]) -> None:
    text = without_blocks(page)
    scripts = "".join((ROOT / name).read_text() for name in set(re.findall(r"benchmarks/\w+\.py", page.read_text())))
    known = set().union(*flags.values()) | FOREIGN_FLAGS
    known |= {group for flag in known for group in (flag.rpartition(".")[0], flag.rpartition(".")[0] + ".*")}
    named = {flag for code in re.findall(r"`([^`]+)`", text) for flag in re.findall(r"(?<![\w-])--[a-z][\w.*-]*", code)}
    assert not {flag for flag in named - known if flag[2:].replace("-", "_") not in scripts}


@every_page
def test_files_in_the_text_exist(page: Path) -> None:
    text = page.read_text()
    named = re.findall(r"(?<![\w/.])((?:pagoda|tests|benchmarks|docs|examples)/[\w/.*-]*[\w/*])", text)
    folders = "|".join(path.parent.name for path in (ROOT / "pagoda").glob("*/__init__.py"))
    named += [f"pagoda/{name}" for name in re.findall(rf"`((?:{folders})/[\w/*]+\.py)`", text)]
    assert not [name for name in named if "NAME" not in name and not [*ROOT.glob(name)]]


def test_the_site_has_every_page() -> None:
    menu = (ROOT / "mkdocs.yml").read_text()
    pages = {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")}
    assert pages == set(re.findall(r": ([\w/-]+\.md)$", menu, re.MULTILINE))


def test_contributing_lists_the_parts_of_the_package_in_the_order_of_imports() -> None:
    table = (ROOT / "CONTRIBUTING.md").read_text()
    assert re.findall(r"^\| `pagoda/(\w+)(?:/|\.py)` \|", table, re.MULTILINE) == [*HOUSE]


def test_the_readme_fits_two_screens() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 110


def test_the_command_of_the_readme_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_pretrained(tmp_path / "my-model")
    (tmp_path / "pages").mkdir()
    write_lines(tmp_path / "chats.jsonl", [{"messages": messages} for messages in chats(30)])
    (words,) = (words for words in commands(ROOT / "README.md") if words[0] == "train")
    assert main([*words, "--memory.host", "600KiB"]) == 0


def test_make_demo_installs_what_its_report_draws_with() -> None:
    root = Path(__file__).parents[1]
    assert 'f"report ' in (root / "examples" / "demo.py").read_text()
    needs = re.findall(r"pagoda-train\[(\w+)\]", (root / "pagoda" / "train" / "report.py").read_text())
    installed = re.findall(r"-e '\.\[([\w,]+)\]'", (root / "Makefile").read_text())[0].split(",")
    assert needs
    assert {*needs} <= {*installed}
