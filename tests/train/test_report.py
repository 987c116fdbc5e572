"""`pagoda report`: the page has what a run wrote, and stands alone."""

import html
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from pagoda.cli.main import main
from pagoda.config.memory import Memory
from pagoda.errors import ConfigError
from pagoda.forecast.record import as_lines
from pagoda.memory.json_forms import whole
from pagoda.memory.sizes import format_bytes
from pagoda.train.report import report
from tests.tiny import tiny_run, trained, write_model


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with state on SSD and evaluations."""
    folder = tmp_path_factory.mktemp("report")
    (folder / "page").write_text("a text that is long enough for <b>some</b> sequences. " * 40)
    (folder / "ssd").mkdir()
    memory = Memory(host="1MiB", ssd=str(folder / "ssd"))
    config = tiny_run(folder, model=write_model(folder / "model"), data=str(folder / "page"), memory=memory)
    config = replace(config, max_length=32, max_steps=6, plan="usual")
    trained(replace(config, eval_share=0.2, max_eval_samples=4, eval_steps=2))
    return folder / "run"


@pytest.fixture(scope="module")
def page(directory: Path) -> str:
    """What `pagoda report` writes of it."""
    assert main(["report", str(directory)]) == 0
    return (directory / "report.html").read_text()


def test_the_page_has_what_the_run_wrote_and_needs_nothing_else(directory: Path, page: str) -> None:
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    evals = [json.loads(line) for line in (directory / "evals.jsonl").read_text().splitlines()]
    assert f"{lines[0]['loss']:.4f} → {lines[-1]['loss']:.4f}" in page
    assert all(f"{line['loss']:.4f}" in page for line in evals)
    plan = json.loads((directory / "plan.json").read_text())
    homes = [f"{state} on {tier}" for unit in plan["units"] for state, tier in unit["homes"].items()]
    for text in (*plan["reasons"], *(unit["name"] for unit in plan["units"]), *homes):
        assert html.escape(text) in page
    peak = max(line["peak_bytes"]["ssd"] for line in lines)
    assert f"<td>{format_bytes(sum(plan['bytes']['ssd'].values()))}</td><td>{format_bytes(peak)}</td>" in page
    assert page.count("<svg") == page.count('role="img"') == 2
    outside = [part.split('"')[0] for part in page.split('href="')[1:] + page.split('src="')[1:]]
    assert all(target.startswith("#") for target in outside)


def drawn(page: str, title: str) -> str:
    """The drawing with this title."""
    return next(part.partition("</svg>")[0] for part in page.split("<svg")[1:] if f">{title}" in part)


def test_lanes_are_drawn_as_predicted_above_as_measured(directory: Path, page: str, tmp_path: Path) -> None:
    measured = drawn(page, "Measured, step 3")
    assert "Predicted" not in measured
    run = shutil.copytree(directory, tmp_path / "run")
    plan = whole((run / "plan.json").read_bytes())
    spans = [["ssd_read", "fetch", 0.1, 0.2], ["compute", "forward", 0.2, 0.4], ["compute", "backward", 0.4, 0.5]]
    plan["timeline"] = {"step_s": 0.5, "busy_s": {"compute": 0.3, "ssd_read": 0.1}, "stall_s": {}, "spans": spans}
    (run / "plan.json").write_text(as_lines(plan))
    page = report(run)
    both = drawn(page, "Predicted: 500.0 ms")
    assert both.index(">Predicted") < both.index(">Measured, step 3")
    assert both.count(">compute<") == 2, "the lanes of both"
    assert "<td>300.0 ms</td>" in page
    assert "Nothing was predicted" not in page


def test_the_page_says_why_nothing_was_predicted(page: str) -> None:
    assert "Nothing was predicted: --plan usual takes the planner&#x27;s first choice." in page


def long_run(directory: Path, to: Path, steps: int) -> Path:
    """The same run as if it had gone on."""
    shutil.copytree(directory, to)
    line = json.loads((directory / "metrics.jsonl").read_text().splitlines()[-1])
    lines = [json.dumps({**line, "step": step, "loss": 5 / step**0.5}) for step in range(1, steps + 1)]
    (to / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return to


def test_ten_thousand_steps_are_a_small_page(directory: Path, tmp_path: Path) -> None:
    page = report(long_run(directory, tmp_path / "run", 10_000))
    assert len(page.encode()) < 1_000_000
    assert "10,000 of" in page


def test_only_reports_are_replaced(
    directory: Path, page: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(tmp_path)]) == 2
    assert "there is no run in" in capsys.readouterr().err
    mine = tmp_path / "notes.html"
    mine.write_text("<!DOCTYPE html><p>mine")
    assert main(["report", str(directory), "--out", str(mine)]) == 2
    assert "is not a report of Pagoda" in capsys.readouterr().err
    assert mine.read_text() == "<!DOCTYPE html><p>mine"
    (tmp_path / "page.html").write_text(page)
    assert main(["report", str(directory), "--out", str(tmp_path / "page.html")]) == 0


def test_a_file_that_was_changed_is_named(directory: Path, tmp_path: Path) -> None:
    run = shutil.copytree(directory, tmp_path / "run")
    for name, old, new in (("timeline.json", '"step_s": ', '"step_s": -'), ("plan.json", "1048576", '"1MiB"')):
        text = (run / name).read_text()
        assert old in text
        (run / name).write_text(text.replace(old, new, 1))
        with pytest.raises(ConfigError, match=rf"{name} was edited or damaged"):
            report(run)
