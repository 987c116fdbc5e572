"""docs/integrations.md is true: the code of each of its sections runs."""

import re
import runpy
from importlib.metadata import version
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "integrations.md"
SECTIONS = {
    title: "\n".join(re.findall(r"^```python\n(.*?)^```", body, re.MULTILINE | re.DOTALL))
    for title, body in re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE.read_text(), re.MULTILINE | re.DOTALL)
}


@pytest.mark.inline
@pytest.mark.parametrize("section", [title for title, code in SECTIONS.items() if code])
def test_the_code_of_a_section_runs(section: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("trl", "datasets", "lightning"):
        if f"from {package} " in SECTIONS[section] or f"import {package}\n" in SECTIONS[section]:
            pytest.importorskip(package)
    (tmp_path / "page.py").write_text(SECTIONS[section])
    monkeypatch.chdir(tmp_path)
    runpy.run_path("page.py", run_name="__main__")


def test_the_sections_are_found() -> None:
    assert SECTIONS["Trainer"]


@pytest.mark.parametrize("package", ["transformers", "trl", "peft", "accelerate", "lightning"])
def test_readme_and_page_name_the_versions_that_were_run(package: str) -> None:
    pytest.importorskip(package)
    number = ".".join(version(package).split(".")[:2])
    assert f"{package} {number}" in PAGE.read_text()
    assert f"{package} {number}" in (PAGE.parents[1] / "README.md").read_text().lower()
