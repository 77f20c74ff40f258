"""Memory that a step frees serves the next one: blocks that come and go are not faulted in page by page again."""

from __future__ import annotations

import subprocess
import sys

import pytest

from ebbflow.core.memory import keep_freed_memory

CHURN = """
import resource, sys, torch
from ebbflow.core.memory import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        blocks = [torch.ones(10 * 2**20, dtype=torch.float32) for _ in range(3)]  # of 40 MB
        del blocks
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

default = faults()
assert keep_freed_memory()
faults()  # the blocks are faulted in once
print(default, faults())
"""


@pytest.mark.process
def test_blocks_that_come_and_go_keep_their_pages() -> None:
    if not keep_freed_memory():
        pytest.skip("the C library of this system is not glibc")
    default, kept = map(int, subprocess.check_output([sys.executable, "-c", CHURN], text=True, timeout=120).split())
    assert default > 300  # 10 x 3 x 40 MB are 300,000 pages of 4 KB, or 600 huge ones
    assert kept < default / 10
