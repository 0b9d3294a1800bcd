"""Changes of splits: held-out classes, folds, label noise."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from proxy_anchor.data.table import ImageTable, Splits
from proxy_anchor.errors import UsageError, check_int, check_number


def hold_out_classes(splits: Splits, *, fraction: float = 0.2, seed: int = 0) -> Splits:
    """Move a fraction of the training classes to `validation`.

    At least 2 classes are moved and at least 2 remain. Raises UsageError for fewer than 4 training classes.
    """
    check_number("validation.fraction", fraction, 0, maximum=1, exclusive=True)
    order = _shuffled_classes(splits.train, seed, minimum=4)
    num_held_out = min(max(2, round(fraction * len(order))), len(order) - 2)
    train, validation = _part(splits.train, order[:num_held_out])
    return replace(splits, train=train, validation=validation)


def take_fold(splits: Splits, *, fold: int, num_folds: int = 4, seed: int = 0) -> Splits:
    """Splits of one fold of a cross-validation over the training classes.

    One of `num_folds` parts of the classes is searched, the others train; test images are not used. The parts are
    disjoint, differ by at most one class in size, and cover all training classes.
    Raises UsageError when a part would have fewer than 2 classes, or `fold` is outside [0, num_folds).
    """
    check_int("validation.num_folds", num_folds, 2)
    check_int("validation.fold", fold, 0)
    if fold >= num_folds:
        raise UsageError(f"validation.fold={fold} is outside 0 ... {num_folds - 1} (validation.num_folds={num_folds}).")
    order = _shuffled_classes(splits.train, seed, minimum=2 * num_folds)
    train, held_out = _part(splits.train, np.array_split(order, num_folds)[fold])
    notice = f"fold {fold} of {num_folds}: {held_out.num_classes} training classes are held out and searched."
    return Splits(splits.name, train, held_out, searched="validation", notice=notice)


def _shuffled_classes(train: ImageTable, seed: int, *, minimum: int) -> np.ndarray:
    check_int("validation.seed", seed, 0)
    if train.num_classes < minimum:
        raise UsageError(
            f"{train.num_classes} training classes cannot be divided: validation needs at least {minimum} of them."
        )
    return np.random.default_rng(seed).permutation(train.num_classes)


def _part(table: ImageTable, held_out: np.ndarray) -> tuple[ImageTable, ImageTable]:
    is_held_out = np.isin(table.labels, held_out)
    return table.select(~is_held_out), table.select(is_held_out)


def mislabel(splits: Splits, *, share: float, seed: int = 0) -> Splits:
    """Give round(share x N) of the N training images a wrong label.

    The label is drawn uniformly from the other classes. Images and labels depend on the seed alone. Query, gallery and
    validation images keep their labels: hold classes out first.
    Raises UsageError for a share outside [0, 1] or fewer than 2 training classes.
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
