"""Training that goes wrong without an error: said with its figure when it is seen, and kept for result.json."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytorch_lightning as pl
import torch
from torch import Tensor

from proxy_anchor.data.table import shorten
from proxy_anchor.training.distributed import gather_objects, reduce_max, write_before_any_ends
from proxy_anchor.training.finite import NotFinite
from proxy_anchor.utils import rank, write_text

if TYPE_CHECKING:
    from proxy_anchor.training.module import MetricLearner

REPLAY_FILE = "not_finite.json"
COLLAPSED = 0.98  # mean cosine similarity of different images, of all classes
# Adam changes each value by at most about the learning rate in a step. As a part of the whole backbone's length that tells a
# rate that is far off whatever the loss is: with normalised embeddings and batch norm the loss falls at rates that ruin the
# weights. CS231n's rule of thumb is 1e-3; rates that networks are trained with give 1e-5 to 1e-1.
STEP_TOO_LARGE, STEP_TOO_SMALL = 0.2, 1e-6
NO_GRADIENT = 1e-8  # AdamW's epsilon: below it a step is smaller than the rate says, and then nothing


class Health(pl.Callback):
    """Warns of what no error stops; keeps the batch when a number is not finite.

    It warns of collapsed embeddings, of a learning rate that is far off, of a backbone without gradients, and of dead
    proxies. What it needs of a step stays on the device; the host reads a few numbers once an epoch. Of several processes
    each looks at its part, the counts are those of all, and the first one warns.

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
        self._seen: Tensor | None = None  # (C,) bool: classes that had an image in this epoch, on the device
        self._ever_seen: Tensor | None = None
        self._num_dead = 0

    def state_dict(self) -> dict[str, Any]:
        """The warnings and classes so far, for a run that is continued."""
        return {"warnings": self.warnings, "ever_seen": self._ever_seen, "num_dead": self._num_dead}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with them."""
        self.warnings = list(state_dict["warnings"])
        self._ever_seen, self._num_dead = state_dict.get("ever_seen"), state_dict.get("num_dead", 0)

    def _warn(self, text: str) -> None:
        self.warnings.append(text)
        if rank() == 0:
            print(f"warning: {text}", flush=True)

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: MetricLearner) -> None:  # type: ignore[override]
        """Judge the learning rate before the first step of the backbone. Forget which classes were seen."""
        if trainer.current_epoch == pl_module.settings.warmup_epochs:
            self._look_at_rate(trainer, pl_module)
        proxies = _proxies(pl_module)
        self._seen = None if proxies is None else torch.zeros(len(proxies), dtype=torch.bool, device=proxies.device)

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Keep the numbers of two batches: on a GPU a step's answer is read one step later. Mark their classes."""
        self._batches = [*self._batches[-1:], batch[2].detach()]
        if self._seen is not None:
            self._seen.index_fill_(0, batch[1], True)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: MetricLearner) -> None:  # type: ignore[override]
        """Look for what has had no gradient."""
        if trainer.current_epoch == pl_module.settings.warmup_epochs:
            self._look_at_backbone(trainer, pl_module)
        if self._seen is not None:
            self._look_at_proxies(trainer, pl_module, reduce_max(self._seen.int()).bool())

    def _look_at_rate(self, trainer: pl.Trainer, pl_module: MetricLearner) -> None:
        """Warn of a learning rate that is far off for the size of the backbone's weights."""
        lr, trained = pl_module.settings.lr, _trained(pl_module)
        length = float(torch.nn.utils.get_total_norm(trained)) if trained else 0.0
        if not length:
            return
        step = lr * sum(parameter.numel() for parameter in trained) ** 0.5 / length
        if not STEP_TOO_SMALL <= step <= STEP_TOO_LARGE:
            self._warn(
                f"epoch {trainer.current_epoch + 1}: optimizer.lr={lr:g} looks far too {'high' if step > 1e-3 else 'low'}: a step "
                f"of lr in every value is {step:.1e} of the backbone's length (about 1e-3 is usual)."
            )

    def _look_at_backbone(self, trainer: pl.Trainer, pl_module: MetricLearner) -> None:
        """Warn of one that has had no gradient in its first epoch after the warm-up."""
        state = trainer.optimizers[0].state
        squares = [state[each]["exp_avg_sq"] for each in _trained(pl_module) if "exp_avg_sq" in state.get(each, {})]
        if not (squares and torch.stack([each.any() for each in squares]).any()):
            self._warn(
                f"epoch {trainer.current_epoch + 1}: the backbone has not moved although the warm-up is over: the loss gave it "
                "no gradient."
            )

    def _look_at_proxies(self, trainer: pl.Trainer, pl_module: MetricLearner, seen: Tensor) -> None:
        """Warn of proxies that get no gradient although their classes had images, and, at the end, of classes without any."""
        names = pl_module.metadata.get("classes", [])
        self._ever_seen = seen if self._ever_seen is None else seen | self._ever_seen.to(seen.device)
        momentum = trainer.optimizers[0].state.get(pl_module.loss.proxies, {}).get("exp_avg")  # type: ignore[arg-type]
        if momentum is not None:
            largest = torch.linalg.vector_norm(momentum, torch.inf, dim=1)  # no copy of what may be millions of rows
            dead = _chosen((largest < NO_GRADIENT) & seen)
            if len(dead) > self._num_dead:
                self._num_dead = len(dead)
                self._warn(
                    f"epoch {trainer.current_epoch + 1}: {len(dead)} of {len(seen)} proxies are dead: none of their "
                    f"gradients' running means is above {NO_GRADIENT:g} although their classes had images "
                    f"({_named(dead, names)})."
                )
        if trainer.current_epoch + 1 == trainer.max_epochs and (never := _chosen(~self._ever_seen)):
            self._warn(
                f"{len(never)} of {len(seen)} proxies were never the positive of an image in training: no full batch held "
                f"their classes ({_named(never, names)})."
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
        if trainer.state.fn != "fit":
            return
        parts = gather_objects((None if self._sum is None else self._sum.cpu(), self._count))
        count = sum(each for _, each in parts)
        if count < 2:
            return
        total = torch.stack([each for each, _ in parts if each is not None]).sum(0)
        similarity = (float(total.square().sum()) - count) / (count * (count - 1))
        if similarity > COLLAPSED:
            self._warn(
                f"epoch {trainer.current_epoch + 1}: the embeddings have collapsed (mean pairwise similarity "
                f"{similarity:.4f}, of at most 1)."
            )

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Write step, rates and the images of the last two batches, of all devices, from which the step can be repeated."""
        if not isinstance(exception, NotFinite):  # which all processes raise after the same step
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
            write_text(self.folder / REPLAY_FILE, json.dumps(content, indent=2) + "\n")
        write_before_any_ends(trainer)


def _trained(pl_module: MetricLearner) -> list[Tensor]:
    """The backbone's tensors that are trained."""
    return [parameter for parameter in pl_module.net.backbone.parameters() if parameter.requires_grad]


def _proxies(pl_module: MetricLearner) -> Tensor | None:
    """(C, D), of losses that have one for each class under this name."""
    proxies, classes = (getattr(pl_module.loss, name, None) for name in ("proxies", "num_classes"))
    return proxies if isinstance(proxies, Tensor) and len(proxies) == classes else None


def _chosen(mask: Tensor) -> list[int]:
    """The rows where a mask is set; waits for the device."""
    return mask.nonzero().flatten().tolist()


def _named(rows: Sequence[int], names: Sequence[str]) -> str:
    return shorten([names[row] if row < len(names) else str(row) for row in rows])
