"""The match threshold against a plain loop over pairs."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from by_fractions import classes
from commands import one_line

from proxy_anchor.retrieval import threshold
from proxy_anchor.retrieval.threshold import calibrate_threshold


def pair_similarities(embeddings: torch.Tensor, labels: torch.Tensor) -> dict[tuple[int, int], float]:
    unit = (embeddings / embeddings.norm(dim=1, keepdim=True)).double()
    return {(i, j): float(unit[i] @ unit[j]) for i, j in itertools.combinations(range(len(labels)), 2)}


# 0.29 x 400 is a float below 116.
@pytest.mark.parametrize(("rate", "number"), [(0.001, 5), (0.01, 5), (0.2, 5), (1.0, 5), (0.29, 2)])
def test_rates_are_those_of_a_loop_over_pairs(rate: float, number: int) -> None:
    embeddings, labels = classes(40, number)
    found = calibrate_threshold(embeddings, labels, false_accept_rate=rate)
    pairs = pair_similarities(embeddings, labels)
    same, different = (
        [s for (i, j), s in pairs.items() if (labels[i] == labels[j]) == alike] for alike in (True, False)
    )
    assert found.false_accept_rate <= rate
    assert found.false_accept_rate == pytest.approx(np.mean([s >= found.similarity - 5e-7 for s in different]))
    assert found.true_accept_rate == pytest.approx(np.mean([s >= found.similarity - 5e-7 for s in same]))
    # Not stricter than it has to be: exactly as many are accepted as the rate allows.
    assert round(found.false_accept_rate * len(different)) == int(round(rate * len(different), 6))


def test_ties_with_the_first_refused_pair_are_refused() -> None:
    """Ten equal pairs of different classes and one may pass: none does."""
    embeddings = torch.eye(2).repeat(5, 1)
    labels = np.arange(10) // 2  # pairs (e1, e2): one class is one of each
    found = calibrate_threshold(embeddings, labels, false_accept_rate=1 / 40)
    assert found.false_accept_rate == 0
    assert found.similarity > 1


def test_large_sets_are_sampled(monkeypatch) -> None:
    monkeypatch.setattr(threshold, "MAX_IMAGES", 20)
    found = calibrate_threshold(*classes(40, 5), false_accept_rate=0.1)
    assert found.num_images == 20
    assert "20 labelled images" in found.describe()


@pytest.mark.parametrize(
    ("labels", "rate", "reason"),
    [
        ([0, 0, 0], 0.1, "two classes or more"),
        ([0, 1, 2], 0.1, "one of them with two images"),
        ([0, 0, 1], 0.0, "false_accept_rate"),
        ([0, 0, 1], 1.5, "false_accept_rate"),
        ([0, 1], 0.1, "3 labelled embeddings but 2 labels"),
    ],
)
def test_what_cannot_be_calibrated(labels: list[int], rate: float, reason: str) -> None:
    one_line(calibrate_threshold, torch.eye(3), np.array(labels), false_accept_rate=rate, match=reason)


def opis_by_loops(embeddings: torch.Tensor, labels: torch.Tensor) -> float:
    """Every pair, class and threshold by itself."""
    distance = {pair: (2 - 2 * s) ** 0.5 for pair, s in pair_similarities(embeddings, labels).items()}
    negatives = sorted(d for (i, j), d in distance.items() if labels[i] != labels[j])
    low, high = (negatives[max(1, int(rate * len(negatives))) - 1] for rate in (0.01, 0.1))
    names, squares = sorted({*labels.tolist()}), []
    own = [np.array([d for (i, j), d in distance.items() if labels[i] == labels[j] == each]) for each in names]
    other = [
        np.array([d for (i, j), d in distance.items() if (labels[i] == each) != (labels[j] == each)]) for each in names
    ]
    for limit in np.linspace(low, high, 101):
        utilities = []
        for same, different in zip(own, other, strict=True):
            sensitivity = np.mean(same <= limit + 1e-7)
            specificity = np.mean(different > limit + 1e-7)
            utilities.append(2 * sensitivity * specificity / (sensitivity + specificity))
        squares += [(each - np.mean(utilities)) ** 2 for each in utilities]
    return float(np.mean(squares))


def test_opis_is_that_of_loops_over_classes_pairs_and_thresholds() -> None:
    embeddings, labels = classes(40, 5)
    found = calibrate_threshold(embeddings, labels, false_accept_rate=0.1)
    assert found.opis == pytest.approx(opis_by_loops(embeddings, labels), rel=0.02)  # a tie may fall on either side
    assert f"OPIS) {found.opis:.3g}" in found.describe()


def test_opis_is_0_where_every_class_is_alike_and_leaves_out_single_images() -> None:
    alike, labels = torch.eye(4).repeat(2, 1), np.arange(8) % 4
    assert calibrate_threshold(alike, labels).opis == 0
    assert calibrate_threshold(torch.eye(5).repeat(2, 1)[:9], np.arange(9) % 5).opis == 0  # one image of class 4
    assert calibrate_threshold(torch.cat([alike, alike[:1]]), np.append(labels, 1)).opis > 0.01


def test_opis_of_a_class_without_negatives_among_the_thousand_is_a_number() -> None:
    labels = np.zeros(1002, dtype=int)
    labels[[1, 3]] = 1  # every second image is compared with
    assert 0 <= calibrate_threshold(torch.randn(1002, 4), labels).opis <= 1 / 4
