"""Writing checkpoints beside the training: whole or not at all, and without stopping it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.plugins.io import AsyncCheckpointIO, TorchCheckpointIO


class WholeFiles(TorchCheckpointIO):
    """Writes under another name and renames, so that a file of the final name is always whole."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        """Write `checkpoint` to `path`, replacing what was there."""
        partial = Path(f"{path}.partial")
        partial.parent.mkdir(parents=True, exist_ok=True)
        try:
            with partial.open("wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())  # a rename that reaches the disk before the content would lose both versions
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)


def run_checkpoints(folder: Path, monitor: str) -> list[ModelCheckpoint]:
    """`best.ckpt` by the highest value of `monitor` and `last.ckpt`, after every evaluation."""
    return [
        ModelCheckpoint(folder, "best", monitor=monitor, mode="max", enable_version_counter=False),
        ModelCheckpoint(folder, "last", enable_version_counter=False),
    ]


def background_writer() -> AsyncCheckpointIO:
    """Lightning's writer thread around `WholeFiles`; the tensors are cloned first, so training goes on at once."""
    return AsyncCheckpointIO(WholeFiles())
