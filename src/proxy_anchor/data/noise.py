"""Wrong training labels on purpose, to measure what they cost."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from proxy_anchor.data.table import Splits
from proxy_anchor.errors import UsageError, check_int, check_number


def mislabel(splits: Splits, *, share: float, seed: int = 0) -> Splits:
    """The splits with round(share x N) of the N training images labelled as another class, each other class as likely.

    Which images and which labels follow from the seed alone. Query, gallery and validation images keep their labels:
    hold classes out first. Raises UsageError for a share outside [0, 1], or with fewer than 2 training classes.
    """
    check_number("dataset.label_noise", share, 0, maximum=1)
    check_int("dataset.label_noise_seed", seed, 0)
    train = splits.train
    count = round(share * len(train))
    if not count:
        return splits
    if train.num_classes < 2:
        raise UsageError("dataset.label_noise needs another class to take labels from: there is one training class.")
    rng = np.random.default_rng(seed)
    changed = rng.choice(len(train), count, replace=False)
    labels = train.labels.copy()
    labels[changed] = (labels[changed] + rng.integers(1, train.num_classes, count)) % train.num_classes
    return replace(splits, train=replace(train, labels=labels), num_mislabelled=count)
