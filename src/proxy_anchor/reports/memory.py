"""How much memory a run needed at its peak."""

from __future__ import annotations

import resource
import sys
from contextlib import suppress
from pathlib import Path

import torch

_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def reset_peak_memory(device: torch.device) -> None:
    """Start counting anew. On a CPU this needs Linux; elsewhere the peak is that of the process so far."""
    if device.type == "cuda":
        torch.cuda.init()  # a card that nothing has used yet has no statistics, which is an error
        torch.cuda.reset_peak_memory_stats(device)
    else:
        with suppress(OSError):
            _RESET.write_text("5")


def peak_memory(device: torch.device) -> int:
    """Bytes: the most that torch's tensors took on a GPU, or that this process took of the main memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    with suppress(OSError):
        for line in _STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
