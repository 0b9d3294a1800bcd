"""What pytorch-metric-learning's losses compute: where they are the papers' (plain loops), and where they are not."""

from __future__ import annotations

import math

import pytest
import pytorch_metric_learning.losses as library
import torch
from pytorch_metric_learning import miners
from pytorch_metric_learning.reducers import DoNothingReducer
from pytorch_metric_learning.regularizers import SparseCentersRegularizer
from torch import Tensor
from torch.nn import functional as F

from proxy_anchor.losses import pml
from proxy_anchor.losses.proxy_nca import ProxyNCALoss
from proxy_anchor.losses.proxy_nca_pp import ProxyNCAPlusPlusLoss

LABELS = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2])


@pytest.fixture
def x() -> Tensor:
    return F.normalize(torch.randn(8, 5, dtype=torch.float64))


def pairs(labels: Tensor):
    """(anchor, positives, negatives) for each row."""
    for anchor, label in enumerate(labels.tolist()):
        same = [other for other, its in enumerate(labels.tolist()) if its == label and other != anchor]
        others = [other for other, its in enumerate(labels.tolist()) if its != label]
        yield anchor, same, others


def lse(values) -> float:
    return math.log(sum(math.exp(value) for value in values))


# The same as in the papers


def test_lifted_structure_is_eq_4(x: Tensor) -> None:
    d, terms = torch.cdist(x, x).tolist(), []
    for i, same, negatives in pairs(LABELS):
        for j in same:
            inside = lse([1 - d[i][k] for k in negatives] + [1 - d[j][k] for k in negatives]) + d[i][j]
            terms.append(max(0.0, inside) ** 2 / 2)  # each pair comes twice, and counts once in 2 |P|
    assert pml.lifted_structure(3, 5)(x, LABELS).item() == pytest.approx(sum(terms) / len(terms))


def test_multi_similarity_with_its_miner(x: Tensor) -> None:
    s, total = (x @ x.T).tolist(), 0.0
    for i, same, others in pairs(LABELS):
        positives = [s[i][k] for k in same if s[i][k] < max(s[i][j] for j in others) + 0.1]
        negatives = [s[i][k] for k in others if s[i][k] > min(s[i][j] for j in same) - 0.1]
        total += math.log(1 + sum(math.exp(-2 * (each - 0.5)) for each in positives)) / 2
        total += math.log(1 + sum(math.exp(50 * (each - 0.5)) for each in negatives)) / 50
    loss = pml.multi_similarity(3, 5, miner=miners.MultiSimilarityMiner(epsilon=0.1))
    assert loss(x, LABELS).item() == pytest.approx(total / 8)


def test_soft_triple_with_its_regulariser(x: Tensor) -> None:
    loss = pml.soft_triple(3, 5, num_centers=2).double()
    centers = F.normalize(loss.loss.fc.detach().T).view(3, 2, 5)
    total = 0.0
    for row, label in zip(x, LABELS.tolist(), strict=True):
        s = (centers @ row).tolist()
        relaxed = [(a * math.exp(10 * a) + b * math.exp(10 * b)) / (math.exp(10 * a) + math.exp(10 * b)) for a, b in s]
        logits = [20 * (each - 0.01 * (index == label)) for index, each in enumerate(relaxed)]
        total += lse(logits) - logits[label]
    apart = sum(math.sqrt(2 + 1e-5 - 2 * float(a @ b)) for a, b in centers) / (3 * 2 * 1)
    assert loss(x, LABELS).item() == pytest.approx(total / 8 + 0.2 * apart)


def test_soft_triples_regulariser_is_the_librarys_without_its_matrix() -> None:
    centers = torch.randn(12, 5)
    expected = SparseCentersRegularizer(4, 3)(centers)
    torch.testing.assert_close(pml.center_distances(centers, 3), expected, rtol=1e-4, atol=0)
    merged = torch.ones(4, 3, requires_grad=True)
    pml.center_distances(merged, 2).backward()
    assert merged.grad.isfinite().all()


@pytest.mark.parametrize("angle", [0.3, 2.0, 3.0])
def test_arcface_and_cosface_margins(angle: float) -> None:
    x = torch.tensor([[math.cos(angle), math.sin(angle), 0.0]], dtype=torch.float64)
    own = math.cos(angle + 0.5) if angle <= math.pi - 0.5 else math.cos(angle) - 0.5 * math.sin(0.5)
    for make, logit in ((pml.arcface, own), (pml.cosface, math.cos(angle) - 0.35)):
        loss = make(2, 3, s=4.0).double()
        loss.loss.W.data = torch.tensor([[1.0, 0.0], [0.0, 0.0], [0.0, 2.0]], dtype=torch.float64)
        value = loss(x, torch.tensor([0])).item()
        assert value == pytest.approx(math.log(1 + math.exp(0 - 4 * logit)), rel=1e-6)


def test_normalized_softmax(x: Tensor) -> None:
    loss = pml.normalized_softmax(3, 5).double()
    expected = F.cross_entropy(20 * x @ F.normalize(loss.loss.W.detach(), dim=0), LABELS)
    torch.testing.assert_close(loss(x, LABELS).detach(), expected)


def test_circle_is_eq_6(x: Tensor) -> None:
    s, terms = (x @ x.T).tolist(), []
    for i, same, others in pairs(LABELS):
        pull = lse(-80 * max(0, 1.4 - s[i][j]) * (s[i][j] - 0.6) for j in same)
        push = lse(80 * max(0, s[i][j] + 0.4) * (s[i][j] - 0.4) for j in others)
        terms.append(math.log1p(math.exp(min(pull + push, 700))))
    terms = [each for each in terms if each > 0]
    assert pml.circle(3, 5)(x, LABELS).item() == pytest.approx(sum(terms) / len(terms))


def test_supcon_is_eq_2(x: Tensor) -> None:
    s, total = (x @ x.T).tolist(), 0.0
    for i, same, others in pairs(LABELS):
        total += sum(lse(10 * s[i][k] for k in same + others) - 10 * s[i][j] for j in same) / len(same)
    assert pml.supcon(3, 5)(x, LABELS).item() == pytest.approx(total / 8)


def test_n_pair_takes_one_pair_of_each_class(x: Tensor) -> None:
    x = x.requires_grad_()
    value = pml.n_pair(3, 5, scale=3.0)(x, LABELS)
    first, second = [0, 3, 5], [1, 4, 6]
    expected = F.cross_entropy(3 * x[first] @ x[second].T, torch.arange(3))
    torch.testing.assert_close(value, expected)
    value.backward()
    assert (x.grad.norm(dim=1) > 0).tolist() == [True, True, False, True, True, True, True, False]  # the third: never


def test_margin_divides_by_the_terms_that_are_not_0(x: Tensor) -> None:
    loss = pml.margin(3, 5).double()  # without miner: all triplets
    with torch.no_grad():
        loss.loss.beta.copy_(torch.tensor([1.0, 1.2, 1.4]))
    d, total, count = torch.cdist(x, x).tolist(), 0.0, 0
    for i, same, others in pairs(LABELS):
        beta = [1.0, 1.2, 1.4][int(LABELS[i])]
        for p in same:
            for n in others:
                terms = max(0, 0.2 + d[i][p] - beta), max(0, 0.2 + beta - d[i][n])
                total += sum(terms)
                count += sum(term > 0 for term in terms)
    assert loss(x, LABELS).item() == pytest.approx(total / count)


# Where the library and a paper part, and which of them is used here


def test_contrastive_takes_distances_not_their_squares(x: Tensor) -> None:
    d, pull, push = torch.cdist(x, x).tolist(), [], []
    for i, same, others in pairs(LABELS):
        pull += [d[i][j] for j in same]
        push += [0.5 - d[i][j] for j in others if d[i][j] < 0.5]
    expected = sum(pull) / len(pull) + (sum(push) / len(push) if push else 0)
    assert pml.contrastive(3, 5)(x, LABELS).item() == pytest.approx(expected)  # as Kim et al.'s released code


def test_semi_hard_triplets_are_all_within_the_margin_on_distances(x: Tensor) -> None:
    d, terms = torch.cdist(x, x).tolist(), []
    for i, same, others in pairs(LABELS):
        terms += [d[i][p] - d[i][n] + 0.3 for p in same for n in others if 0 < d[i][n] - d[i][p] <= 0.3]
    loss = pml.triplet(3, 5, 0.3, miners.TripletMarginMiner(margin=0.3, type_of_triplets="semihard"))
    assert loss(x, LABELS).item() == pytest.approx(sum(terms) / len(terms))


def test_proxy_nca_of_the_library_is_proxy_nca_pp() -> None:
    x, ours, theirs = torch.randn(8, 5), ProxyNCAPlusPlusLoss(3, 5, 1 / 4), library.ProxyNCALoss(3, 5, softmax_scale=4)
    theirs.proxies.data = ours.proxies.data.clone()
    torch.testing.assert_close(theirs(x, LABELS), ours(x, LABELS))
    paper = ProxyNCALoss(3, 5, scale=4)
    paper.proxies.data = ours.proxies.data.clone()
    assert abs(theirs(x, LABELS) - paper(x, LABELS)) > 0.1


def test_proxy_nca_of_the_library_leaves_out_the_hardest_samples() -> None:
    proxies = torch.tensor([[1.0, 0.0], [-1.0, 0.0]])
    theirs, ours = library.ProxyNCALoss(2, 2, softmax_scale=32), ProxyNCALoss(2, 2, scale=32)
    theirs.proxies.data, ours.proxies.data = proxies.clone(), proxies.clone()
    x = torch.tensor([[-1.0, 0.0], [0.0, 1.0]])  # on the other class's proxy: exp(-128) is 0 in float32; and half-way
    both, easy = (theirs(rows, torch.zeros(len(rows), dtype=torch.int64)).item() for rows in (x, x[1:]))
    assert both == easy == pytest.approx(math.log(2))
    assert theirs(x[:1], torch.tensor([0])).isnan()
    assert ours(x[:1], torch.tensor([0])).item() == pytest.approx(128)


@pytest.mark.filterwarnings("ignore:Values of Tp or Tn")  # the paper's 10 is "too high" for it
def test_ranked_list_of_the_library_pulls_easy_negatives_closer() -> None:
    angles = torch.tensor([0.0, 0.2, 1.0], dtype=torch.float64)  # a query, a hard and an easy negative
    x = torch.stack([angles.cos(), angles.sin()], 1).requires_grad_()
    loss = library.RankedListLoss(margin=0.4, Tn=10, imbalance=1, alpha=1.2, reducer=DoNothingReducer())
    loss(x, torch.tensor([0, 1, 1]))["loss"]["losses"][0].backward()
    away = -(x.grad * torch.stack([-angles.sin(), angles.cos()], 1)).sum(1)
    assert away[1] > 0
    assert away[2] < 0  # ours: tests/losses/test_written_here.py


def test_distance_weighted_miner_leaves_out_images_whose_negatives_are_all_far() -> None:
    torch.manual_seed(0)
    centre = F.normalize(torch.randn(1, 512))
    near = F.normalize(centre + 0.01 * F.normalize(torch.randn(4, 512)))  # two classes on one spot
    far = F.normalize(0.3 * centre + F.normalize(torch.randn(2, 512)))
    anchors, _, _ = miners.DistanceWeightedMiner()(torch.cat([near, far]), torch.tensor([0, 0, 1, 1, 2, 2]))
    assert 1 < torch.cdist(near, far).max() < 1.4
    assert set(anchors.tolist()) == {0, 1, 2, 3}
