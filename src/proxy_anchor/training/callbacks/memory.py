"""Peak memory of a run."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytorch_lightning as pl
import torch

_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def reset_peak_memory(device: torch.device) -> None:
    """Reset the peak. On a CPU this needs Linux."""
    if device.type == "cuda":
        torch.cuda.init()  # a GPU that is not in use has no statistics
        torch.cuda.reset_peak_memory_stats(device)
    else:
        with suppress(OSError):
            _RESET.write_text("5")


def peak_memory(device: torch.device) -> int:
    """Peak in bytes: of torch's tensors on a GPU, or of this process in main memory (0 outside Linux: not known)."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    with suppress(OSError):
        for line in _STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return 0


class PeakMemory(pl.Callback):
    """Measures the peaks of training and of evaluation (embedding and searching) separately.

    The peak of training omits the memory of the CUDA graph when the check of the compiled network has already recorded
    it, as it does when it compares mirrored batches.

    Attributes:
        bytes: {"start", "training", "evaluation"}: largest peak of each so far, of this process.
    """

    def __init__(self) -> None:
        self.bytes: dict[str, int] = {}
        self._running = "start"

    def gib(self, *phases: str) -> float | None:
        """Largest peak of these phases (without any: of all); None where none of them has run."""
        known = [self.bytes[each] for each in phases or self.bytes if each in self.bytes]
        return max(known) / 2**30 if known else None

    def _begin(self, phase: str, trainer: pl.Trainer) -> None:
        device = trainer.strategy.root_device
        self.bytes[self._running] = max(self.bytes.get(self._running, 0), peak_memory(device))
        self._running = phase
        reset_peak_memory(device)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Begin training."""
        self._begin("training", trainer)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """End training."""
        self._begin("start", trainer)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Begin evaluation."""
        self._begin("evaluation", trainer)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """End evaluation."""
        self._begin("training" if trainer.state.fn == "fit" else "start", trainer)
