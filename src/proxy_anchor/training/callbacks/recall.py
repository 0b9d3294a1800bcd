"""Recall@K after every epoch: gathers embeddings, searches, logs, prints, remembers the best."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor

from proxy_anchor.data.table import Splits
from proxy_anchor.errors import UsageError, check_int
from proxy_anchor.retrieval.metrics import num_queries_without_positive
from proxy_anchor.retrieval.recall_at_k import RecallAtK
from proxy_anchor.retrieval.rows import check_k
from proxy_anchor.training.distributed import decided_by_first


@dataclass(frozen=True)
class EpochResult:
    """One evaluation.

    epoch: 0 before training. train_seconds + eval_seconds is the whole epoch; search_seconds is the part of
    eval_seconds after the last image was embedded.

    recall: {K: share of queries, in [0, 1]} on the searched classes. validation: the same on held-out classes,
    None without. train_loss: the logged `train/loss_epoch`, mean over the epoch's batches; None before training.
    """

    epoch: int
    recall: dict[int, float]
    train_seconds: float
    eval_seconds: float
    train_loss: float | None = None
    validation: dict[int, float] | None = None
    search_seconds: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """Plain types with string keys, as JSON has them."""
        return json.loads(json.dumps(asdict(self)))

    @classmethod
    def from_dict(cls, plain: dict[str, Any]) -> EpochResult:
        """The inverse of `as_dict`."""
        names = ("recall", "validation")
        sets = {name: plain[name] and {int(k): value for k, value in plain[name].items()} for name in names}
        return cls(**{**plain, **sets})


# Name for callbacks: Recall at the smallest K that selects the epoch, as `selected` does.
SELECTING = "selecting_recall"


def format_recall(recall: dict[int, float], digits: int = 1) -> str:
    """'Recall@1 73.9  @2 82.0  ...' in percent."""
    return "Recall" + "  ".join(f"@{k} {100 * value:.{digits}f}" for k, value in recall.items())


class RecallCallback(pl.Callback):
    """Scores every complete validation pass and logs `<set>/recall_at_<K>`, as shares in [0, 1].

    Callbacks find the value that selects the epoch as `selecting_recall`: of held-out classes where there are any.

    The sanity pass is ignored. A pass that did not see every image is an error, unless `scored` is false.

    Args:
        k: the K of Recall@K. engine: see `proxy_anchor.retrieval.search.resolve_engine`.
        dims: numbers of leading dimensions whose Recall is logged too, as `<set>/recall_at_<K>_dim<d>`.
        scored: false where evaluations see a part of the images only (Lightning's debug modes): none is scored.

    Attributes:
        history: one EpochResult per evaluation, the untrained state first.
        selected_embeddings: (N, D) embeddings on the CPU at the selected epoch, in dataset order: [query] or
            [query, gallery] of the searched classes.
    """

    def __init__(
        self,
        k: int | Sequence[int] = (1, 2, 4, 8),
        *,
        engine: str = "auto",
        scored: bool = True,
        dims: Sequence[int] = (),
    ) -> None:
        ks = [k] if isinstance(k, (int, float, str)) else list(k or ())
        if not ks:
            raise UsageError("recall_k is empty: name at least one K, for example recall_k=[1,2,4,8].")
        for value in ks:
            check_int("recall_k", value, 1)
        self.k = sorted(set(ks))
        self.engine = engine
        self.scored, self.dims = scored, dims
        self.metrics: dict[str, RecallAtK] = {"test": RecallAtK(self.k, engine=engine)}
        self.history: list[EpochResult] = []
        self.selected_embeddings: list[Tensor] = []
        self._train_start = self._eval_start = 0.0
        self._rates: dict[str, float] = {}

    @property
    def best(self) -> EpochResult:
        """Epoch with the highest Recall at the smallest K on the searched classes; the earliest of equals."""
        return max(self._trained, key=lambda result: result.recall[self.k[0]])

    @property
    def selected(self) -> EpochResult:
        """The best epoch on held-out classes, where there are any, or `best`."""
        return max(self._trained, key=lambda result: (result.validation or result.recall)[self.k[0]])

    @property
    def _trained(self) -> list[EpochResult]:
        return [result for result in self.history if result.epoch > 0] or self.history

    def fit(self, splits: Splits) -> bool:
        """Leave out each K larger than the gallery, if a smaller one remains; returns whether there was any."""
        sizes = [len(query) - 1 if gallery is None else len(gallery) for query, gallery in splits.evaluated.values()]
        fitting = [k for k in self.k if k <= min(sizes)]
        if fitting in ([], self.k):
            return False
        self.k = fitting
        return True

    def check(self, splits: Splits) -> None:
        """Raise UsageError for a K larger than the gallery."""
        for query, gallery in splits.evaluated.values():
            check_k(max(self.k), len(query if gallery is None else gallery), gallery is None)

    def state_dict(self) -> dict[str, Any]:
        """All evaluations and the selected embeddings, for a resumed run."""
        return {"history": [each.as_dict() for each in self.history], "selected_embeddings": self.selected_embeddings}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore them."""
        self.history = [EpochResult.from_dict(each) for each in state_dict["history"]]
        self.selected_embeddings = state_dict["selected_embeddings"]

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Check K; count the images of a whole pass and the queries without a positive."""
        splits: Splits | None = getattr(getattr(trainer, "datamodule", None), "splits", None)
        if splits is None:
            raise UsageError(
                "RecallCallback reads the splits of an ImageDataModule: pass one as datamodule=..., or with other "
                "loaders use proxy_anchor.retrieval.recall_at_k.RecallAtK in a hook of your own."
            )
        self.check(splits)
        self.metrics = {}
        for name, (query, gallery) in splits.evaluated.items():
            num_images = len(query) + (0 if gallery is None else len(gallery))
            self.metrics[name] = RecallAtK(self.k, engine=self.engine, num_images=num_images, dims=self.dims)
            lonely = num_queries_without_positive(query.labels, None if gallery is None else gallery.labels)
            if lonely and not self.history:
                pl_module.print(
                    f"{lonely} of {len(query)} {name} queries have no image of their class to find: counted as misses."
                )

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start the clock of the epoch."""
        self._train_start = time.perf_counter()

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Keep the learning rates of the step: at the evaluation the schedule has moved on."""
        groups = enumerate(optimizer.param_groups)
        self._rates = {f"lr/{group.get('name', number)}": group["lr"] for number, group in groups}

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Evaluate after the last step of `max_steps`, which may end an epoch early and is saved."""
        if trainer.global_step == trainer.max_steps:
            trainer.val_check_batch = batch_idx + 1

    def on_validation_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Reset the metrics."""
        self._eval_start = time.perf_counter()
        for metric in self.metrics.values():
            metric.to(pl_module.device).reset()

    def on_validation_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Add a batch of embeddings to the metric of its set."""
        name, is_gallery = trainer.datamodule.eval_roles[dataloader_idx]  # type: ignore[attr-defined]
        self.metrics[name].update(outputs["embeddings"], outputs["labels"], outputs["indices"], is_gallery=is_gallery)

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Search, log and keep the result."""
        if trainer.sanity_checking or not self.scored:
            return
        if pl_module.device.type == "cuda":
            torch.cuda.synchronize(pl_module.device)  # embedding must not count as search
        search_start = time.perf_counter()
        values = {name: metric.compute() for name, metric in self.metrics.items()}
        # All take the first rank's numbers: what is decided by them has to be the same on all.
        recall = decided_by_first(
            lambda: {name: {k: float(each[f"recall_at_{k}"]) for k in self.k} for name, each in values.items()}
        )
        end = time.perf_counter()
        training = trainer.state.fn == "fit"
        searched = next(iter(recall))
        result = EpochResult(
            epoch=trainer.current_epoch + 1 if training else 0,
            recall=recall[searched],
            train_seconds=self._eval_start - self._train_start if training else 0.0,
            eval_seconds=end - self._eval_start,
            search_seconds=end - search_start,
            validation=recall["validation"] if "validation" in recall and searched != "validation" else None,
        )
        if training or not self.history:  # `trainer.test` or `validate` after training is no part of it
            self.history.append(result)
        pl_module.log("search_seconds", result.search_seconds)
        # With the evaluation, not at the start of an epoch, so that a resumed run logs the same rows.
        pl_module.log_dict(self._rates)
        for name, each in values.items():
            pl_module.log_dict({f"{name}/{key}": value for key, value in each.items()})
        pl_module.log(SELECTING, (result.validation or result.recall)[self.k[0]], logger=False)
        # The logger's `epoch` counts from 0, and is 0 before training too.
        pl_module.log("epochs_trained", float(result.epoch))
        if self.selected is result:
            self.selected_embeddings = self.metrics[searched].gathered_embeddings()

    on_test_epoch_start = on_validation_epoch_start
    on_test_batch_end = on_validation_batch_end
    on_test_epoch_end = on_validation_epoch_end

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Add the mean loss, which the trainer has computed only now, and print the epoch."""
        epoch, loss = trainer.current_epoch + 1, float(trainer.callback_metrics["train/loss_epoch"])
        begin = f"epoch {epoch}/{trainer.max_epochs}: loss {loss:.3f}"
        if not self.scored:
            pl_module.print(f"{begin}  a part of the images: Recall is not computed")
        elif self.history and self.history[-1].epoch == epoch:
            result = self.history[-1] = replace(self.history[-1], train_loss=loss)
            seconds = f"{result.train_seconds:.1f} s + {result.eval_seconds:.1f} s"
            held_out = "" if result.validation is None else f"validation {format_recall(result.validation)}  test "
            recall = f"{held_out}{format_recall(result.recall)}"
            pl_module.print(f"{begin}  {recall}  ({seconds}, {result.search_seconds:.2f} s of it search)")
