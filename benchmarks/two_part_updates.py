"""What updates in two parts could gain: bounds of a step in which gradients are clipped and moments are on SSD.

With exact clipping, updates begin when backward has ended, so moments stream through RAM during the next forward only.
An update could have two parts. The first runs in forward: it reads all states, computes the new weights, and writes
them and the low half of their master, but not the moments. The second runs in backward, before the unit's next
gradient comes: it reads the moments once more, computes them again from the same gradient, and writes them. The bits
are the same. The SSD moves more bytes in total and fewer of them in forward. A share of the parameters is updated so,
and the script prints the share with the shortest step.

A pass over the model takes as long as its compute, its transfers or its updates, whichever takes longest. Where the CPU
computes, transfers slow compute. Nothing else is counted, so a real gain is smaller.

    python benchmarks/two_part_updates.py [--machines h100 8 rtx4090 1] [--tokens 4096 16384] [--out FILE]
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import tyro

from pagoda.simulate.machines import find_machine

STATES, MOMENTS = 10, 8
"""Bytes of a parameter on SSD: the low half of the master, and of these the two moments."""
UPDATE, PART_OF_UPDATE = 28, 18
"""Bytes of a parameter that an update reads and writes in RAM, and each of two parts of it."""
MEASURED = Path(__file__).parent / "results" / "predict.json"
_SHARES = 200


@dataclass(frozen=True)
class Machine:
    """Rates of one GPU, or of the CPU where that computes, with its part of the drives."""

    flop_per_s: float
    read_bytes_per_s: float
    write_bytes_per_s: float
    both_bytes_per_s: float
    update_params_per_s: float
    lost_compute: float = 0.0
    """Share of compute that is lost while the SSD transfers."""

    def transfers_s(self, read: float, written: float) -> float:
        """Seconds to read and write so many bytes: both directions at once for as long as both have something."""
        both = min(read, written)
        return 2 * both / self.both_bytes_per_s + max(
            (read - both) / self.read_bytes_per_s, (written - both) / self.write_bytes_per_s
        )

    def pass_s(self, compute_s: float, read: float, written: float, updates: float) -> float:
        """Seconds of forward or backward, for a parameter of the model."""
        transfers = self.transfers_s(read, written)
        lost = self.lost_compute * transfers
        return max(compute_s + lost, transfers, updates / self.update_params_per_s)

    def step_s(self, tokens: int, share: float) -> float:
        """Seconds of a step for each parameter of the model, of which `share` is updated in two parts."""
        forward = 2 * tokens / self.flop_per_s
        part = share * PART_OF_UPDATE / UPDATE
        written, moments = STATES - share * MOMENTS, share * MOMENTS
        return self.pass_s(forward, STATES, written, 1 - share + part) + self.pass_s(
            3 * forward, moments, moments, part
        )


def named(name: str, gpus: int) -> Machine:
    """One GPU of a machine that Pagoda has figures for, of which so many work and share the rest."""
    hardware = find_machine(name)
    ssd = hardware.ssd
    assert ssd is not None, f"{name} has no SSD"
    rates = (ssd.read_bytes_per_s, ssd.write_bytes_per_s, ssd.both_bytes_per_s, hardware.cpu.update_params_per_s)
    return Machine(hardware.matmul("bf16").reached_flop_per_s.value, *(rate.value / gpus for rate in rates))


def measured() -> Machine:
    """The CPU that `predict.py` has measured with moments on SSD and 512 tokens of the largest model."""
    runs = [run for run in json.loads(MEASURED.read_text()) if run["placement"] == "SSD state" and run["tokens"] == 512]
    cpu, ssd = (runs[-1]["hardware"][part] for part in ("cpu", "ssd"))
    rates = (ssd["read_bytes_per_s"], ssd["write_bytes_per_s"], ssd["both_bytes_per_s"], cpu["update_params_per_s"])
    flops = cpu["bf16"]["reached_flop_per_s"]["value"]
    return Machine(flops, *(rate["value"] for rate in rates), lost_compute=ssd["cpu_share"]["value"])


def row(machine: Machine, tokens: int, parameters: float) -> Mapping[str, float]:
    """The step as it is, and with the best share of updates in two parts."""
    step_s, share = min((machine.step_s(tokens, share / _SHARES), share / _SHARES) for share in range(_SHARES + 1))
    whole = machine.step_s(tokens, 0.0)
    return {
        "step_s": whole * parameters,
        "two_parts_s": step_s * parameters,
        "share": share,
        "gain": 1 - step_s / whole,
    }


def main(
    machines: tuple[tuple[str, int], ...] = (("h100", 8), ("h100", 2), ("rtx4090", 1)),
    tokens: tuple[int, ...] = (4096, 16_384, 32_768, 131_072),
    parameters: float = 8e9,
    cpu_tokens: tuple[int, ...] = (128, 512, 2048),
    cpu_parameters: float = 215e6,
    out: Path | None = None,
) -> None:
    """Print a table. `machines`: names, and how many GPUs work there. Tokens are those of a step on one GPU."""
    result = {
        "two CPU cores": {str(count): row(measured(), count, cpu_parameters) for count in cpu_tokens},
        **{
            f"{name}, {gpus} GPUs" if gpus > 1 else name: {
                str(count): row(named(name, gpus), count, parameters) for count in tokens
            }
            for name, gpus in machines
        },
    }
    print("| machine | tokens | a step | updates in two parts | of the parameters | gain |\n|---|---|---|---|---|---|")
    for name, rows in result.items():
        for count, one in rows.items():
            seconds = f"{one['step_s']:.2f} s | {one['two_parts_s']:.2f} s"
            print(f"| {name} | {int(count):,} | {seconds} | {one['share']:.0%} | {one['gain']:.0%} |")
    if out is not None:
        out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    tyro.cli(main)
