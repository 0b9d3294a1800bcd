"""Training's peak memory apart from evaluation's."""

from __future__ import annotations

import os

import pytest
from processes import run_python

# In a process of its own: in another, what earlier tests freed may still be the process's (`keep_freed_memory`).
_SCRIPT = """
from types import SimpleNamespace
import torch
from proxy_anchor.training.callbacks.memory import PeakMemory, reset_peak_memory

device = torch.device("cpu")
trainer = SimpleNamespace(strategy=SimpleNamespace(root_device=device), state=SimpleNamespace(fn="fit"))
memory = PeakMemory()
assert memory.gib() is memory.gib("training") is None
reset_peak_memory(device)
memory.on_train_start(trainer, None)
for _ in range(2):
    torch.ones(2**27)  # half a GiB, for a moment
    memory.on_validation_start(trainer, None)
    torch.ones(2**25)
    memory.on_validation_end(trainer, None)
memory.on_train_end(trainer, None)
training, evaluation = memory.gib("training"), memory.gib("evaluation")
assert 0.3 < training - evaluation < 0.5, (training, evaluation)
assert memory.gib() == training
"""


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="only Linux counts anew")
def test_each_peak_counts_what_was_taken_while_it_lasted():
    run_python(_SCRIPT)
