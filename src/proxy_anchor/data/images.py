"""Reading of image files to RGB, and the dataset classes."""

from __future__ import annotations

import hashlib
import io
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from PIL import ExifTags, Image, ImageFile, ImageOps
from torch import Tensor
from torch.utils.data import Dataset

from proxy_anchor.data.table import Box, ImageTable, split_box
from proxy_anchor.errors import UnreadableImage, UsageError, counted, reason_of
from proxy_anchor.utils import available_cpus

# Pillow's exceptions for damaged or malicious files; damaged headers cause MemoryError and NotImplementedError.
UNREADABLE = (OSError, SyntaxError, ValueError, MemoryError, NotImplementedError, Image.DecompressionBombError)
SHARED_MEMORY = Path("/dev/shm")  # a file system in memory, shared by processes; Linux only
_FILES_PER_WORKER = 16  # pipes, and tensors on their way
Crops = Callable[[Image.Image, int, int], Tensor]  # (image, epoch, row) -> uint8 (3, crop, crop)

_SWAPPED = range(5, 9)  # orientations that exchange width and height


def _orientation(image: Image.Image) -> int:
    """EXIF orientation, 1 to 8, of an image whose pixels are not decoded; 1 where Pillow applies it itself."""
    if image.format == "TIFF":
        return 1
    try:
        # Not the method of PNG, which decodes the whole image first.
        found = Image.Image.getexif(image).get(ExifTags.Base.Orientation, 1)
    except Exception:  # damaged EXIF data raise any type, and do not affect the pixels
        return 1
    return found if found in range(2, 9) else 1


def upright_size(image: Image.Image) -> tuple[int, int]:
    """(height, width) of an opened image after its EXIF orientation is applied."""
    return (image.width, image.height) if _orientation(image) in _SWAPPED else (image.height, image.width)


def upright(image: Image.Image) -> Image.Image:
    """The decoded image with its EXIF orientation applied."""
    is_turned = _orientation(image) != 1
    image.load()
    return ImageOps.exif_transpose(image) if is_turned else image


def to_rgb(image: Image.Image) -> Image.Image:
    """Convert any mode (L, P, CMYK, RGBA, I;16, ...) to RGB, over white."""
    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    if image.mode.startswith("I;16") or image.mode in ("I", "F"):
        # Pillow clips these to 0-255 instead of scaling them, so a 16-bit scan would become white.
        pixels = np.asarray(image, dtype=np.float32)
        if not np.isfinite(pixels).all():
            raise ValueError("pixels are not finite")
        brightest = float(pixels.max())
        if image.mode.startswith("I;16") or (image.mode, image.format) == ("I", "PPM"):
            white = 65535.0
        else:
            white = 1.0 if image.mode == "F" and brightest <= 1 else max(brightest, 255.0)
        return Image.fromarray((pixels * (255.0 / white)).clip(0, 255).astype(np.uint8)).convert("RGB")
    if image.mode in ("LA", "La", "PA", "RGBA", "RGBa") or "transparency" in image.info:
        rgba = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", rgba.size, "white"), rgba).convert("RGB")
    return image.convert("RGB")


def cut(image: Image.Image, box: Box | None) -> Image.Image:
    """The part in a box, see `split_box`; ValueError for a box that is not inside the image."""
    if box is None:
        return image
    x, y, width, height = box
    if not (width and height and x + width <= image.width and y + height <= image.height):
        raise ValueError(f"box {x},{y},{width},{height} is not inside its {image.width} x {image.height} pixels")
    return image.crop((x, y, x + width, y + height))


def read_rgb(
    source: Path | io.BytesIO, *, max_pixels: int | None = None, formats: tuple[str, ...] | None = None
) -> Image.Image:
    """Decode an image file, or an object in it, to an RGB image.

    An EXIF orientation is applied, then the box (see `split_box`).
    max_pixels, formats: largest width x height and Pillow's names of accepted formats; both are checked on the header,
    before anything is decoded.
    Raises UnreadableImage for a file that is missing, empty, truncated or not an image, UsageError above max_pixels.
    """
    file, box = split_box(source) if isinstance(source, Path) else (source, None)
    with open_image(file, formats) as image:
        if max_pixels is not None and image.width * image.height > max_pixels:
            raise UsageError(
                f"the image has {image.width} x {image.height} pixels; at most {max_pixels:,} are accepted."
            )
        return cut(to_rgb(upright(image)), box)  # the whole decides what is white


@contextmanager
def open_image(source: Path | io.BytesIO, formats: tuple[str, ...] | None = None) -> Iterator[Image.Image]:
    """Open an image lazily: only the header is read.

    Raises UnreadableImage as `read_rgb` does, also for errors of Pillow inside the block.
    """
    # Another library may have set this since the last call; a truncated file must be an error.
    ImageFile.LOAD_TRUNCATED_IMAGES = False
    try:
        with Image.open(source, formats=formats) as image:
            yield image
    except UsageError:
        raise
    except FileNotFoundError as error:
        raise UnreadableImage(f"image {source} is missing: restore it or remove it from the list.") from error
    except UNREADABLE as error:
        is_file, is_unknown = isinstance(source, Path), isinstance(error, Image.UnidentifiedImageError)
        name, repair = (f"image {source}", ": replace or remove it.") if is_file else ("the image", ".")
        reason = "no image of a known format" if is_unknown else reason_of(error)
        raise UnreadableImage(f"{name} cannot be read ({reason}){repair}") from error


def fit_workers(num_workers: int | None, loaders: Sequence[tuple[int, int]], key: str = "data.num_workers") -> int:
    """Worker processes of each loader: as given, or as many as have shared memory and open files.

    The default is the available CPUs, at most 16.
    loaders: (bytes of a batch, number of batches) of all loaders of this rank; a worker keeps two batches ready.
    Raises UsageError where a given number does not fit, and prints a line where the default is lowered.
    """
    wanted = min(16, available_cpus()) if num_workers is None else num_workers
    if not SHARED_MEMORY.is_dir():
        return wanted
    import resource

    free = shutil.disk_usage(SHARED_MEMORY).free // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    opened, limit = len(os.listdir("/proc/self/fd")), resource.getrlimit(resource.RLIMIT_NOFILE)[0]

    def lacks(workers: int) -> str:
        memory = sum(min(2 * workers + 1, batches) * size for size, batches in loaders)
        if workers and memory > free:
            return f"{memory / 1e6:.0f} MB of {SHARED_MEMORY} ({free / 1e6:.0f} MB are free; docker: --shm-size=8g)"
        files = opened + _FILES_PER_WORKER * workers * len(loaders)
        return f"{files} open files (the limit is {limit}; `ulimit -n 4096`)" if workers and files > limit else ""

    fitting = next(each for each in range(wanted, -1, -1) if not lacks(each))
    if fitting < wanted:
        reason = f"{key}={wanted}: so many processes for each of {counted(len(loaders), 'loader')} take {lacks(wanted)}"
        if num_workers is not None:
            raise UsageError(f"{reason}: set {key}={fitting}, or give more.")
        print(f"{reason}: lowered to {fitting}.", flush=True)
    return fitting


class ImageDataset(Dataset):
    """Cropped images of a table: item i is (uint8 (3, crop, crop), label, i).

    The index is part of the item, so that evaluation can undo the order or padding of a sampler.
    Item e * N + i (see `ShuffledBatches`) is image i with the random numbers of epoch e.
    decoded: images that were decoded before, in host memory; None reads the files.
    """

    def __init__(self, table: ImageTable, crops: Crops, decoded: DecodedImages | None = None) -> None:
        self.table, self.crops, self.decoded = table, crops, decoded
        self.labels = torch.from_numpy(table.labels)

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        epoch, row = divmod(index, len(self.table))
        image = read_rgb(self.table.paths[row]) if self.decoded is None else Image.fromarray(self.decoded.array(row))
        return self.crops(image, epoch, row), self.labels[row], row


ImageInput = str | Path | bytes | np.ndarray | Image.Image


def open_input(
    image: ImageInput, *, max_pixels: int | None = None, formats: tuple[str, ...] | None = None
) -> Image.Image:
    """RGB image from a path, bytes, an array or a Pillow image.

    Bytes are those of an encoded file. Arrays are uint8, (H, W, 3) or (H, W).
    max_pixels, formats: limits for bytes from an untrusted source, see `read_rgb`.
    Raises UsageError when the image cannot be read.
    """
    if isinstance(image, (str, Path)):
        return read_rgb(Path(image))
    if isinstance(image, bytes):
        return read_rgb(io.BytesIO(image), max_pixels=max_pixels, formats=formats)
    if isinstance(image, Image.Image):
        return to_rgb(upright(image))
    if isinstance(image, np.ndarray):
        is_image = image.dtype == np.uint8 and image.size > 0 and (image.ndim == 2 or image.shape[2:] == (3,))
        if not is_image:
            raise UsageError(
                f"image array of type {image.dtype} and shape {image.shape}: expected uint8 pixels in 0-255 of shape "
                "(H, W, 3) in RGB order, or (H, W)."
            )
        return to_rgb(Image.fromarray(np.ascontiguousarray(image)))
    raise UsageError(f"image of type {type(image).__name__}: expected a path, bytes, a uint8 array or a Pillow image.")


def input_key(image: ImageInput) -> str:
    """Identifier of the content, equal for equal bytes or pixels.

    For a file it is made of path, size and modification time.
    """
    if isinstance(image, (str, Path)):
        try:
            status = split_box(Path(image))[0].stat()
        except (OSError, ValueError):
            return f"missing {image}"
        return f"{status.st_size} {status.st_mtime_ns} {Path(image).absolute()}"
    if isinstance(image, bytes):
        return hashlib.sha256(image).hexdigest()
    pixels = np.asarray(image)
    return f"{pixels.shape} {hashlib.sha256(np.ascontiguousarray(pixels).tobytes()).hexdigest()}"


def prepare_readable(
    prepare: Callable[[Image.Image], Tensor], images: Sequence[tuple[int, ImageInput]]
) -> tuple[list[int], Tensor, list[tuple[int, str]]]:
    """(rows, pixels (b, 3, crop, crop)) of the readable ones of (row, image), and (row, reason) of the others.

    prepare: the network's preprocessing.
    """
    readable, skipped = {}, []
    for row, image in images:
        try:
            readable[row] = prepare(open_input(image))
        except UsageError as error:
            skipped.append((row, str(error)))
    pixels = torch.stack([*readable.values()]) if readable else torch.empty(0, 3, 0, 0, dtype=torch.uint8)
    return [*readable], pixels, skipped


def make_thumbnail(image: Image.Image, width: int, height: int) -> bytes:
    """A WebP file of at most `width` x `height` pixels."""
    small = image.copy()
    small.thumbnail((width, height), Image.Resampling.LANCZOS, reducing_gap=2.0)
    stream = io.BytesIO()
    small.save(stream, "WEBP", quality=80)
    return stream.getvalue()


@dataclass(frozen=True, eq=False)
class DecodedImages:
    """N concatenated RGB images, each (height, width, 3) uint8.

    values: flat uint8, on any device, possibly a memory-mapped file. sizes: (N, 2) int64 on the CPU, heights and
    widths.
    """

    values: Tensor
    sizes: Tensor

    def __len__(self) -> int:
        return len(self.sizes)

    @cached_property
    def offsets(self) -> Tensor:
        """(N,) int64 on the CPU: start of each image in `values`."""
        lengths = 3 * self.sizes.prod(1)
        return lengths.cumsum(0) - lengths

    def array(self, row: int) -> np.ndarray:
        """View of image `row` as (height, width, 3); for values on the CPU."""
        (height, width), start = self.sizes[row].tolist(), int(self.offsets[row])
        return self.values[start : start + 3 * height * width].numpy().reshape(height, width, 3)
