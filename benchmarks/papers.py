"""The papers' tables and experiments, and what Pagoda's planner and simulator give: `python benchmarks/papers.py`
writes docs/internals/papers.md, docs/internals/experiments.md and its plots. `python benchmarks/papers.py tables`
writes the first page only, `experiments` the other.

Nothing is measured here: the same code gives the same text on every machine, and a test compares it with the files.
"""

from pathlib import Path
from typing import Literal

import tyro
from tyro.conf import Positional

from paper_tables.claims import claim_table
from paper_tables.drawing import draw
from paper_tables.efficiency import overlap_table
from paper_tables.experiments import EXPERIMENTS, Plot, sections
from paper_tables.memory import memory_table
from paper_tables.pinned import pinned_table

DOCS = Path(__file__).parents[1] / "docs" / "internals"
PAGE = DOCS / "papers.md"
EXPERIMENTS_PAGE = DOCS / "experiments.md"

INTRODUCTION = """\
# The papers' tables, from Pagoda's planner

This page compares Pagoda's plans with the memory, efficiency and largest models that papers state. `python
benchmarks/papers.py` writes it. Nothing was run. Pagoda's figures come from its planner and its simulator, on the
machines of `pagoda/simulate/machines.py`.
"""

MEMORY = """
## Memory of a data-parallel rank

GB (1e9 bytes) of model state on each of N_d ranks. ZeRO (arXiv 1910.02054, table 1) needs 2 bytes a parameter for the
weight, 2 for the gradient and 12 for the rest, Pagoda 10 for the rest. Pagoda's figures are from a real plan of one
rank, in whole pages, without buffers.
"""

PINNED = """
## Pinned memory

GB of pinned RAM for all states and gradients. torch's allocator rounds each tensor up to a power of two. Pagoda pins
one arena of exactly its pages.
"""

OVERLAP = """
## Efficiency by bandwidth

ZeRO-Infinity (arXiv 2104.07857, section 4) computes efficiency as ait * bw / (ait * bw + peak), with ait = seq * batch
FLOPs a byte for weights and gradients. The simulated plans are of a 10B GPT on one GPU with 70 TFLOP/s, and sequences
of 1,024. A model that is *one unit* cannot overlap anything, but moves 4 bytes a parameter where the formula has 8.
*Units of 512 MiB* move 6, and overlap with compute.
"""

LARGEST = """
## The largest model of a machine

The largest shape that has a plan, and its simulated step. GPTs have sequences of 1,024, T5s of 512. Rates are as in
[the papers' experiments](experiments.md). Assumed: ZeRO stage 3, data parallel, one micro-batch, no clipping; nine
tenths of RAM and drives, and all of a GPU but 1 GiB and the activations; activation checkpoints in up to half of a GPU
and in RAM, whose copies take no time.
"""


EXPERIMENTS_INTRODUCTION = """\
# The papers' experiments, simulated

`python benchmarks/papers.py` writes this page. **Nothing was run.** The papers' figures were measured; Pagoda's are
simulated, without latency and imbalance, at the rates in `pagoda/simulate/machines.py`: 70 TFLOP/s for a V100, 187 for
an A100. So a ratio above 1 means that transfers end before compute where the paper's did not. TFLOP/s are of one GPU
unless stated otherwise, with recomputation. A batch is of one GPU, in sequences.

Each case is planned as `pagoda plan` does it: AdamW in bf16 with fp32 moments, ZeRO stage 3, data parallel, one
micro-batch, clipping, recomputed layers. Pages may use nine tenths of RAM and drives, and what CUDA (1 GiB) and
activations leave of the GPU.
"""


def page() -> str:
    """The text of docs/internals/papers.md."""
    parts = [
        INTRODUCTION,
        MEMORY,
        *memory_table(),
        PINNED,
        *pinned_table(),
        OVERLAP,
        *overlap_table(),
        LARGEST,
        *claim_table(),
    ]
    return "\n".join(parts).rstrip() + "\n"


def experiments_page() -> tuple[str, list[Plot]]:
    """The text of docs/internals/experiments.md, and its plots."""
    made = [experiment() for experiment in EXPERIMENTS]
    return "\n".join([EXPERIMENTS_INTRODUCTION.rstrip(), *sections(made)]).rstrip() + "\n", [e.plot for e in made]


def main(pages: Positional[tuple[Literal["tables", "experiments"], ...]] = ("tables", "experiments")) -> None:
    """Write the pages."""
    if "tables" in pages:
        PAGE.write_text(page())
    if "experiments" in pages:
        text, plots = experiments_page()
        EXPERIMENTS_PAGE.write_text(text)
        for plot in plots:
            draw(plot, DOCS)


if __name__ == "__main__":
    tyro.cli(main)
