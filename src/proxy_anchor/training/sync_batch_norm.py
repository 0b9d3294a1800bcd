"""Batch norm over the batch of all processes, where batch norm trains."""

from __future__ import annotations

import torch.distributed as dist
from pytorch_lightning.plugins.layer_sync import TorchSyncBatchNorm
from timm.layers import convert_sync_batchnorm
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


class SyncBatchNorms(TorchSyncBatchNorm):
    """Has every batch norm of a network with `batch_norm="train"` count over all processes' images while it is fitted.

    By timm's conversion: torch's own drops the activation that timm's fused layers (EfficientNet and others) hold, without
    an error. torch has synchronised batch norm for GPUs only: on CPUs each process counts over its own share.
    """

    def __init__(self) -> None:
        self._originals: dict[str, nn.Module] = {}

    def apply(self, model: nn.Module) -> nn.Module:
        """Exchange the layers; parameters and statistics stay the same tensors."""
        if getattr(getattr(model, "net", None), "batch_norm", "train") != "train" or not dist.is_initialized():
            return model
        if "nccl" not in dist.get_backend():
            if dist.get_rank() == 0:
                print(
                    "note: on CPUs batch norm trains on each process's part of the batch, not on all of it.", flush=True
                )
            return model
        return self.exchange(model)

    def exchange(self, model: nn.Module) -> nn.Module:
        """As `apply`, whatever the backend."""
        self._originals = {name: each for name, each in model.named_modules() if isinstance(each, _BatchNorm)}
        return convert_sync_batchnorm(model)

    def revert(self, model: nn.Module) -> nn.Module:
        """Put the network's own layers back, with what was learned."""
        for name, original in self._originals.items():
            parent, _, attribute = name.rpartition(".")
            trained = model.get_submodule(name)
            for key in (*original._parameters, *original._buffers):
                setattr(original, key, getattr(trained, key))
            setattr(model.get_submodule(parent), attribute, original.train(trained.training))
        self._originals = {}
        return model
