"""Runs that leave time to interrupt them, and how the end of two runs is compared."""

from __future__ import annotations

import csv
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytorch_lightning as pl
import torch
from commands import REPOSITORY, TINY_GLYPHS

RUN = [*TINY_GLYPHS, "trainer.max_epochs=5", "trainer.log_every_n_steps=1", "run=x"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]

SLOWLY = f"""
import sys, time
sys.path.insert(0, {str(REPOSITORY / "src")!r})
from proxy_anchor.cli import main as entry
import train
from proxy_anchor.training import module
from proxy_anchor.training.callbacks import checkpoint
checkpoint.BackgroundWriter.__init__.__defaults__ = (0.0,)
step = module.MetricLearner.training_step
module.MetricLearner.training_step = lambda *given: (time.sleep(0.05), step(*given))[1]
entry.run(train.main, "train")
"""


class StopBefore(pl.Callback):
    """Ends training as a kill between two epochs does."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.current_epoch + 1 == self.epoch:
            raise RuntimeError("stopped")


def start(*arguments: str, cwd: Path, launcher: list[str] | None = None) -> subprocess.Popen[str]:
    """The command, slowed down so that there are moments to kill it at; it writes every checkpoint at once.

    launcher: what starts it instead of Python. It has a process group of its own, which its processes share.
    """
    program = cwd / "slowly.py"
    if not program.exists():  # another command may be reading it
        program.write_text(SLOWLY)
    return subprocess.Popen(
        [*(launcher or [sys.executable]), str(program), *arguments],
        cwd=cwd,
        # Without it a command itself has to see that its lines are read while it runs.
        env={name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def wait_for_line(process: subprocess.Popen[str], text: str) -> str:
    """What was printed until a line with this text."""
    assert process.stdout is not None
    seen = ""
    for line in process.stdout:
        seen += line
        if text in line:
            return seen
    raise AssertionError(seen)


def truncate_last(place: Path) -> None:
    """Cut the last checkpoint of the run in half, next to its previous version."""
    last = place / "runs/x/last.ckpt"
    if not last.with_name("last.ckpt.previous").exists():  # all epochs may fall between two writes
        shutil.copy(last, last.with_name("last.ckpt.previous"))
    os.truncate(last, last.stat().st_size // 2)


def metrics(folder: Path) -> list[dict[str, str]]:
    """The rows of metrics.csv, less what a clock says."""
    with (folder / "metrics.csv").open() as file:
        return [{name: v for name, v in row.items() if name != "search_seconds"} for row in csv.DictReader(file)]


def assert_same_end(one: Path, other: Path) -> None:
    """Weights, proxies, numbers by epoch and the rows of metrics.csv, except for what a clock says."""
    mine, theirs = (torch.load(each / "runs/x/last.ckpt", weights_only=True)["state_dict"] for each in (one, other))
    assert mine.keys() == theirs.keys()
    for name, value in mine.items():
        torch.testing.assert_close(value, theirs[name], rtol=0, atol=1e-6)
    histories = [json.loads((each / "runs/x/result.json").read_text())["history"] for each in (one, other)]
    numbers = [[(row["epoch"], row["recall"], row["train_loss"]) for row in history] for history in histories]
    assert numbers[0] == numbers[1]
    assert metrics(one / "runs/x") == metrics(other / "runs/x")
