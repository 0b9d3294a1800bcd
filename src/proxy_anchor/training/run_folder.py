"""Continuing a run in its folder: which checkpoint to take, and what a checkpoint must hold beside weights and rates."""

from __future__ import annotations

import csv
import io
import shutil
import signal
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
from proxy_anchor.utils import FAILURE_FILE, NOTICES, Fetch, write_text

RECORD_KEY = "run_record"
_LEFT_BEFORE_A_CHECKPOINT = (
    "config.yaml",
    BAD_IMAGES_FILE,
    "metrics.csv",
    "hparams.yaml",
    "tensorboard",
    "wandb",
    REPLAY_FILE,
    FAILURE_FILE,
)


def newest_checkpoint(folder: Path) -> Checkpoint | None:
    """The last whole checkpoint of a run folder; None where there is none at all.

    A damaged last.ckpt is named on standard output and the version before it is taken. Of a run that was killed between its
    first two files, best.ckpt is taken, as last.ckpt.
    Raises UsageError when all that are there are damaged.
    """
    last = folder / "last.ckpt"
    reasons = []
    for file in (last, previous_version(last)):
        if not file.exists():
            continue
        try:
            checkpoint = load_checkpoint(file)
        except UsageError as error:
            reasons.append(str(error))
            continue
        for reason in reasons:
            print(f"{reason} The version before it, {file.name} of epoch {checkpoint.epoch}, is used.", flush=True)
        if file != last:
            file.replace(last)  # also where no further epoch would write it anew
        return replace(checkpoint, path=last)
    if reasons:
        raise UsageError(f"{reasons[0]} There is no earlier one: remove {folder} to begin anew.")
    best = folder / "best.ckpt"
    if not best.exists():
        return None
    checkpoint = load_checkpoint(best)
    copy = last.with_name(f"{last.name}.partial")
    shutil.copyfile(best, copy)  # it stays the best until an epoch is better
    copy.replace(last)
    return replace(checkpoint, path=last)


def clear_beginning(folder: Path) -> bool:
    """Remove what a run leaves that was killed before its first checkpoint; False when there is anything else."""
    found = [each for each in folder.iterdir() if each.suffix not in (".partial", ".tmp")]
    if any(each.name not in _LEFT_BEFORE_A_CHECKPOINT for each in found):
        return False
    for each in folder.iterdir():
        shutil.rmtree(each) if each.is_dir() else each.unlink()
    return True


class RunRecord(pl.Callback):
    """Keeps the rows of metrics.csv and the random numbers' state in every checkpoint, and restores them.

    The file on the disk may be ahead of the checkpoint, or half written; the checkpoint's copy is neither. Of several
    processes the first keeps the rows, and every one its own random numbers.
    """

    def __init__(self) -> None:
        self._restored: dict[str, Any] | None = None

    def on_save_checkpoint(self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict) -> None:
        """Add them, as plain types. The trainer calls this in all processes, of which the first writes the file."""
        # The trainer logs an epoch's means only after its checkpoint.
        means = {name: float(value) for name, value in trainer.logged_metrics.items() if _is_mean(name)}
        rng = [torch.get_rng_state()]
        if pl_module.device.type == "cuda":
            rng.append(torch.cuda.get_rng_state(pl_module.device))
        checkpoint[RECORD_KEY] = {
            "metrics": [_read(logger) for logger in _csv_loggers(trainer)],
            "means": means | {"epoch": trainer.current_epoch, "step": trainer.global_step - 1},
            "rng": gather_objects(rng),
        }

    def on_load_checkpoint(self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict) -> None:
        """Remember them until the loggers are there.

        Raises AgreedError when the run began on another number of devices, which `trainer.devices=auto` does not tell.
        """
        # Checkpoints are written at the end of an epoch; with max_steps the trainer would take it for unfinished.
        trainer.fit_loop._iteration_based_training = lambda: False  # type: ignore[method-assign]
        for callback in trainer.checkpoint_callbacks:
            _move(checkpoint["callbacks"].get(callback.state_key), callback.dirpath)  # type: ignore[attr-defined]
        record = checkpoint.get(RECORD_KEY)
        if record is None:
            return
        if isinstance(record["rng"][0], torch.Tensor):  # written when only runs on one device were continued
            record["rng"] = [record["rng"]]
        if len(record["rng"]) != trainer.world_size:
            raise AgreedError(
                f"this run began with trainer.devices={len(record['rng'])} and there is another number now, "
                f"{trainer.world_size}: continue it where there are as many, or choose another run=NAME."
            )
        self._restored = record

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Put the rows up to the checkpoint's epoch back in place of those that the killed run had written."""
        if self._restored is None:
            return
        for logger, text in zip(_csv_loggers(trainer), self._restored["metrics"], strict=False):
            writer = logger.experiment  # making it removes the file
            rows = list(csv.DictReader(io.StringIO(text)))
            means = self._restored["means"]
            names = sorted({*(rows[0] if rows else ()), *means})
            stream = io.StringIO(newline="")
            table = csv.DictWriter(stream, names)
            table.writeheader()
            table.writerows([*rows, means])
            write_text(Path(writer.metrics_file_path), stream.getvalue())
            writer.metrics_keys = names

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Go on with the same random numbers."""
        if self._restored is not None:
            cpu, *cuda = self._restored["rng"][trainer.global_rank]
            torch.set_rng_state(cpu.cpu())
            if cuda and pl_module.device.type == "cuda":
                torch.cuda.set_rng_state(cuda[0].cpu(), pl_module.device)


def _move(state: dict[str, Any] | None, folder: str) -> None:
    """Have what a checkpoint says about the files of its run name them where they are now: its folder may have been renamed.

    Otherwise the trainer forgets how good best.ckpt is, and the next epoch replaces it.
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
    """Ends training on SIGTERM and SIGUSR1 (a cluster's notice) with exit code STOPPED, the last epoch's checkpoint written.

    The step or evaluation batch that runs is finished first. Of several processes it is enough that one gets the signal: all
    stop after the same step.
    """

    def __init__(self) -> None:
        self._received: int | None = None
        self._before: dict[int, Any] = {}
        self._agreed: Fetch | None = None
        self._common_batches: list[int] = []  # of each evaluation loader: batches that every process has

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """On several devices, listen from here on, and instead of the trainer.

        Its own answer to SIGTERM starts a broadcast from within the signal's handler, which no other process expects, and
        for that it asks the GPU, and waits, before every step.
        """
        if trainer.world_size > 1:
            trainer._signal_connector.register_signal_handlers = lambda: None  # type: ignore[method-assign]
            trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]
            self._listen()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Listen from the first step on, in place of the trainer: it ends `fit` on SIGTERM as if all epochs were done."""
        if trainer.received_sigterm:
            self._received = signal.SIGTERM
        self._listen()

    def _listen(self) -> None:
        for number in NOTICES:
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
            for each in NOTICES:  # whoever started the processes sends more of them as soon as one has ended
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
        """What any process had received one call ago, or 0; the same in all of them, which all call it.

        One number is reduced per call, in line with the step's other reductions, and read only at the next call: neither the
        host nor the GPU waits for it, so that it need not be saved for every few steps.
        """
        before = 0 if self._agreed is None else int(self._agreed.get())
        # Filled on the device: a copy from the host would wait for the GPU.
        self._agreed = Fetch(reduce_max(torch.full((1,), self._received or 0, device=device)))
        return before

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *rest: Any, **named: Any) -> None:
        """Between two steps."""
        self._stop(trainer, pl_module.device)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Processes may have one batch more or less than others: together they look after those that all have."""
        if trainer.world_size > 1:
            batches = torch.tensor([int(each) for each in trainer.num_val_batches], device=pl_module.device)
            self._common_batches = reduce_max(-batches).neg().tolist()

    def on_validation_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Between two batches of an evaluation."""
        if trainer.world_size == 1 or batch_idx < self._common_batches[dataloader_idx]:
            self._stop(trainer, pl_module.device)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Give the signals back, unless the trainer has: its handler would keep this run's memory for as long as the process."""
        for number, handler in self._before.items():
            if signal.getsignal(number) == self._receive:
                signal.signal(number, handler)
        self._before = {}
