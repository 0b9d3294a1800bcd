"""Freed memory is kept: large blocks come back from the same place instead of from the system."""

from __future__ import annotations

import subprocess
import sys

import pytest

from proxy_anchor.allocator import keep_freed_memory

_FAULTS = """
import resource, sys, torch
from proxy_anchor.allocator import keep_freed_memory
if sys.argv[1] == "kept" and not keep_freed_memory():
    print(-1)
    raise SystemExit
torch.set_num_threads(1)
def use():
    torch.ones(16 * 2**20).sum()
for _ in range(5):
    use()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    use()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(mode: str) -> int:
    command = [sys.executable, "-c", _FAULTS, mode]
    environment = {"PYTHONPATH": ":".join(sys.path)}
    return int(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)


def test_pages_are_not_asked_for_again() -> None:
    if not keep_freed_memory():
        pytest.skip("not glibc")
    plain, kept = faults("plain"), faults("kept")
    assert kept < 200
    assert plain > 10 * kept or plain < 200  # a system with huge pages, or one that is told so, has no faults to save


def test_elsewhere_nothing_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert keep_freed_memory() is False
