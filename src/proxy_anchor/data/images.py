"""From an image file to pixels: the one place that makes RGB, and the one image dataset class."""

from __future__ import annotations

import hashlib
import io
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageFile
from torch import Tensor
from torch.utils.data import Dataset

from proxy_anchor.data.table import ImageTable, natural_key
from proxy_anchor.errors import UnreadableImage, UsageError
from proxy_anchor.utils import own_cores

# What Pillow raises for a damaged or hostile file; MemoryError and NotImplementedError come out of damaged headers.
UNREADABLE = (OSError, SyntaxError, ValueError, MemoryError, NotImplementedError, Image.DecompressionBombError)
Crops = Callable[[Image.Image, int, int], Tensor]  # (image, epoch, row) -> uint8 (3, crop, crop)

IMAGE_SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".webp", ".gif", ".tif", ".tiff", ".ppm"})


def is_hidden(path: Path) -> bool:
    """Whether a part of a relative path is hidden or what an archive tool left behind (`._` twins, __MACOSX)."""
    return any(part.startswith(".") or part == "__MACOSX" for part in path.parts)


def is_image_file(path: Path) -> bool:
    """Whether the name is an image's: known suffix, and no `._` twin or hidden file of some archive tool."""
    return path.suffix.lower() in IMAGE_SUFFIXES and not path.name.startswith(".")


def to_rgb(image: Image.Image) -> Image.Image:
    """Any mode (L, LA, P, CMYK, RGBA, I;16, ...) to RGB; transparent pixels are laid over white."""
    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    if image.mode.startswith("I;16") or image.mode in ("I", "F"):
        # Pillow clips these to 0-255 instead of scaling them: a 16-bit scan would turn white.
        pixels = np.asarray(image, dtype=np.float32)
        if not np.isfinite(pixels).all():
            raise ValueError("pixels that are not finite")
        brightest = float(pixels.max())
        if image.mode.startswith("I;16"):
            white = 65535.0
        else:
            white = 1.0 if image.mode == "F" and brightest <= 1 else max(brightest, 255.0)
        return Image.fromarray((pixels * (255.0 / white)).clip(0, 255).astype(np.uint8)).convert("RGB")
    if image.mode in ("LA", "La", "PA", "RGBA", "RGBa") or "transparency" in image.info:
        rgba = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", rgba.size, "white"), rgba).convert("RGB")
    return image.convert("RGB")


def reason_of(error: BaseException) -> str:
    """An error's text on one line, or its kind where it has none."""
    return " ".join(str(error).split()) or type(error).__name__


def read_rgb(path: Path) -> Image.Image:
    """Decode an image file to an RGB image.

    The pixels are taken as stored: an EXIF orientation is not applied, as in the authors' loader.
    Raises UnreadableImage with the file's name when it is missing, empty, truncated or no image.
    """
    with open_image(path) as image:
        image.load()
        return to_rgb(image)


@contextmanager
def open_image(path: Path) -> Iterator[Image.Image]:
    """Pillow's lazy image of a file: its header is read, its pixels when they are asked for.

    Raises UnreadableImage as `read_rgb` does, also for what goes wrong while the image is used.
    """
    # A truncated file must be an error, also when another library has switched Pillow's leniency on since the last call.
    ImageFile.LOAD_TRUNCATED_IMAGES = False
    try:
        with Image.open(path) as image:
            yield image
    except FileNotFoundError as error:
        raise UnreadableImage(f"image {path} is missing: restore it or remove it from the list.") from error
    except UNREADABLE as error:
        is_empty = path.is_file() and path.stat().st_size == 0
        reason = "empty file" if is_empty else reason_of(error)
        raise UnreadableImage(f"image {path} cannot be read ({reason}): replace or remove it.") from error


def default_num_workers() -> int:
    """This process's share of the cores, at most 16."""
    return min(16, own_cores())


class ImageDataset(Dataset):
    """The images of a table, cropped: item i is (uint8 tensor (3, crop, crop), label, i).

    The index travels with the image, so that evaluation can undo whatever order or padding a sampler made.
    Item e * N + i (see `ShuffledBatches`) is image i with the random numbers of epoch e.
    pixels: the images decoded before, in host memory; None reads the files.
    """

    def __init__(self, table: ImageTable, crops: Crops, pixels: Pixels | None = None) -> None:
        self.table, self.crops, self.pixels = table, crops, pixels
        self.labels = torch.from_numpy(table.labels)

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        epoch, row = divmod(index, len(self.table))
        image = read_rgb(self.table.paths[row]) if self.pixels is None else self.pixels.image(row)
        return self.crops(image, epoch, row), self.labels[row], row


ImageInput = str | Path | bytes | np.ndarray | Image.Image
Prepared = tuple[int, Tensor | None, str]  # row, pixels or None, reason or ""

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
    """Item i is (i, uint8 pixels (3, crop, crop), ""), or (i, None, reason) for an unreadable image.

    prepare: the network's preprocessing.
    """

    def __init__(self, images: Sequence[ImageInput], prepare: Callable[[Image.Image], Tensor]) -> None:
        self.images, self.prepare = images, prepare

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, row: int) -> Prepared:
        try:
            return row, self.prepare(open_input(self.images[row])), ""
        except UsageError as error:
            return row, None, str(error)


def make_thumbnail(image: Image.Image, side: int) -> bytes:
    """A JPEG file whose longest side is at most `side` pixels."""
    small = image.copy()
    small.thumbnail((side, side), Image.Resampling.BILINEAR, reducing_gap=2.0)
    stream = io.BytesIO()
    small.save(stream, "JPEG", quality=THUMBNAIL_QUALITY)
    return stream.getvalue()


def collate_readable(batch: Sequence[Prepared]) -> tuple[list[int], Tensor, list[tuple[int, str]]]:
    """(rows, pixels (b, 3, crop, crop)) of the readable images, and (row, reason) of the others."""
    readable = [(row, pixels) for row, pixels, _ in batch if pixels is not None]
    skipped = [(row, reason) for row, pixels, reason in batch if pixels is None]
    pixels = torch.stack([each for _, each in readable]) if readable else torch.empty(0, 3, 0, 0, dtype=torch.uint8)
    return [row for row, _ in readable], pixels, skipped


@dataclass(frozen=True, eq=False)
class Pixels:
    """N images behind one another, each as (height, width, 3) uint8, RGB.

    values: flat uint8, on any device, possibly a mapped file. sizes: (N, 2) int64 on the CPU, heights and widths.
    """

    values: Tensor
    sizes: Tensor

    def __len__(self) -> int:
        return len(self.sizes)

    @cached_property
    def offsets(self) -> Tensor:
        """(N,) int64 on the CPU: where each image starts in `values`."""
        lengths = 3 * self.sizes.prod(1)
        return lengths.cumsum(0) - lengths

    def array(self, row: int) -> np.ndarray:
        """Image `row` as (height, width, 3), a view; for values on the CPU."""
        (height, width), start = self.sizes[row].tolist(), int(self.offsets[row])
        return self.values[start : start + 3 * height * width].numpy().reshape(height, width, 3)

    def image(self, row: int) -> Image.Image:
        """Image `row` as Pillow's."""
        return Image.fromarray(self.array(row))
