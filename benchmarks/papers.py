"""The papers' tables beside what Pagoda's planner and simulator give: `python benchmarks/papers.py` writes
docs/papers.md.

Nothing is measured here: the same code gives the same text on every machine, and a test compares it with the file.
"""

from collections.abc import Iterator
from pathlib import Path

from paper_tables.claims import claim_table
from paper_tables.efficiency import efficiency_table, overlap_table
from paper_tables.memory import memory_table

PAGE = Path(__file__).parents[1] / "docs" / "papers.md"

INTRODUCTION = """\
# The papers' tables, from Pagoda's planner

Written by `python benchmarks/papers.py`; a test compares this file with what that writes. Nothing here was run: the
papers' figures are theirs, and Pagoda's come from the planner that the runtime executes and from the simulator, which
the scheduler drives, on machines as `pagoda/simulate/machines.py` describes them, each figure there with its source.
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
- A plan has leases and collective buffers on the GPU and homes in RAM and on SSD. The *closed form* is what would fit
  if the rest of GPU memory were home to state, at 12 bytes a parameter: alone, or beside RAM and SSD. No plan does
  that yet.
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


def page() -> str:
    """The text of docs/papers.md."""
    parts = [INTRODUCTION, MEMORY, *_lines(memory_table()), EFFICIENCY, *_lines(efficiency_table())]
    parts += [OVERLAP, *_lines(overlap_table()), LARGEST, *_lines(claim_table())]
    return "\n".join(parts).rstrip() + "\n"


def _lines(table: Iterator[str]) -> list[str]:
    return ["\n".join(table)]


if __name__ == "__main__":
    PAGE.write_text(page())
