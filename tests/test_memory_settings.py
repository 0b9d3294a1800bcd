"""Freed memory is kept: large blocks come back from the same place instead of from the system."""

from __future__ import annotations

import subprocess
import sys

import pytest

from proxy_anchor.utils import keep_freed_memory

_FAULTS = """
import resource, statistics, torch
from proxy_anchor.utils import keep_freed_memory
torch.set_num_threads(1)
def use():
    torch.ones(16 * 2**20).sum()
def faults():
    for _ in range(5):
        use()
    counts = [resource.getrusage(resource.RUSAGE_SELF).ru_minflt]
    for _ in range(11):
        use()
        counts.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
    # The median: the system may take pages away from any process now and then.
    return statistics.median(after - before for before, after in zip(counts, counts[1:]))
plain = faults()
keep_freed_memory()
print(plain, faults())
"""


def test_pages_are_not_asked_for_again() -> None:
    if not keep_freed_memory():
        pytest.skip("not glibc")
    environment = {"PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run([sys.executable, "-c", _FAULTS], env=environment, capture_output=True, text=True, check=True)
    plain, kept = map(float, done.stdout.split())
    assert kept < 20
    assert plain > 10 * kept or plain < 20  # a system with huge pages, or one that is told so, has no faults to save
