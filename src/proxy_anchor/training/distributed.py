"""Training on several ranks as on one: global batch, collectives, batch norm, gradients.

Gradients are averaged over W ranks. Every rank computes the loss L of the global batch, so
- every rank has the whole gradient of the proxies, and so has their mean;
- the backward pass of the gather sums an embedding's gradient over the W losses, W x dL/dx; the mean over ranks, only
  one of which made that embedding, is dL/dx again.
Backbone, head and proxies therefore move as in one process, without a correction factor.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any, TypeVar

import pytorch_lightning as pl
import torch
import torch.distributed as dist
from pytorch_lightning import LightningModule
from pytorch_lightning.overrides.distributed import _sync_module_states
from pytorch_lightning.plugins.layer_sync import TorchSyncBatchNorm
from pytorch_lightning.strategies import DDPStrategy
from timm.layers import convert_sync_batchnorm
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from proxy_anchor.errors import AgreedError, UsageError


def world_size() -> int:
    """Number of ranks; 1 outside distributed training."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def gather_batch(embeddings: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Gather (b, D) embeddings and (b,) labels of each rank to (B, D) and (B,) on all ranks.

    All ranks hold equally many rows; the order is that of the ranks. The backward pass gives each rank the gradient of
    its own rows, summed over all ranks. No-op in a single process.
    """
    if world_size() == 1:
        return embeddings, labels
    return _GatherRows.apply(embeddings), _gather(labels)


def _gather(rows: Tensor) -> Tensor:
    rows = rows.contiguous()
    everyone = rows.new_empty(world_size() * len(rows), *rows.shape[1:])
    # torch 2.13 renamed the function, and warns of the former name.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(everyone, rows)
    return everyone


class _GatherRows(torch.autograd.Function):
    """Concatenates the rows of all ranks; the backward pass sums."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        return _gather(rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        # Not reduce_scatter, which not every backend has: (B, D) is small compared with the network's gradients.
        total = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total)
        return total.chunk(world_size())[dist.get_rank()]


T = TypeVar("T")


def decided_by_first(decide: Callable[[], T]) -> T:
    """Call `decide()` on rank 0 and return its result on all ranks.

    Raises on rank 0 what it raised, and AgreedError on the others.
    """
    if world_size() == 1:
        return decide()
    told: list[Any] = [None, None]  # the result, or the message of the error
    failed: Exception | None = None
    if dist.get_rank() == 0:
        try:
            told[0] = decide()
        except Exception as error:  # of any kind: the other ranks wait
            failed, told[1] = error, str(error) or type(error).__name__
    dist.broadcast_object_list(told, src=0)
    if told[1] is not None:
        raise failed or AgreedError(told[1])
    return told[0]


def gather_objects(value: T) -> list[T]:
    """Gather a value of every rank, in their order, on all ranks. Tensors must be on the CPU."""
    if world_size() == 1:
        return [value]
    everyone: list[Any] = [None] * world_size()
    dist.all_gather_object(everyone, value)
    return everyone


def raise_on_all(error: UsageError | None) -> None:
    """Raise this rank's error, or AgreedError where only another rank has one. All ranks call it."""
    if told := [each for each in gather_objects(error and str(error)) if each]:
        raise error or AgreedError(told[0])


def reduce_max(values: Tensor) -> Tensor:
    """Maximum over all ranks of (N,) integers, in place and without waiting for the GPU."""
    if world_size() > 1:
        dist.all_reduce(values, dist.ReduceOp.MAX)
    return values


def write_before_any_ends(trainer: pl.Trainer) -> None:
    """Wait until rank 0 has written its last checkpoint. All ranks call it before they end with an error.

    torchrun, srun and `run_ranks` kill all ranks soon after one has ended with a nonzero exit code.
    """
    if world_size() > 1:
        trainer.strategy.checkpoint_io.teardown()
        trainer.strategy.barrier()


class SyncBatchNorms(TorchSyncBatchNorm):
    """Synchronises batch norm over all ranks for a network with `batch_norm="train"`.

    Uses timm's conversion: torch's own silently drops the activation of timm's fused layers (EfficientNet and others).
    torch synchronises batch norm on GPUs only; on CPUs each rank uses its part of the batch.
    """

    def __init__(self) -> None:
        self._plain: dict[str, nn.Module] = {}

    def apply(self, model: nn.Module) -> nn.Module:
        """Exchange the layers. Parameters and statistics stay the same tensors."""
        if getattr(getattr(model, "net", None), "batch_norm", "train") != "train" or not dist.is_initialized():
            return model
        if "nccl" not in dist.get_backend():
            if dist.get_rank() == 0:
                print(
                    "note: on CPUs batch norm trains on each process's part of the batch, not on all of it.", flush=True
                )
            return model
        self._plain = {name: each for name, each in model.named_modules() if isinstance(each, _BatchNorm)}
        return convert_sync_batchnorm(model)

    def revert(self, model: nn.Module) -> nn.Module:
        """Put the network's own layers back, with what was learned, for a later fit on CPUs or in one process."""
        for name, plain in self._plain.items():
            trained = model.get_submodule(name)
            plain._parameters, plain._buffers = trained._parameters, trained._buffers
            model.set_submodule(name, plain.train(trained.training))
        self._plain = {}
        return model


# torch 2.13 renamed the argument, and warns of the former name.
_RENAMED = "forward_sync_buffers" in signature(DistributedDataParallel).parameters
_SENDS_STATISTICS = "forward_sync_buffers" if _RENAMED else "broadcast_buffers"


# For a compiled network, which returns all gradients at once. Not static_graph, which fails where the first batches are
# accumulated.
ONE_BUCKET: dict[str, Any] = {"gradient_as_bucket_view": True, "bucket_cap_mb": 100_000}


class LeanDDP(DDPStrategy):
    """Lightning's `ddp` for a MetricLearner, with the same result.

    torch's wrapper
    - averages the gradients of a compiled network in one bucket, and leaves them in it: nothing is copied back;
    - runs on the stream that computes: Lightning wraps on a stream of its own, with which torch then synchronises for
      every parameter in each step;
    - does not broadcast statistics before each step where they are equal anyway: frozen, or synchronised.

    Arguments that are given to the strategy prevail.
    """

    def _setup_model(self, model: LightningModule) -> DistributedDataParallel:  # type: ignore[override]
        """Wrap the module; all begin with the weights of rank 0."""
        learner: Any = self.lightning_module  # a MetricLearner, whose module imports this one
        arguments = ONE_BUCKET if learner.compiled is not None else {}
        # On CPUs each rank has statistics of its own (see `SyncBatchNorms`).
        if self.root_device.type == "cuda" or learner.net.batch_norm != "train":
            _sync_module_states(learner)  # statistics too, which the wrapper does not send
            arguments = arguments | {_SENDS_STATISTICS: False}
        return DistributedDataParallel(
            model, device_ids=self.determine_ddp_device_ids(), **arguments | self._ddp_kwargs
        )
