"""From an image file to pixels: the one place that makes RGB, and the one image dataset class."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from PIL import Image, ImageFile
from torch import Tensor
from torch.utils.data import Dataset

from proxy_anchor.cores import own_cores
from proxy_anchor.data.table import ImageTable
from proxy_anchor.errors import UnreadableImage

if TYPE_CHECKING:
    from proxy_anchor.data.pixels import Pixels

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
