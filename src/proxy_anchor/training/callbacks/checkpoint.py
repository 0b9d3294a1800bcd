"""Writing checkpoints beside the training: whole or not at all, and without stopping it."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.plugins.io import TorchCheckpointIO
from torch import Tensor

from proxy_anchor.errors import UsageError

TOGETHER_SECONDS = 0.2


def run_checkpoints(folder: Path, monitor: str | None, every_n_epochs: int = 1) -> list[ModelCheckpoint]:
    """`best.ckpt` by the highest value of `monitor` (none without) and `last.ckpt`, after every evaluated epoch.

    Not right after the evaluation: the epoch is over only then, and a run continues at the start of the next.
    """
    when: dict[str, Any] = {"every_n_epochs": every_n_epochs, "save_on_train_epoch_end": True}
    best = ModelCheckpoint(folder, "best", monitor=monitor, mode="max", enable_version_counter=False, **when)
    last = ModelCheckpoint(folder, "last", enable_version_counter=False, **when)
    return [best, last] if monitor else [last]


def previous_version(path: Path) -> Path:
    """Where the version before the newest `last.ckpt` is kept, for the case that a disk damages the newest."""
    return path.with_name(f"{path.name}.previous")


class BackgroundWriter(TorchCheckpointIO):
    """Copies a checkpoint where its tensors are and writes it from a thread of its own.

    A file of the final name is always whole: it is written under another name, flushed to the disk and renamed. Of several
    versions of a file that come within `every_seconds` only the newest is written: on a fast card an epoch takes less time
    than writing its checkpoints, and the writing thread holds Python's lock. The last version is written in any case,
    also when training stops with an error; a process that is killed loses at most `every_seconds` and one write.

    The first of several files that are saved one after the other, as an epoch does, waits `TOGETHER_SECONDS` for the others:
    written alone, best.ckpt would be an epoch of which last.ckpt knows nothing until `every_seconds` later.

    Raises what writing raised, at the next checkpoint or at the end of training.
    """

    def __init__(self, every_seconds: float = 10.0) -> None:
        self.every_seconds = every_seconds
        self._pending: dict[str, dict[str, Any]] = {}
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closing, self._due = False, 0.0
        self._error: BaseException | None = None

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        """Take a copy; it is at `path` soon, at the latest after `teardown`."""
        self._raise()
        copy = apply_to_collection(checkpoint, Tensor, lambda tensor: tensor.detach().clone())
        with self._changed:
            self._pending[str(path)] = copy
            if self._thread is None:
                self._closing = False
                self._thread = threading.Thread(target=self._run, name="checkpoint writer", daemon=True)
                self._thread.start()
            self._changed.notify()

    def load_checkpoint(self, path: str | Path, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The newest version, from the disk."""
        self.teardown()
        return super().load_checkpoint(path, *args, **kwargs)

    def remove_checkpoint(self, path: str | Path) -> None:
        """Remove the file, and a version that is not written yet."""
        with self._changed:
            self._pending.pop(str(path), None)
        super().remove_checkpoint(path)

    def teardown(self) -> None:
        """Write what waits, and end the thread."""
        with self._changed:
            thread, self._closing = self._thread, True
            self._changed.notify()
        if thread is not None:
            thread.join()
        self._raise()

    def _raise(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _is_due(self) -> bool:
        return self._closing or (bool(self._pending) and time.monotonic() >= self._due)

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._is_due():
                    self._changed.wait(0.5)
                self._changed.wait_for(lambda: self._closing, TOGETHER_SECONDS)
                batch, self._pending = self._pending, {}
                if not batch:  # closing, and nothing waits
                    self._thread = None
                    return
            for path, checkpoint in batch.items():
                try:
                    write_whole(checkpoint, Path(path))
                except BaseException as error:  # raised where the trainer can see it
                    self._error = error
            self._due = time.monotonic() + self.every_seconds


def write_whole(checkpoint: dict[str, Any], path: Path) -> None:
    """Write a file that has its final name only when it is complete.

    Raises UsageError when the system refuses (a full disk, a folder that may not be written); the version before it stays.
    """
    partial = Path(f"{path}.partial")
    partial.parent.mkdir(parents=True, exist_ok=True)
    try:
        with partial.open("wb") as file:
            torch.save(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())  # a rename that reaches the disk before the content would lose both versions
        if path.name == "last.ckpt" and path.is_file():
            path.replace(previous_version(path))  # killed here, a run continues from that one
        partial.replace(path)
    except (OSError, RuntimeError) as error:
        # torch's writer may cover what the system said by an error of its own.
        reason = error if isinstance(error, OSError) else error.__context__
        if not isinstance(reason, OSError):
            raise
        raise UsageError(
            f"{path} cannot be written ({reason.strerror or reason}): make room or give the folder back; the version before it "
            "stays, and the same command with run=NAME continues from there."
        ) from error
    finally:
        partial.unlink(missing_ok=True)
