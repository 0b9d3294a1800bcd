"""Freed memory is kept: large blocks come back from the same place instead of from the system."""

from __future__ import annotations

import resource
import statistics
from itertools import pairwise

import pytest
import torch

from proxy_anchor.utils import keep_freed_memory


def test_pages_are_not_asked_for_again() -> None:
    if not keep_freed_memory():
        pytest.skip("not glibc")
    counts = []
    for _ in range(16):
        torch.ones(16 * 2**20).sum()
        counts.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
    # The median: the system may take pages away from any process now and then.
    assert statistics.median(after - before for before, after in pairwise(counts[5:])) < 20  # of 16,384, each time
