"""CUB-200-2011 (Wah et al. 2011), class-disjoint: classes 1-100 train, 101-200 are searched.

Built from the class ids of its list files. The image split of the archive (train_test_split.txt, 5,994 / 5,794) has all
classes in both parts and is not used.
"""

from __future__ import annotations

from pathlib import Path

from proxy_anchor.data.benchmarks.lists import as_int, read_columns, require_below
from proxy_anchor.data.table import Splits, make_splits, require_benchmark

EXPECTED = {"train": (5864, 100), "query": (5924, 100)}
_LAST_TRAIN_CLASS = 100
_LABELS = "image_class_labels.txt"


def load_cub(root: Path | str, *, allow_partial: bool = False, verify_files: bool = True) -> Splits:
    """Load CUB-200-2011 from `root`.

    Expects images.txt, image_class_labels.txt and images/, as in the archive CUB_200_2011.tgz.

    allow_partial: accept fewer images or classes than the protocol; results are then not comparable.
    verify_files: False also lists images that are missing or empty, for src/check.py.
    Raises UsageError when files are missing or damaged, or counts differ.
    """
    names_file = require_below(Path(root), "CUB-200-2011", "images.txt")
    folder = names_file.parent
    labels = {image: as_int(label, place) for place, (image, label) in read_columns(folder / _LABELS, 2)}
    # An image without a class is left out here, so that its number is missing in the counts.
    rows = [
        (folder / "images" / name, labels[image]) for _, (image, name) in read_columns(names_file, 2) if image in labels
    ]
    train = [(path, str(label)) for path, label in rows if label <= _LAST_TRAIN_CLASS]
    query = [(path, str(label)) for path, label in rows if label > _LAST_TRAIN_CLASS]
    splits = make_splits("cub", train, query)
    return require_benchmark(splits, EXPECTED, allow_partial=allow_partial, verify_files=verify_files)
