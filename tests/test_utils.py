"""What an operating system and its packages have, and what they are asked for."""

from __future__ import annotations

import resource
import statistics
import subprocess
import sys
from itertools import pairwise
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from proxy_anchor import utils


def test_images_are_cropped_by_triton_where_it_can_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = pytest.importorskip("triton.runtime").driver

    link = Mock(side_effect=[None, RuntimeError("no C compiler"), subprocess.CalledProcessError(1, "cc")])
    monkeypatch.setattr(driver, "_active", SimpleNamespace(get_current_target=link))
    assert [utils.have_triton.__wrapped__() for _ in range(3)] == [True, False, False]
    monkeypatch.setitem(sys.modules, "triton.runtime", None)
    assert not utils.have_triton.__wrapped__()


def test_pages_of_freed_memory_are_not_asked_for_again() -> None:
    if not utils.keep_freed_memory():
        pytest.skip("not glibc")
    counts = []
    for _ in range(16):
        torch.ones(16 * 2**20).sum()
        counts.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
    # The median: the system may take pages away from any process now and then.
    assert statistics.median(after - before for before, after in pairwise(counts[5:])) < 20  # of 16,384, each time
