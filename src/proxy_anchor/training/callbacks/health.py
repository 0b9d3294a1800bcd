"""Warnings of training that goes wrong without an error; the batch of a number that is not finite."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from proxy_anchor.data.table import shorten
from proxy_anchor.training.distributed import gather_objects, reduce_max, write_before_any_ends
from proxy_anchor.training.finite import NotFinite
from proxy_anchor.training.module import MetricLearner
from proxy_anchor.utils import rank, write_json

REPLAY_FILE = "not_finite.json"
COLLAPSED = 0.98  # mean cosine similarity of different images, of all classes
# CS231n's rule of thumb for a step is 1e-3 of the weights; rates that networks are trained with give 1e-5 to 1e-1.
STEP_TOO_LARGE, STEP_TOO_SMALL = 0.2, 1e-6


class Health(pl.Callback):
    """Warns of collapsed embeddings, of steps that are far off, of unseen classes.

    Logs `health/update_ratio`, the length of an epoch's first step of the backbone over that of its weights, and
    `health/mean_similarity` of the evaluated embeddings. All ranks count together, and the first one warns. Keeps the
    images of the last two batches when a number is not finite.

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
        self._seen: Tensor | None = None  # (C,) bool: classes that had an image so far, on the device
        self._before: list[Tensor] = []  # the backbone's weights before the step that is measured
        self._ratio: Tensor | None = None  # (), on the device

    def state_dict(self) -> dict[str, Any]:
        """Warnings and classes so far, for a resumed run."""
        return {"warnings": self.warnings, "seen": self._seen}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore them."""
        self.warnings, self._seen = list(state_dict["warnings"]), state_dict.get("seen")

    def _warn(self, text: str) -> None:
        self.warnings.append(text)
        if rank() == 0:
            print(f"warning: {text}", flush=True)

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Prepare a flag per class, where the loss has one proxy per class."""
        proxies, classes = (getattr(pl_module.loss, name, None) for name in ("proxies", "num_classes"))
        if isinstance(proxies, Tensor) and len(proxies) == classes:
            seen = torch.zeros(len(proxies), dtype=torch.bool) if self._seen is None else self._seen
            self._seen = seen.to(proxies.device)

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: MetricLearner) -> None:  # type: ignore[override]
        """The first step of this epoch is measured."""
        self._ratio = None

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Keep the indices of two batches, since errors are read one step later; mark their classes."""
        self._batches = [*self._batches[-1:], batch[2].detach()]
        if self._seen is not None:
            self._seen.index_fill_(0, batch[1], True)

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: Any, optimizer: Any) -> None:
        """Keep the backbone's weights before an epoch's first step, unless it is one of the warm-up."""
        if self._ratio is None and trainer.current_epoch >= pl_module.warmup_epochs:
            self._before = [each.detach().clone() for each in _trained(pl_module)]

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: MetricLearner, *rest: Any) -> None:  # type: ignore[override]
        """Compare the weights with those before the step."""
        if self._before:
            changes = [each.detach() - before for each, before in zip(_trained(pl_module), self._before, strict=True)]
            self._ratio = get_total_norm(changes) / get_total_norm(self._before)
            self._before = []

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: MetricLearner) -> None:  # type: ignore[override]
        """Log and judge the step."""
        if self._ratio is None:
            return
        pl_module.log("health/update_ratio", self._ratio)
        if trainer.current_epoch != pl_module.warmup_epochs:
            return
        ratio, epoch, lr = float(self._ratio), trainer.current_epoch + 1, pl_module.lr
        if ratio == 0 and str(trainer.precision) != "16-mixed":  # whose scaler skips its first steps
            self._warn(f"epoch {epoch}: the backbone has not moved although the warm-up is over: it got no gradient.")
        elif ratio and not STEP_TOO_SMALL <= ratio <= STEP_TOO_LARGE:
            self._warn(
                f"epoch {epoch}: optimizer.lr={lr:g} looks far too {'high' if ratio > 1e-3 else 'low'}: the "
                f"backbone's first step is {ratio:.1e} of its weights' length (about 1e-3 is usual)."
            )

    def on_train_end(self, trainer: pl.Trainer, pl_module: MetricLearner) -> None:  # type: ignore[override]
        """Name classes that no batch held."""
        if self._seen is not None and not (trainer.fast_dev_run or trainer.overfit_batches):  # type: ignore[attr-defined]
            never = (~reduce_max(self._seen.int()).bool()).nonzero().flatten().tolist()
            names = pl_module.metadata.get("classes", [])
            if never:
                self._warn(
                    f"{len(never)} of {len(self._seen)} classes were never in a batch of training: no full batch held "
                    f"them ({shorten([names[row] if row < len(names) else str(row) for row in never])})."
                )

    def on_validation_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Reset the sum."""
        self._sum, self._count = None, 0

    def on_validation_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, *rest: Any) -> None:
        """Add up unit-length embeddings: the length of the sum gives their mean similarity."""
        embeddings = outputs["embeddings"].double()
        self._sum = embeddings.sum(0) + (0 if self._sum is None else self._sum)
        self._count += len(embeddings)

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Log the mean similarity; warn where it is near 1. Before training it often is."""
        if trainer.state.fn != "fit":
            return
        parts = gather_objects((None if self._sum is None else self._sum.cpu(), self._count))
        count = sum(each for _, each in parts)
        if count < 2:
            return
        total = torch.stack([each for each, _ in parts if each is not None]).sum(0)
        similarity = mean_similarity(total, count)
        pl_module.log("health/mean_similarity", similarity)
        if similarity > COLLAPSED:
            self._warn(
                f"epoch {trainer.current_epoch + 1}: the embeddings have collapsed (mean pairwise similarity "
                f"{similarity:.4f}, of at most 1)."
            )

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Write step, learning rates and the images of the last two batches of all ranks."""
        if not isinstance(exception, NotFinite):  # all ranks raise it after the same step
            return
        batches = zip(*gather_objects([batch.cpu() for batch in self._batches]), strict=True)
        table = trainer.datamodule.splits.train  # type: ignore[attr-defined]
        content = {
            "error": str(exception),
            "step": trainer.global_step,
            "epoch": trainer.current_epoch + 1,
            "learning_rates": {group["name"]: group["lr"] for group in trainer.optimizers[0].param_groups},
            "batches": [[str(table.paths[row]) for row in torch.cat(parts).tolist()] for parts in batches],
        }
        if rank() == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_json(self.folder / REPLAY_FILE, content)
        write_before_any_ends(trainer)


def mean_similarity(total: Tensor, count: int) -> float:
    """Mean cosine similarity of the pairs of `count` unit-length embeddings, of which `total` (D,) is the sum."""
    return (float(total.square().sum()) - count) / (count * (count - 1))


def _trained(pl_module: MetricLearner) -> list[Tensor]:
    """The backbone's tensors that are trained."""
    return [parameter for parameter in pl_module.net.backbone.parameters() if parameter.requires_grad]
