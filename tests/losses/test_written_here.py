from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F

from proxy_anchor.errors import UsageError
from proxy_anchor.losses.proxy_nca import ProxyNCALoss, proxy_nca_loss
from proxy_anchor.losses.proxy_nca_pp import ProxyNCAPlusPlusLoss
from proxy_anchor.losses.ranked_list import RankedListLoss


def batch(classes: int = 5, size: int = 12, dim: int = 6):
    return torch.randn(size, dim, dtype=torch.float64), torch.randint(classes, (size,))


def distances(x, proxies):
    """Squared distances of unit vectors, pair by pair."""
    unit = [[value / math.hypot(*row) for value in row] for row in x]
    other = [[value / math.hypot(*row) for value in row] for row in proxies]
    return [[sum((a - b) ** 2 for a, b in zip(row, proxy, strict=True)) for proxy in other] for row in unit]


@pytest.mark.parametrize("scale", [1.0, 32.0])
def test_proxy_nca_equals_plain_loops(scale: float) -> None:
    x, labels = batch()
    loss = ProxyNCALoss(5, 6, scale).double()
    total = 0.0
    for row, label in zip(distances(x.tolist(), loss.proxies.tolist()), labels.tolist(), strict=True):
        total += scale * row[label] + math.log(
            sum(math.exp(-scale * d) for other, d in enumerate(row) if other != label)
        )
    assert loss(x, labels).item() == pytest.approx(total / 12, rel=1e-9)


def test_proxy_nca_gradient_is_eq_3() -> None:
    similarities, labels = torch.randn(7, 4, dtype=torch.float64).requires_grad_(), torch.randint(4, (7,))
    proxy_nca_loss(similarities, labels).sum().backward()
    own = F.one_hot(labels, 4).bool()
    exponentials = similarities.detach().exp().masked_fill(own, 0)
    expected = torch.where(own, -1.0, exponentials / exponentials.sum(1, keepdim=True))
    torch.testing.assert_close(similarities.grad, expected, rtol=1e-12, atol=1e-14)


def test_proxy_nca_needs_a_negative() -> None:
    with pytest.raises(UsageError, match="num_classes=1"):
        ProxyNCALoss(1, 6)


def test_proxy_nca_pp_equals_plain_loops() -> None:
    x, labels = batch()
    loss = ProxyNCAPlusPlusLoss(5, 6).double()
    total = 0.0
    for row, label in zip(distances(x.tolist(), loss.proxies.tolist()), labels.tolist(), strict=True):
        total -= math.log(math.exp(-9 * row[label]) / sum(math.exp(-9 * d) for d in row))
    assert loss(x, labels).item() == pytest.approx(total / 12, rel=1e-6)  # the file's 1/9


@pytest.mark.parametrize("balance", [0.5, 0.2])
def test_ranked_list_equals_plain_loops(balance: float) -> None:
    x, labels = batch(classes=3)
    total = 0.0
    for query, row in enumerate(distances(x.tolist(), x.tolist())):
        far, near = [], []
        for other, squared in enumerate(row):
            d = math.sqrt(squared)
            if other != query and labels[other] == labels[query] and d > 0.8:
                far.append(d - 0.8)
            if labels[other] != labels[query] and d < 1.2:
                near.append(1.2 - d)
        weights = [math.exp(10 * each) for each in near]
        total += (1 - balance) * sum(far) / max(1, len(far))
        total += balance * sum(w * each for w, each in zip(weights, near, strict=True)) / (sum(weights) or 1)
    value = RankedListLoss(3, 6, balance=balance)(x, labels)
    assert value.item() == pytest.approx(total / 12, rel=1e-9)


def test_ranked_list_weights_are_constants() -> None:
    # One query, two negatives inside the ball: both are pushed away, in the proportion of their weights.
    angles = torch.tensor([0.0, 0.4, 1.0], dtype=torch.float64)
    x = torch.stack([angles.cos(), angles.sin()], 1)
    near, far = (x[0] - x[1]).norm(), (x[0] - x[2]).norm()
    query = x[:1].clone()

    def of_query(others: torch.Tensor) -> torch.Tensor:
        loss = RankedListLoss(3, 2, balance=1.0)
        everything = torch.cat([query, others])
        return loss(everything, torch.tensor([0, 1, 1])) * 3

    others = x[1:].clone().requires_grad_()
    of_query(others).backward()
    tangent = torch.stack([-angles[1:].sin(), angles[1:].cos()], 1)
    away = -(others.grad * tangent).sum(1)  # along the circle, from the query
    assert (away > 0).all()
    assert near < far < 1.2
