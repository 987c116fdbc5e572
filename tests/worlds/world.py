"""A random world: programs that train through the package, in turns with the package's threads.

All of the package runs as for users. What lies below it is make-believe: threads, locks and time (`threads.py`), drives
(`disk.py`), devices (`device.py`), and the network (`network.py`). The model's layers (`model.py`) and the program
(`program.py`) know by `truth.py` what they must read. `observers.py` sees each event and operation of the scheduler,
and knows what must never be. `mutants.py` breaks a line of the package; `noticing.py` says which world notices.

    python -m tests.worlds.world 1000    # worlds with seeds 0 to 999
    python -m tests.worlds.world 1 4711  # that one, with what its program does printed
"""

import gc
import logging
import os
import shutil
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import torch
from torch import nn

from pagoda import api, engine
from pagoda.autograd.activations import places as activation_places
from pagoda.memory.ssd import checked_file, store as ssd_store
from pagoda.mesh.mesh import Mesh
from pagoda.mesh.world import World as Processes
from pagoda.plan.planner import Plan
from pagoda.plan.ranks import Ranks
from pagoda.prepare import construct
from pagoda.ranks import service, transport
from pagoda.runtime import gradients as runtime_gradients, lanes, moving, store as runtime_store, updaters
from pagoda.schedule import updates as schedule_updates
from pagoda.schedule.operations import schedule_plan

from .device import DeviceError, slow_copy, slow_kernel
from .disk import Drive
from .model import Layer
from .network import Network
from .observers import Observed
from .program import Program, require
from .rules import Rules
from .threads import OverError, Threads, ViolationError, in_turns

Change = Callable[[Rules], Rules]
"""What is changed of the rules that a world draws."""


class AtOnce:
    """A pool of threads in which all work is done when it is submitted."""

    def __init__(self, *_: object) -> None:
        pass

    def __enter__(self) -> "AtOnce":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def map(self, work: Callable[[Any], object], items: Iterable[Any]) -> Iterator[object]:
        return map(work, items)

    def submit(self, work: Callable[[], object]) -> "Future[object]":
        done: Future[object] = Future()
        done.set_result(work())
        return done


class World:
    """One run."""

    def __init__(self, seed: int, log: bool = False, haste: int = 0, rules: Change = Rules.as_drawn) -> None:
        """Worlds of one seed, but another `haste`, have the same programs on threads that take other turns. `rules`
        changes the rules that are drawn."""
        self.seed = seed
        self.rules = rules(Rules.draw(Random(seed)))
        self.haste = Random(7 * seed + haste + 1)
        """Decides everything but what programs do."""
        self.log: list[str] | None = [] if log else None
        self.threads = Threads(self.haste)
        self.drive = Drive(self.threads, self.haste, self.rules)
        self.network = Network(self.threads, self.rules.ranks)
        self.folder = Path(tempfile.mkdtemp(prefix="pagoda-world-", dir=_FOLDER))
        self.given: dict[tuple[int, int, int], dict[int, float]] = {}
        """(step, layer, slot) -> the sum of the gradients of each rank."""
        self.programs: list[Program] = []
        self.schedulers: list[Observed] = []
        self.fetches: list[tuple[Any, ...]] = []
        """What ranks have fetched, in order."""

    def run(self) -> None:
        """Run the world. Raises ViolationError."""
        try:
            with ExitStack() as stack:
                stack.enter_context(self._make_believe())
                stack.enter_context(in_turns(self.threads))
                try:
                    self._run()
                except OverError:
                    pass
                except BaseException as error:
                    self.threads.end(error)
        finally:
            for program in self.programs:
                program.leave_autograd()
            shutil.rmtree(self.folder, ignore_errors=True)
        if self.threads.cause is not None:
            raise self.threads.cause

    def _run(self) -> None:
        self.programs += [Program(self, rank) for rank in range(self.rules.ranks)]
        others = []
        for program in self.programs[1:]:
            others.append(self.threads.start(self._run_one, f"compute {program.rank}", program))
            others[-1].rank = program.rank
        self._run_one(self.programs[0])
        for other in others:
            other.join()
        alive = [thread.name for thread in self.threads.all[1:] if not thread.ended]
        require(not alive, f"threads run on after close(): {alive}")

    def _run_one(self, program: Program) -> None:
        with warnings.catch_warnings():
            program.run()
        self.network.leave(program.rank)

    def _open_scheduler(self, plan: Plan, _: int | None) -> Observed:
        self.schedulers.append(Observed(schedule_plan(plan), self._require, self.fetches))
        return self.schedulers[-1]

    def _lookups(self, model: nn.Module) -> dict[nn.Module, str]:
        layers = [module for module in model.modules() if isinstance(module, Layer)]
        return {layer: "" for layer in layers if layer.number in self.rules.in_ram}

    def _require(self, holds: bool, message: str) -> None:
        """Like `require`, where an error might be handled as one of the package."""
        if not holds:
            self.threads.end(ViolationError(message))
            raise OverError

    def mesh(self, rank: int) -> Mesh | None:
        """For `wrap`."""
        size = self.rules.ranks
        if size == 1:
            return None
        ranks = Ranks(size, size, self.rules.stage, ordered_sums=self.rules.ordered)
        return Mesh(Processes(rank, size, rank, size), ranks)

    def note(self, rank: int, *words: object) -> None:
        if self.log is not None:
            self.log.append(" ".join(map(str, (*([f"rank {rank}:"] if self.rules.ranks > 1 else []), *words))))

    def _end_of_kernel(self, changed: list[int]) -> None:
        """Raises DeviceError at random. `changed`: the addresses of states that were changed where they are."""
        program, likely = self.programs[self.threads.running.rank], self.rules.kernel_failures
        device = program.device
        if likely and not device.healthy and self.haste.random() < likely:
            device.failed += 1
            slots = ((slot.tensor(torch.uint8).data_ptr(), slot.nbytes) for slot in program.engine.store.slots)
            ring = [range(start, start + nbytes) for start, nbytes in slots]
            device.failed_in_place |= any(all(each not in slot for slot in ring) for each in changed)
            raise DeviceError("a kernel of this world failed")

    @contextmanager
    def _make_believe(self) -> Iterator[None]:
        """Inside, the package uses this world's drive, devices, copies, kernels and network."""

        def pauses(make: Callable[..., Any]) -> Callable[..., Any]:
            return slow_kernel(self.threads, make, self._end_of_kernel)

        places: list[tuple[Any, str, Any]] = [
            (ssd_store, "PageFile", self.drive.file),
            (checked_file, "PageFile", self.drive.file),
            (construct, "ThreadPoolExecutor", AtOnce),
            (moving, "ThreadPoolExecutor", AtOnce),
            (construct, "lookups_in", self._lookups),
            (engine, "open_scheduler", self._open_scheduler),
            (api, "open_device", lambda _: self.programs[self.threads.running.rank].device),
            (runtime_store, "copy_bytes", slow_copy(self.threads)),
            (updaters, "update_kernel", pauses(updaters.update_kernel)),
            (runtime_gradients, "_WORTH_BYTES", 2048 if self.rules.small_pieces else 256 << 10),
            (schedule_updates, "CALM_STEPS", 1),
            (activation_places, "_GROWTH_BYTES", 4096),
            (lanes, "INLINE_BYTES", 128 << 10 if self.rules.inline else 0),
        ]
        if self.rules.ranks > 1:
            places += [(transport, "dist", self.network), (service, "dist", self.network)]
            places += [(transport, "_get_default_store", lambda: None)]
        with ExitStack() as stack:
            for each in places:
                stack.enter_context(mock.patch.object(*each))
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
            yield


_FOLDER = "/dev/shm" if os.path.isdir("/dev/shm") else None


@contextmanager
def alone() -> Iterator[None]:
    """Inside, one core is used: threads that take turns hand over four times faster. Processes that run worlds at once
    use different ones. Warnings are not logged."""
    log = logging.getLogger("pagoda")
    level = log.level
    log.setLevel(logging.ERROR)
    cores, threads = os.sched_getaffinity(0), torch.get_num_threads()
    os.sched_setaffinity(0, {sorted(cores)[os.getpid() % len(cores)]})
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        gc.collect()  # what worlds have left
        gc.freeze()
        gc.enable()
        torch.set_num_threads(threads)
        os.sched_setaffinity(0, cores)
        log.setLevel(level)


def run(seed: int, log: bool = False, rules: Change = Rules.as_drawn) -> str | None:
    """Run a world; what went wrong in it, if anything."""
    gc.freeze()  # a collection looks at this world's objects alone
    world = World(seed, log, rules=rules)
    wrong = None
    try:
        world.run()
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        wrong = f"seed {seed}: {error if isinstance(error, ViolationError) else repr(error)}"
        if log:
            traceback.print_exc()
    if world.log is not None:
        print(*world.log, f"{world.threads.turns} turns", sep="\n")
    return wrong


def main() -> None:
    os.environ["PAGODA_POISON"] = "1"
    numbers = [int(each) for each in sys.argv[1:]]
    with alone():
        if len(numbers) > 1:
            print(run(numbers[1], log=True))
            return
        started = time.perf_counter()
        wrong = [found[:300] for seed in range(numbers[0]) if (found := run(seed))]
        print(*wrong[:20], f"{numbers[0]} worlds, {len(wrong)} wrong, {time.perf_counter() - started:.1f} s", sep="\n")


if __name__ == "__main__":
    main()
