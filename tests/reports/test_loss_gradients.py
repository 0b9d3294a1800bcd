from __future__ import annotations

import pytest
import torch

from proxy_anchor.errors import UsageError
from proxy_anchor.reports.loss_gradients import eq_3, eq_6, gradient_by_hardness, similarity_gradients

GRID = torch.linspace(-1, 1, 41, dtype=torch.float64)
EASY = torch.full((5,), 0.9, dtype=torch.float64)


@pytest.mark.parametrize(("batch", "classes"), [(12, 5), (3, 20), (4, 2)])
@pytest.mark.parametrize(("alpha", "delta"), [(32.0, 0.1), (4.0, 0.0)])
def test_autograd_is_eq_3_and_eq_6(batch, classes, alpha, delta):
    similarities, labels = torch.rand(batch, classes, dtype=torch.float64) * 2 - 1, torch.randint(classes, (batch,))
    torch.testing.assert_close(similarity_gradients("proxy_nca", similarities, labels), eq_3(similarities, labels))
    found = similarity_gradients("proxy_anchor", similarities, labels, alpha=alpha, delta=delta)
    torch.testing.assert_close(found, eq_6(similarities, labels, alpha=alpha, delta=delta))


def test_proxy_nca_pulls_every_positive_alike_and_proxy_anchor_the_hard_ones():
    nca = gradient_by_hardness("proxy_nca", GRID, EASY, positive=True)
    anchor = gradient_by_hardness("proxy_anchor", GRID, EASY, positive=True)
    assert (nca == -1).all()
    assert (anchor.diff() > 0).all()  # weaker as the sample gets easier
    assert anchor[0] == pytest.approx(-32, rel=1e-3)
    assert abs(anchor[-1]) < 1e-3


@pytest.mark.parametrize("positive", [True, False])
def test_companions_matter_to_proxy_anchor_only(positive):
    hard = torch.tensor([-0.9 if positive else 0.9], dtype=torch.float64)
    for loss, matters in (("proxy_nca", False), ("proxy_anchor", True)):
        alone, together = (gradient_by_hardness(loss, GRID, others, positive=positive) for others in (hard[:0], hard))
        assert torch.equal(alone, together) != matters
    # A harder companion takes the strength away from the sample (and the batch has no more of it to give).
    assert (together.abs() <= alone.abs() + 1e-12).all()


def test_bad_input():
    with pytest.raises(UsageError, match="choose one of: proxy_nca, proxy_anchor"):
        similarity_gradients("triplet", GRID.view(1, -1), torch.tensor([0]))
    with pytest.raises(UsageError, match=r"grid: expected cosine similarities in \[-1, 1\], received 2"):
        gradient_by_hardness("proxy_nca", GRID * 2, EASY, positive=True)
