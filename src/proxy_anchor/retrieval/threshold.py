"""From which similarity on two images count as the same thing: chosen for a rate of false accepts on labelled data."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from proxy_anchor.errors import UsageError, check_number
from proxy_anchor.retrieval.metrics import as_labels
from proxy_anchor.retrieval.search import as_rows, full_precision, normalise, row_chunks

_ABOVE = 1e-6  # some roundings of a similarity in float32
MAX_IMAGES = 20_000  # 200 million pairs; of larger sets a random part of this size is used


@dataclass(frozen=True)
class Threshold:
    """similarity: accept at or above it. The rates were measured on the pairs that chose it, all in [0, 1].

    false_accept_rate: share of the pairs of different classes that are accepted; wanted_rate: what was asked for.
    true_accept_rate: share of the pairs of one class that are accepted. images_with_false_accept: share of the images
    that accept at least one image of another class, which grows with the number of images compared.
    """

    similarity: float
    wanted_rate: float
    false_accept_rate: float
    true_accept_rate: float
    images_with_false_accept: float
    num_images: int

    def describe(self) -> str:
        """One line."""
        return (
            f"match threshold {self.similarity:.3f}: accepts {100 * self.false_accept_rate:.3g} % of the pairs of different "
            f"classes and {100 * self.true_accept_rate:.1f} % of those of one class ({self.num_images:,} labelled images)"
        )


def calibrate_threshold(
    embeddings: Tensor | np.ndarray, labels: Tensor | np.ndarray, *, false_accept_rate: float = 0.001, seed: int = 0
) -> Threshold:
    """The lowest similarity at which at most this share of the pairs of different classes is accepted.

    embeddings: (N, D) float, need not be normalised. labels: (N,) integers. Pairs (i, j) with i < j count once.
    The data should be of classes that the network was not trained on: trained classes lie further apart.
    Ties: similarities equal to the first refused one are refused, so the measured rate never exceeds the wanted one.
    Raises UsageError for a rate outside (0, 1), NaN, or labels without two classes or without a pair of one class.
    """
    check_number("false_accept_rate", false_accept_rate, 0, maximum=1, exclusive=True)
    rows = as_rows(embeddings, "embeddings")
    classes = as_labels(labels, "labels").to(rows.device)
    if len(rows) != len(classes):
        raise UsageError(f"{len(rows)} embeddings and {len(classes)} labels: give one label per embedding.")
    if len(rows) > MAX_IMAGES:
        chosen = np.sort(np.random.default_rng(seed).choice(len(rows), MAX_IMAGES, replace=False))
        rows, classes = rows[torch.from_numpy(chosen)], classes[torch.from_numpy(chosen)]
    unit = normalise(rows, "labelled").float()
    n = len(unit)
    num_same = int(sum(count * (count - 1) // 2 for count in classes.unique(return_counts=True)[1].tolist()))
    num_different = n * (n - 1) // 2 - num_same
    if not num_same or not num_different:
        raise UsageError(
            "a threshold needs labelled images of two classes or more, one of them with two images or more."
        )
    allowed = int(false_accept_rate * num_different)
    column = torch.arange(n, device=unit.device)
    with full_precision(unit.device):
        highest = unit.new_empty(0)  # of different classes; the first refused one is the last of these
        for chunk in row_chunks(n, n):
            same = classes[chunk, None] == classes
            later = column[chunk, None] < column
            similarities = unit[chunk] @ unit.T
            found = torch.cat([highest, similarities[~same & later]])
            highest = found.topk(min(allowed + 1, len(found))).values
        if len(highest) > allowed:
            # Between the first refused and the last accepted pair: a later search may round either the other way.
            refused, above = highest[allowed], highest[highest > highest[allowed]]
            threshold = ((refused + above.min()) / 2 if len(above) else refused + _ABOVE).item()
        else:
            threshold = -1.0
        accepted_same = accepted_different = 0
        careless = torch.zeros(n, dtype=torch.bool, device=unit.device)
        for chunk in row_chunks(n, n):
            same = classes[chunk, None] == classes
            accepted = unit[chunk] @ unit.T >= threshold
            later = column[chunk, None] < column
            accepted_same += int((accepted & same & later).sum())
            accepted_different += int((accepted & ~same & later).sum())
            careless[chunk] = (accepted & ~same).any(1)
    return Threshold(
        similarity=threshold,
        wanted_rate=false_accept_rate,
        false_accept_rate=accepted_different / num_different,
        true_accept_rate=accepted_same / num_same,
        images_with_false_accept=careless.float().mean().item(),
        num_images=n,
    )
