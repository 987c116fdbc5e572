"""The tables of docs/internals/papers.md, one module each; `benchmarks/papers.py` writes the page."""
