"""Threads that make something ready neither speak nor change how a process ends."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager

import pytest

from proxy_anchor.training import beside
from proxy_anchor.training.beside import run_beside

# Torch is left by a thread that comes back from C++ when Python has gone: without being waited for, it aborts the process.
ENDS = """
import sys, time, torch
from proxy_anchor.training.beside import run_beside

def work():
    images, weight = torch.zeros(16, 32, 56, 56), torch.zeros(64, 32, 3, 3)
    while True:
        torch.nn.functional.conv2d(images, weight)
        yield

run_beside(work())
time.sleep(0.2)
sys.exit(2)
"""


def test_a_process_that_ends_meanwhile_keeps_its_exit_code() -> None:
    done = subprocess.run([sys.executable, "-c", ENDS], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (2, "")


def test_no_further_step_is_begun_when_python_ends_and_each_is_left_in_its_own_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(beside, "_ENDING", threading.Event())
    begun, may_go_on, left = threading.Event(), threading.Event(), []
    steps = []

    @contextmanager
    def noting() -> Generator[None]:
        try:
            yield
        finally:
            left.append(threading.current_thread())

    def work() -> Generator[None]:
        with noting():
            for step in range(3):
                steps.append(step)
                begun.set()
                may_go_on.wait(10)
                yield

    thread = run_beside(work())
    assert begun.wait(10)
    beside._ENDING.set()
    may_go_on.set()
    thread.join(10)
    assert steps == [0]
    assert left == [thread]


def test_what_fails_says_nothing(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(threading, "excepthook", threading.__excepthook__)  # pytest has its own

    def work() -> Generator[None]:
        yield
        raise RuntimeError("CUDA error")

    thread = run_beside(work())
    thread.join(10)
    assert not thread.is_alive()
    assert capfd.readouterr().err == ""
