"""Cars-196 (Krause et al. 2013), class-disjoint: classes 1-98 train, 99-196 are searched.

Public copies have two layouts, whose file numbers both start at 00001 and must not be mixed:
- joint: `cars_annos.mat` lists `car_ims/000001.jpg` ... for all 16,185 images;
- two folders: `devkit/cars_train_annos.mat` numbers `cars_train/00001.jpg` ..., and
  `devkit/cars_test_annos_withlabels.mat` numbers `cars_test/00001.jpg` ... from 1 again.
The two folders are an image split over the same classes, which the protocol does not use: both are pooled.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from proxy_anchor.data.benchmarks.lists import find_below
from proxy_anchor.data.table import Splits, make_splits, require_benchmark
from proxy_anchor.errors import UsageError

EXPECTED = {"train": (8054, 98), "query": (8131, 98)}
_LAST_TRAIN_CLASS = 98
_PARTS = {
    "car_ims": ("cars_annos.mat",),
    "cars_train": ("cars_train_annos.mat",),
    "cars_test": ("cars_test_annos_withlabels.mat", "cars_test_annos.mat"),
}


def load_cars(root: Path | str, *, allow_partial: bool = False, verify_files: bool = True) -> Splits:
    """Load Cars-196 from `root`, in either layout.

    allow_partial: accept fewer images or classes than the protocol; results are then not comparable.
    verify_files: False also lists images that are missing or empty, for src/check.py.
    Raises UsageError when annotations are missing or have no classes, files are missing, or counts differ.
    """
    root = Path(root)
    rows = _rows(root)
    names = _class_names(root)
    train = [(path, names.get(label, str(label))) for path, label in rows if label <= _LAST_TRAIN_CLASS]
    test = [(path, names.get(label, str(label))) for path, label in rows if label > _LAST_TRAIN_CLASS]
    splits = make_splits("cars", train, test)
    return require_benchmark(splits, EXPECTED, allow_partial=allow_partial, verify_files=verify_files)


def _load(file: Path) -> dict[str, Any]:
    from scipy.io import loadmat

    try:
        return loadmat(file, squeeze_me=True)
    except Exception as error:  # scipy raises many types for damaged files
        raise UsageError(f"{file} cannot be read as a file of Cars-196 ({error}): fetch it again.") from error


def _read_annotations(file: Path) -> list[tuple[str, int]]:
    """(file name, class id from 1) of each row of an annotation file."""
    annotations = _load(file).get("annotations", np.empty(0))
    fields = annotations.dtype.names or ()
    if "class" not in fields:
        raise UsageError(
            f"{file} holds no classes: it is the challenge's version; fetch cars_test_annos_withlabels.mat or "
            "cars_annos.mat."
        )
    names = annotations["fname" if "fname" in fields else "relative_im_path"]
    return [
        (str(name), int(label))
        for name, label in zip(np.atleast_1d(names), np.atleast_1d(annotations["class"]), strict=True)
    ]


def _class_names(root: Path) -> dict[int, str]:
    """{1: "1 AM General Hummer SUV 2000", ...}, or {} without names."""
    file = find_below(root, "cars_meta.mat", "cars_annos.mat")
    names = [] if file is None else _load(file).get("class_names", [])
    return {number: f"{number} {each}" for number, each in enumerate(names, start=1)}


def _rows(root: Path) -> list[tuple[Path, int]]:
    rows: list[tuple[Path, int]] = []
    for part, candidates in _PARTS.items():
        if rows and part == "cars_train":
            break  # the joint layout holds all images
        folder = find_below(root, part)
        files = [file for file in (find_below(root, name) for name in candidates) if file is not None]
        if folder is not None and files:
            rows += [(folder / Path(name).name, label) for name, label in _read_annotations(files[0])]
    if not rows:
        raise UsageError(
            f"dataset.root={root} does not hold Cars-196: expected car_ims/ with cars_annos.mat, or cars_train/ and "
            "cars_test/ with devkit/cars_train_annos.mat and cars_test_annos_withlabels.mat."
        )
    return rows
