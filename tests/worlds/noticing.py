"""Which random world notices a mutant: `python -m tests.worlds.noticing` looks for it, for each one.

    python -m tests.worlds.noticing               # the table: mutant, world that notices it first, what it says
    python -m tests.worlds.noticing leases 60     # of modules whose name contains a text, in at most 60 worlds each
    python -m tests.worlds.noticing --keep        # and keep these worlds in `noticed.json`, for the default suite
    python -m tests.worlds.noticing --keep --lost # only of mutants that the worlds near the kept ones do not notice

The changed functions run in place of the real ones in a process that is forked for each mutant, and ends with it.
"""

import inspect
import json
import os
import pickle
import select
import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from . import world
from .mutants import MUTANTS, Mutant

WORLD_S = 30
"""A world takes a tenth of a second: one that takes this long runs for ever."""
NEARBY = 40
"""The number of worlds near another one."""
KEPT = Path(__file__).with_name("noticed.json")


def kept_worlds() -> dict[str, int]:
    """What a mutant breaks -> the first world that notices it."""
    kept: dict[str, int] = json.loads(KEPT.read_text())
    return kept


def near(seed: int) -> list[int]:
    """If a change of the package gives worlds other orders of events, one of these notices the same mutant."""
    return [seed, *range(max(0, seed - NEARBY // 2), seed), *range(seed + 1, seed + NEARBY // 2)]


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


def noticed(mutant: Mutant, seeds: Iterable[int]) -> tuple[int, str] | None:
    """The first of these worlds that notices a mutant, and what it says. Call it inside `world.alone()`."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            with os.fdopen(writing, "wb", buffering=0) as told:
                _run_worlds(mutant, seeds, told)
        finally:
            os._exit(0)
    os.close(writing)
    found: tuple[int, str] | None = None
    with os.fdopen(reading, "rb", buffering=0) as told:
        seed = 0
        while found is None:
            ready, _, _ = select.select([told], [], [], WORLD_S)
            if not ready:
                found = seed, f"a world takes more than {WORLD_S} s"
                break
            try:
                seed, found = pickle.load(told)
            except EOFError:
                break
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return found


def _run_worlds(mutant: Mutant, seeds: Iterable[int], told: Any) -> None:
    put_in(mutant)
    for seed in seeds:
        pickle.dump((seed, None), told)
        wrong = world.run(seed, rules=mutant.rules)
        if wrong is not None:
            pickle.dump((seed, (seed, wrong.partition(": ")[2])), told)
            return


def main() -> None:
    os.environ["PAGODA_POISON"] = "1"
    words = [each for each in sys.argv[1:] if not each.startswith("--")]
    wanted, limit = words[0] if words else "", int(words[1]) if len(words) > 1 else 3_000
    kept = kept_worlds()
    survivors = count = 0
    with world.alone():
        assert world.run(0) is None  # imports and compiles what worlds need
        for mutant in MUTANTS:
            if wanted not in mutant.module.__name__ and wanted not in mutant.breaks:
                continue
            if "--lost" in sys.argv and mutant.breaks in kept and noticed(mutant, near(kept[mutant.breaks])):
                continue
            started = time.perf_counter()
            found = noticed(mutant, range(limit))
            survivors += found is None
            count += 1
            seed, said = found or (limit, "SURVIVED")
            if found is not None:
                kept[mutant.breaks] = seed
            print(f"{mutant.breaks:80} {seed:5} {time.perf_counter() - started:5.1f} s  {said[:150]}", flush=True)
    print(f"{count} mutants, {survivors} survived")
    if "--keep" in sys.argv:
        names = {mutant.breaks for mutant in MUTANTS}
        lines = (f"{json.dumps(breaks)}: {seed}" for breaks, seed in sorted(kept.items()) if breaks in names)
        KEPT.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
