"""Finding and handling of bad images.

`data.on_bad_image=skip` leaves bad training images out. Images that are searched are never left out.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
from PIL import Image
from tqdm import tqdm

from proxy_anchor.data.images import cut, open_image, to_rgb, upright
from proxy_anchor.data.table import Splits, missing_or_empty, shorten, split_box
from proxy_anchor.errors import UnreadableImage, UsageError, reason_of

_MIN_SIDE = 32
BAD = ("missing", "empty", "corrupt")
ODD = {
    "contradiction": "the same bytes under two classes",
    "duplicate": "the same bytes twice in one class",
    "format": "content is of another format than the name says",
    "mode": "not stored as RGB; converted on reading, alpha over white",
    "split": "another part of the same photograph is in another split",
    "small": f"a side is shorter than {_MIN_SIDE} pixels",
}
NEAR = {
    "leak": "nearly the same image in another split",
    "near": "nearly the same image twice",
    "label": "the neighbours are of another class",
}
_SAME_FORMAT = {"MPO": "JPEG"}  # many cameras write a JPEG followed by further images as MPO


Entry = tuple[Path, str, str]  # path, table, class


class Finding(NamedTuple):
    """A finding about one image.

    kind: one of BAD or a key of ODD or NEAR. table: train, query, gallery or validation.
    """

    kind: str
    path: Path
    table: str
    class_name: str
    detail: str = ""


def check_images(splits: Splits) -> list[Finding]:
    """Read all images once; findings in table order, bad images first.

    splits: from a loader called with verify_files=False, which otherwise refuses missing files itself.
    """
    entries = entries_of(splits)
    paths = list(dict.fromkeys(path for path, *_ in entries))
    with warnings.catch_warnings(), ThreadPoolExecutor() as pool:  # decoding releases the GIL
        warnings.simplefilter("ignore")  # Pillow's warnings about odd files, which are findings here
        each_read = tqdm(pool.map(_inspect, paths), "checking", len(paths), unit=" images", disable=None)
        results = dict(zip(paths, each_read, strict=True))
    findings = []
    seen: dict[str, list[Entry]] = {}
    photographs: dict[str, Entry] = {}
    for path, table, name in entries:
        remarks, digest = results[path]
        findings += [Finding(kind, path, table, name, detail) for kind, detail in remarks]
        earlier = seen.setdefault(digest, []) if digest else []
        if twin := next((each for each in earlier if each[2] != name), next(iter(earlier), None)):
            kind = "duplicate" if twin[2] == name else "contradiction"
            findings.append(Finding(kind, path, table, name, f"as {twin[0]} ({twin[1]}, class {twin[2]})"))
        elif digest:
            part, its_table, its_name = photographs.setdefault(digest.partition(" ")[0], (path, table, name))
            if table != its_table and {table, its_table} != {"query", "gallery"}:
                findings.append(Finding("split", path, table, name, f"as {part} ({its_table}, class {its_name})"))
        earlier.append((path, table, name))
    order = [*BAD, *ODD]
    return sorted(findings, key=lambda finding: order.index(finding.kind))  # stable: table order within a kind


def entries_of(splits: Splits) -> list[Entry]:
    """Every image, in table order."""
    return [(path, name, label) for name, table in splits.tables.items() for path, label in table.rows]


def _inspect(path: Path) -> tuple[list[tuple[str, str]], str]:
    """([(kind, detail)], key of the content, or "" for a bad image)."""
    path, box = split_box(path)
    if bad := missing_or_empty([path]):
        why = bad[path]
        return [(why, "") if why in BAD else ("missing", why)], ""
    try:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        with open_image(path) as image:
            image.load()
            size = cut(to_rgb(upright(image)), box).size
            return list(_oddities(image, size, path)), f"{digest} {box}"  # objects of one file are different images
    except (OSError, UnreadableImage) as error:
        return [("corrupt", reason_of(error.__cause__ or error))], ""


def _oddities(image: Image.Image, size: tuple[int, int], path: Path) -> Iterator[tuple[str, str]]:
    expected = Image.registered_extensions().get(path.suffix.lower())
    content = _SAME_FORMAT.get(image.format or "", image.format)
    if expected is not None and content != expected:
        yield "format", f"{content} under {path.suffix}"
    if image.mode != "RGB" or "transparency" in image.info:
        yield "mode", image.mode if image.mode != "RGB" else "RGB with a transparent colour"
    if min(size) < _MIN_SIDE:
        yield "small", f"{size[0]} x {size[1]} pixels"


def format_findings(findings: Sequence[Finding], num_images: int) -> str:
    """The findings by kind, and a last line with the counts."""
    lines, counts = [], []
    for kind in (*BAD, *ODD):
        if chosen := [finding for finding in findings if finding.kind == kind]:
            counts.append(f"{len(chosen):,} {kind}")
            lines.append(f"{kind}: {len(chosen):,}" + (f" ({ODD[kind]})" if kind in ODD else ""))
            lines += [f"  {finding.path}" + (f": {finding.detail}" if finding.detail else "") for finding in chosen]
    num_bad = len({finding.path for finding in findings if finding.kind in BAD})
    verdict = f"{num_bad:,} cannot be used" if num_bad else "all can be used"
    listed = ": " + ", ".join(counts) if counts else ""
    return "\n".join([*lines, f"checked {num_images:,} images, {verdict}{listed}"])


def write_findings(file: Path, findings: Sequence[Finding]) -> None:
    """Write the findings as CSV: kind, path, table, class, detail."""
    table = pd.DataFrame(findings, columns=["kind", "path", "table", "class", "detail"])
    try:
        table.to_csv(file, index=False, errors="surrogateescape")
    except OSError as error:
        raise UsageError(f"output={file} cannot be written ({error.strerror}): choose another file.") from error


ON_BAD_IMAGE = ("raise", "skip")
BAD_IMAGES_FILE = "bad_images.txt"
_RESTORE = "Restore or remove them (`python src/check.py` with the same dataset keys lists all)"
_REPAIR = {
    "searched": f"{_RESTORE}: evaluation leaves none out.",
    "raise": f"{_RESTORE}, or set data.on_bad_image=skip to train without them.",
    "skip": "They could be read when training began: restore them, and the same command with run=NAME continues.",
}


def drop_bad_images(splits: Splits) -> Splits:
    """Splits without bad training images, which `skipped` lists.

    All images are read once before training, as `src/check.py` does. So every batch has its full size, every epoch has
    the same images, and a resumed run notices by the fingerprint of its images whether it leaves out the same ones.
    Classes that lose all their images are removed.

    Raises UnreadableImage for bad images that are searched.
    """
    bad = _bad_training_images(splits)
    keep = np.array([path not in bad for path in splits.train.paths], dtype=bool)
    return replace(splits, train=splits.train.select(keep), skipped=tuple(bad.values())) if bad else splits


@contextmanager
def naming_bad_images(splits: Splits, on_bad_image: str = "raise") -> Iterator[None]:
    """When an image is unreadable inside the block, name all bad images.

    Raises UnreadableImage; the original error if a second reading finds no bad image.
    """
    try:
        yield
    except UnreadableImage as error:
        if bad := _bad_training_images(splits):
            raise _bad_images_error(bad, "training", on_bad_image) from error
        raise


def _bad_training_images(splits: Splits) -> dict[Path, str]:
    """{path: path with reason}. Raises UnreadableImage for query, gallery and held-out images."""
    training: dict[Path, str] = {}
    searched: dict[Path, str] = {}
    for each in check_images(splits):
        if each.kind in BAD:
            part = training if each.table == "train" else searched
            part[each.path] = f"{each.path} ({each.kind}{each.detail and f', {each.detail}'})"
    if searched:
        raise _bad_images_error(searched, "searched", "searched")
    return training


def _bad_images_error(images: dict[Path, str], what: str, repair: str) -> UnreadableImage:
    named = shorten(list(images.values()))
    return UnreadableImage(f"{len(images)} {what} images cannot be used: {named}. {_REPAIR[repair]}")
