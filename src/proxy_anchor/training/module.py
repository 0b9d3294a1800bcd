"""The LightningModule: images in, embeddings out, loss, log."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial, reduce
from operator import add
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from proxy_anchor.data.sampling import PKBatches, share_seen
from proxy_anchor.losses.base import MetricLoss
from proxy_anchor.losses.proxy_anchor import ProxyAnchorLoss
from proxy_anchor.losses.regulariser import Regulariser, regularised_loss, wants
from proxy_anchor.models.embedding_net import EmbeddingNet
from proxy_anchor.training import optim
from proxy_anchor.training.checkpoint import (
    CHECKPOINT_FORMAT,
    CHECKPOINT_KEY,
    load_checkpoint,
    load_embedding_net,
    make_loss,
    make_regularisers,
)
from proxy_anchor.training.compile import CompiledNet, compile_loss
from proxy_anchor.training.distributed import gather_batch
from proxy_anchor.training.finite import FiniteGuard

Batch = tuple[Tensor, Tensor, Tensor]


class MetricLearner(pl.LightningModule):
    """An embedding network and a loss that may hold proxies, trained together.

    Args:
        net: images (B, 3, H, W) to embeddings (B, D).
        loss: `loss(embeddings, labels)`; its parameters, if any, are the proxies.
        regularisers: {name: term beside the loss, or what mixes its batch}, see `losses.regulariser`; parameters of
        theirs train as proxies do.
        seed: of the random numbers of regularisers, together with epoch and batch.
        optimizer: called with the parameter groups, as `partial(torch.optim.AdamW, lr=1e-4)`; lr is that of backbone
        and head.
        scheduler: called with the optimizer, see `optim.make_scheduler`.
        proxy_lr_mult: the proxies' learning rate over lr (paper: 100).
        layer_decay: learning rate of each layer of the backbone over that of the next; None: one rate.
        warmup_epochs: first epochs in which only head and proxies move, at full rate; the schedule counts them.
        metadata: plain values saved in every checkpoint (how data and model were made).
        compile: compile the network and the Proxy-Anchor loss (see `training.compile`); `net` and `loss` keep the
        weights.
        num_evaluated: images of all evaluations together (see `CompiledNet`). None: many.

    Raises UsageError for an optimizer or scheduler that does not take its arguments, and when the loss stops being
    finite.
    """

    def __init__(
        self,
        net: EmbeddingNet,
        loss: nn.Module,
        optimizer: partial[Optimizer] = optim.DEFAULT_OPTIMIZER,
        scheduler: partial[LRScheduler] = optim.DEFAULT_SCHEDULER,
        *,
        regularisers: Mapping[str, Regulariser] | None = None,
        seed: int = 0,
        proxy_lr_mult: float = 100.0,
        warmup_epochs: int = 1,
        layer_decay: float | None = None,
        metadata: dict[str, Any] | None = None,
        compile: bool = False,
        num_evaluated: int | None = None,
    ) -> None:
        super().__init__()
        groups: dict[str, Any] = {"proxy_lr_mult": proxy_lr_mult, "layer_decay": layer_decay}
        optim.check_learning(optimizer, scheduler, warmup_epochs=warmup_epochs, **groups)
        self.make_optimizer, self.make_scheduler = optimizer, scheduler
        self.lr, self.groups, self.warmup_epochs = optimizer.keywords["lr"], groups, warmup_epochs
        self.net, self.loss, self.seed = net, loss, seed
        self.regularisers = nn.ModuleDict(dict(regularisers or {}))
        for each in self.regularisers.values():
            each.check(loss)  # type: ignore[operator]
        self.wants_features = any("features" in wants(each) for each in self.regularisers.values())
        if isinstance(loss, MetricLoss):
            loss.check_labels = False  # checked once by the data module; each check waits for the GPU
        self.metadata = metadata or {}
        self.compiled, self.compiled_loss = None, None
        if compile:
            self.compiled = CompiledNet(
                net.to(memory_format=torch.channels_last),
                num_evaluated=num_evaluated,
                with_features=self.wants_features,
            )
            mixed = any(each.mix for each in self.regularisers.values())  # the loss is called with other proxies
            if isinstance(loss, ProxyAnchorLoss) and not mixed:  # other losses look at values on the host
                self.compiled_loss = compile_loss(loss.forward)
        self._guard, self._loss_finite = FiniteGuard(), torch.tensor(True)

    def forward(self, images: Tensor, **more: bool) -> Any:
        """Images (B, 3, H, W) in 0-255 to unit-length embeddings (B, D). more: arguments of the network's forward."""
        return self.net(images, **more) if self.compiled is None else self.compiled(images, **more)

    def on_train_epoch_start(self) -> None:
        """Log the share of the training images in this epoch's P x K batches."""
        order = getattr(getattr(self.trainer, "datamodule", None), "order", None)
        if isinstance(order, PKBatches):
            self.log("train/images_seen", share_seen(order, self.current_epoch))

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Images in, embeddings out, loss on the global batch, log."""
        images, labels, *_ = batch
        terms = self.loss_terms(images, labels, batch_idx)
        loss = reduce(add, terms.values())
        self._loss_finite = self._loss_finite.to(loss.device) & torch.isfinite(loss.detach())
        # Not prog_bar: the trainer would copy it from the GPU, and wait, in every step. See LossBar.
        self.log("train/loss", loss, on_step=True, on_epoch=True, batch_size=len(labels))
        if self.regularisers:
            logged = {f"train/{name}_term": term.detach() for name, term in terms.items()}
            self.log_dict(logged, on_step=False, on_epoch=True, batch_size=len(labels))
        return loss

    def loss_terms(self, images: Tensor, labels: Tensor, batch_idx: int = 0) -> dict[str, Tensor]:
        """{"loss": the loss, NAME: weighted term of a regulariser}, scalars, of the batches of all processes.

        images (b, 3, H, W) and labels (b,) are of this process.
        """
        embeddings, *features = self(images, with_features=True) if self.wants_features else (self(images),)
        features = [gather_batch(each, labels)[0] for each in features]
        embeddings, labels = gather_batch(embeddings, labels)
        if not self.regularisers:
            return {"loss": (self.compiled_loss or self.loss)(embeddings, labels)}
        return regularised_loss(
            self.loss,
            self.regularisers,  # type: ignore[arg-type]
            embeddings,
            labels,
            # Not torch's generators, whose states differ between ranks, and after resuming.
            random=np.random.default_rng([self.seed, self.current_epoch, batch_idx]),
            features=features[0] if features else None,
            head=self.net.head,
            compute=self.compiled_loss,
        )

    def validation_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> dict[str, Tensor]:
        """Embeddings with their dataset indices and labels; a callback gathers and scores them."""
        images, labels, indices = batch
        return {"embeddings": self(images), "labels": labels, "indices": indices}

    test_step = predict_step = validation_step

    def configure_optimizers(self) -> Any:
        """The optimizer over the groups backbone, head, proxies; prints their learning rates."""
        learned = nn.ModuleList([self.loss, self.regularisers])
        groups = optim.make_parameter_groups(self.net, learned, lr=self.lr, **self.groups)
        sizes = {group["name"]: sum(p.numel() for p in group["params"]) for group in groups}
        rates = [f"{each['name']} {each['lr']:.4g} ({sizes[each['name']]:,} parameters)" for each in groups]
        self.print(f"learning rates: {' | '.join(rates)}")
        # A loss scaler (16-mixed) unscales and inspects gradients itself, which a fused optimizer would repeat.
        fused = self.device.type in ("cuda", "cpu") and str(self.trainer.precision) != "16-mixed"
        optimizer = optim.make_optimizer(self.make_optimizer, groups, fused=fused)
        steps = int(self.trainer.estimated_stepping_batches)
        return {"optimizer": optimizer, "lr_scheduler": optim.make_scheduler(self.make_scheduler, optimizer, steps)}

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Stop on a loss or gradient that is not finite. During warm-up, remove the backbone's gradients.

        Warm-up does not use `requires_grad`: DDP registers hooks only for parameters that require gradients when it
        wraps the module, and a network compiled while frozen has no gradient path later. The optimizer skips a
        parameter without gradient (no decay, no moments).
        """
        # The scaler of 16-mixed skips steps with infinite gradients by design; a loss that is not finite stops it too.
        scaled = str(self.trainer.precision) == "16-mixed"
        # Not self.parameters(), which walks through all modules in every step.
        trained = (p for group in optimizer.param_groups for p in group["params"])
        gradients = [p.grad for p in trained if p.grad is not None]
        norm = torch.zeros((), device=self.device) if scaled else torch.nn.utils.get_total_norm(gradients)
        skips_itself = bool(optimizer.defaults.get("fused"))
        if skips_itself:
            self._guard.check()  # of the previous step
        bad = self._guard.show(f"at step {self.global_step} (epoch {self.current_epoch + 1})", self._loss_finite, norm)
        self._loss_finite = torch.ones_like(self._loss_finite)
        if skips_itself:
            optimizer.found_inf = bad  # type: ignore[attr-defined]  # torch's way to have the kernel skip the step
        if not skips_itself or self.device.type == "cpu":
            self._guard.check()
        if self.current_epoch < self.warmup_epochs:
            self.net.backbone.zero_grad(set_to_none=True)

    def on_train_epoch_end(self) -> None:
        """Check the last step of the epoch."""
        self._guard.check()

    def configure_gradient_clipping(
        self, optimizer: Optimizer, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        """Clip as the trainer would, which refuses fused optimizers because of loss scalers."""
        if gradient_clip_val is None or gradient_clip_val <= 0:
            return
        clip = clip_grad_value_ if gradient_clip_algorithm == "value" else clip_grad_norm_
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if any(parameter.grad is not None for parameter in parameters):  # clip_grad_value_ fails without
            clip(parameters, gradient_clip_val)

    def on_save_checkpoint(self, checkpoint: dict) -> None:
        """Add what rebuilds the network, as plain types: torch.load(weights_only=True) reads the file."""
        made = {"config": {}, "classes": [], **self.metadata}
        checkpoint[CHECKPOINT_KEY] = {"format": CHECKPOINT_FORMAT, "model": self.net.config, **made}

    @classmethod
    def load_from_checkpoint(  # type: ignore[override]
        cls,
        checkpoint_path: str | Path,
        map_location: Any = None,
        *,
        loss: nn.Module | None = None,
        regularisers: Mapping[str, Regulariser] | None = None,
        **arguments: Any,
    ) -> Self:
        """The learner of a checkpoint, with trained network and loss, on the CPU or `map_location`.

        loss, regularisers: as they were made for training; None: by the config of train.py, see `make_loss`.
        arguments: see the class.
        Raises UsageError for a checkpoint that cannot be read, or whose loss has to be given.
        """
        saved = load_checkpoint(checkpoint_path)
        made = {key: value for key, value in saved.metadata.items() if key not in ("format", "model")}
        further = make_regularisers(saved) if regularisers is None else regularisers
        more = {"metadata": made, "regularisers": further, "seed": saved.metadata["config"].get("seed", 0)} | arguments
        learner = cls(load_embedding_net(saved), loss or make_loss(saved), **more)
        learner.load_state_dict(saved.state)
        return learner.to(map_location or "cpu")
