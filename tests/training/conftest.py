from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import pytorch_lightning as pl
import torch
from quiet import QUIET
from torch.optim import AdamW

from proxy_anchor import EmbeddingNet, ProxyAnchorLoss
from proxy_anchor.data.datamodule import ImageDataModule
from proxy_anchor.data.table import Splits, make_tables
from proxy_anchor.training.module import MetricLearner
from proxy_anchor.training.optim import DEFAULT_SCHEDULER


@pytest.fixture
def splits(write_images: Callable) -> Splits:
    """Three classes of 4 images to train on, and three others of 3, 3 and 2 to search."""
    rows = write_images({"a": 4, "b": 4, "c": 4, "x": 3, "y": 3, "z": 2})
    return Splits("tiny", make_tables(rows[:12])[0], make_tables(rows[12:])[0])


@pytest.fixture
def make_data(splits: Splits) -> Callable[..., ImageDataModule]:
    def make(**arguments) -> ImageDataModule:
        return ImageDataModule(
            **{"splits": splits, "batch_size": 6, "eval_batch_size": 3, "num_workers": 0, "crop": 32, "resize": 32}
            | arguments
        )

    return make


@pytest.fixture
def make_learner() -> Callable[..., MetricLearner]:
    def make(loss=None, lr=1e-3, optimizer=AdamW, scheduler=DEFAULT_SCHEDULER, **arguments) -> MetricLearner:
        torch.manual_seed(0)
        net = EmbeddingNet("test_resnet", 8, pretrained=False, image_size=32)
        return MetricLearner(
            net,
            loss or ProxyAnchorLoss(3, 8),
            partial(optimizer, lr=lr),
            scheduler,
            metadata={"config": {"seed": 1}, "classes": ["a", "b", "c"]},
            **{"warmup_epochs": 0} | arguments,
        )

    return make


@pytest.fixture
def make_trainer(tmp_path: Path) -> Callable[..., pl.Trainer]:
    def make(**arguments) -> pl.Trainer:
        return pl.Trainer(
            **QUIET
            | {"max_epochs": 1, "devices": 1, "default_root_dir": tmp_path}
            | {"gradient_clip_val": 10, "gradient_clip_algorithm": "value"}
            | arguments
        )

    return make


@pytest.fixture
def fit(make_data: Callable, make_trainer: Callable) -> Callable[..., pl.Trainer]:
    """fit(learner, data={}, **trainer) trains on `splits`, without evaluation; returns the trainer."""

    def train(learner: MetricLearner, data: dict | None = None, **arguments) -> pl.Trainer:
        trainer = make_trainer(**{"limit_val_batches": 0} | arguments)
        trainer.fit(learner, make_data(**data or {}))
        return trainer

    return train
