"""Freed memory is kept, and OpenMP is told how long to spin before torch loads it."""

import os
import resource
import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys
import torch
from pagoda.process import keep_freed_memory

if sys.argv[1] == "kept":
    assert keep_freed_memory()
for _ in range(24):  # malloc takes some before it finds room for an aligned block in what was freed
    torch.ones(64 << 18)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
torch.ones(64 << 18)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
PAGES = (64 << 20) // resource.getpagesize()


def faults(how: str) -> int:
    return int(subprocess.check_output([sys.executable, "-c", PROGRAM, how], timeout=120))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="mallopt is glibc's")
def test_a_freed_block_is_taken_again_without_faults() -> None:
    assert faults("given back") >= PAGES / 2
    assert faults("kept") < PAGES / 10


RESTARTED = """
import torch
from pagoda.process import restart_spinning_briefly

print("once", flush=True)
restart_spinning_briefly()
"""
SPINS = ("GOMP_SPINCOUNT", "KMP_BLOCKTIME")


def lines_of(program: str, **environment: str) -> list[str]:
    env = {name: value for name, value in os.environ.items() if name not in SPINS} | environment
    return subprocess.check_output([sys.executable, "-c", program], timeout=120, env=env, text=True).splitlines()


def test_the_command_sets_how_long_to_spin_before_torch_is_imported() -> None:
    program = """
import os, sys
from pagoda.__main__ import main

assert "torch" not in sys.modules
sys.argv = ["pagoda", "inspect", "nowhere"]
main()
assert "torch" in sys.modules
print(os.environ["GOMP_SPINCOUNT"])
"""
    assert lines_of(program)[-1] == "10000"
    assert lines_of(program, GOMP_SPINCOUNT="7")[-1] == "7"


def test_a_program_that_has_imported_torch_starts_again_once() -> None:
    assert lines_of(RESTARTED) == ["once", "once"]
    assert lines_of(RESTARTED, GOMP_SPINCOUNT="7", KMP_BLOCKTIME="7") == ["once"]
