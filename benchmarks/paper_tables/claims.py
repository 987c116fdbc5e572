"""What the papers train on a machine beside what Pagoda's planner has a plan for."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from pagoda.models.papers import PAPER_SHAPES, PaperShape
from paper_tables.common import count, gigabytes
from paper_tables.largest import Setting, fits, forecast, gpt_shape, largest, t5_shape, with_device_homes


@dataclass(frozen=True)
class Claim:
    """A row of the table: what a paper trains on a machine."""

    claim: str
    source: str
    setting: Setting
    why: str
    family: Callable[[float], PaperShape] = gpt_shape
    named: str | None = None
    """A shape to plan as it is, in place of the largest."""


_DRAM = "RAM is the limit: 12 bytes a parameter, where the paper keeps 14 to 16"

CLAIMS: Sequence[Claim] = (
    Claim(
        "18B",
        "PatrickStar, 8xV100, 240 GB",
        Setting("v100-32g-8", batch=4),
        "GPU memory is home to the units that RAM has no room for",
    ),
    Claim("68B; DeepSpeed 30B", "PatrickStar, 8xA100-40G, 1 TB", Setting("a100-40g", batch=4), _DRAM),
    Claim("55B; DeepSpeed 28B", "Angel-PTM, 8xA100-40G, 1 TB, GPT", Setting("a100-40g", batch=8), _DRAM),
    Claim(
        "58B; DeepSpeed 27B", "Angel-PTM, 8xA100-40G, 1 TB, T5", Setting("a100-40g", batch=8), _DRAM, family=t5_shape
    ),
    Claim(
        "55B on SSD",
        "the same node with its 11 TB of SSD",
        Setting("a100-40g", batch=8, ssd=True),
        "No claim of the paper: what SSD adds. One drive's 3.5 GB/s for eight GPUs (assumed) makes it slow",
    ),
    Claim(
        "13B, data parallel only",
        "ZeRO, 128 V100 (8 DGX-2)",
        Setting("v100-32g", nodes=8, batch=2),
        "ZeRO uses GPU memory only and stage 2, whose whole 16-bit weights fill a GPU at 13B; a plan uses stage 3 and "
        "13 TB of RAM",
    ),
    Claim(
        "170B, with 16-way model parallelism",
        "ZeRO, 400 V100 (25 DGX-2)",
        Setting("v100-32g", nodes=25, batch=2),
        "As above, with 41 TB of RAM, of which checkpoints take three tenths",
    ),
    Claim(
        "1T",
        "ZeRO-Infinity, one DGX-2 with NVMe",
        Setting("v100-32g", batch=1, ssd=True),
        "28 TB of drives hold 12 bytes a parameter, where ZeRO-Infinity keeps 16 to 20. 1,024 tokens a GPU do not hide "
        "40 TB of drive traffic; a step of more tokens would",
    ),
    Claim(
        "32T",
        "ZeRO-Infinity, 32 DGX-2 with NVMe",
        Setting("v100-32g", nodes=32, batch=1, ssd=True),
        "RAM is the limit: the checkpoints of a sequence a GPU fill it, as this family is deeper than the paper's "
        "shapes and no model parallelism shares them",
    ),
    Claim(
        "32T",
        "the same, in the paper's proportions",
        Setting("v100-32g", nodes=32, batch=1, ssd=True),
        "Fits as it is, in 55% of the room on the drives. The paper shares each layer among GPUs too",
        named="gpt-32t",
    ),
    Claim(
        "175B at about 109 TFLOP/s a GPU",
        "PatrickStar, 32 A100-40G (3.5 PFLOP/s, read off its plot)",
        Setting("a100-40g", nodes=4, batch=8),
        "100 Gb/s between nodes, as Angel-PTM has: all-gathers bind; 16,384 tokens a GPU hide most of them, and the "
        "paper's tokens are not known",
        named="gpt3-175b",
    ),
    Claim(
        "175B",
        "the same with 8 x 200 Gb/s between nodes, a DGX A100's",
        Setting("a100-40g-dgx", nodes=4, batch=8),
        "PatrickStar's network is not stated; this is its upper end",
        named="gpt3-175b",
    ),
    Claim(
        "1.2T",
        "Angel-PTM, T5-MoE on hundreds of GPUs: 256 A100-40G here",
        Setting("a100-40g", nodes=32, batch=16, experts=256),
        "9 of 2,304 experts a rank: 4.8B parameters to update in RAM for the FLOPs of 0.7B",
        named="t5-moe-1.2t",
    ),
)


def claim_table() -> Iterator[str]:
    yield (
        "| source | the paper's | Pagoda's plan | closed form: GPU memory alone | GPU memory too "
        "| sequences a GPU and step | step | TFLOP/s a GPU | binding lane | per rank: GPU, RAM, SSD | why it differs |"
    )
    yield "|---|---|---:|---:|---:|---:|---:|---:|---|---|---|"
    for claim in CLAIMS:
        setting = claim.setting
        if claim.named is None:
            shape = largest(claim.family, partial(fits, setting=setting))
            size = f"{count(shape.params)} ({shape.name})"
            closed = [count(params) for params in with_device_homes(shape, setting)]
        else:
            shape = PAPER_SHAPES[claim.named]
            size = f"{count(shape.params)} ({shape.name}): fits"
            closed = ["—", "—"]
        result = forecast(shape, setting)
        tiers = result.plan.peak_bytes
        times = result.step_s / result.timeline.step_s
        held = [tiers.get("device", 0), tiers.get("host", 0) * times, tiers.get("ssd", 0) * times]
        cells = [
            claim.source,
            claim.claim,
            size,
            *closed,
            f"{setting.batch} x {shape.seq_len}",
            f"{result.step_s:,.1f} s",
            f"{result.flops / result.step_s / 1e12:.0f}",
            result.timeline.binding_lane,
            ", ".join(f"{gigabytes(nbytes)} GB" for nbytes in held),
            claim.why,
        ]
        yield f"| {' | '.join(cells)} |"
