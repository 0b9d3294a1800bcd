"""The progress bar, with the loss, at a price that is paid only when it is drawn."""

from __future__ import annotations

from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.callbacks import TQDMProgressBar


class LossBar(TQDMProgressBar):
    """The trainer's bar with the last loss beside it.

    Lightning's own way (`log(prog_bar=True)`) fetches the value after every step, drawn or not, and a GPU stands still while
    Python waits for it and then prepares the next step. Here it is fetched when the bar is drawn.

    refresh_rate: steps from one drawing to the next.
    """

    def get_metrics(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> dict[str, Any]:
        """What stands beside the bar; asked for when it is drawn."""
        shown = super().get_metrics(trainer, pl_module)
        shown.pop("v_num", None)  # the last letters of a logger's folder
        # Not the step's output, which the trainer divides by accumulate_grad_batches.
        loss = trainer.callback_metrics.get("train/loss_step")
        return shown if loss is None else {**shown, "loss": f"{float(loss):.3f}"}
