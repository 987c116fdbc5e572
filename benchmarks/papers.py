"""The papers' tables and experiments beside what Pagoda's planner and simulator give: `python benchmarks/papers.py`
writes docs/papers.md, docs/papers/experiments.md and its plots. `python benchmarks/papers.py tables` writes the first
page only, `experiments` the other.

Nothing is measured here: the same code gives the same text on every machine, and a test compares it with the files.
"""

import sys
from pathlib import Path

from paper_tables.claims import claim_table
from paper_tables.drawing import draw
from paper_tables.efficiency import efficiency_table, overlap_table
from paper_tables.experiments import EXPERIMENTS, Plot, sections
from paper_tables.memory import memory_table

DOCS = Path(__file__).parents[1] / "docs"
PAGE = DOCS / "papers.md"
EXPERIMENTS_PAGE = DOCS / "papers" / "experiments.md"

INTRODUCTION = """\
# The papers' tables, from Pagoda's planner

Written by `python benchmarks/papers.py`; a test compares this file with what that writes. Nothing here was run: the
papers' figures are theirs, and Pagoda's come from the planner that the runtime executes and from the simulator, which
the scheduler drives, on machines as `pagoda/simulate/machines.py` describes them, each figure there with its source.
[The papers' experiments](papers/experiments.md) have a page of their own.
"""

MEMORY = """
## Memory of a data-parallel rank

GB (1e9 bytes) of model state on each of N_d ranks. ZeRO (arXiv 1910.02054, table 1): 2 bytes a parameter for the
weight, 2 for the gradient, 12 for the rest. Stage 1 divides the 12 by N_d, stage 2 the gradient too, stage 3 all.
Pagoda: 2 + 2 + 10, because a 16-bit weight is the high half of the fp32 master and not a second copy; sums of a real
plan of one rank, in whole pages, without buffers, scaled from the shape's parameters to the nominal ones. With units
updated during backward a gradient lives in a few buffers only, and 12 bytes remain.
"""

EFFICIENCY = """
## Efficiency by bandwidth

ZeRO-Infinity (arXiv 2104.07857, section 4): efficiency = ait * bw / (ait * bw + peak), peak 70 TFLOP/s, sequences of
1,024. Arithmetic intensity (FLOPs a byte): weights and gradients seq * batch, optimizer states seq * batch / 4,
activation checkpoints 24 * hidden. Transfers and compute take turns in it.
"""

OVERLAP = """
What the simulator gives for plans of a 10B GPT on one such GPU, with a link of that bandwidth each way and with RAM and
updates that never bind. The paper counts 8 bytes a parameter and step: weights in forward, in recomputation and in
backward, and the gradient. A plan gathers weights once for recomputation and backward (6 bytes), and a model that is a
single unit keeps them between forward and backward (4). *One unit* cannot overlap anything, and agrees with the formula
for its own FLOPs and bytes to a tenth of a per cent. *Units of 512 MiB* overlap and are better than the formula: a step
nears the longer of compute and of transfers, which go both ways at once.
"""

LARGEST = """
## The largest model of a machine

The largest shape for which the planner has a plan, and its simulated step. GPTs are of one family (`gpt_shape`: hidden
about 96 times the layers, sequences of 1,024), T5s of hidden 8,192. Assumptions:

- Every rank is data parallel, ZeRO stage 3, and updates units during backward: one micro-batch, no clipping. Clipping
  adds 2 bytes a parameter for gradients. ZeRO's 170B and the 1T and 32T of ZeRO-Infinity used model parallelism too.
- A plan has leases and collective buffers on the GPU, and homes in RAM and on SSD; what does not fit there has its home
  on the GPU too, as far as whole units fit. The *closed form* is what would fit if all the rest of GPU memory were home
  to state, at 12 bytes a parameter: alone, or beside RAM and SSD.
- Units are modules of at most 512 MiB of weights.
- Pages may use nine tenths of RAM and of drives, split evenly over a node's ranks, and all of a GPU's memory but 1 GiB
  and the activations: ZeRO-Infinity's formulas with a checkpoint each layer, 2 * tokens * hidden * layers, and
  tokens * (16 * hidden + 2 * heads * seq) while a layer is recomputed, or 6 bytes a logit, if that is more.
  Checkpoints that take more than half of the GPU are in RAM instead; their copies are not in the step time.
- Matrices of more than 256 MiB, the embedding too, are cut in up to 64 tiles (memory-centric tiling).
- Models that would have more than some 200 units are planned with a part of their layers, as large a part of RAM and
  drives, and all of the GPU; the step is as many times as long. The embedding then counts too often, which is safe.
- FLOPs are four forward passes, recomputation included, attention as a full square. GPUs reach the rate that
  `machines.py` has as `reached`; latencies and imbalance between ranks or experts are not modelled.
- T5-MoE is planned with the experts of one rank, and tokens that travel to the others', evenly.
- RAM that is left holds copies of up to a quarter of the state there while a checkpoint is written, and the table
  counts them. No pages on drives are kept for checkpoints.
"""


EXPERIMENTS_INTRODUCTION = """\
# The papers' experiments, simulated

Written by `python benchmarks/papers.py`; a test compares this file with what that writes. [The papers'
tables](../papers.md) are on another page.

**Nothing here was run.** The papers' figures were measured; Pagoda's are simulated, on machines of the same kind. The
simulator has no latencies, no imbalance, and lets a GPU compute at the rate that it reaches while all its data is there
(`reached` in `pagoda/simulate/machines.py`: 70 TFLOP/s of a V100, 187 of an A100). So a ratio above 1 says that copies,
updates and collectives end under compute where the paper's did not. It does not say that a run would reach that rate.

Each case is planned and simulated as `pagoda plan` does it, with these settings:

- AdamW in bf16 with fp32 moments, ZeRO stage 3, one micro-batch, all ranks data parallel, and clipping: 14 bytes a
  parameter, gradients included.
- Layers are recomputed. If their inputs do not fit the GPU, they are copied to RAM or to drives and back
  ("activations copied"); these copies are counted.
- Pages may use nine tenths of RAM and of drives. Of the GPU, what 1 GiB for CUDA and the activations leave. The
  planner decides what is home to a unit: GPU, RAM or drive.
- The plan is the fastest of a short search (GPU memory as a home, updates on the GPU), with units of
  at most 512 MiB, or a matrix. Of shapes with many units, a part of the layers is planned, with the same part of every
  tier; activations are those of all layers.
- Matrices of more than 512 MiB are cut in tiles.
- TFLOP/s count four forward passes, recomputation included, attention as a full square.
- Where `d2h` binds on several nodes, compute waits for gradients, which are reduced between nodes before they leave.
"""


def page() -> str:
    """The text of docs/papers.md."""
    parts = [INTRODUCTION, MEMORY, *memory_table(), EFFICIENCY, *efficiency_table()]
    parts += [OVERLAP, *overlap_table(), LARGEST, *claim_table()]
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
