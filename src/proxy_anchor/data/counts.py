"""What a benchmark must contain, and the error when it does not."""

from __future__ import annotations

from dataclasses import dataclass, replace

from proxy_anchor.data.table import Splits
from proxy_anchor.errors import UsageError


@dataclass(frozen=True)
class ExpectedCounts:
    """Images and classes of a benchmark's official class-disjoint protocol."""

    train_classes: int
    train: int
    test_classes: int
    query: int
    gallery: int | None = None


def require_counts(splits: Splits, expected: ExpectedCounts, *, allow_partial: bool, hint: str = "") -> Splits:
    """The splits, if they hold exactly what the protocol says; otherwise UsageError with expected and found counts.

    allow_partial: accept the difference and say so in the splits' notice, as long as both sides hold images.
    hint: what the loader knows about the reason.
    """
    found = ExpectedCounts(
        splits.train.num_classes,
        len(splits.train),
        splits.query.num_classes,
        len(splits.query),
        None if splits.gallery is None else len(splits.gallery),
    )
    if found == expected:
        return splits
    difference = f"expected {_describe(expected)}; found {_describe(found)}"
    reason = f" ({hint})" if hint else ""
    if not allow_partial or not len(splits.train) or not len(splits.query):
        raise UsageError(
            f"{splits.name} is not the whole benchmark: {difference}{reason}. Complete the download, or set "
            "dataset.allow_partial=true for numbers that cannot be compared with the paper's."
        )
    notice = f"partial {splits.name}, not comparable with the paper: {difference}{reason}."
    return replace(splits, notice=notice + (f" {splits.notice}" if splits.notice else ""))


def _describe(counts: ExpectedCounts) -> str:
    gallery = "" if counts.gallery is None else f" query + {counts.gallery:,} gallery"
    return (
        f"{counts.train:,} training images of {counts.train_classes:,} classes and "
        f"{counts.query:,}{gallery} test images of {counts.test_classes:,} classes"
    )
