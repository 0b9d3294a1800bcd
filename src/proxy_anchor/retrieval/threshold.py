"""Match threshold: the similarity at which two images count as one class."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from proxy_anchor.errors import UsageError, check_number
from proxy_anchor.retrieval.ranking import paired
from proxy_anchor.retrieval.rows import normalise
from proxy_anchor.retrieval.search import full_precision

_ABOVE = 1e-6  # several rounding errors of a float32 similarity
MAX_IMAGES = 10_000  # 50 million pairs; larger sets are sampled down to this size


@dataclass(frozen=True)
class Threshold:
    """A threshold and its error rates on the calibration pairs.

    similarity: pairs at or above it are accepted. Rates are in [0, 1].
    wanted_rate: requested false accept rate. false_accept_rate: share of pairs of different classes that are accepted.
    true_accept_rate: share of pairs of one class that are accepted. images_with_false_accept: share of images that
    accept at least one image of another class; it grows with the number of images.
    opis: how much classes differ in what one threshold does to them, see `operating_point_inconsistency`; None where it
    was not measured.
    """

    similarity: float
    wanted_rate: float
    false_accept_rate: float
    true_accept_rate: float
    images_with_false_accept: float
    num_images: int
    opis: float | None = None

    def describe(self) -> str:
        """Describe the threshold in one line."""
        return (
            f"match threshold {self.similarity:.3f}: accepts {100 * self.false_accept_rate:.3g} % of the pairs of "
            f"different classes and {100 * self.true_accept_rate:.1f} % of those of one class ({self.num_images:,} "
            "labelled images)"
            + ("" if self.opis is None else f"; inconsistency between classes (OPIS) {self.opis:.3g}")
        )


def calibrate_threshold(
    embeddings: Tensor | np.ndarray, labels: Tensor | np.ndarray, *, false_accept_rate: float = 0.001, seed: int = 0
) -> Threshold:
    """Lowest similarity whose false accept rate is at most the given one.

    embeddings: (N, D) float, need not be normalised. labels: (N,) integers. Pairs (i, j) with i < j count once.
    Use classes that the network was not trained on: trained classes are further apart.
    Ties: similarities equal to the highest rejected one are rejected, so the measured rate never exceeds the given one.
    Raises UsageError for a rate outside (0, 1), NaN, or labels without two classes or without a pair of one class.
    """
    check_number("false_accept_rate", false_accept_rate, 0, maximum=1, exclusive=True)
    rows, classes = paired(embeddings, labels, "labelled")
    if len(rows) > MAX_IMAGES:
        chosen = np.sort(np.random.default_rng(seed).choice(len(rows), MAX_IMAGES, replace=False))
        rows, classes = rows[torch.from_numpy(chosen)], classes[torch.from_numpy(chosen)]
    unit = normalise(rows, "labelled").float()
    same = classes[:, None] == classes
    once = torch.ones_like(same).triu(1)
    with full_precision(unit.device):
        similarities = unit @ unit.T
    positives, negatives = similarities[same & once], similarities[~same & once]
    if not len(positives) or not len(negatives):
        raise UsageError(
            "a threshold needs labelled images of two classes or more, one of them with two images or more."
        )
    allowed = int(false_accept_rate * len(negatives) + 1e-6)  # 0.29 * 100 is below 29
    threshold = -1.0
    if allowed < len(negatives):
        # Halfway between the rejected and the accepted pair, because a later search may round differently.
        rejected = negatives.topk(allowed + 1).values[-1]
        above = negatives[negatives > rejected]
        threshold = ((rejected + above.min()) / 2 if len(above) else rejected + _ABOVE).item()
    return Threshold(
        similarity=threshold,
        wanted_rate=false_accept_rate,
        false_accept_rate=(negatives >= threshold).double().mean().item(),
        true_accept_rate=(positives >= threshold).double().mean().item(),
        images_with_false_accept=((similarities >= threshold) & ~same).any(1).double().mean().item(),
        num_images=len(unit),
        opis=operating_point_inconsistency(similarities, classes),
    )


def operating_point_inconsistency(similarities: Tensor, classes: Tensor) -> float:
    """OPIS: variance between classes of the utility of one threshold; Zhang et al. 2024.

    "Threshold-Consistent Margin Loss for Open-World Deep Metric Learning". For class i and the distance d of unit
    vectors, U_i(d) is the harmonic mean of the share of its pairs within d, and the share of the pairs of one image of
    i with one of another class beyond d. OPIS is the mean over classes and d of (U_i(d) - mean over classes)^2; d runs
    evenly over where the false accept rate of all pairs lies between 0.01 and 0.1.

    similarities: (N, N) cosines. classes: (N,) integers, at least two classes. Of more than 1,000 images, as many are
    the other class's. Classes with a single image do not count. In [0, 1/4]; 0 where all classes have the same rates.
    """
    distances = (2 - 2 * similarities).clamp_min_(0).sqrt_()
    some = torch.arange(0, len(classes), -(-len(classes) // 1000), device=classes.device)
    others, different = distances[:, some], classes[:, None] != classes[some]
    negatives = others[different]
    low, high = (negatives.kthvalue(max(1, int(rate * len(negatives)))).values.item() for rate in (0.01, 0.1))
    thresholds = torch.linspace(low, high, 101, device=distances.device)

    def share_within(values: Tensor) -> Tensor:
        return torch.searchsorted(values.sort().values, thresholds, right=True).double() / max(1, len(values))

    utilities = []
    for each in classes.unique():
        rows = (classes == each).nonzero().squeeze(1)
        if len(rows) < 2:
            continue
        own = distances[rows][:, rows]
        sensitivity = share_within(own[torch.ones_like(own).triu(1) > 0])
        specificity = 1 - share_within(others[rows][different[rows]])
        utilities.append(2 * sensitivity * specificity / (sensitivity + specificity).clamp_min(1e-12))
    return torch.stack(utilities).var(dim=0, correction=0).mean().item()
