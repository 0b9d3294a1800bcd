"""The progress bar with the loss, which is copied from the GPU only when it is drawn."""

from __future__ import annotations

import sys
import time
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.callbacks import TQDMProgressBar
from pytorch_lightning.callbacks.progress.tqdm_progress import convert_inf
from tqdm import tqdm

EVERY_SECONDS = 0.5


class LossBar(TQDMProgressBar):
    """Lightning's bar on stderr, with the last loss, drawn at most every EVERY_SECONDS.

    `log(prog_bar=True)` copies the loss after every step, and the GPU idles while Python waits for it. Here it is
    copied when the bar is drawn. Steps are no measure of time: 20 take a tenth of a second on a GPU and minutes on a
    CPU.
    """

    def __init__(self) -> None:
        super().__init__()
        self._due = 0.0

    @property
    def refresh_rate(self) -> int:
        """Draw at this step, or at none."""
        return 1 if time.monotonic() >= self._due else sys.maxsize

    def init_train_tqdm(self) -> Any:
        """The bar of an epoch."""
        return _on_stderr(super().init_train_tqdm())

    def init_validation_tqdm(self) -> Any:
        """The bar of an evaluation."""
        return _on_stderr(super().init_validation_tqdm())

    def on_train_epoch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        """Number epochs from 1, as the printed lines do."""
        bar = self.train_progress_bar
        bar.reset(convert_inf(self.total_train_batches))
        bar.set_description(f"epoch {trainer.current_epoch + 1}/{trainer.max_epochs}")

    def get_metrics(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> dict[str, Any]:
        """The values shown after the bar; called when it is drawn."""
        self._due = time.monotonic() + EVERY_SECONDS
        shown = super().get_metrics(trainer, pl_module)
        shown.pop("v_num", None)  # a part of the logger's folder name
        # Not the output of the step, which the trainer divides by accumulate_grad_batches.
        loss = trainer.callback_metrics.get("train/loss_step")
        return shown if loss is None else {**shown, "loss": f"{float(loss):.3f}"}

    def print(self, *args: Any, sep: str = " ", **kwargs: Any) -> None:
        """Print a line above the bar; Lightning's own drops it where no bar is drawn yet."""
        tqdm.write(sep.join(map(str, args)), file=sys.stdout)


def _on_stderr(bar: tqdm) -> tqdm:
    bar.fp, bar.sp = sys.stderr, bar.status_printer(sys.stderr)
    return bar
