"""The tables of docs/papers.md, one module each; `benchmarks/papers.py` writes the page."""
