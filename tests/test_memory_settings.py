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
keep_freed_memory()
counts = []
for _ in range(16):
    torch.ones(16 * 2**20).sum()
    counts.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
# The median: the system may take pages away from any process now and then.
print(statistics.median(after - before for before, after in zip(counts[5:], counts[6:])))
"""


def test_pages_are_not_asked_for_again() -> None:
    if not keep_freed_memory():
        pytest.skip("not glibc")
    environment = {"PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run([sys.executable, "-c", _FAULTS], env=environment, capture_output=True, text=True, check=True)
    assert float(done.stdout) < 20  # of 16,384, each time
