"""CUB-200-2011 (Wah et al. 2011), class-disjoint: classes 1-100 train, 101-200 are searched.

Built from the class ids of its list files. The image split that ships with it (train_test_split.txt, 5,994 / 5,794)
shares its classes between both parts and is never read.
"""

from __future__ import annotations

from pathlib import Path

from proxy_anchor.data.counts import ExpectedCounts, require_counts
from proxy_anchor.data.lists import as_int, present_rows, read_columns, require_below, require_folder
from proxy_anchor.data.table import Splits, make_tables
from proxy_anchor.errors import UsageError

EXPECTED = ExpectedCounts(train_classes=100, train=5864, test_classes=100, query=5924)
KNOWN_TOTALS = {
    5994: "it looks like the training part of the image split that ships with CUB",
    5794: "it looks like the test part of the image split that ships with CUB",
    6033: "it looks like the birds of 2010 (CUB-200), another set",
}
_LAST_TRAIN_CLASS = 100


def load_cub(root: Path | str, *, allow_partial: bool = False) -> Splits:
    """CUB-200-2011 below `root`: images.txt, image_class_labels.txt and images/, as in the archive CUB_200_2011.tgz.

    allow_partial: accept fewer images or classes than the benchmark has (numbers are then not comparable).
    Raises UsageError when files are missing or damaged, or counts differ.
    """
    root = require_folder(root, "CUB-200-2011")
    names_file = require_below(root, "CUB-200-2011", "images.txt")
    labels_file = require_below(root, "CUB-200-2011", "image_class_labels.txt")
    images = require_below(root, "CUB-200-2011", "images")
    labels = {image: as_int(label, labels_file) for image, label in read_columns(labels_file, 2)}
    rows = []
    for image, name in read_columns(names_file, 2):
        if image not in labels:
            raise UsageError(f"{labels_file} has no class for image {image} ({name}): it belongs to another copy.")
        rows.append((images / name, labels[image]))
    rows, note = present_rows(rows, "CUB-200-2011", allow_partial=allow_partial)
    [train] = make_tables((path, str(label)) for path, label in rows if label <= _LAST_TRAIN_CLASS)
    [query] = make_tables((path, str(label)) for path, label in rows if label > _LAST_TRAIN_CLASS)
    hint = note or KNOWN_TOTALS.get(len(rows), "")
    return require_counts(Splits("cub", train, query), EXPECTED, allow_partial=allow_partial, hint=hint)
