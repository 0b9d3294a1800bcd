"""Tables of images and labels, and the splits of a data set."""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from proxy_anchor.errors import UsageError, counted


def natural_key(name: str) -> tuple[list[tuple[int, int | str]], str]:
    """Natural sort key: '2' before '10', letters as strings."""
    return [(0, int(part)) if part.isdecimal() else (1, part) for part in re.split(r"(\d+)", name) if part], name


_BOX = re.compile(r"#xywh=(\d+),(\d+),(\d+),(\d+)$")
Box = tuple[int, ...]  # x, y, width, height in pixels
Rows = Iterable[tuple[Path, str]]  # (path, class name)


def split_box(path: Path) -> tuple[Path, Box | None]:
    """File and box of an object: `a.jpg#xywh=160,120,320,240`, a media fragment of the W3C, is a part of a.jpg.

    The box is in pixels of the upright image, from its upper left corner.
    """
    found = _BOX.search(path.name)
    return (path.with_name(path.name[: found.start()]), tuple(map(int, found.groups()))) if found else (path, None)


@dataclass(frozen=True, eq=False)
class ImageTable:
    """N images and their classes.

    paths: N files, or objects in files, see `split_box`. labels: (N,) int64 in [0, C), an index into `classes`.
    classes: C names, in label order.
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

    @property
    def rows(self) -> list[tuple[Path, str]]:
        """(path, class name) of each image."""
        return [(path, self.classes[label]) for path, label in zip(self.paths, self.labels.tolist(), strict=True)]

    def select(self, keep: np.ndarray) -> ImageTable:
        """Images where `keep`, (N,) bool, is true; classes without images are removed."""
        return make_tables(row for row, kept in zip(self.rows, keep, strict=True) if kept)[0]


def make_tables(*groups: Rows) -> list[ImageTable]:
    """Tables with one common label map, in natural order of the class names.

    Each group is a sequence of (path, class name); class names are arbitrary strings. Pass query and gallery together,
    because labels of different maps cannot be compared.
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
    """Images to train on and images to search, as loaders return them.

    gallery: None: every query image searches all other query images. Query and gallery share one label map; training
    has its own, because in class-disjoint protocols it has other classes.
    validation: held-out classes that select the epoch; their images search each other.
    searched: role of query and gallery, "test" or, in cross-validation, "validation".
    notice: one line for the user about the split, or "".
    num_mislabelled: number of training images whose label was changed (`mislabel`).
    skipped: bad training images that were left out, each with the reason.
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
        """The tables by name: train, query and, if present, gallery and validation."""
        named = {"train": self.train, "query": self.query, "gallery": self.gallery, "validation": self.validation}
        return {name: table for name, table in named.items() if table is not None}

    @property
    def evaluated(self) -> dict[str, tuple[ImageTable, ImageTable | None]]:
        """Sets that are searched after each epoch: {name in logs: (query, gallery or None)}."""
        sets = {self.searched: (self.query, self.gallery)}
        return sets if self.validation is None else {**sets, "validation": (self.validation, None)}

    def describe(self) -> str:
        """Lines on numbers of images and classes, images left out, notice."""
        counts = ", ".join(
            f"{counted(len(table), f'{name} image')} of {counted(len(set(table.labels.tolist())), 'class')}"
            for name, table in self.tables.items()
            if len(table)
        )
        if self.num_mislabelled:
            share = self.num_mislabelled / len(self.train)
            counts += f"; {self.num_mislabelled:,} training labels are wrong on purpose ({100 * share:.1f} %)"
        lines = [f"data: {self.name}, {counts}"]
        if self.skipped:
            lines.append(
                f"left out, as they cannot be read: {counted(len(self.skipped), 'training image')}: "
                f"{shorten(self.skipped)}"
            )
        if self.notice:
            lines.append(f"note: {self.notice}")
        return "\n".join(lines)

    @property
    def shared_classes(self) -> list[str]:
        """Names of classes that are both trained on and searched."""
        searched = set(self.query.classes)
        return [name for name in self.train.classes if name in searched]


def make_splits(name: str, train: Rows, query: Rows, gallery: Rows | None = None, *, notice: str = "") -> Splits:
    """Splits of rows, see `make_tables`; gallery None: the queries search each other."""
    query_table, *gallery_table = make_tables(query, *([] if gallery is None else [gallery]))
    return Splits(name, make_tables(train)[0], query_table, gallery_table[0] if gallery_table else None, notice)


def missing_or_empty(paths: Iterable[Path]) -> dict[Path, str]:
    """{path: "missing", "not a file" or "empty"} of those that hold nothing."""
    bad = {}
    for path in paths:
        try:
            status = split_box(path)[0].stat()
        except (OSError, ValueError):  # ValueError: no file can have this name
            bad[path] = "missing"
        else:
            if not stat.S_ISREG(status.st_mode):
                bad[path] = "not a file"
            elif status.st_size == 0:
                bad[path] = "empty"
    return bad


def shorten(items: Sequence[str] | Mapping[Path, str]) -> str:
    """The first five items, or paths with the reasons, and the number of further ones."""
    items = [f"{path} ({why})" for path, why in items.items()] if isinstance(items, Mapping) else items
    return ", ".join(items[:5]) + (f" and {len(items) - 5} more" if len(items) > 5 else "")


def require_files(paths: Sequence[Path], what: str) -> None:
    """Raise UsageError that names the files that are missing or empty."""
    if bad := missing_or_empty(paths):
        raise UsageError(
            f"{len(bad)} of {len(paths)} {what} images cannot be used: {shorten(bad)}. Restore or remove them "
            "(`python src/check.py` lists all); data.on_bad_image=skip trains without those that are trained on."
        )


Counts = Mapping[str, tuple[int, int]]  # {table: (images, classes)} of a benchmark's protocol


def require_benchmark(splits: Splits, expected: Counts, *, allow_partial: bool, verify_files: bool) -> Splits:
    """Raise UsageError unless all images exist and the counts are the expected ones.

    allow_partial: remove missing images, accept other counts and say so in the notice of the returned splits, if both
    sides hold images. verify_files: False does not look for the files.
    """
    bad = missing_or_empty(path for table in splits.tables.values() for path in table.paths) if verify_files else {}
    if bad:
        kept = ([row for row in table.rows if row[0] not in bad] for table in splits.tables.values())
        splits = make_splits(splits.name, *kept, notice=splits.notice)
    found = {name: (len(table), table.num_classes) for name, table in splits.tables.items()}
    if found == expected:
        return splits
    difference = f"expected {_describe(expected)}; found {_describe(found)}"
    if bad:
        difference += f" ({len(bad)} listed images are missing or empty: {shorten(bad)})"
    if not allow_partial or not len(splits.train) or not len(splits.query):
        raise UsageError(
            f"{splits.name} is not the whole benchmark: {difference}. Complete the download (src/check.py lists "
            "missing images), or set dataset.allow_partial=true for numbers that cannot be compared with the paper's."
        )
    notice = f"partial {splits.name}, not comparable with the paper: {difference}."
    return replace(splits, notice=notice + (f" {splits.notice}" if splits.notice else ""))


def _describe(counts: Counts) -> str:
    return ", ".join(f"{images:,} {name} images of {classes:,} classes" for name, (images, classes) in counts.items())


def data_fingerprint(splits: Splits) -> dict[str, str]:
    """Summary of each table: {table: "N images of C classes, HASH"}.

    The hash covers folder and file names, labels and file sizes, but not the location or modification time.
    """
    found = {}
    for name, table in splits.tables.items():
        digest = hashlib.sha256()
        for path, label in zip(table.paths, table.labels.tolist(), strict=True):
            file = split_box(path)[0]
            size = os.stat(file).st_size if os.path.exists(file) else -1
            digest.update(os.fsencode(f"{path.parent.name}/{path.name}") + f"\0{label} {size}\n".encode())
        found[name] = f"{len(table)} images of {table.num_classes} classes, {digest.hexdigest()[:12]}"
    return found


def require_same_data(made: dict[str, str] | None, now: dict[str, str]) -> None:
    """Raise UsageError if the images of a table differ from the checkpoint's.

    made: fingerprint in the checkpoint, or None to accept any images.
    """
    for name in now if made is not None else ():
        if (before := (made or {}).get(name)) != now[name]:
            raise UsageError(
                f"the {name} images are not those that this run began with (then {before}; now {now[name]}): restore "
                "them, or choose another run=NAME."
            )
