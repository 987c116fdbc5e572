"""How near the update of states on SSD comes to what the drives reach, and what hashing every page costs.

    python benchmarks/ssd.py --ssd DIR [--ssd DIR ...] [--out FILE]

Alternates, in rounds, three things that move the same bytes: raw O_DIRECT reads and writes together of the same pages,
two threads each way for each drive; one optimizer step over states on SSD from `step()` to `drain()`, with nothing
computed beside it; and the same with the hash left out. Weights and gradients are in RAM, the other states on SSD.
Then it alternates training steps, with and without the hash, whose updates run under the compute of the next.
"""

import argparse
import itertools
import json
import queue
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import numpy as np
import torch
from torch import nn

import pagoda
from pagoda.calibrate.meter import cpu_name
from pagoda.memory.arena import Arena
from pagoda.memory.sizes import parse_bytes
from pagoda.memory.ssd import striped, tier
from pagoda.memory.ssd.file import PageFile
from pagoda.memory.ssd.slots import Hashes
from pagoda.process import keep_freed_memory, restart_spinning_briefly

PAGE = 4 << 20
RING = 12
"""Buffers of a drive: about as many as the update's ring has."""
_RAW_THREADS = 2
"""Each way: one transfer is on the drive while the next is prepared."""


def main() -> None:
    restart_spinning_briefly()
    keep_freed_memory()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ssd", type=Path, action="append", required=True, help="directory, once for each drive")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--width", type=int, default=3072)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=512, help="rows of a batch, in training steps")
    parser.add_argument("--out", type=Path)
    settings = parser.parse_args()
    result = measure(settings.ssd, settings.layers, settings.width, settings.rounds, settings.tokens)
    print(json.dumps(result, indent=2))
    if settings.out:
        settings.out.write_text(json.dumps(result, indent=2) + "\n")


def measure(directories: list[Path], layers: int, width: int, rounds: int, tokens: int) -> dict[str, object]:
    """Seconds of each kind in every round, and what follows from their medians."""
    seconds: dict[str, list[float]] = {"raw": [], "hashed": [], "unhashed": []}
    training: dict[str, list[float]] = {"hashed": [], "unhashed": []}
    with ExitStack() as stack:
        folders = {
            kind: [Path(stack.enter_context(TemporaryDirectory(dir=d))) for d in directories] for kind in seconds
        }
        hashed = Streaming(folders["hashed"], layers, width)
        stack.callback(hashed.close)
        with without_hashes():
            unhashed = Streaming(folders["unhashed"], layers, width)
            stack.callback(unhashed.close)
            unhashed.step()
        hashed.step()
        pages = hashed.bytes_on_ssd // PAGE
        raw = Raw(folders["raw"], pages, hashed)
        stack.callback(raw.close)
        for turn in range(rounds):
            seconds["raw"].append(raw.step())
            for kind in ("hashed", "unhashed") if turn % 2 else ("unhashed", "hashed"):
                if kind == "hashed":
                    seconds[kind].append(hashed.step())
                else:
                    with without_hashes():
                        seconds[kind].append(unhashed.step())
        for turn in range(rounds):
            for kind in ("hashed", "unhashed") if turn % 2 else ("unhashed", "hashed"):
                if kind == "hashed":
                    training[kind].append(hashed.train(tokens))
                else:
                    with without_hashes():
                        training[kind].append(unhashed.train(tokens))
    middle = {kind: statistics.median(values) for kind, values in seconds.items()}
    steps = {kind: statistics.median(values) for kind, values in training.items()}
    return {
        "machine": f"{cpu_name()}, {torch.get_num_threads()} threads",
        "settings": {"layers": layers, "width": width, "tokens": tokens, "drives": len(directories)},
        "bytes_each_way": pages * PAGE,
        "seconds": seconds,
        "training_step_seconds": training,
        "raw_gb_per_s_both_ways": 2 * pages * PAGE / middle["raw"] / 1e9,
        "streaming_share_of_raw": middle["raw"] / middle["hashed"],
        "streaming_share_of_raw_without_hashing": middle["raw"] / middle["unhashed"],
        "hashing_share_of_update": 1 - middle["unhashed"] / middle["hashed"],
        "hashing_share_of_training_step": 1 - steps["unhashed"] / steps["hashed"],
    }


class Streaming:
    """A model whose weights and gradients are in RAM, and whose low halves and moments are on SSD."""

    def __init__(self, directories: list[Path], layers: int, width: int) -> None:
        model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
        # 2 bytes each for weights and gradients; what is left is too little for the states of a unit, or next to it.
        host = 4 * layers * width * width + parse_bytes("200MiB")
        memory = pagoda.Memory(host=host, ssd=",".join(map(str, directories)), page_size=PAGE, ssd_checkpoints=0)
        self.width = width
        self.model, self.optimizer = pagoda.wrap(model, pagoda.AdamW(), memory=memory, clip_grad_norm=1.0)
        self.bytes_on_ssd = pagoda.plan_of(self.model).peak_bytes["ssd"]

    def step(self) -> float:
        """Seconds from `step()` until every state is written back."""
        self.model(torch.randn(1, self.width, dtype=torch.bfloat16)).sum().backward()
        start = time.perf_counter()
        self.optimizer.step()
        self.optimizer.drain()
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
        self.optimizer.drain()
        return elapsed / 2

    def load_pages(self, view: memoryview) -> Iterator[None]:
        """Every page of state on SSD, one after another, in `view`."""
        engine = self.optimizer._engine
        assert engine.store.ssd is not None
        for unit, state in itertools.product(engine.plan.units, engine.plan.layout.states):
            run = engine.store.run(unit.index, state.name)
            for page in range(run.count if run else 0):
                assert run is not None
                engine.store.ssd.load(run, page * PAGE, view)
                yield

    def close(self) -> None:
        self.optimizer.close()


@contextmanager
def without_hashes() -> Iterator[None]:
    """Pages are neither hashed nor compared."""

    def zeros(data: memoryview, page_bytes: int) -> Hashes:
        return np.zeros(data.nbytes // page_bytes, np.uint64)

    with patch.object(tier, "hashes_of", zeros), patch.object(striped, "hashes_of", zeros):
        yield


class Raw:
    """Reads of every page and, as soon as it has been read, its write to the same place: what the update moves, without
    anything but the transfers.
    """

    def __init__(self, directories: list[Path], pages: int, content: "Streaming") -> None:
        self._each = pages // len(directories)
        self._files = [PageFile(directory, self._each, PAGE) for directory in directories]
        self._arena = Arena(len(directories) * RING * PAGE)
        # The pages' own content: a drive may compress what it is given.
        places = itertools.cycle((file, page) for file in self._files for page in range(self._each))
        filled = 0
        while filled < pages:
            for (file, page), _ in zip(places, content.load_pages(self._view(0)), strict=False):
                file.pwrite(page, self._view(0))
                filled += 1

    def step(self) -> float:
        """Seconds to read and write every page once."""
        work = [
            thread
            for number, file in enumerate(self._files)
            for thread in self._threads(file, range(self._each), number)
        ]
        start = time.perf_counter()
        for thread in work:
            thread.start()
        for thread in work:
            thread.join()
        return time.perf_counter() - start

    def close(self) -> None:
        for file in self._files:
            file.close()

    def _view(self, slot: int) -> memoryview:
        return self._arena.view(slot * PAGE, PAGE)

    def _threads(self, file: PageFile, pages: range, number: int) -> list[threading.Thread]:
        """Two that read and two that write one drive's pages, through a ring of buffers."""
        free: queue.SimpleQueue[int] = queue.SimpleQueue()
        filled: queue.SimpleQueue[tuple[int, int] | None] = queue.SimpleQueue()
        for slot in range(RING):
            free.put(number * RING + slot)

        def read(share: range) -> None:
            for page in share:
                slot = free.get()
                file.pread(page, self._view(slot))
                filled.put((page, slot))
            filled.put(None)

        def write() -> None:
            while (item := filled.get()) is not None:
                page, slot = item
                file.pwrite(page, self._view(slot))
                free.put(slot)

        readers = [threading.Thread(target=read, args=(pages[i::_RAW_THREADS],)) for i in range(_RAW_THREADS)]
        return [*readers, *(threading.Thread(target=write) for _ in range(_RAW_THREADS))]


if __name__ == "__main__":
    main()
