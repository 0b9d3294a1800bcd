"""Stanford Online Products (Song et al. 2016), class-disjoint by its own lists.

The lists are Ebay_train.txt and Ebay_test.txt.
"""

from __future__ import annotations

from pathlib import Path

from proxy_anchor.data.benchmarks.lists import read_columns, require_below
from proxy_anchor.data.table import Splits, make_splits, require_benchmark

EXPECTED = {"train": (59551, 11318), "query": (60502, 11316)}


def load_sop(root: Path | str, *, allow_partial: bool = False, verify_files: bool = True) -> Splits:
    """Load SOP from `root`.

    Expects both lists and the twelve `*_final` folders, as in Stanford_Online_Products.zip.

    allow_partial: accept fewer images or classes than the protocol; results are then not comparable.
    verify_files: False also lists images that are missing or empty, for src/check.py.
    Raises UsageError when files are missing or damaged, or counts differ.
    """
    root = Path(root)
    parts = []
    for name in ("Ebay_train.txt", "Ebay_test.txt"):
        file = require_below(root, "Stanford Online Products", name)
        # image_id class_id super_class_id path
        parts.append([(file.parent / path, label) for _, (_, label, _, path) in read_columns(file, 4, skip_lines=1)])
    splits = make_splits("sop", *parts)
    return require_benchmark(splits, EXPECTED, allow_partial=allow_partial, verify_files=verify_files)
