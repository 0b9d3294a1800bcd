"""The one table type that every benchmark and every user's folder is turned into."""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from proxy_anchor.errors import UsageError


def natural_key(name: str) -> tuple[list[tuple[int, int | str]], str]:
    """Sort key under which '2' comes before '10' and text sorts as text; '01' and '1' differ by the text alone."""
    parts = re.split(r"(\d+)", name)
    return [(0, int(part)) if part.isdecimal() else (1, part) for part in parts if part], name


@dataclass(frozen=True, eq=False)
class ImageTable:
    """N images and their classes.

    paths: N files. labels: (N,) int64 in [0, C), an index into `classes`. classes: C names, in label order.
    """

    paths: tuple[Path, ...]
    labels: np.ndarray
    classes: tuple[str, ...]

    def __post_init__(self) -> None:
        if len(self.paths) != len(self.labels):
            raise ValueError(f"{len(self.paths)} paths but {len(self.labels)} labels")
        if len(self.labels) and not (self.labels.min() >= 0 and self.labels.max() < len(self.classes)):
            raise ValueError(f"labels must lie in [0, {len(self.classes)})")

    def __len__(self) -> int:
        return len(self.paths)

    @property
    def num_classes(self) -> int:
        """C."""
        return len(self.classes)

    def select(self, keep: np.ndarray) -> ImageTable:
        """The images that `keep`, (N,) bool, chooses, in their order; classes that have none left are gone."""
        rows = np.flatnonzero(keep).tolist()
        return make_tables((self.paths[row], self.classes[self.labels[row]]) for row in rows)[0]


def make_tables(*groups: Iterable[tuple[Path, str]]) -> list[ImageTable]:
    """Tables over one common, naturally sorted label map, so that equal classes have equal labels in all of them.

    Each group is a sequence of (path, class name); class names may have gaps or be any text. Pass query and
    gallery together: labels of two maps must never be compared.
    """
    rows = [list(group) for group in groups]
    classes = tuple(sorted({name for group in rows for _, name in group}, key=natural_key))
    index = {name: label for label, name in enumerate(classes)}
    return [
        ImageTable(
            tuple(path for path, _ in group),
            np.fromiter((index[name] for _, name in group), dtype=np.int64, count=len(group)),
            classes,
        )
        for group in rows
    ]


@dataclass(frozen=True, eq=False)
class Splits:
    """What a loader function returns: images to train on and images to search.

    gallery None means that every query image searches all the other query images. Query and gallery share one
    label map; the training map is its own, because in this field the two hold different classes.
    validation: held-out training classes that select the epoch; they search themselves.
    searched: what query and gallery are, "test" or, in cross-validation, "validation".
    notice: one line for the user about how the split came about, or "".
    num_mislabelled: training images whose label was changed on purpose.
    skipped: training images that cannot be read and were left out, each with the reason.
    """

    name: str
    train: ImageTable
    query: ImageTable
    gallery: ImageTable | None = None
    notice: str = ""
    validation: ImageTable | None = None
    searched: str = "test"
    num_mislabelled: int = 0
    skipped: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.gallery is not None and self.gallery.classes != self.query.classes:
            raise ValueError("query and gallery must share one label map (use make_tables on both)")

    @property
    def tables(self) -> dict[str, ImageTable]:
        """The tables by name: train, query and, where there are any, gallery and validation."""
        named = {"train": self.train, "query": self.query, "gallery": self.gallery, "validation": self.validation}
        return {name: table for name, table in named.items() if table is not None}

    @property
    def evaluated(self) -> dict[str, tuple[ImageTable, ImageTable | None]]:
        """What is searched after each epoch, by the name under which it is logged: (query, gallery or None)."""
        sets = {self.searched: (self.query, self.gallery)}
        return sets if self.validation is None else {**sets, "validation": (self.validation, None)}

    def describe(self) -> str:
        """One line that counts images and classes, one for images left out and one for the notice if there are any."""
        counts = ", ".join(
            f"{len(table):,} {name} images of {len(set(table.labels.tolist())):,} classes"
            for name, table in self.tables.items()
        )
        if self.num_mislabelled:
            share = self.num_mislabelled / len(self.train)
            counts += f"; {self.num_mislabelled:,} training labels are wrong on purpose ({100 * share:.1f} %)"
        lines = [f"data: {self.name}, {counts}"]
        if self.skipped:
            lines.append(
                f"left out, as they cannot be read: {len(self.skipped)} training images: {shorten(self.skipped)}"
            )
        if self.notice:
            lines.append(f"note: {self.notice}")
        return "\n".join(lines)

    @property
    def shared_classes(self) -> list[str]:
        """Names of classes that are both trained on and searched (empty in a class-disjoint protocol)."""
        searched = set(self.query.classes)
        return [name for name in self.train.classes if name in searched]


def missing_or_empty(paths: Sequence[Path]) -> list[str]:
    """Every path that is no file or has no bytes, with the reason, in one pass over the file system."""
    bad = []
    for path in paths:
        try:
            status = path.stat()
        except (OSError, ValueError):  # ValueError: no file can have this name
            bad.append(f"{path} (missing)")
        else:
            if not stat.S_ISREG(status.st_mode):
                bad.append(f"{path} (not a file)")
            elif status.st_size == 0:
                bad.append(f"{path} (empty)")
    return bad


def shorten(texts: Sequence[str]) -> str:
    """The first five, and how many more there are."""
    return ", ".join(texts[:5]) + (f" and {len(texts) - 5} more" if len(texts) > 5 else "")


def require_files(paths: Sequence[Path], what: str) -> None:
    """Raise one UsageError that counts and names files that are missing or empty."""
    bad = missing_or_empty(paths)
    if bad:
        raise UsageError(
            f"{len(bad)} of {len(paths)} {what} images cannot be used: {shorten(bad)}. Restore or remove them "
            "(`python src/check.py` lists all); data.on_bad_image=skip trains without those that are trained on."
        )


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


def data_fingerprint(splits: Splits) -> dict[str, str]:
    """{table: "N images of C classes, HASH"}; the hash is over names, labels and file sizes, not over the place or time."""
    found = {}
    for name, table in splits.tables.items():
        digest = hashlib.sha256()
        for path, label in zip(table.paths, table.labels.tolist(), strict=True):
            size = os.stat(path).st_size if os.path.exists(path) else -1
            digest.update(os.fsencode(f"{path.parent.name}/{path.name}") + f"\0{label} {size}\n".encode())
        found[name] = f"{len(table)} images of {table.num_classes} classes, {digest.hexdigest()[:12]}"
    return found


def require_same_data(made: dict[str, str] | None, now: dict[str, str]) -> None:
    """Raise UsageError that names the tables in which the images are others than those of the checkpoint."""
    for name in now if made is not None else ():
        if (before := (made or {}).get(name)) != now[name]:
            raise UsageError(
                f"the {name} images are not those that this run began with (then {before}; now {now[name]}): restore them, "
                "or choose another run=NAME."
            )
