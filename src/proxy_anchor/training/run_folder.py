"""Resuming a run: the checkpoint to load, what it holds besides Lightning's part, stopping on signals."""

from __future__ import annotations

import csv
import io
import shutil
import signal
import threading
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.loggers import CSVLogger

from proxy_anchor.data.bad_images import BAD_IMAGES_FILE
from proxy_anchor.errors import STOPPED, AgreedError, UsageError
from proxy_anchor.training.callbacks.checkpoint import previous_version
from proxy_anchor.training.callbacks.health import REPLAY_FILE
from proxy_anchor.training.checkpoint import Checkpoint, load_checkpoint
from proxy_anchor.training.distributed import gather_objects, reduce_max, write_before_any_ends
from proxy_anchor.training.finite import HostCopy
from proxy_anchor.utils import CLASSES_FILE, FAILURE_FILE, STOP_SIGNALS

RECORD_KEY = "run_record"
_LEFT_BEFORE_A_CHECKPOINT = (
    "config.yaml",
    CLASSES_FILE,
    BAD_IMAGES_FILE,
    "metrics.csv",
    "hparams.yaml",
    "tensorboard",
    "wandb",
    REPLAY_FILE,
    FAILURE_FILE,
)


def newest_checkpoint(folder: Path) -> Checkpoint | None:
    """The newest whole checkpoint of a run folder; None without any.

    Prints that last.ckpt is damaged and returns its previous version. Of a run that was killed between its first two
    files, copies best.ckpt to last.ckpt. Raises UsageError where all are damaged.
    """
    last, best = folder / "last.ckpt", folder / "best.ckpt"
    saved = [file for file in (last, previous_version(last)) if file.exists()]
    reasons = []
    for file in saved or ([best] if best.exists() else []):
        try:
            checkpoint = load_checkpoint(file)
        except UsageError as error:
            reasons.append(str(error))
            continue
        for reason in reasons:
            print(f"{reason} The version before it, {file.name} of epoch {checkpoint.epoch}, is used.", flush=True)
        if file == best:
            copy = last.with_name(f"{last.name}.partial")
            shutil.copyfile(best, copy)  # not renamed: it stays the best
            file = copy
        if file != last:
            file.replace(last)  # no further epoch may write it
        return replace(checkpoint, path=last)
    if reasons:
        raise UsageError(f"{reasons[0]} There is no earlier one: remove {folder} to begin anew.")
    return None


def clear_beginning(folder: Path) -> bool:
    """Remove the files of a run that was killed before its first checkpoint. False where there are others."""
    found = [each for each in folder.iterdir() if each.suffix not in (".partial", ".tmp")]
    if any(each.name not in _LEFT_BEFORE_A_CHECKPOINT for each in found):
        return False
    for each in folder.iterdir():
        shutil.rmtree(each) if each.is_dir() else each.unlink()
    return True


class RunRecord(pl.Callback):
    """Saves in every checkpoint what the trainer does not: how a resumed run goes on as if it had not been interrupted.

    The rows of metrics.csv, which on the disk may be newer than the checkpoint, or half written; the state of each
    rank's random number generators; and whether a callback has ended training.
    """

    def __init__(self) -> None:
        self._restored: dict[str, Any] | None = None

    def on_save_checkpoint(self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict) -> None:
        """Add them, as plain types. All ranks call this; rank 0 writes the file."""
        # The trainer logs an epoch's means only after its checkpoint.
        means = {name: float(value) for name, value in trainer.logged_metrics.items() if _is_mean(name)}
        rng = [torch.get_rng_state()]
        if pl_module.device.type == "cuda":
            rng.append(torch.cuda.get_rng_state(pl_module.device))
        checkpoint[RECORD_KEY] = {
            "metrics": [_read(logger) for logger in _csv_loggers(trainer)],
            "means": means | {"epoch": trainer.current_epoch, "step": trainer.global_step - 1},
            "rng": gather_objects(rng),
            "ended": trainer.should_stop,
        }

    def on_load_checkpoint(self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict) -> None:
        """Keep them until the loggers exist.

        Raises AgreedError where the run began on another number of devices, as trainer.devices=auto may.
        """
        # Checkpoints are of whole epochs; with max_steps the trainer would repeat the last one.
        trainer.fit_loop._iteration_based_training = lambda: False  # type: ignore[method-assign]
        for callback in trainer.checkpoint_callbacks:
            _move(checkpoint["callbacks"].get(callback.state_key), callback.dirpath)  # type: ignore[attr-defined]
        self._restored = record = checkpoint.get(RECORD_KEY)
        trainer.should_stop = bool(record and record.get("ended"))  # missing where the run began with an older version
        if record is not None and len(record["rng"]) != trainer.world_size:
            raise AgreedError(
                f"this run began with trainer.devices={len(record['rng'])} and there is another number now, "
                f"{trainer.world_size}: continue it where there are as many, or choose another run=NAME."
            )

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Replace the rows of metrics.csv by those up to the checkpoint's epoch."""
        if self._restored is None:
            return
        for logger, text in zip(_csv_loggers(trainer), self._restored["metrics"], strict=False):
            writer = logger.experiment  # making it removes the file
            writer.metrics = [*csv.DictReader(io.StringIO(text)), self._restored["means"]]
            writer.save()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Restore the random number generators; take the step of a scheduler that the checkpoint lacks."""
        if self._restored is None:
            return
        cpu, *cuda = self._restored["rng"][trainer.global_rank]
        torch.set_rng_state(cpu.cpu())
        if cuda and pl_module.device.type == "cuda":
            torch.cuda.set_rng_state(cuda[0].cpu(), pl_module.device)
        for each in trainer.lr_scheduler_configs:
            if each.reduce_on_plateau:  # the trainer moves it after the checkpoint
                each.scheduler.step(self._restored["means"][each.monitor])


def _move(state: dict[str, Any] | None, folder: str) -> None:
    """Change the paths in the state of a ModelCheckpoint to `folder`: the run folder may have been renamed.

    Otherwise the callback forgets the score of best.ckpt, and the next epoch replaces it.
    """
    if state is None or state["dirpath"] == folder:
        return
    moved = lambda path: path and str(Path(folder, Path(path).name))  # noqa: E731
    state |= {key: moved(state[key]) for key in ("best_model_path", "kth_best_model_path", "last_model_path")}
    state |= {"dirpath": folder, "best_k_models": {moved(path): each for path, each in state["best_k_models"].items()}}


def _is_mean(name: str) -> bool:
    return name.startswith(("train/", "health/update_ratio")) and not name.endswith("_step")


def _csv_loggers(trainer: pl.Trainer) -> list[CSVLogger]:
    """Those that write a file: none but in the first process."""
    return [logger for logger in trainer.loggers if isinstance(logger, CSVLogger) and trainer.is_global_zero]


def _read(logger: CSVLogger) -> str:
    logger.save()
    file = Path(logger.experiment.metrics_file_path)
    return file.read_text(encoding="utf-8") if file.is_file() else ""


class StopOnSignal(pl.Callback):
    """Ends training on SIGTERM or SIGUSR1 (a cluster's notice) with exit code STOPPED.

    The current step or evaluation batch (on several devices, evaluation) is finished, and the checkpoint of the last
    epoch written. One rank that gets the signal is enough: all stop after the same step.
    """

    def __init__(self) -> None:
        self._received: int | None = None
        self._before: dict[int, Any] = {}
        self._agreed: HostCopy | None = None

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """On several devices, replace the trainer's handlers.

        Its handler of SIGTERM starts a broadcast that no other rank expects, and its loop waits for the GPU before
        every step to allow for it.
        """
        if trainer.world_size > 1:
            trainer._signal_connector.register_signal_handlers = lambda: None  # type: ignore[method-assign]
            trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]
            self._listen()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Replace the trainer's handlers: on SIGTERM it would end `fit` as if all epochs were done."""
        if trainer.received_sigterm:
            self._received = signal.SIGTERM
        self._listen()

    def _listen(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return  # Python allows handlers in the main thread only
        for number in STOP_SIGNALS:
            handler = signal.signal(number, self._receive)
            if handler != self._receive:
                self._before[number] = handler

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._received = number

    def _stop(self, trainer: pl.Trainer, device: torch.device) -> None:
        number = self._received if trainer.world_size == 1 else self._agree(device)
        if not number:
            return
        if trainer.world_size > 1:
            for each in STOP_SIGNALS:  # the launcher sends more of them when one rank has ended
                signal.signal(each, signal.SIG_IGN)
            self._before = {}
            write_before_any_ends(trainer)
        if trainer.is_global_zero:
            print(
                f"{signal.Signals(number).name}: stopped; the same command continues after the last whole epoch.",
                flush=True,
            )
        raise SystemExit(STOPPED)

    def _agree(self, device: torch.device) -> int:
        """The signal that any rank had received at the previous call, or 0; the same on all ranks.

        One number is reduced per call and read at the next one, so neither the host nor the GPU waits for it.
        """
        before = 0 if self._agreed is None else int(self._agreed.get())
        # Made on the device: a copy from the host would wait for the GPU.
        self._agreed = HostCopy(reduce_max(torch.full((1,), self._received or 0, device=device)))
        return before

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *rest: Any, **named: Any) -> None:
        """Stop between two steps."""
        self._stop(trainer, pl_module.device)

    def on_validation_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *rest: Any) -> None:
        """Stop between two batches of an evaluation; several ranks, which have different numbers of them, after it."""
        if trainer.world_size == 1:
            self._stop(trainer, pl_module.device)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Restore the former handlers, unless the trainer has: ours would keep this run in memory."""
        for number, handler in self._before.items():
            if signal.getsignal(number) == self._receive:
                signal.signal(number, handler)
        self._before = {}
