"""The progress bar with the loss, which is copied from the GPU only when it is drawn."""

from __future__ import annotations

from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.callbacks import TQDMProgressBar


class LossBar(TQDMProgressBar):
    """Lightning's bar with the last loss.

    `log(prog_bar=True)` copies the loss after every step, and the GPU idles while Python waits for it. Here it is
    copied when the bar is drawn.

    refresh_rate: steps between two drawings.
    """

    def get_metrics(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> dict[str, Any]:
        """The values shown after the bar; called when it is drawn."""
        shown = super().get_metrics(trainer, pl_module)
        shown.pop("v_num", None)  # a part of the logger's folder name
        # Not the output of the step, which the trainer divides by accumulate_grad_batches.
        loss = trainer.callback_metrics.get("train/loss_step")
        return shown if loss is None else {**shown, "loss": f"{float(loss):.3f}"}
