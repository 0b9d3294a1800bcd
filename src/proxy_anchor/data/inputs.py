"""Images that a user hands over one by one: files, folders, bytes, arrays, pictures. No labels needed, no split."""

from __future__ import annotations

import hashlib
import io
import os
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageFile
from torch import Tensor
from torch.utils.data import Dataset

from proxy_anchor.data.images import UNREADABLE, is_hidden, is_image_file, read_rgb, reason_of, to_rgb
from proxy_anchor.data.table import natural_key
from proxy_anchor.errors import UsageError

ImageInput = str | Path | bytes | np.ndarray | Image.Image
Prepared = tuple[int, Tensor | None, bytes, str]  # row, pixels or None, thumbnail or b"", why it cannot be read or ""

THUMBNAIL_QUALITY = 80


def find_images(folder: Path | str) -> list[Path]:
    """Every image file below a folder, in natural order; hidden files, what archive tools leave and pipes are passed over.

    Raises UsageError when there is no such folder or no image in it.
    """
    root = Path(folder)
    if not root.is_dir():
        raise UsageError(f"{root}: no such folder of images.")
    files = [Path(place, name).relative_to(root) for place, _, names in os.walk(root) for name in names]
    images = [f for f in files if is_image_file(f) and not is_hidden(f) and not (root / f).is_fifo()]
    found = sorted(images, key=lambda f: natural_key(f.as_posix()))
    if not found:
        raise UsageError(f"{root} holds no image file: there is nothing to search or embed in it.")
    return [root / file for file in found]


def class_folders(paths: Sequence[Path], root: Path | str) -> list[str | None]:
    """Each image's first sub-folder below `root` as its class; None for all of them unless every image has one."""
    parts = [path.relative_to(root).parts for path in paths]
    if all(len(each) > 1 for each in parts):
        return [each[0] for each in parts]
    return [None] * len(paths)


def open_input(
    image: ImageInput, *, max_pixels: int | None = None, formats: tuple[str, ...] | None = None
) -> Image.Image:
    """An RGB image from a path, an encoded file's bytes, an (H, W, 3) or (H, W) uint8 array, or a Pillow image.

    max_pixels, formats: for bytes from a stranger, the largest width x height and Pillow's names of accepted formats;
    both are checked on the header, before anything is decoded.
    Raises UsageError when it cannot be read.
    """
    if isinstance(image, (str, Path)):
        return read_rgb(Path(image))
    if isinstance(image, bytes):
        return _decode(image, max_pixels, formats)
    if isinstance(image, Image.Image):
        return to_rgb(image)
    if isinstance(image, np.ndarray):
        is_image = image.dtype == np.uint8 and image.size > 0 and (image.ndim == 2 or image.shape[2:] == (3,))
        if not is_image:
            raise UsageError(
                f"image array of type {image.dtype} and shape {image.shape}: expected uint8 pixels in 0-255 of shape "
                "(H, W, 3) in RGB order, or (H, W)."
            )
        return to_rgb(Image.fromarray(np.ascontiguousarray(image)))
    raise UsageError(f"image of type {type(image).__name__}: expected a path, bytes, a uint8 array or a Pillow image.")


def _decode(content: bytes, max_pixels: int | None, formats: tuple[str, ...] | None) -> Image.Image:
    ImageFile.LOAD_TRUNCATED_IMAGES = False
    try:
        with warnings.catch_warnings():
            # Above 90 million pixels Pillow warns, above twice that it raises: both are refusals here.
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(io.BytesIO(content), formats=formats) as image:
                if max_pixels is not None and image.width * image.height > max_pixels:
                    raise UsageError(
                        f"the image has {image.width} x {image.height} pixels; at most {max_pixels:,} are accepted."
                    )
                image.load()
                return to_rgb(image)
    except UsageError:
        raise
    except (*UNREADABLE, Warning) as error:
        is_unknown = isinstance(error, Image.UnidentifiedImageError)
        reason = "no image of a known format" if is_unknown else reason_of(error)
        raise UsageError(f"the image cannot be read ({'empty' if not content else reason}).") from error


def input_key(image: ImageInput) -> str:
    """A name for the content: equal for equal bytes or pixels; for a file, its path, size and time of change."""
    if isinstance(image, (str, Path)):
        try:
            status = Path(image).stat()
        except (OSError, ValueError):
            return f"missing {image}"
        return f"{status.st_size} {status.st_mtime_ns} {Path(image).absolute()}"
    if isinstance(image, bytes):
        return hashlib.sha256(image).hexdigest()
    pixels = np.asarray(image)
    return f"{pixels.shape} {hashlib.sha256(np.ascontiguousarray(pixels).tobytes()).hexdigest()}"


class InputImages(Dataset):
    """Item i is (i, uint8 pixels (3, crop, crop), JPEG thumbnail, ""), or (i, None, b"", reason) for one that is unreadable.

    prepare: the network's own preprocessing. thumbnail_side: longest side in pixels of the small picture; 0: none.
    """

    def __init__(
        self, images: Sequence[ImageInput], prepare: Callable[[Image.Image], Tensor], *, thumbnail_side: int = 0
    ) -> None:
        self.images, self.prepare, self.thumbnail_side = images, prepare, thumbnail_side

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, row: int) -> Prepared:
        try:
            image = open_input(self.images[row])
            pixels = self.prepare(image)
        except UsageError as error:
            return row, None, b"", str(error)
        return row, pixels, make_thumbnail(image, self.thumbnail_side) if self.thumbnail_side else b"", ""


def make_thumbnail(image: Image.Image, side: int) -> bytes:
    """A JPEG file whose longest side is at most `side` pixels."""
    small = image.copy()
    small.thumbnail((side, side), Image.Resampling.BILINEAR, reducing_gap=2.0)
    stream = io.BytesIO()
    small.save(stream, "JPEG", quality=THUMBNAIL_QUALITY)
    return stream.getvalue()


def collate_readable(batch: Sequence[Prepared]) -> tuple[list[int], Tensor, list[bytes], list[tuple[int, str]]]:
    """(rows, pixels (b, 3, crop, crop), thumbnails) of those that could be read, and (row, reason) of the others."""
    readable = [(row, pixels, thumbnail) for row, pixels, thumbnail, _ in batch if pixels is not None]
    skipped = [(row, reason) for row, pixels, _, reason in batch if pixels is None]
    pixels = torch.stack([each for _, each, _ in readable]) if readable else torch.empty(0, 3, 0, 0, dtype=torch.uint8)
    return [row for row, _, _ in readable], pixels, [thumbnail for _, _, thumbnail in readable], skipped
