"""Synchronised batch norm keeps network and tensors; torch computes it on GPUs only."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn

from proxy_anchor import EmbeddingNet
from proxy_anchor.training.distributed import SyncBatchNorms


# The first has plain layers, the second timm's with an activation inside, which torch's own conversions lose.
@pytest.mark.parametrize("backbone", ["test_resnet", "test_efficientnet"])
@pytest.mark.parametrize("batch_norm", ["train", "frozen", "frozen_statistics"])
@pytest.mark.parametrize("backend", ["nccl", "gloo", None])
def test_layers_are_exchanged_for_training_on_gpus(
    backbone: str, batch_norm: str, backend: str | None, make_learner: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: backend is not None)
    monkeypatch.setattr(dist, "get_backend", lambda: backend)
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    learner = make_learner()
    learner.net = EmbeddingNet(backbone, 8, pretrained=False, image_size=32, batch_norm=batch_norm).eval()
    images = torch.randint(0, 256, (4, 3, 32, 32), dtype=torch.uint8)
    expected, tensors = learner(images), {name: id(each) for name, each in learner.named_parameters()}
    sync = SyncBatchNorms()
    assert sync.revert(sync.apply(learner)) is learner
    exchanged = sum(isinstance(each, nn.SyncBatchNorm) for each in learner.modules())
    assert (exchanged > 3) == (batch_norm == "train" and backend == "nccl")
    torch.testing.assert_close(learner.eval()(images), expected)
    assert {name: id(each) for name, each in learner.named_parameters()} == tensors
