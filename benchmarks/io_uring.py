"""Whether io_uring moves pages faster than the threads that Pagoda reads and writes with, or with less processor time.

Both move the same 4 MiB blocks of one file past the page cache, in turns: reads, writes, and both at once. The threads
call preadv and pwritev, two in each direction as the lanes have them, or more. io_uring has one thread, registered
buffers and some blocks in flight. It is a C program here, which needs a C compiler: no Python package for io_uring
takes buffers that are aligned for direct I/O.

    python benchmarks/io_uring.py --ssd DIR [--gib 2] [--threads 2 4 8] [--depths 4 16] [--rounds 5]
"""

import os
import resource
import statistics
import subprocess
import threading
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import tyro
from rich.console import Console
from rich.table import Table

from pagoda.memory.arena import Arena
from pagoda.memory.ssd.file import PageFile

BLOCK = 4 << 20
KINDS = {"r": "read", "w": "write", "b": "read and write"}


def main(
    ssd: Path,
    gib: float = 2.0,
    threads: tuple[int, ...] = (2, 4, 8),
    depths: tuple[int, ...] = (4, 16),
    rounds: int = 5,
) -> None:
    """Print a table. `gib` is the size of the file, `threads` those of a direction, `depths` the blocks in flight."""
    blocks = int(gib * (1 << 30)) // BLOCK // 2 * 2
    table = Table("transfers", "method", "GB/s", "over the first", "processor seconds a GB")
    with TemporaryDirectory(dir=ssd) as folder:
        program = Path(folder, "io_uring")
        subprocess.run(["cc", "-O2", "-o", program, Path(__file__).with_suffix(".c")], check=True)
        movers = Threads(Path(folder), blocks, max(threads))
        movers.move("w", 2)
        for kind, name in KINDS.items():
            found: dict[str, list[tuple[float, float]]] = {}
            for _ in range(rounds):
                for count in threads:
                    found.setdefault(f"{count} threads", []).append(movers.move(kind, count))
                for depth in depths:
                    measured = with_io_uring(program, movers.file, blocks, depth, kind)
                    found.setdefault(f"io_uring, {depth} in flight", []).append(measured)
            gigabytes = blocks * BLOCK / 1e9
            first = next(iter(found.values()))
            for method, of in found.items():
                ratio = statistics.median(a[0] / b[0] for a, b in zip(first, of, strict=True))
                seconds, processor = (statistics.median(values) for values in zip(*of, strict=True))
                rate = f"{gigabytes / seconds:.2f}"
                table.add_row(name, method, rate, f"{ratio:.2f}", f"{processor / gigabytes:.3f}")
        movers.file.close()
    Console().print(table)


class Threads:
    """A file of blocks, and threads that move them."""

    def __init__(self, folder: Path, blocks: int, most: int) -> None:
        self.file = PageFile(folder, blocks, BLOCK)
        self._blocks = blocks
        self._arena = Arena(2 * most * BLOCK)
        self._arena.view(0, self._arena.nbytes)[:] = os.urandom(self._arena.nbytes)  # a drive may compress zeros

    def move(self, kind: str, count: int) -> tuple[float, float]:
        """(seconds, processor seconds) of every block read ("r"), written ("w"), or half of them each ("b"), with so
        many threads of a direction."""
        half = self._blocks // 2
        shares = {"r": [(self.file.pread, 0, self._blocks)], "w": [(self.file.pwrite, 0, self._blocks)]}
        shares["b"] = [(self.file.pread, 0, half), (self.file.pwrite, half, self._blocks)]
        threads: list[threading.Thread] = []
        for call, first, stop in shares[kind]:
            for number in range(count):
                view = self._arena.view(len(threads) * BLOCK, BLOCK)
                places = range(first + number, stop, count)
                threads.append(threading.Thread(target=lambda c=call, v=view, p=places: [c(at, v) for at in p]))
        began, processor = time.perf_counter(), processor_seconds()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return time.perf_counter() - began, processor_seconds() - processor


def processor_seconds() -> float:
    """Of this process so far."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def with_io_uring(program: Path, file: PageFile, blocks: int, depth: int, kind: str) -> tuple[float, float]:
    """(seconds, processor seconds) of the same with io_uring."""
    path = f"/proc/{os.getpid()}/fd/{file._fd}"  # the file has no name
    command = [str(program), path, str(BLOCK), str(blocks), str(depth), kind]
    seconds, processor = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    return float(seconds), float(processor)


if __name__ == "__main__":
    tyro.cli(main)
