from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from commands import compose_train

from proxy_anchor.cli import config
from proxy_anchor.data.splits import mislabel
from proxy_anchor.data.table import ImageTable, Splits, make_tables
from proxy_anchor.errors import UsageError


def make_splits(classes: int = 10, images: int = 50) -> Splits:
    def table(prefix: str) -> ImageTable:
        return make_tables(
            (Path(f"{prefix}{c}/{i}.png"), f"{prefix}{c}") for c in range(classes) for i in range(images)
        )[0]

    return Splits("made-up", table("train"), table("test"))


@pytest.mark.parametrize(("share", "count"), [(0.2, 100), (0.4, 200), (0.001, 0), (0.003, 2), (1.0, 500)])
def test_exactly_that_share_gets_another_class(share, count):
    clean = make_splits()
    noisy = mislabel(clean, share=share)
    assert (noisy.train.labels != clean.train.labels).sum() == noisy.num_mislabelled == count
    assert noisy.train.paths == clean.train.paths
    assert noisy.train.classes == clean.train.classes
    assert set(noisy.train.labels.tolist()) <= set(range(10))


def test_other_classes_are_equally_likely():
    clean = make_splits(classes=5, images=2000)
    noisy = mislabel(clean, share=0.5)
    counts = np.zeros((5, 5))
    np.add.at(counts, (clean.train.labels, noisy.train.labels), 1)
    others = counts[~np.eye(5, dtype=bool)]
    assert others == pytest.approx(np.full(20, 250), abs=60)
    assert counts.diagonal() == pytest.approx(np.full(5, 1000), abs=100)


def test_the_seed_decides_and_nothing_else():
    clean = make_splits()
    a, b, c = (mislabel(clean, share=0.2, seed=seed).train.labels for seed in (0, 0, 1))
    assert (a == b).all()
    assert (a != c).any()


def test_what_cannot_be_done_is_refused():
    with pytest.raises(UsageError, match=r"dataset\.label_noise=1\.5"):
        mislabel(make_splits(), share=1.5)
    with pytest.raises(UsageError, match="another class"):
        mislabel(make_splits(classes=1), share=0.2)


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
