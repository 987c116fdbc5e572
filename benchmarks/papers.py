"""The papers' tables and experiments, and what Pagoda's planner and simulator give: `python benchmarks/papers.py`
writes docs/papers.md, docs/papers/experiments.md and its plots. `python benchmarks/papers.py tables` writes the first
page only, `experiments` the other.

Nothing is measured here: the same code gives the same text on every machine, and a test compares it with the files.
"""

import sys
from pathlib import Path

from paper_tables.claims import claim_table
from paper_tables.drawing import draw
from paper_tables.efficiency import overlap_table
from paper_tables.experiments import EXPERIMENTS, Plot, sections
from paper_tables.memory import memory_table
from paper_tables.pinned import pinned_table

DOCS = Path(__file__).parents[1] / "docs"
PAGE = DOCS / "papers.md"
EXPERIMENTS_PAGE = DOCS / "papers" / "experiments.md"

INTRODUCTION = """\
# The papers' tables, from Pagoda's planner

How do Pagoda's plans compare with the memory, the efficiency and the largest models that papers state?

`python benchmarks/papers.py` writes this page. Nothing was run. Pagoda's figures come from its planner and its
simulator, on the machines of `pagoda/simulate/machines.py`, which names the source of each figure.
"""

MEMORY = """
## Memory of a data-parallel rank

GB (1e9 bytes) of model state on each of N_d ranks. ZeRO (arXiv 1910.02054, table 1) counts 2 bytes a parameter for the
weight, 2 for the gradient and 12 for the rest. Pagoda needs 10 for the rest, because a 16-bit weight is the high half
of its fp32 master. Pagoda's figures are from a real plan of one rank, in whole pages, without buffers.
"""

PINNED = """
## Pinned memory

GB of pinned RAM for all states and gradients. torch's allocator rounds each tensor up to a power of two. Pagoda pins
one arena of exactly its pages. A page is as large as possible, up to 4 MiB, if the units' sizes waste at most 2%.
"""

OVERLAP = """
## Efficiency by bandwidth

ZeRO-Infinity (arXiv 2104.07857, section 4) computes efficiency as ait * bw / (ait * bw + peak), with ait = seq * batch
FLOPs a byte for weights and gradients. The table compares this with simulated plans of a 10B GPT on one GPU: peak 70
TFLOP/s, sequences of 1,024, a link of that bandwidth in each direction. A model that is *one unit* cannot overlap
anything, but moves 4 bytes a parameter where the formula counts 8. *Units of 512 MiB* move 6, and overlap with compute.
"""

LARGEST = """
## The largest model of a machine

The largest shape that has a plan, and its simulated step. GPTs are of one family (hidden about 96 times the layers,
sequences of 1,024), T5s have hidden 8,192 and sequences of 512. Assumptions:

- ZeRO stage 3, data parallel, one micro-batch, no clipping. Units have at most 512 MiB of weights, and are updated
  during backward. Matrices above 256 MiB are cut into at most 64 tiles.
- Pages may use nine tenths of RAM and drives, and all of a GPU but 1 GiB and the activations (ZeRO-Infinity's
  formulas). Activation checkpoints take up to half of a GPU, and the rest is in RAM; their copies take no time.
- Parts of large models, FLOPs and rates are as in [the papers' experiments](papers/experiments.md).
"""


EXPERIMENTS_INTRODUCTION = """\
# The papers' experiments, simulated

`python benchmarks/papers.py` writes this page. **Nothing was run.** The papers' figures were measured; Pagoda's are
simulated, without latency and imbalance. A GPU computes at the rate `reached` in `pagoda/simulate/machines.py`: 70
TFLOP/s for a V100, 187 for an A100. So a ratio above 1 means that copies, updates and collectives end before compute
where the paper's did not, and not that a run reaches that rate. TFLOP/s are of one GPU unless stated otherwise, and
count four forward passes with attention as a full square. A batch is of one GPU, in sequences.

Each case is planned as `pagoda plan` does it:

- AdamW in bf16 with fp32 moments, ZeRO stage 3, data parallel, one micro-batch, clipping: 12 bytes of state a
  parameter, and 2 of gradient.
- Layers are recomputed. If their inputs do not fit on the GPU, they are copied to RAM or drives and back.
- Pages may use nine tenths of RAM and drives, and what CUDA (1 GiB) and activations leave of the GPU.
- The plan is the fastest of a short search. Units have at most 512 MiB, and larger matrices are cut into tiles. Models
  with many units are planned with a part of their layers and of each tier, except the one with experts.
"""


def page() -> str:
    """The text of docs/papers.md."""
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
    """The text of docs/papers/experiments.md, and its plots."""
    made = [experiment() for experiment in EXPERIMENTS]
    return "\n".join([EXPERIMENTS_INTRODUCTION.rstrip(), *sections(made)]).rstrip() + "\n", [e.plot for e in made]


if __name__ == "__main__":
    wanted = sys.argv[1:] or ["tables", "experiments"]
    if "tables" in wanted:
        PAGE.write_text(page())
    if "experiments" in wanted:
        text, plots = experiments_page()
        EXPERIMENTS_PAGE.write_text(text)
        for plot in plots:
            draw(plot, DOCS / "images")
