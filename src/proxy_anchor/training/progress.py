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

    def __init__(self, refresh_rate: int = 1) -> None:
        super().__init__(refresh_rate=refresh_rate)
        self._loss: Any = None

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Keep the loss where it is, and draw if it is time."""
        self._loss = outputs["loss"]
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    def get_metrics(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> dict[str, Any]:
        """What stands beside the bar; asked for when it is drawn."""
        shown = super().get_metrics(trainer, pl_module)
        shown.pop("v_num", None)  # the last letters of a logger's folder
        return shown if self._loss is None else {**shown, "loss": f"{float(self._loss):.3f}"}
