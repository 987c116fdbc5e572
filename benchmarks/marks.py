"""Tables that a benchmark writes into a page, between marks with the benchmark's name."""

from pathlib import Path

END = "<!-- end of figures -->"


def write_between_marks(page: Path, script: str, text: str) -> None:
    """Puts a text between the marks of `benchmarks/SCRIPT`. Raises ValueError if the page has none."""
    begin = f"<!-- figures: benchmarks/{script} writes them -->"
    before, mark, rest = page.read_text().partition(begin)
    _, end, after = rest.partition(END)
    if not (mark and end):
        raise ValueError(f"{page} has no line '{begin}' with '{END}' after it")
    page.write_text(f"{before}{begin}\n{text}\n{END}{after}")
