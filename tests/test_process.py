"""Freed memory is kept, and OpenMP is told how long to spin before torch loads it."""

import os
import resource
import subprocess
import sys

import pytest

FREED = """
import resource
import numpy
from pagoda.process import keep_freed_memory

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def of_a_block():
    for _ in range(3):
        numpy.ones(8 << 20)
    before = faults()
    numpy.ones(8 << 20)
    return faults() - before

print(of_a_block())
assert keep_freed_memory()
print(of_a_block())
"""
IMPORTED = """
import os, sys
from pagoda.__main__ import main

class BeforeTorch:
    def find_spec(self, name, *_):
        if name == "torch":
            print(os.environ["GOMP_SPINCOUNT"], flush=True)
            os._exit(0)

sys.meta_path.insert(0, BeforeTorch())
sys.argv = ["pagoda", "inspect", "nowhere"]
main()
"""
RESTARTED = """
import sys
from types import ModuleType

sys.modules["torch"] = ModuleType("torch")
from pagoda.process import restart_spinning_briefly

print("once", flush=True)
restart_spinning_briefly()
"""
SPINS = ("GOMP_SPINCOUNT", "KMP_BLOCKTIME")


def lines_of(program: str, **environment: str) -> list[str]:
    env = {name: value for name, value in os.environ.items() if name not in SPINS} | environment
    return subprocess.check_output([sys.executable, "-c", program], timeout=120, env=env, text=True).splitlines()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="mallopt is glibc's")
def test_a_freed_block_is_taken_again_without_faults() -> None:
    given_back, kept = map(int, lines_of(FREED, NUMPY_MADVISE_HUGEPAGE="0"))
    pages = (64 << 20) // resource.getpagesize()
    assert given_back >= pages / 2
    assert kept < pages / 10


@pytest.mark.parametrize(("environment", "count"), [({}, "10000"), ({"GOMP_SPINCOUNT": "7"}, "7")])
def test_before_torch_is_imported_the_command_sets_how_long_to_spin_unless_the_environment_does(
    environment: dict[str, str], count: str
) -> None:
    assert lines_of(IMPORTED, **environment) == [count]


def test_a_program_that_has_imported_torch_starts_again_once() -> None:
    assert lines_of(RESTARTED) == ["once", "once"]
