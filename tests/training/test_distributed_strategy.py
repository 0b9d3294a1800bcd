"""What is done between the steps of several processes, and what is not."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import run_processes
from torch import nn

from proxy_anchor import EmbeddingNet
from proxy_anchor.losses.proxy_anchor import ProxyAnchorLoss
from proxy_anchor.training.distributed import LeanDDP, SyncBatchNorms
from proxy_anchor.training.module import MetricLearner


def begin() -> list[dict[str, Any]]:
    """Of a plain and a compiled frozen network: weights and statistics, which differed between the ranks.

    And one of the statistics after a forward for which it differs again.
    """
    dist.init_process_group("gloo")
    LeanDDP.root_device = torch.device("cpu")  # type: ignore[assignment,method-assign]
    found = []
    for compiled, given in ((False, {}), (True, {}), (True, {"bucket_cap_mb": 7})):
        net = EmbeddingNet("test_efficientnet", 8, pretrained=False, image_size=32, batch_norm="frozen")
        learner: Any = MetricLearner(net, ProxyAnchorLoss(2, 8))
        learner.compiled = net.forward if compiled else None
        strategy: Any = LeanDDP(**given)
        strategy.connect(learner)
        states = [*learner.parameters(), *learner.buffers()]
        for state in states:
            state.data.fill_(dist.get_rank() + 1)
        with warnings.catch_warnings():
            warnings.simplefilter("error", FutureWarning)
            strategy.configure_ddp()
        begun = {float(value) for state in states for value in state.flatten()}
        learner.net.backbone.bn1.running_mean.fill_(dist.get_rank() + 5)
        strategy.model(torch.zeros(2, 3, 32, 32, dtype=torch.uint8))
        mean = learner.net.backbone.bn1.running_mean[0].item()
        views, bucket = strategy.model.gradient_as_bucket_view, strategy.model.bucket_bytes_cap / 2**20
        found.append({"views": views, "bucket": bucket, "begun": begun, "mean": mean})
    return found


def test_all_begin_with_the_weights_and_statistics_of_the_first(tmp_path: Path) -> None:
    for rank, found in enumerate(run_processes(begin, world_size=2, folder=tmp_path)):
        assert [(each.pop("views"), each.pop("bucket")) for each in found] == [(False, 25), (True, 100_000), (True, 7)]
        assert found == [{"begun": {1.0}, "mean": 5.0 + rank}] * 3


# ---- batch norm


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
    kinds, sync = [type(each) for each in learner.modules()], SyncBatchNorms()
    for number in range(2):  # as of a learner that is fitted twice
        assert sync.apply(learner) is learner
        exchanged = [each for each in learner.modules() if isinstance(each, nn.SyncBatchNorm)]
        assert (len(exchanged) > 3) == (batch_norm == "train" and backend == "nccl")
        torch.testing.assert_close(learner(images), expected)
        for each in exchanged:
            each.running_mean = torch.full_like(each.running_mean, number)  # another tensor, as of a move
        expected = learner(images)
        assert sync.revert(learner) is learner
        assert [type(each) for each in learner.modules()] == kinds
        torch.testing.assert_close(learner(images), expected)
    assert {name: id(each) for name, each in learner.named_parameters()} == tensors
