"""Image files below a folder, by the suffixes that Pillow decodes."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from PIL import Image

from proxy_anchor.data.table import natural_key
from proxy_anchor.errors import UsageError

# EPS needs Ghostscript, Pillow reads no more than the header of a video, and the others are stubs without a decoder.
_NOT_DECODED = {"EPS", "MPEG", "WMF", "HDF5", "GRIB", "BUFR"}


def is_hidden(path: Path) -> bool:
    """Whether any part of a relative path is hidden or __MACOSX."""
    return any(part.startswith(".") or part == "__MACOSX" for part in path.parts)


@cache
def image_suffixes() -> frozenset[str]:
    """Suffixes of the formats that Pillow decodes, with those of its plugins that are registered."""
    formats = Image.registered_extensions()  # registers the formats
    decoded = {*Image.OPEN, "MPO"} - _NOT_DECODED  # MPO is opened as JPEG
    return frozenset(suffix for suffix, name in formats.items() if name in decoded)


def images_below(folder: Path, *, by_class: bool = False) -> tuple[list[Path], Counter[str]]:
    """Image files below a folder, in natural order, and the number of other files by suffix.

    Links to folders are followed, except to a folder that holds the link; a folder that several links lead to is
    entered once (by_class: once below each sub-folder). Hidden files and leftovers of archive tools are neither.
    Raises UsageError for a folder that cannot be read.
    """
    try:
        found = list(_files_below(folder, {*map(str, Path(os.path.realpath(folder)).parents)}, by_class))
    except PermissionError as error:
        raise UsageError(f"{error.filename} cannot be read: change its permissions, or move it elsewhere.") from error
    images = [path for path in found if path.suffix.lower() in image_suffixes()]
    suffixes = (path.suffix.lower() for path in found)
    others = Counter(each or "without suffix" for each in suffixes if each not in image_suffixes())
    return sorted(images, key=lambda path: natural_key(path.relative_to(folder).as_posix())), others


def _files_below(folder: Path, entered: set[str], by_class: bool = False) -> Iterator[Path]:
    if (here := os.path.realpath(folder)) in entered:
        return
    entered.add(here)
    for entry in sorted(os.scandir(folder), key=lambda each: (each.is_symlink(), each.name)):
        path = folder / entry.name
        if is_hidden(Path(entry.name)):
            continue
        if path.is_dir():
            yield from _files_below(path, {*entered} if by_class else entered)
        else:
            yield path


def counted_suffixes(others: Counter[str]) -> str:
    """'12 .heic, 1 .txt', the most frequent first."""
    return ", ".join(f"{count:,} {suffix}" for suffix, count in others.most_common())


def find_images(folder: Path | str) -> list[Path]:
    """All image files below a folder, in natural order; prints how many other files it holds.

    See `images_below`. Raises UsageError for a folder that does not exist or holds no image.
    """
    root = Path(folder)
    if not root.is_dir():
        raise UsageError(f"{root}: no such folder of images.")
    found, others = images_below(root, by_class=True)
    left_out = f"{counted_suffixes(others)} left out" if others else "no other file"
    if not found:
        raise UsageError(f"{root} holds no image file ({left_out}): there is nothing to search or embed in it.")
    if others:
        print(f"{root}: {left_out}", flush=True)
    return [path for path in found if not path.is_fifo()]  # reading a pipe would wait; training refuses it
