"""Images that cannot be read: training images are left out where that is asked for, and said; searched ones never."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np

from proxy_anchor.data.check import UNUSABLE, check_images
from proxy_anchor.data.table import Splits, shorten
from proxy_anchor.errors import UnreadableImage
from proxy_anchor.reports.files import write_text

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
