"""Training that goes wrong without an error: said with its figure when it is seen, and kept for result.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytorch_lightning as pl
import torch
from torch import Tensor

from proxy_anchor.reports.files import write_text
from proxy_anchor.training.guard import NotFinite

if TYPE_CHECKING:
    from proxy_anchor.training.module import MetricLearner

REPLAY_FILE = "not_finite.json"
COLLAPSED = 0.98  # mean cosine similarity of different images, of all classes


class Health(pl.Callback):
    """Warns of collapsed embeddings and of a backbone that stands still; keeps the batch when a number is not finite.

    folder: where REPLAY_FILE is written.

    Attributes:
        warnings: what was said, each with its epoch and figure.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.warnings: list[str] = []
        self._batches: list[Tensor] = []
        self._sum: Tensor | None = None
        self._count = 0
        self._before: Tensor | None = None

    def state_dict(self) -> dict[str, Any]:
        """The warnings so far, for a run that is continued."""
        return {"warnings": self.warnings}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with them."""
        self.warnings = list(state_dict["warnings"])

    def _warn(self, text: str) -> None:
        self.warnings.append(text)
        print(f"warning: {text}", flush=True)

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: MetricLearner) -> None:  # type: ignore[override]
        """Remember where the backbone stands: its first tensor that is trained."""
        first = next((p for p in pl_module.net.backbone.parameters() if p.requires_grad), None)
        self._before = None if first is None else first.detach().clone()

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Keep the numbers of two batches: on a GPU a step's answer is read one step later."""
        self._batches = [*self._batches[-1:], batch[2].detach()]

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: MetricLearner) -> None:  # type: ignore[override]
        """Warn of a backbone that has not moved in an epoch after the warm-up."""
        if self._before is None or trainer.current_epoch < pl_module.settings.warmup_epochs:
            return
        first = next(p for p in pl_module.net.backbone.parameters() if p.requires_grad)
        if torch.equal(first.detach(), self._before):
            self._warn(
                f"epoch {trainer.current_epoch + 1}: the backbone has not moved (largest change of its first tensor 0) "
                "although the warm-up is over."
            )

    def on_validation_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Begin anew."""
        self._sum, self._count = None, 0

    def on_validation_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, *rest: Any) -> None:
        """Add up unit-length embeddings: the sum's length tells their mean similarity."""
        embeddings = outputs["embeddings"].double()
        self._sum = embeddings.sum(0) + (0 if self._sum is None else self._sum)
        self._count += len(embeddings)

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Warn of embeddings that are nearly one point; the untrained network's often are, and mean nothing yet."""
        if self._sum is None or self._count < 2 or trainer.state.fn != "fit":
            return
        similarity = (float(self._sum.square().sum()) - self._count) / (self._count * (self._count - 1))
        if similarity > COLLAPSED:
            self._warn(
                f"epoch {trainer.current_epoch + 1}: the embeddings have collapsed (mean pairwise similarity "
                f"{similarity:.4f}, of at most 1)."
            )

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Write step, rates and the images of the last two batches, from which the step can be repeated."""
        if not isinstance(exception, NotFinite):
            return
        table = trainer.datamodule.splits.train  # type: ignore[attr-defined]
        content = {
            "error": str(exception),
            "step": trainer.global_step,
            "epoch": trainer.current_epoch + 1,
            "learning_rates": {group["name"]: group["lr"] for group in trainer.optimizers[0].param_groups},
            "batches": [[str(table.paths[row]) for row in batch.tolist()] for batch in self._batches],
        }
        self.folder.mkdir(parents=True, exist_ok=True)
        write_text(self.folder / REPLAY_FILE, json.dumps(content, indent=2) + "\n")
