from __future__ import annotations

import pytest
import torch
from torch import Tensor

from proxy_anchor.models.pooling import GeMPool, average_plus_max_pool, average_pool, max_pool


@pytest.fixture
def features() -> Tensor:
    """(1, 2, 2, 3): means 3.5 and -2, maxima 6 and 0."""
    return torch.tensor([[[[1.0, 2, 3], [4, 5, 6]], [[0, -1, -2], [-2, -3, -4]]]])


def test_values_by_hand(features: Tensor) -> None:
    assert average_pool(features).tolist() == [[3.5, -2]]
    assert max_pool(features).tolist() == [[6, 0]]
    assert average_plus_max_pool(features).tolist() == [[9.5, -2]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_max_gives_its_gradient_to_one_place_among_equals(dtype: torch.dtype) -> None:
    # `amax` would share it: 1/6 each. Under bf16 equal values are common.
    features = torch.ones(1, 1, 2, 3, dtype=dtype, requires_grad=True)
    max_pool(features).sum().backward()
    assert sorted(features.grad.flatten().tolist()) == [0, 0, 0, 0, 0, 1]


def test_gem_by_hand_and_its_exponent_learns() -> None:
    pool = GeMPool()
    pooled = pool(torch.tensor([[[[1.0, 2.0]], [[0.0, -5.0]]]]))
    assert pooled[0, 0].item() == pytest.approx(4.5 ** (1 / 3))
    assert pooled[0, 1].item() == pytest.approx(1e-6, rel=1e-3)  # negative features are clamped
    pooled[0, 0].backward()
    assert pool.p.grad is not None
    assert pool.p.grad > 0


def test_gem_is_float32_under_autocast() -> None:
    features = torch.full((1, 1, 2, 2), 1e-3, dtype=torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        pooled = GeMPool()(features)
    assert pooled.dtype == torch.float32
    assert pooled.item() == pytest.approx(1e-3, rel=1e-2)
