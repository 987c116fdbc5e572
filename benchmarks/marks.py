"""Tables that a benchmark writes into a page, between marks with the benchmark's name."""

from pathlib import Path

END = "<!-- end of figures -->"


def between_marks(page: Path, script: str) -> str:
    """The text between the marks of `benchmarks/SCRIPT`. Raises ValueError if the page has none."""
    return _parts(page, script)[1]


def write_between_marks(page: Path, script: str, text: str) -> None:
    """Puts a text between the marks of `benchmarks/SCRIPT`. Raises ValueError if the page has none."""
    before, _, after = _parts(page, script)
    page.write_text(f"{before}{text}{after}")


def _parts(page: Path, script: str) -> tuple[str, str, str]:
    """A page up to the text between marks, that text, and the rest."""
    begin = f"<!-- figures: benchmarks/{script} writes them -->\n"
    before, mark, rest = page.read_text().partition(begin)
    text, end, after = rest.partition(f"{END}")
    if not (mark and end):
        raise ValueError(f"{page} has no line '{begin.strip()}' with '{END}' after it")
    return before + mark, text.rstrip("\n"), f"\n{END}{after}"
