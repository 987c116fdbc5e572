"""Freed memory is kept: a block taken again costs no page fault."""

import resource
import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys
import torch
from pagoda.memory.heap import keep_freed_memory

if sys.argv[1] == "kept":
    assert keep_freed_memory()
for _ in range(2):
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
