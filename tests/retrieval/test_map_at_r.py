from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch
from by_fractions import coarse_problems, on_circle, ranked_hits, rows
from hypothesis import given, settings

from proxy_anchor.retrieval import ranking
from proxy_anchor.retrieval.metrics import metrics_at_r, num_queries_without_positive, recall_at_k


def from_hits(hits: list[list[bool]]) -> tuple[float, float]:
    """MAP@R and R-precision, summed as fractions from each query's sorted gallery: hit or miss, rank by rank."""
    total, precision = Fraction(0), Fraction(0)
    for found in hits:
        r = sum(found)
        for i in range(1, r + 1):
            total += Fraction(found[i - 1] * sum(found[:i]), i * r)
        precision += Fraction(sum(found[:r]), max(r, 1))
    return float(total / len(hits)), float(precision / len(hits))


def both(*args: object, **kwargs: object) -> tuple[float, float]:
    return tuple(metrics_at_r(*args, **kwargs).values())  # type: ignore[arg-type]


def by_fractions(*given: np.ndarray) -> tuple[float, float]:
    return from_hits(ranked_hits(*given))


class TestByHand:
    @pytest.mark.parametrize(
        ("correct", "map_", "precision"),
        [  # R = 10; the four cases of Musgrave et al. 2020
            ([1], Fraction(1, 10), Fraction(1, 10)),
            ([1, 10], Fraction(12, 100), Fraction(2, 10)),
            ([1, 2], Fraction(2, 10), Fraction(2, 10)),
            (range(1, 11), 1, 1),
            # and: the first place wrong; nothing within R; one at the last place within R
            (range(2, 11), sum(Fraction(i - 1, i) for i in range(2, 11)) / 10, Fraction(9, 10)),
            ([], 0, 0),
            ([10], Fraction(1, 100), Fraction(1, 10)),
        ],
    )
    def test_one_query_with_ten_positives(self, correct: range, map_: Fraction, precision: Fraction) -> None:
        """The first ten are correct as listed; the positives that are left over come behind them."""
        labels = np.array([1 if rank in correct else 0 for rank in range(1, 11)] + [1] * (10 - len(correct)))
        gallery = on_circle(*range(1, len(labels) + 1))
        got = both(on_circle(0), np.array([1]), gallery=gallery, gallery_labels=labels)
        assert got == pytest.approx((float(map_), float(precision)), abs=1e-15)

    def test_points_on_a_circle(self) -> None:
        x, labels = on_circle(0, 10, 25, 45, 85), np.array([7, 3, 7, 3, 3])
        # Neighbours, nearest first, + for a positive; R is the number of +, and only the first R count:
        #  0: 10- 25+ 45- 85-   R=1: AP 0            precision 0
        # 10: 0-  25- 45+ 85+   R=2: AP 0            precision 0
        # 25: 10- 45- 0+  85-   R=1: AP 0            precision 0
        # 45: 25- 10+ 85+ 0-    R=2: AP (1/2) / 2    precision 1/2
        # 85: 45+ 25- 10+ 0-    R=2: AP (1) / 2      precision 1/2
        assert both(x, labels) == pytest.approx(((1 / 4 + 1 / 2) / 5, (1 / 2 + 1 / 2) / 5), abs=1e-15)

    def test_duplicates_rank_by_index(self) -> None:
        # Of each point four copies, of classes a b a a, and its opposite, of class a: R = 3 for a, 0 for b.
        # Copy 1 sees b a a. Copies 3 and 4 see a b a. The opposite sees other points first.
        x, a = rows(40, 256), torch.arange(40)
        x, labels = torch.cat([x, x, x, x, -x]), torch.cat([a, a + 100, a, a, a])
        copies = [(1 / 2 + 2 / 3) / 3, 0, (1 + 2 / 3) / 3, (1 + 2 / 3) / 3, 0]
        assert both(x, labels) == pytest.approx((sum(copies) / 5, 3 * (2 / 3) / 5), abs=1e-14)
        scaled = x * torch.rand(len(x), 1).add(0.1)
        assert both(scaled.double(), labels) == pytest.approx((sum(copies) / 5, 3 * (2 / 3) / 5), abs=1e-14)


def test_nobody_has_a_positive() -> None:
    assert both(rows(5), torch.arange(5)) == (0, 0)
    assert both(rows(1), torch.arange(1)) == (0, 0)
    assert both(rows(5), torch.arange(5), gallery=rows(3), gallery_labels=torch.full((3,), 9)) == (0, 0)


@pytest.mark.parametrize("lonely", [0, 7])
def test_pytorch_metric_learning_times_the_share_with_a_positive(lonely: int) -> None:
    accuracy = pytest.importorskip("pytorch_metric_learning.utils.accuracy_calculator")
    pytest.importorskip("faiss")
    random = np.random.default_rng(lonely)
    centres = random.normal(size=(12, 32))
    classes = np.concatenate([random.integers(0, 12, 200 - lonely), 100 + np.arange(lonely)])
    x = torch.tensor(centres[classes % 12] + 1.5 * random.normal(size=(200, 32)))
    x, labels = torch.nn.functional.normalize(x).float(), torch.tensor(classes)  # the calculator takes them as given
    names = ("precision_at_1", "mean_average_precision_at_r", "r_precision")
    calculator = accuracy.AccuracyCalculator(include=names, device=torch.device("cpu"))
    theirs = calculator.get_accuracy(x, labels)
    ours = metrics_at_r(x, labels) | {"recall_at_1": recall_at_k(x, labels, 1)[1]}
    share = 1 - num_queries_without_positive(labels) / 200
    assert share == 1 - lonely / 200
    assert 0.1 < ours["map_at_r"] < ours["r_precision"] < 0.9
    for key, name in zip(("recall_at_1", "map_at_r", "r_precision"), names, strict=True):
        assert ours[key] == pytest.approx(share * theirs[name], abs=1e-6)  # their sums are float64, ranks float32


class TestAgainstPlainLoops:
    @settings(max_examples=80, deadline=None, derandomize=True)
    @given(problem=coarse_problems())
    def test_coarse_integers(self, problem: tuple[np.ndarray, ...]) -> None:
        x, labels, g, g_labels = problem
        got = both(x.astype("f4"), labels)
        assert got == pytest.approx(by_fractions(x, labels, x, labels), abs=1e-14)
        assert got[0] <= got[1] + 1e-15
        got = both(x.astype("f4"), labels, gallery=g.astype("f4"), gallery_labels=g_labels)
        assert got == pytest.approx(by_fractions(x, labels, g, g_labels), abs=1e-14)

    @pytest.mark.parametrize("dim", [3, 12, 200])
    @pytest.mark.parametrize("spare", [0, 1, 32])
    def test_many_exact_ties_across_the_cut(self, dim: int, spare: int, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(ranking, "_SPARE_HITS", spare)
        random = np.random.default_rng(dim)
        x, labels = random.integers(-1, 2, (150, dim)), random.integers(0, 12, 150) ** 2 // 12  # classes of 13 to 50
        expected = by_fractions(x, labels, x, labels)
        assert 0 < expected[0] < expected[1] < 1
        assert both(x.astype("f4"), labels) == pytest.approx(expected, abs=1e-14)

    def test_r_above_2048(self) -> None:
        """Beyond what faiss returns on a GPU."""
        assert both(rows(2100, 4), torch.zeros(2100, dtype=torch.int64)) == (1, 1)
