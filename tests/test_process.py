"""Freed memory is kept, and OpenMP is told how long to spin before torch loads it."""

import os
import resource
import subprocess
import sys

import pytest

FREED = """
import resource, sys
import torch
from pagoda.process import keep_freed_memory

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def of_a_block():
    for _ in range(24):  # malloc takes some before it finds room for an aligned block in what was freed
        torch.ones(64 << 18)
    before = faults()
    torch.ones(64 << 18)
    return faults() - before

print(of_a_block())
assert keep_freed_memory()
print(of_a_block())
"""
COMMAND = """
import os, sys
from pagoda.__main__ import main

assert "torch" not in sys.modules
sys.argv = ["pagoda", "inspect", "nowhere"]
main()
assert "torch" in sys.modules
print(os.environ["GOMP_SPINCOUNT"])
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
    given_back, kept = map(int, lines_of(FREED))
    pages = (64 << 20) // resource.getpagesize()
    assert given_back >= pages / 2
    assert kept < pages / 10


def test_the_command_sets_how_long_to_spin_before_torch_is_imported() -> None:
    assert lines_of(COMMAND)[-1] == "10000"


def test_what_the_environment_says_of_spinning_stays() -> None:
    said = "import os\nfrom pagoda.process import spin_briefly\nspin_briefly()\nprint(os.environ['GOMP_SPINCOUNT'])"
    assert lines_of(said, GOMP_SPINCOUNT="7") == ["7"]


def test_a_program_that_has_imported_torch_starts_again_once() -> None:
    assert lines_of(RESTARTED) == ["once", "once"]
