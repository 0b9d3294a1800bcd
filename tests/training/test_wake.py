"""The card that a run will use is started beside the imports, and only that one."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest
import torch

from proxy_anchor.training.wake import card_of_this_process, import_beside, wake_card


@pytest.mark.parametrize(
    ("accelerator", "devices", "local_rank", "expected"),
    [
        ("auto", 1, None, "cuda:0"),
        ("gpu", 1, None, "cuda:0"),
        ("gpu", 4, "3", "cuda:3"),
        ("auto", 4, None, None),  # this process starts the others, and takes no card
        ("cpu", 1, None, None),
        ("gpu", [1], None, None),
        ("auto", "auto", None, None),
    ],
)
def test_the_card_of_the_run_is_started(
    monkeypatch: pytest.MonkeyPatch,
    accelerator: str,
    devices: object,
    local_rank: str | None,
    expected: str | None,
) -> None:
    asked, zeros = [], torch.zeros
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: asked.append(str(device)))
    monkeypatch.setattr(torch, "zeros", lambda *shape, dtype, device: zeros(*shape, dtype=dtype))
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if local_rank is not None:
        monkeypatch.setenv("LOCAL_RANK", local_rank)
    state = torch.get_rng_state()
    device = card_of_this_process(accelerator, devices)
    assert (device is None) == (expected is None)
    if device is not None:
        wake_card(device).join(10)
    assert asked == ([expected] if expected else [])
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    "error", [RuntimeError("CUDA error: out of memory"), torch.cuda.DeferredCudaCallError("no kernel image")], ids=str
)
def test_a_card_that_does_not_answer_is_left_to_training(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], error: Exception
) -> None:
    asked = []

    def fail(*shape: int, **arguments: object) -> None:
        asked.append(shape)
        raise error

    monkeypatch.setattr(torch, "zeros", fail)
    monkeypatch.setattr(threading, "excepthook", threading.__excepthook__)  # pytest has its own
    thread = wake_card(torch.device("cuda", 0))
    thread.join(10)
    assert not thread.is_alive()
    assert asked
    assert capfd.readouterr().err == ""


def test_nothing_happens_without_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert card_of_this_process("auto", 1) is None


def test_what_training_imports_is_imported_beside() -> None:
    program = """
import sys
from proxy_anchor.training.wake import import_beside
assert not {"pytorch_lightning", "torch._inductor.compile_fx"} & set(sys.modules)
import torch
state = torch.get_rng_state()
import_beside().join()
# It keeps graphs for each thread, and in older versions of torch only for the one that imports it.
assert "torch._inductor.cudagraph_trees" not in sys.modules
assert torch.equal(torch.get_rng_state(), state)
before = set(sys.modules)
import pytorch_lightning
torch.compile(torch.nn.Identity(), options={})
print(sorted(set(sys.modules) - before))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("[]\n", 0), done.stderr


def test_what_cannot_be_imported_is_said_where_it_is_needed(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "pytorch_lightning", None)  # as if it were not installed
    import_beside().join()
    assert capfd.readouterr().err == ""
