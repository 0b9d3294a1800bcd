"""Faults in one of two processes. Imported by the processes themselves."""

from __future__ import annotations

import os
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from ddp_runs import make_network, make_training

from proxy_anchor import ProxyAnchorLoss
from proxy_anchor.data.table import Splits
from proxy_anchor.training.callbacks.health import Health
from proxy_anchor.training.finite import NotFinite
from proxy_anchor.training.module import MetricLearner


class OwnClass(Health):
    """As if each process had met the class of its own number only."""

    def on_train_batch_start(self, *arguments: Any) -> None:
        super().on_train_batch_start(*arguments)
        assert self._seen is not None
        self._seen.zero_()[dist.get_rank()] = True


class BadNumber(MetricLearner):
    """The third step's loss is not finite, in the second process alone."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if self.global_step == 2 and dist.get_rank() == 1:
            self._loss_finite = torch.tensor(False)
        return loss


class StandingBackbone(MetricLearner):
    """Its optimizer never sees a gradient of the backbone."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        super().on_before_optimizer_step(optimizer)
        for parameter in self.net.backbone.parameters():
            parameter.grad = None


def watch(splits: Splits, folder: Path, learner_type: type[MetricLearner], health_type: type[Health]) -> dict[str, Any]:
    """Two epochs of two steps in two processes: the warnings, what was printed, and the error that ended it."""
    learner = learner_type(make_network(), ProxyAnchorLoss(3, 8), warmup_epochs=0)
    health, error = health_type(folder), None
    settings = {"strategy": "ddp", "callbacks": [health], "limit_val_batches": 0}
    trainer, data = make_training(splits, folder, 2, {}, **settings)
    with redirect_stdout(StringIO()) as printed:
        try:
            trainer.fit(learner, data)
        except NotFinite as stopped:
            error = str(stopped)
    return {"warnings": health.warnings, "printed": printed.getvalue(), "error": error, "step": trainer.global_step}


def watch_all(splits: Splits, folder: Path) -> dict[str, dict[str, Any]]:
    return {
        "fine": watch(splits, folder, MetricLearner, Health),
        "standing": watch(splits, folder, StandingBackbone, Health),
        "classes": watch(splits, folder, MetricLearner, OwnClass),
        "not finite": watch(splits, folder, BadNumber, Health),
    }


def evaluate_parts(folder: Path, parts: list[list[torch.Tensor]]) -> list[list[str]]:
    """The warnings after each evaluation, of which each process had one of the parts, or none of it."""
    dist.init_process_group("gloo")
    trainer: Any = SimpleNamespace(state=SimpleNamespace(fn="fit"), current_epoch=0)
    told = []
    for part in parts:
        health, none = Health(folder), SimpleNamespace(log=lambda *given, **named: None)
        health.on_validation_epoch_start(trainer, none)  # type: ignore[arg-type]
        if len(mine := part[int(os.environ["RANK"])]):
            health.on_validation_batch_end(trainer, none, {"embeddings": mine})
        health.on_validation_epoch_end(trainer, none)  # type: ignore[arg-type]
        told.append(health.warnings)
    return told
