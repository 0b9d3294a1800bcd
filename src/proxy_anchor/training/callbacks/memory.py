"""How much memory a run needed at its peak."""

from __future__ import annotations

import resource
import sys
from contextlib import suppress
from pathlib import Path

import pytorch_lightning as pl
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


class PeakMemory(pl.Callback):
    """Tells the peak of training from that of evaluation (embedding and searching), each since the one before ended.

    Attributes:
        bytes: the largest of each so far, {"start" (all before the first of them), "training", "evaluation"}; of this process.
    """

    def __init__(self) -> None:
        self.bytes: dict[str, int] = {}
        self._running = "start"

    def gib(self, *phases: str) -> float | None:
        """The largest of these phases, of all without any; None where none of them has run (nothing was left to train)."""
        known = [self.bytes[each] for each in phases or self.bytes if each in self.bytes]
        return max(known) / 2**30 if known else None

    def _begin(self, phase: str, trainer: pl.Trainer) -> None:
        device = trainer.strategy.root_device
        self.bytes[self._running] = max(self.bytes.get(self._running, 0), peak_memory(device))
        self._running = phase
        reset_peak_memory(device)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """The first step follows."""
        self._begin("training", trainer)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """The last step and its checkpoint are over."""
        self._begin("start", trainer)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Embedding follows."""
        self._begin("evaluation", trainer)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """The search is over."""
        self._begin("training" if trainer.state.fn == "fit" else "start", trainer)
