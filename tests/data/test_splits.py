from __future__ import annotations

from collections import Counter
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from commands import compose_train, one_line

from proxy_anchor.cli import config
from proxy_anchor.data.splits import hold_out_classes, mislabel, take_fold
from proxy_anchor.data.table import Splits, make_tables


def make_splits(num_classes: int, images: int | None = None) -> Splits:
    """With 1, 2, 3, 1, ... images of a class, unless their number is given."""
    train = [
        (Path(f"{label}/{index}.png"), f"c{label}")
        for label in range(num_classes)
        for index in range(images or label % 3 + 1)
    ]
    test = [(Path(f"t{label}.png"), f"t{label}") for label in (0, 0, 1, 1)]
    return Splits("made-up", make_tables(train)[0], make_tables(test)[0])


def contents(table) -> set[tuple[str, str]]:
    return set(table.rows)


def test_held_out_classes_leave_training_and_keep_their_names_and_images():
    whole = make_splits(10)
    divided = hold_out_classes(whole, fraction=0.3, seed=5)
    assert divided.validation.num_classes == 3
    assert divided.train.num_classes == 7
    assert not set(divided.train.classes) & set(divided.validation.classes)
    assert contents(divided.train) | contents(divided.validation) == contents(whole.train)
    assert divided.query is whole.query
    assert set(divided.train.labels.tolist()) == set(range(7))


@pytest.mark.parametrize("divide", [hold_out_classes, partial(take_fold, fold=1)], ids=["classes", "folds"])
def test_the_seed_decides_which_classes(divide):
    parts = [divide(make_splits(20), seed=seed) for seed in (0, 0, 1)]
    chosen = [each.evaluated["validation"][0].classes for each in parts]
    assert chosen[0] == chosen[1] != chosen[2]


@pytest.mark.parametrize(("fraction", "expected"), [(0.01, 2), (0.5, 5), (1.0, 8)])
def test_both_sides_keep_two_classes(fraction, expected):
    assert hold_out_classes(make_splits(10), fraction=fraction).validation.num_classes == expected


def test_folds_are_disjoint_complete_and_even():
    whole = make_splits(11)
    folds = [take_fold(whole, fold=fold, num_folds=4) for fold in range(4)]
    counted = Counter(name for fold in folds for name in fold.query.classes)
    assert counted == Counter(whole.train.classes)
    assert sorted(fold.query.num_classes for fold in folds) == [2, 3, 3, 3]
    for fold in folds:
        assert contents(fold.train) | contents(fold.query) == contents(whole.train)
        assert list(fold.evaluated) == ["validation"]  # no test image is read
        assert fold.gallery is None


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: hold_out_classes(make_splits(3)), "3 training classes cannot be divided"),
        (lambda: hold_out_classes(make_splits(9), fraction=0), "validation.fraction=0"),
        (lambda: hold_out_classes(make_splits(9), seed=-1), "validation.seed=-1"),
        (lambda: take_fold(make_splits(7), fold=0, num_folds=4), "at least 8"),
        (lambda: take_fold(make_splits(9), fold=4, num_folds=4), "validation.fold=4 is outside 0 ... 3"),
        (lambda: take_fold(make_splits(9), fold=0, num_folds=1), "validation.num_folds=1"),
        (lambda: mislabel(make_splits(10), share=1.5), "dataset.label_noise=1.5"),
        (lambda: mislabel(make_splits(1, images=9), share=0.2), "another class"),
    ],
)
def test_what_cannot_be_divided_or_mislabelled_is_refused(call, text):
    assert text in one_line(call)


# ---- label noise


@pytest.mark.parametrize(("share", "count"), [(0.2, 100), (0.4, 200), (0.001, 0), (0.003, 2), (1.0, 500)])
def test_exactly_that_share_gets_another_class(share, count):
    clean = make_splits(10, images=50)
    noisy = mislabel(clean, share=share)
    assert (noisy.train.labels != clean.train.labels).sum() == noisy.num_mislabelled == count
    assert noisy.train.paths == clean.train.paths
    assert noisy.train.classes == clean.train.classes
    assert set(noisy.train.labels.tolist()) <= set(range(10))


def test_other_classes_are_equally_likely():
    clean = make_splits(5, images=2000)
    noisy = mislabel(clean, share=0.5)
    counts = np.zeros((5, 5))
    np.add.at(counts, (clean.train.labels, noisy.train.labels), 1)
    others = counts[~np.eye(5, dtype=bool)]
    assert others == pytest.approx(np.full(20, 250), abs=60)
    assert counts.diagonal() == pytest.approx(np.full(5, 1000), abs=100)


def test_the_seed_decides_which_labels():
    clean = make_splits(10, images=50)
    a, b, c = (mislabel(clean, share=0.2, seed=seed).train.labels for seed in (0, 0, 1))
    assert (a == b).all()
    assert (a != c).any()


def test_settings_make_noise_after_holding_out(tmp_path):
    cfg = compose_train(
        f"dataset.root={tmp_path}",
        "dataset.load.train_classes=8",
        "dataset.load.test_classes=4",
        "dataset.load.images_per_class=4",
        "dataset.label_noise=0.25",
        "validation=classes",
    )
    splits = config.load_splits(cfg)
    assert splits.num_mislabelled == 6  # of 6 classes x 4 images: 2 classes are held out
    for table in (splits.query, splits.validation):
        assert all(path.parent.name == name for path, name in table.rows)
