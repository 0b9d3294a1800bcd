"""Images that cannot be read: training images are left out where that is asked for, and said; searched ones never."""

from __future__ import annotations

import csv
import hashlib
import stat
import warnings
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from PIL import Image
from tqdm import tqdm

from proxy_anchor.data.images import read_rgb
from proxy_anchor.data.table import Splits, shorten
from proxy_anchor.errors import UnreadableImage, UsageError, check_int
from proxy_anchor.utils import write_text

_MIN_SIDE = 32
_MAX_ASPECT = 5
UNUSABLE = ("missing", "empty", "corrupt")
ODD = {
    "contradiction": "the same bytes under two classes",
    "leak": "the same bytes in the training images and in those searched",
    "duplicate": "the same bytes twice in one class",
    "format": "content is of another format than the name says",
    "mode": "not stored as RGB; converted on reading, alpha over white",
    "rotated": "has an EXIF orientation, which is not applied",
    "small": f"a side is shorter than {_MIN_SIDE} pixels",
    "stretched": f"one side is more than {_MAX_ASPECT} times the other",
}
_ORIENTATION = 0x0112  # EXIF tag
_SAME_FORMAT = {"MPO": "JPEG"}  # what many cameras write: a JPEG with further pictures behind it


@dataclass(frozen=True)
class Finding:
    """One remark about one image: kind is one of UNUSABLE or a key of ODD; table is train, query or gallery."""

    kind: str
    path: Path
    table: str
    class_name: str
    detail: str = ""


def check_images(splits: Splits, *, num_workers: int | None = None, progress: bool = True) -> list[Finding]:
    """All findings about the images of all tables, in table order, the unusable first.

    splits: from a loader called with verify_files=False, or missing files would have been refused there.
    num_workers: reading threads (decoding leaves Python's lock); None takes a few more than there are cores.
    """
    if num_workers is not None:
        check_int("num_workers", num_workers, 1)
    entries = [
        (name, path, table.classes[label])
        for name, table in splits.tables.items()
        for path, label in zip(table.paths, table.labels.tolist(), strict=True)
    ]
    paths = list(dict.fromkeys(path for _, path, _ in entries))
    with warnings.catch_warnings(), ThreadPoolExecutor(num_workers) as pool:
        warnings.simplefilter("ignore")  # Pillow's remarks on odd files: they are listed here by name
        results = list(
            tqdm(pool.map(_inspect, paths), total=len(paths), desc="checking", unit=" images", disable=not progress)
        )
    remarks = {path: remark for path, (remark, _) in zip(paths, results, strict=True)}
    findings = [
        Finding(kind, path, table, name, detail) for table, path, name in entries for kind, detail in remarks[path]
    ]
    digests = {path: digest for path, (_, digest) in zip(paths, results, strict=True) if digest}
    findings += _same_bytes(entries, digests)
    order = [*UNUSABLE, *ODD]
    return sorted(findings, key=lambda finding: order.index(finding.kind))  # stable: table order within a kind


def _inspect(path: Path) -> tuple[list[tuple[str, str]], str]:
    """([(kind, detail)], hash of the file's bytes or "")."""
    try:
        status = path.stat()
    except (OSError, ValueError):  # ValueError: no file can have this name
        return [("missing", "")], ""
    if not stat.S_ISREG(status.st_mode):
        return [("missing", "not a file")], ""
    if status.st_size == 0:
        return [("empty", "")], ""
    try:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        read_rgb(path)
        with Image.open(path) as image:
            return list(_oddities(image, path)), digest
    except (OSError, UsageError) as error:
        reason = str(error).removeprefix(f"image {path} cannot be read (").removesuffix("): replace or remove it.")
        return [("corrupt", reason)], ""


def _oddities(image: Image.Image, path: Path) -> list[tuple[str, str]]:
    found = []
    expected = Image.registered_extensions().get(path.suffix.lower())
    content = _SAME_FORMAT.get(image.format or "", image.format)
    if expected is not None and content != expected:
        found.append(("format", f"{content} under {path.suffix}"))
    if image.mode != "RGB" or "transparency" in image.info:
        found.append(("mode", image.mode if image.mode != "RGB" else "RGB with a transparent colour"))
    try:
        orientation = image.getexif().get(_ORIENTATION, 1)
    except Exception:  # damaged EXIF data raise whatever their bytes provoke, and matter to no pixel
        orientation = 1
    if orientation in range(2, 9):
        found.append(("rotated", f"EXIF orientation {orientation}"))
    size = f"{image.width} x {image.height} pixels"
    if min(image.size) < _MIN_SIDE:
        found.append(("small", size))
    if max(image.size) > _MAX_ASPECT * min(image.size):
        found.append(("stretched", size))
    return found


def _same_bytes(entries: Sequence[tuple[str, Path, str]], digests: dict[Path, str]) -> list[Finding]:
    """One finding for each entry whose bytes were seen before, against the first that makes the worst of it."""
    groups: defaultdict[str, list[tuple[str, Path, str]]] = defaultdict(list)
    for entry in entries:
        if entry[1] in digests:
            groups[digests[entry[1]]].append(entry)
    findings = []
    for group in groups.values():
        for index, (table, path, name) in enumerate(group):
            earlier = group[:index]
            other_class = next((each for each in earlier if each[2] != name), None)
            other_side = next((each for each in earlier if (each[0] == "train") != (table == "train")), None)
            if twin := other_class or other_side or next(iter(earlier), None):
                kind = "contradiction" if other_class else "leak" if other_side else "duplicate"
                findings.append(Finding(kind, path, table, name, f"as {twin[1]} ({twin[0]}, class {twin[2]})"))
    return findings


def format_findings(findings: Sequence[Finding], num_images: int) -> str:
    """All findings by kind, and a last line that counts."""
    lines = []
    counts = []
    for kind in (*UNUSABLE, *ODD):
        chosen = [finding for finding in findings if finding.kind == kind]
        if not chosen:
            continue
        counts.append(f"{len(chosen):,} {kind}")
        lines.append(f"{kind}: {len(chosen):,}" + (f" ({ODD[kind]})" if kind in ODD else ""))
        lines += [f"  {finding.path}" + (f": {finding.detail}" if finding.detail else "") for finding in chosen]
    unusable = len({finding.path for finding in findings if finding.kind in UNUSABLE})
    verdict = f"{unusable:,} cannot be used" if unusable else "all can be used"
    return "\n".join(
        [*lines, f"checked {num_images:,} images, {verdict}" + (": " if counts else "") + ", ".join(counts)]
    )


def write_findings(file: Path, findings: Sequence[Finding]) -> None:
    """The findings as CSV: kind, path, table, class, detail."""
    try:
        with file.open("w", encoding="utf-8", errors="surrogateescape", newline="") as stream:
            lines = csv.writer(stream)
            lines.writerow(["kind", "path", "table", "class", "detail"])
            lines.writerows([each.kind, each.path, each.table, each.class_name, each.detail] for each in findings)
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


def leave_out_unusable(splits: Splits, *, progress: bool = True) -> Splits:
    """The splits without the training images that cannot be used, which `skipped` lists.

    All images are read once, by what `src/check.py` reads them with: a batch that a worker process or a graphics card gets
    is then as large as any other, every epoch has the same images, and a run that is continued sees by the fingerprint of
    its images whether it leaves out the same ones. Classes that lose all their images are gone.

    Raises UnreadableImage that names images which are searched, or when no training image is left.
    """
    training, searched = _unusable(splits, progress)
    if searched:
        raise _refusal(searched, "searched", "searched")
    keep = np.array([path not in training for path in splits.train.paths], dtype=bool)
    if not keep.any():
        raise UnreadableImage(
            f"none of the {len(keep)} training images can be used: {shorten(list(training.values()))}."
        )
    skipped = tuple(training.values())
    return replace(splits, train=splits.train.select(keep), skipped=skipped) if skipped else splits


@contextmanager
def naming_all_unusable(splits: Splits, on_bad_image: str = "raise") -> Iterator[None]:
    """Have the first unreadable image that is met inside be the reason to look for all, and name those and the repair.

    Raises UnreadableImage; the one from inside where reading again finds none.
    """
    try:
        yield
    except UnreadableImage as error:
        training, searched = _unusable(splits, progress=False)
        if searched:
            raise _refusal(searched, "searched", "searched") from error
        if training:
            raise _refusal(training, "training", on_bad_image) from error
        raise


def _unusable(splits: Splits, progress: bool) -> tuple[dict[Path, str], dict[Path, str]]:
    """{path: path with reason} of training images and of searched ones (query, gallery, held-out)."""
    parts: tuple[dict[Path, str], dict[Path, str]] = ({}, {})
    for each in check_images(splits, progress=progress):
        if each.kind in UNUSABLE:
            parts[each.table != "train"][each.path] = f"{each.path} ({each.kind}{each.detail and f', {each.detail}'})"
    return parts


def _refusal(images: dict[Path, str], what: str, repair: str) -> UnreadableImage:
    named = shorten(list(images.values()))
    return UnreadableImage(f"{len(images)} {what} images cannot be used: {named}. {_REPAIR[repair]}")


def write_skipped(folder: Path, splits: Splits) -> None:
    """List the images that were left out in BAD_IMAGES_FILE, one a line; without any there is no file."""
    if splits.skipped:
        lines = "".join(f"{line}\n" for line in splits.skipped)
        # A name that is no UTF-8 keeps its readable part.
        write_text(folder / BAD_IMAGES_FILE, lines.encode("utf-8", "replace").decode("utf-8"))
