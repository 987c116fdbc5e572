"""What the papers train on a machine, and what Pagoda's planner has a plan for."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from pagoda.models.papers import PAPER_SHAPES, PaperShape
from paper_tables.common import count
from paper_tables.largest import Setting, fits, forecast, gpt_shape, largest, t5_shape


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


_DRAM = "12 bytes a parameter, not 14 to 16"

CLAIMS: Sequence[Claim] = (
    Claim(
        "18B",
        "PatrickStar, 8xV100, 240 GB",
        Setting("v100-32gx8", batch=4),
        "GPU memory stores units too",
    ),
    Claim("68B; DeepSpeed 30B", "PatrickStar, 8xA100-40G, 1 TB", Setting("a100-40gx8", batch=4), _DRAM),
    Claim("55B; DeepSpeed 28B", "Angel-PTM, 8xA100-40G, 1 TB, GPT", Setting("a100-40gx8", batch=8), _DRAM),
    Claim(
        "58B; DeepSpeed 27B", "Angel-PTM, 8xA100-40G, 1 TB, T5", Setting("a100-40gx8", batch=8), _DRAM, family=t5_shape
    ),
    Claim(
        "13B, data parallel only",
        "ZeRO, 128 V100 (8 DGX-2)",
        Setting("v100-32gx16", nodes=8, batch=2),
        "ZeRO: stage 2, no RAM. Pagoda: stage 3, 13 TB of RAM",
    ),
    Claim(
        "170B, 16-way model parallelism",
        "ZeRO, 400 V100 (25 DGX-2)",
        Setting("v100-32gx16", nodes=25, batch=2),
        "As above, with 41 TB of RAM",
    ),
    Claim(
        "1T",
        "ZeRO-Infinity, one DGX-2 with NVMe",
        Setting("v100-32gx16", batch=1, ssd=True),
        "12 bytes a parameter, not 16 to 20",
    ),
    Claim(
        "32T",
        "ZeRO-Infinity, 32 DGX-2 with NVMe",
        Setting("v100-32gx16", nodes=32, batch=1, ssd=True),
        "GPUs hold a part of the activation checkpoints",
    ),
    Claim(
        "175B at about 109 TFLOP/s a GPU",
        "PatrickStar, 32 A100-40G",
        Setting("a100-40gx8", nodes=4, batch=8),
        "Assumed: 100 Gb/s between nodes",
        named="gpt3-175b",
    ),
    Claim(
        "1.2T",
        "Angel-PTM, T5-MoE, 256 A100-40G",
        Setting("a100-40gx8", nodes=32, batch=16, experts=256),
        "the CPU updates 4.8B parameters a rank",
        named="t5-moe-1.2t",
    ),
)


def claim_table() -> Iterator[str]:
    yield "| source | the paper's | Pagoda's plan | tokens a GPU | step | TFLOP/s a GPU | reason |"
    yield "|---|---|---:|---:|---:|---:|---|"
    for claim in CLAIMS:
        setting = claim.setting
        if claim.named is None:
            shape = largest(claim.family, partial(fits, setting=setting))
        else:
            shape = PAPER_SHAPES[claim.named]
        result = forecast(shape, setting)
        cells = [
            claim.source,
            claim.claim,
            count(shape.params) + ("" if claim.named is None else ", fits"),
            f"{setting.batch * shape.seq_len:,}",
            f"{result.step_s:,.1f} s",
            f"{result.flops / result.step_s / 1e12:.0f}",
            claim.why,
        ]
        yield f"| {' | '.join(cells)} |"
