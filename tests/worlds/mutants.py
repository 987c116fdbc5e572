"""Mutants: each breaks one rule of the package's own code, and random worlds must notice.

    python -m tests.worlds.mutants               # the table: mutant, worlds until it was noticed, what they said
    python -m tests.worlds.mutants leases 60     # of modules whose name contains a text, in at most 60 worlds each

The mutants are those of `tests/schedule/mutants.py`. The changed functions run in place of the real ones in a process
that is forked for each mutant, and ends with it.
"""

import inspect
import os
import pickle
import select
import signal
import sys
import time
from types import FunctionType, ModuleType
from typing import Any

from tests.schedule.mutants import MUTANTS, Mutant

from . import world

WORLD_S = 30
"""A world takes a tenth of a second: one that takes this long runs for ever."""


def put_in(mutant: Mutant) -> None:
    """Run the changed functions in place of the real ones, in this process."""
    real = mutant.module
    changed = ModuleType(real.__name__)
    sys.modules[real.__name__] = changed
    try:
        text = inspect.getsource(real).replace(mutant.old, mutant.new)
        exec(compile(text, f"<{real.__name__}>", "exec"), changed.__dict__)
    finally:
        sys.modules[real.__name__] = real
    _replace(vars(real), vars(changed), real.__name__)


def _replace(real: Any, changed: Any, module: str) -> None:
    """Give functions the code of others with the same names, also in classes."""
    for name, value in [*changed.items()]:
        mine = real.get(name)
        if isinstance(value, type) and isinstance(mine, type) and value.__module__ == module:
            _replace(vars(mine), vars(value), module)
        for ours, theirs in zip(_functions(mine), _functions(value), strict=False):
            if theirs.__module__ == module and ours.__code__ != theirs.__code__:
                ours.__code__, ours.__defaults__ = theirs.__code__, theirs.__defaults__


def _functions(value: Any) -> list[FunctionType]:
    """The functions behind a name: of a property, a static method or a wrapper too."""
    if isinstance(value, property):
        return [each for each in (value.fget, value.fset) if isinstance(each, FunctionType)]
    value = getattr(value, "__func__", value)
    value = getattr(value, "__wrapped__", value)
    return [value] if isinstance(value, FunctionType) else []


def noticed(mutant: Mutant, worlds: int) -> tuple[int, str] | None:
    """The number of worlds, of at most `worlds`, that it takes to notice a mutant, and what the last one says."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            with os.fdopen(writing, "wb", buffering=0) as told:
                _run_worlds(mutant, worlds, told)
        finally:
            os._exit(0)
    os.close(writing)
    found: tuple[int, str] | None = None
    with os.fdopen(reading, "rb", buffering=0) as told:
        seed = 0
        while True:
            ready, _, _ = select.select([told], [], [], WORLD_S)
            if not ready:
                found = seed + 1, f"a world takes more than {WORLD_S} s"
                break
            try:
                seed, found = pickle.load(told)
            except EOFError:
                break
            if found is not None:
                break
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return found


def _run_worlds(mutant: Mutant, worlds: int, told: Any) -> None:
    put_in(mutant)
    with world.alone():
        for seed in range(worlds):
            pickle.dump((seed, None), told)
            wrong = world.run(seed)
            if wrong is not None:
                pickle.dump((seed, (seed + 1, wrong.partition(": ")[2])), told)
                return


def main() -> None:
    os.environ["PAGODA_POISON"] = "1"
    wanted = sys.argv[1] if len(sys.argv) > 1 else ""
    limit = int(sys.argv[2]) if len(sys.argv) > 2 else 3_000
    with world.alone():
        assert world.run(0) is None  # imports and compiles what worlds need
    survivors = count = 0
    for mutant in MUTANTS:
        if wanted not in mutant.module.__name__ and wanted not in mutant.breaks:
            continue
        started = time.perf_counter()
        found = noticed(mutant, limit)
        survivors += found is None
        count += 1
        worlds, words = found or (limit, "SURVIVED")
        seconds = time.perf_counter() - started
        print(f"{mutant.breaks:80} {worlds:5} {seconds:5.1f} s  {words[:150]}", flush=True)
    print(f"{count} mutants, {survivors} survived")


if __name__ == "__main__":
    main()
