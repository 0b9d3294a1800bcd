"""Writing checkpoints in the background: whole or not at all."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.plugins.io import TorchCheckpointIO
from torch import Tensor

from proxy_anchor.errors import UsageError

LAST = "last.ckpt"


def run_checkpoints(
    folder: Path, monitor: str | None, every_n_epochs: int = 1, further: Sequence[Any] = ()
) -> list[ModelCheckpoint]:
    """`best.ckpt` by the highest value of `monitor` (none without) and `last.ckpt`, after every evaluated epoch.

    Not right after the evaluation: a run resumes at the start of an epoch. Raises UsageError where one of the `further`
    callbacks would write these files.
    """
    for each in further:
        if isinstance(each, ModelCheckpoint) and each.dirpath:
            written = {Path(each.dirpath, str(name)).resolve() for name in (each.filename, each.save_last and "last")}
            if written & {folder.resolve() / "best", folder.resolve() / "last"}:
                raise UsageError("a ModelCheckpoint would write over best.ckpt or last.ckpt: give it another filename.")
    when: dict[str, Any] = {"every_n_epochs": every_n_epochs, "save_on_train_epoch_end": True}
    best = ModelCheckpoint(folder, "best", monitor=monitor, mode="max", enable_version_counter=False, **when)
    last = ModelCheckpoint(folder, "last", enable_version_counter=False, **when)
    return [best, last] if monitor else [last]


def previous_version(path: Path) -> Path:
    """The file of the version before the newest `last.ckpt`, in case the newest is damaged."""
    return path.with_name(f"{path.name}.previous")


class BackgroundWriter(TorchCheckpointIO):
    """Copies checkpoints on their device and writes them in a background thread.

    When `last.ckpt` is saved, but at most once in `every_seconds`, the newest version of each saved file is written: on
    a fast GPU an epoch takes less time than writing its checkpoints. A killed process loses at most an epoch and
    `every_seconds`. The rest is written at the end of training, also after an error.

    Raises what writing raised, at the next checkpoint or at the end of training.
    """

    def __init__(self, every_seconds: float = 10.0) -> None:
        self.every_seconds = every_seconds
        self._thread = ThreadPoolExecutor(1, "checkpoint writer")
        self._pending: dict[Path, dict[str, Any]] = {}
        self._writing: Future[None] | None = None
        self._due = 0.0

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        """Copy the checkpoint; it is written to `path` by the end of `teardown`."""
        path = Path(path)
        self._pending[path] = apply_to_collection(checkpoint, Tensor, lambda tensor: tensor.detach().clone())
        if self._writing is not None and self._writing.done():
            writing, self._writing = self._writing, None
            writing.result()
        # best.ckpt waits for last.ckpt, which must not be older.
        if path.name == LAST and self._writing is None and time.monotonic() >= self._due:
            pending, self._pending = self._pending, {}
            self._writing = self._thread.submit(_write_all, pending)
            self._due = time.monotonic() + self.every_seconds

    def load_checkpoint(self, path: str | Path, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Write pending versions, then read the file."""
        self.teardown()
        return super().load_checkpoint(path, *args, **kwargs)

    def remove_checkpoint(self, path: str | Path) -> None:
        """Remove the file and its pending version."""
        self._pending.pop(Path(path), None)
        super().remove_checkpoint(path)

    def teardown(self) -> None:
        """Write pending versions."""
        pending, self._pending = self._pending, {}
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()
        _write_all(pending)


def _write_all(checkpoints: dict[Path, dict[str, Any]]) -> None:
    for path, checkpoint in checkpoints.items():
        write_whole(checkpoint, path)


def write_whole(checkpoint: dict[str, Any], path: Path) -> None:
    """Write a file that gets its final name only when it is complete.

    Raises UsageError where it cannot be written (full disk, read-only folder); its previous version stays.
    """
    partial = Path(f"{path}.partial")
    partial.parent.mkdir(parents=True, exist_ok=True)
    try:
        with partial.open("wb") as file:
            torch.save(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())  # else the rename may reach the disk before the content
        if path.name == LAST and path.is_file():
            path.replace(previous_version(path))  # a run that is killed here resumes from that version
        partial.replace(path)
    except (OSError, RuntimeError) as error:
        # torch's writer may hide the system's error behind its own.
        reason = error if isinstance(error, OSError) else error.__context__
        if not isinstance(reason, OSError):
            raise
        raise UsageError(
            f"{path} cannot be written ({reason.strerror or reason}): make room or restore the folder; the previous "
            "version stays, and the same command with run=NAME continues from there."
        ) from error
    finally:
        partial.unlink(missing_ok=True)
