"""docs/integrations.md is true: the code of each section runs, each cell of the table has a test."""

import re
import runpy
from importlib.metadata import version
from pathlib import Path

import pytest

HERE = Path(__file__).parent
PAGE = Path(__file__).parents[2] / "docs" / "integrations.md"
SECTIONS = {
    title: "\n".join(re.findall(r"^```python\n(.*?)^```", body, re.MULTILINE | re.DOTALL))
    for title, body in re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE.read_text(), re.MULTILINE | re.DOTALL)
}

SAME, NOT = "same bits", "not tested"
COLUMNS = "framework", "losses", "after resuming", "after a kill", "on 2 ranks"
_TRL = "test_trl: test_losses_have_the_bits_of_trls_own_trainer"
_KILLED = "test_processes: test_a_killed_run_goes_on_as_one_that_was_not"
WORKS: dict[str, list[tuple[str, str]]] = {
    "transformers 5.23: Trainer": [
        (SAME, "test_trainer: test_losses_have_the_bits_of_the_stock_trainer"),
        (SAME, "test_trainer: test_a_resumed_run_has_the_bits_of_one_that_was_not_interrupted"),
        (SAME, "test_processes: test_beyond_memory_it_takes_what_it_is_given_and_resumes_once_killed"),
        (SAME, "test_processes: test_on_two_ranks_it_is_the_stock_trainer_on_two_ranks"),
    ],
    "Seq2SeqTrainer": [
        (SAME, "test_trainer: test_seq2seq_trains_resumes_and_generates_as_the_stock_trainer"),
        (SAME, "test_trainer: test_seq2seq_trains_resumes_and_generates_as_the_stock_trainer"),
        (NOT, ""),
        (NOT, ""),
    ],
    "TRL 1.16: SFT, DPO, GRPO": [(SAME, _TRL), (SAME, _TRL), (SAME, _KILLED), (NOT, "")],
    "TRL with LoRA of PEFT 0.21": [(SAME, _TRL), (SAME, _TRL), (NOT, ""), (NOT, "")],
    "Accelerate 1.15": [
        (SAME, "test_accelerate: test_losses_have_the_bits_of_the_stock_accelerator"),
        (SAME, "test_accelerate: test_a_loaded_state_goes_on_with_the_same_bits"),
        (SAME, _KILLED),
        (SAME, "test_processes: test_accelerate_on_two_ranks_is_the_stock_one_on_two_ranks"),
    ],
    "Lightning 2.6: Trainer": [
        (SAME, "test_lightning: test_losses_have_the_bits_of_lightnings_own_strategy"),
        (SAME, "test_lightning: test_a_resumed_run_has_the_bits_of_one_that_was_not_interrupted"),
        (SAME, _KILLED),
        (SAME, "test_processes: test_lightning_on_two_ranks_is_the_stock_one_on_two_ranks"),
    ],
    "Lightning's Fabric": [
        (SAME, "test_lightning: test_fabric_has_the_bits_of_its_own_strategy"),
        (SAME, "test_lightning: test_fabric_trains_and_resumes"),
        (SAME, _KILLED),
        (NOT, ""),
    ],
}
"""The table of what works: framework -> what each cell says, and the test that shows it."""


def test_the_table_says_what_tests_show() -> None:
    assert SECTIONS["Trainer"], "sections are found"
    rows = [[name, *(said for said, _ in cells)] for name, cells in WORKS.items()]
    lines = ["| " + " | ".join(row) + " |" for row in (COLUMNS, *rows)]
    lines.insert(1, "|---" * len(COLUMNS) + "|")
    assert "\n".join(lines) in PAGE.read_text()
    for said, test in (cell for cells in WORKS.values() for cell in cells):
        file, _, name = test.partition(": ")
        assert said == NOT or f"def {name}(" in (HERE / f"{file}.py").read_text(), test


@pytest.mark.inline
@pytest.mark.parametrize(
    "section",
    [
        pytest.param(title, marks=() if title == "Trainer" else pytest.mark.slow)
        for title, code in SECTIONS.items()
        if code
    ],
)
def test_the_code_of_a_section_runs(section: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("trl", "datasets", "lightning"):
        if f"from {package} " in SECTIONS[section] or f"import {package}\n" in SECTIONS[section]:
            pytest.importorskip(package)
    (tmp_path / "page.py").write_text(SECTIONS[section])
    monkeypatch.chdir(tmp_path)
    runpy.run_path("page.py", run_name="__main__")


@pytest.mark.parametrize("package", ["transformers", "trl", "peft", "accelerate", "lightning"])
def test_the_page_names_the_versions_that_were_run(package: str) -> None:
    pytest.importorskip(package)
    number = ".".join(version(package).split(".")[:2])
    assert f"{package} {number}" in PAGE.read_text().lower()
