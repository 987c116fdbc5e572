"""How near the update of states on SSD comes to what the drives reach, and what hashing every page costs.

    python benchmarks/ssd.py --ssd DIR [DIR ...] [--out FILE]

Alternates, in rounds, three things that move as many bytes: raw O_DIRECT reads and writes of pages, both at once, two
threads each way for each drive; one optimizer step over states on SSD from `step()` to `drain()`, with nothing computed
beside it; and the same with the hash left out. Weights and gradients are in RAM, the other states on SSD. Then it
alternates training steps, with and without the hash, whose updates run under the compute of the next.
"""

import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import numpy as np
import torch
import tyro
from torch import nn

import pagoda
from pagoda.memory.sizes import parse_bytes
from pagoda.memory.ssd import checked_file
from pagoda.memory.ssd.slots import Hashes
from script import begin, machine, write
from step_time import PAGE, raw_streams, run_together


class Streaming:
    """A model whose weights and gradients are in RAM, and whose low halves and moments are on SSD."""

    def __init__(self, directories: list[Path], layers: int, width: int) -> None:
        model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
        # 2 bytes each for weights and gradients; what is left is too little for the states of a unit, or next to it.
        host = 4 * layers * width * width + parse_bytes("200MiB")
        memory = pagoda.Memory(host=host, ssd=",".join(map(str, directories)), page_size=PAGE, ssd_checkpoints=0)
        self.width = width
        self.model, self.optimizer = pagoda.wrap(
            model, pagoda.AdamW(), memory=memory, max_grad_norm=1.0, precision="bf16"
        )
        self.bytes_on_ssd = pagoda.plan_of(self.model).peak_bytes["ssd"]

    def step(self) -> float:
        """Seconds from `step()` until every state is written back."""
        self.model(torch.randn(1, self.width, dtype=torch.bfloat16)).sum().backward()
        start = time.perf_counter()
        self.optimizer.step()
        self.optimizer.synchronize()
        elapsed = time.perf_counter() - start
        self.optimizer.zero_grad()
        return elapsed

    def train(self, tokens: int) -> float:
        """Seconds a step, the mean of two after a first one, whose updates they wait for."""
        start = 0.0
        for step in range(3):
            if step == 1:
                start = time.perf_counter()
            self.model(torch.randn(tokens, self.width, dtype=torch.bfloat16)).sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        elapsed = time.perf_counter() - start
        self.optimizer.synchronize()
        return elapsed / 2


@contextmanager
def without_hashes() -> Iterator[None]:
    """Pages are neither hashed nor compared."""

    def zeros(data: memoryview, page_bytes: int) -> Hashes:
        return np.zeros(data.nbytes // page_bytes, np.uint64)

    with patch.object(checked_file, "hashes_of", zeros):
        yield


WAYS: dict[str, Callable[[], AbstractContextManager[None]]] = {"hashed": nullcontext, "unhashed": without_hashes}


def measure(directories: tuple[Path, ...], layers: int, width: int, rounds: int, tokens: int) -> dict[str, object]:
    """Seconds of each kind in every round, and what follows from their medians."""
    seconds: dict[str, list[float]] = {"raw": [], "hashed": [], "unhashed": []}
    training: dict[str, list[float]] = {"hashed": [], "unhashed": []}
    with ExitStack() as stack:
        folders = {
            kind: [Path(stack.enter_context(TemporaryDirectory(dir=d))) for d in directories] for kind in seconds
        }
        runs: dict[str, Streaming] = {}
        for kind, way in WAYS.items():
            with way():
                runs[kind] = Streaming(folders[kind], layers, width)
                stack.callback(runs[kind].optimizer.close)
                runs[kind].step()
        nbytes = runs["hashed"].bytes_on_ssd
        streams = [stack.enter_context(raw_streams(str(f), *[nbytes // len(directories)] * 2)) for f in folders["raw"]]

        def alternate(turn: int, found: dict[str, list[float]], work: Callable[[Streaming], float]) -> None:
            for kind in [*WAYS][:: 1 if turn % 2 else -1]:
                with WAYS[kind]():
                    found[kind].append(work(runs[kind]))

        for turn in range(rounds):
            start = time.perf_counter()
            run_together(*streams)
            seconds["raw"].append(time.perf_counter() - start)
            alternate(turn, seconds, Streaming.step)
        for turn in range(rounds):
            alternate(turn, training, lambda run: run.train(tokens))
    middle = {kind: statistics.median(values) for kind, values in seconds.items()}
    steps = {kind: statistics.median(values) for kind, values in training.items()}
    return {
        **machine(),
        "settings": {"layers": layers, "width": width, "tokens": tokens, "drives": len(directories)},
        "bytes_each_way": nbytes,
        "seconds": seconds,
        "training_step_seconds": training,
        "raw_gb_per_s_both_ways": 2 * nbytes / middle["raw"] / 1e9,
        "streaming_share_of_raw": middle["raw"] / middle["hashed"],
        "streaming_share_of_raw_without_hashing": middle["raw"] / middle["unhashed"],
        "hashing_share_of_update": 1 - middle["unhashed"] / middle["hashed"],
        "hashing_share_of_training_step": 1 - steps["unhashed"] / steps["hashed"],
    }


def main(
    ssd: tuple[Path, ...],
    layers: int = 16,
    width: int = 3072,
    rounds: int = 3,
    tokens: int = 512,
    out: Path | None = None,
) -> None:
    """Print the figures. `ssd` names a directory on each drive; `tokens` are the rows of a batch in training steps."""
    begin()
    result = measure(ssd, layers, width, rounds, tokens)
    print(json.dumps(result, indent=2))
    write(out, result)


if __name__ == "__main__":
    tyro.cli(main)
