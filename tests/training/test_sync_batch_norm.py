"""Exchanging batch norm for its synchronised form keeps network and tensors; torch computes it on GPUs only."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from proxy_anchor import EmbeddingNet
from proxy_anchor.training.distributed import SyncBatchNorms


# The first has plain layers, the second timm's with an activation inside, which torch's own conversion loses.
@pytest.mark.parametrize("backbone", ["test_resnet", "test_efficientnet"])
def test_there_and_back(backbone: str, make_learner: Callable) -> None:
    learner = make_learner()
    learner.net = EmbeddingNet(backbone, 8, pretrained=False, image_size=32, batch_norm="train")
    images = torch.randint(0, 256, (4, 3, 32, 32), dtype=torch.uint8)
    learner.train()(images)
    learner.eval()
    expected, names = learner(images), list(learner.state_dict())
    kinds = [type(each) for each in learner.modules()]
    parameters = [id(each) for each in learner.parameters()]
    sync = SyncBatchNorms()
    exchanged = sync.exchange(learner)
    assert exchanged is learner
    assert sum(isinstance(each, nn.SyncBatchNorm) for each in learner.modules()) > 3
    torch.testing.assert_close(learner(images), expected)
    with torch.no_grad():
        next(each for each in learner.modules() if isinstance(each, nn.SyncBatchNorm)).running_mean = torch.ones(
            next(each for each in learner.modules() if isinstance(each, nn.SyncBatchNorm)).num_features
        )
    learned = learner(images)
    assert not torch.allclose(learned, expected)
    assert sync.revert(learner) is learner
    assert [type(each) for each in learner.modules()] == kinds
    assert [id(each) for each in learner.parameters()] == parameters
    assert list(learner.state_dict()) == names
    torch.testing.assert_close(learner(images), learned)


def test_nothing_happens_in_one_process_or_where_batch_norm_is_frozen(make_learner: Callable) -> None:
    for batch_norm in ("train", "frozen", "frozen_statistics"):
        learner = make_learner(batch_norm=batch_norm)
        SyncBatchNorms().apply(learner)
        assert not any(isinstance(each, nn.SyncBatchNorm) for each in learner.modules())
