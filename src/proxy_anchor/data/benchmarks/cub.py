"""CUB-200-2011 (Wah et al. 2011), class-disjoint: classes 1-100 train, 101-200 are searched.

Built from the class ids of its list files. The image split of the archive (train_test_split.txt, 5,994 / 5,794) has all
classes in both parts and is not used.
"""

from __future__ import annotations

from pathlib import Path

from proxy_anchor.data.benchmarks.lists import (
    as_int,
    find_below,
    read_columns,
    require_below,
)
from proxy_anchor.data.table import ExpectedCounts, Splits, make_tables, require_benchmark
from proxy_anchor.errors import UsageError

EXPECTED = ExpectedCounts(train_classes=100, train=5864, test_classes=100, query=5924)
_LAST_TRAIN_CLASS = 100


def load_cub(root: Path | str, *, allow_partial: bool = False, verify_files: bool = True) -> Splits:
    """Load CUB-200-2011 from `root`.

    Expects images.txt, image_class_labels.txt and images/, as in the archive CUB_200_2011.tgz.

    allow_partial: accept fewer images or classes than the protocol; results are then not comparable.
    verify_files: False also lists images that are missing or empty, for src/check.py.
    Raises UsageError when files are missing or damaged, or counts differ.
    """
    root = Path(root)
    if find_below(root, "images.txt") is None and find_below(root, "lists/files.txt") is not None:
        raise UsageError(f"dataset.root={root} holds the birds of 2010 (CUB-200, 6,033 images): fetch CUB-200-2011.")
    names_file = require_below(root, "CUB-200-2011", "images.txt")
    # Files next to the list are preferred, because `root` may hold a second copy.
    labels_file, images = (
        find_below(names_file.parent, name) or require_below(root, "CUB-200-2011", name)
        for name in ("image_class_labels.txt", "images")
    )
    labels: dict[str, int] = {}
    for place, (image, label) in read_columns(labels_file, 2):
        if labels.setdefault(image, as_int(label, place)) != int(label):
            raise UsageError(f"{place}: image {image} has a second class; the file is damaged, fetch it again.")
    rows = []
    for place, (image, name) in read_columns(names_file, 2):
        if image not in labels:
            raise UsageError(
                f"{place}: {labels_file} has no class for image {image} ({name}): take both lists from one archive."
            )
        rows.append((images / name, labels[image]))
    [train] = make_tables((path, str(label)) for path, label in rows if label <= _LAST_TRAIN_CLASS)
    [query] = make_tables((path, str(label)) for path, label in rows if label > _LAST_TRAIN_CLASS)
    return require_benchmark(
        Splits("cub", train, query), EXPECTED, allow_partial=allow_partial, verify_files=verify_files
    )
