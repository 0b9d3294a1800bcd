from __future__ import annotations

from collections import Counter
from functools import partial
from pathlib import Path

import pytest

from proxy_anchor.data.splits import hold_out_classes, take_fold
from proxy_anchor.data.table import Splits, make_tables
from proxy_anchor.errors import UsageError


def make_splits(num_classes: int) -> Splits:
    train = [
        (Path(f"{label}/{index}.png"), f"c{label}") for label in range(num_classes) for index in range(label % 3 + 1)
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
        (lambda: take_fold(make_splits(7), fold=0, num_folds=4), "at least 8"),
        (lambda: take_fold(make_splits(9), fold=4, num_folds=4), "validation.fold=4 is outside 0 ... 3"),
        (lambda: take_fold(make_splits(9), fold=0, num_folds=1), "validation.num_folds=1"),
    ],
)
def test_what_cannot_be_divided_is_refused(call, text):
    with pytest.raises(UsageError) as caught:
        call()
    assert text in str(caught.value)
