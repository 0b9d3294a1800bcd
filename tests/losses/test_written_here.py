from __future__ import annotations

import math

import pytest
import torch
from commands import one_line
from torch.nn import functional as F

from proxy_anchor.losses.base import ProxyLoss
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


@pytest.mark.parametrize(
    ("loss", "scale", "with_own"),
    [(ProxyNCALoss(5, 6, 1.0), 1, False), (ProxyNCALoss(5, 6), 32, False), (ProxyNCAPlusPlusLoss(5, 6), 9, True)],
)
def test_proxy_nca_and_proxy_nca_pp_equal_plain_loops(loss: ProxyLoss, scale: float, with_own: bool) -> None:
    x, labels = batch()
    total = 0.0
    for row, label in zip(distances(x.tolist(), loss.double().proxies.tolist()), labels.tolist(), strict=True):
        total += scale * row[label]
        total += math.log(sum(math.exp(-scale * d) for other, d in enumerate(row) if with_own or other != label))
    assert loss(x, labels).item() == pytest.approx(total / 12, rel=1e-6)  # the file's 1/9


def test_proxy_nca_needs_a_negative() -> None:
    one_line(ProxyNCALoss, 1, 6, match="num_classes=1")


def test_proxy_nca_gradient_is_eq_3() -> None:
    similarities, labels = torch.randn(7, 4, dtype=torch.float64).requires_grad_(), torch.randint(4, (7,))
    proxy_nca_loss(similarities, labels).sum().backward()
    own = F.one_hot(labels, 4).bool()
    exponentials = similarities.detach().exp().masked_fill(own, 0)
    expected = torch.where(own, -1.0, exponentials / exponentials.sum(1, keepdim=True))
    torch.testing.assert_close(similarities.grad, expected, rtol=1e-12, atol=1e-14)


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
    angles = torch.tensor([0.0, 0.4, 1.0], dtype=torch.float64)
    x = torch.stack([angles.cos(), angles.sin()], 1).requires_grad_()
    loss = RankedListLoss(3, 2, balance=1.0)(x, torch.tensor([0, 1, 1]))
    unit = F.normalize(x)
    inside = 1.2 - (unit[0] - unit[1:]).norm(dim=1)  # both negatives are in the query's ball, and it in each of theirs
    expected = ((10 * inside).softmax(0).detach() @ inside + inside.sum()) / 3
    torch.testing.assert_close(*(torch.autograd.grad(each, x) for each in (loss, expected)))
