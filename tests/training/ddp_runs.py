"""Short trainings whose tensors are compared between one process and several. Imported by the processes themselves."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_metric_learning.losses import TripletMarginLoss
from pytorch_metric_learning.miners import TripletMarginMiner
from quiet import QUIET
from torch import Tensor, nn

from proxy_anchor import EmbeddingNet, ProxyAnchorLoss
from proxy_anchor.data.datamodule import ImageDataModule
from proxy_anchor.data.table import Splits
from proxy_anchor.losses.anti_collapse import AntiCollapse
from proxy_anchor.losses.metrix import Metrix, MetrixFeatures
from proxy_anchor.losses.nested import Nested
from proxy_anchor.losses.pml import PMLLoss
from proxy_anchor.losses.proxy_synthesis import ProxySynthesis
from proxy_anchor.losses.regulariser import Regulariser
from proxy_anchor.losses.tcm import ThresholdConsistentMargin
from proxy_anchor.training.callbacks.recall import RecallCallback
from proxy_anchor.training.distributed import LeanDDP, SyncBatchNorms
from proxy_anchor.training.module import MetricLearner

# Each: arguments of the network, loss, data, optimizer settings and trainer that differ from the plain run.
RUNS: dict[str, dict[str, Any]] = {
    "plain": {},
    "warmup": {"warmup_epochs": 1},
    "frozen": {"batch_norm": "frozen"},
    "p_x_k": {"loss": "triplet", "data": {"images_per_class": 2}},
    "regularised": {"regularisers": True},
    "clipped_values": {"trainer": {"gradient_clip_val": 0.05, "gradient_clip_algorithm": "value"}},
    "clipped_norm": {"trainer": {"gradient_clip_val": 2, "gradient_clip_algorithm": "norm"}},
    "accumulated": {"trainer": {"accumulate_grad_batches": 2}},
    "compiled": {"compiled": True},
    "compiled_regularised": {"compiled": True, "regularisers": True},
    "compiled_warmup": {"compiled": True, "warmup_epochs": 1},
    "compiled_p_x_k": {"compiled": True, "loss": "triplet", "data": {"images_per_class": 2}},
    "compiled_clipped_norm": {"compiled": True, "trainer": {"gradient_clip_val": 2, "gradient_clip_algorithm": "norm"}},
    "compiled_accumulated": {"compiled": True, "trainer": {"accumulate_grad_batches": 2}},
}
PARTS = {"backbone": "net.backbone.", "head": "net.head.", "proxies": "loss."}


class SGDLearner(MetricLearner):
    """Without momentum: Adam would hide a constant factor of a gradient."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.02)


def make_loss(name: str) -> nn.Module:
    if name == "proxy_anchor":
        return ProxyAnchorLoss(3, 8, alpha=8)
    return PMLLoss(3, 8, TripletMarginLoss, TripletMarginMiner(margin=0.5, type_of_triplets="all"))


def make_regularisers() -> dict[str, Regulariser]:
    """All of them: every term, and a mixed batch."""
    made = [AntiCollapse(0.1), Metrix(), MetrixFeatures(), Nested(dims=[4], gamma=1), ProxySynthesis()]
    return {type(each).__name__: each for each in [*made, ThresholdConsistentMargin(1, 0.95, 0.2)]}


def make_network(batch_norm: str = "frozen_statistics") -> EmbeddingNet:
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    return EmbeddingNet("test_resnet", 8, pretrained=False, image_size=32, batch_norm=batch_norm)


def make_training(
    splits: Splits, folder: Path, world_size: int, data: dict[str, Any], **settings: Any
) -> tuple[pl.Trainer, ImageDataModule]:
    """Of two epochs of two steps."""
    sizes = {"batch_size": 6, "eval_batch_size": 5, "num_workers": 0, "crop": 32, "resize": 32}
    more = {"devices": world_size, "use_distributed_sampler": False, "default_root_dir": folder}
    return pl.Trainer(**QUIET | {"max_epochs": 2} | more | settings), ImageDataModule(splits, **sizes | data)


# In float64: six values per channel amplify float32's rounding to 1e-4 within four steps of batch norm.
ON_GPU = {"accelerator": "gpu", "precision": "64-true"}


def train(splits: Splits, world_size: int, folder: Path, run: dict, device: dict | None = None) -> dict[str, Any]:
    """State dict before and after 2 epochs of 2 steps, the losses that were logged, and every evaluation's Recall."""
    torch.backends.cudnn.allow_tf32 = False
    net = make_network(run.get("batch_norm", "frozen_statistics"))
    learner = SGDLearner(
        net,
        make_loss(run.get("loss", "proxy_anchor")),
        warmup_epochs=run.get("warmup_epochs", 0),
        regularisers=make_regularisers() if run.get("regularisers") else None,
        seed=3,
    )
    if run.get("compiled"):
        learner.compiled = net.to(memory_format=torch.channels_last)  # compiling it would change nothing here
        if isinstance(learner.loss, ProxyAnchorLoss):
            learner.compiled_loss = torch.compile(learner.loss.forward, dynamic=False, backend="aot_eager")
    recall = RecallCallback((1, 2, 4), engine="torch")
    strategy = LeanDDP() if world_size > 1 else "auto"
    settings = {
        "plugins": [SyncBatchNorms()],
        "strategy": strategy,
        "callbacks": [recall],
        **run.get("trainer", {}),
        **(device or {}),
    }
    trainer, data = make_training(splits, folder, world_size, run.get("data", {}), **settings)
    before = snapshot(learner)
    trainer.fit(learner, data)
    return {
        "before": before,
        "after": snapshot(learner),
        "steps": trainer.global_step,
        "losses": [each.train_loss for each in recall.history],
        "recall": [each.recall for each in recall.history],
        "embeddings": recall.selected_embeddings,
    }


def snapshot(learner: MetricLearner) -> dict[str, Tensor]:
    return {key: value.to("cpu", copy=True) for key, value in learner.state_dict().items()}


def train_all(splits: Splits, world_size: int, folder: Path, names: list[str], device: dict) -> dict[str, dict]:
    return {name: train(splits, world_size, folder, RUNS[name], device) for name in names}


def part(state: dict[str, Tensor], name: str) -> Tensor:
    """All parameters and buffers of backbone, head or proxies as one vector; empty for a loss without any."""
    chosen = [value.double().flatten() for key, value in state.items() if key.startswith(PARTS[name])]
    return torch.cat(chosen) if chosen else torch.empty(0)
