"""Cache of decoded images on the GPU, in shared memory or on disk.

Images are decoded once by worker processes instead of in every epoch. The bytes are the same in every place.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from filelock import FileLock
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader
from torchvision.transforms.v2 import functional as F
from tqdm import tqdm

from proxy_anchor.data.augment import CentralCrop
from proxy_anchor.data.images import SHARED_MEMORY, DecodedImages, open_image, read_rgb, upright_size
from proxy_anchor.data.table import ImageTable, split_box
from proxy_anchor.errors import UnreadableImage, UsageError, check_int

_IMAGES_PER_TASK = 32  # images that a worker decodes before it returns them


@dataclass(frozen=True)
class Shrunk:
    """Form of cached training images: shorter side at most `side` pixels.

    None keeps images as stored.
    """

    side: int | None = None

    def __post_init__(self) -> None:
        check_int("data.cache_side", self.side, 1, optional=True)

    def size(self, height: int, width: int) -> tuple[int, int]:
        """Height and width after shrinking."""
        shorter = min(height, width)
        if self.side is None or shorter <= self.side:
            return height, width
        longer = int(self.side * max(height, width) / shorter)
        return (self.side, longer) if height <= width else (longer, self.side)

    def keep(self, image: Image.Image) -> Image.Image:
        """The image, shrunk."""
        size = self.size(image.height, image.width)
        return image if size == (image.height, image.width) else F.resize(image, list(size), antialias=True)


# Form in which images are cached. Its repr is part of the file name.
Form = Shrunk | CentralCrop


def _read(paths: Any, read: Callable[[list[Path]], Any], num_workers: int, batch_size: int, what: str) -> Iterable[Any]:
    """Results of `read` for the paths of all images, batch by batch; any sequence is a Dataset."""
    loader = DataLoader(paths, batch_size=batch_size, num_workers=num_workers, collate_fn=read)
    return tqdm(loader, what, delay=3, leave=False, disable=None)


def _kept_sizes(form: Shrunk, paths: list[Path]) -> list[tuple[int, int]]:
    return [_kept_size(form, path) for path in paths]


def _kept_size(form: Shrunk, path: Path) -> tuple[int, int]:
    file, box = split_box(path)
    if box is not None:
        return form.size(box[3], box[2])
    with open_image(file) as image:
        return form.size(*upright_size(image))


def _kept_pixels(form: Form, paths: list[Path]) -> np.ndarray:  # a tensor would take shared memory
    return np.concatenate([np.asarray(form.keep(read_rgb(path))).reshape(-1) for path in paths])


def kept_sizes(table: ImageTable, form: Form, num_workers: int) -> Tensor:
    """(N, 2) int64 height and width of cached images, from file headers.

    Raises UnreadableImage for the first file that cannot be read.
    """
    if isinstance(form, CentralCrop):
        return torch.full((len(table), 2), form.crop)
    num_workers = min(num_workers, len(table) // 1000)  # starting a worker takes as long as reading 1000 headers
    parts = _read(table.paths, partial(_kept_sizes, form), num_workers, 256, "reading image sizes")
    return torch.tensor([size for part in parts for size in part], dtype=torch.int64).view(-1, 2)


def decode_into(values: Tensor, paths: Sequence[Path], form: Form, num_workers: int) -> None:
    """Decode images, in order, into the flat `values`.

    values: uint8 on any device. Raises UnreadableImage for the first file that cannot be read, or if an image does not
    have the size in its header.
    """
    start = 0
    for part in _read(paths, partial(_kept_pixels, form), num_workers, _IMAGES_PER_TASK, "decoding images"):
        flat = torch.from_numpy(part)
        values[start : start + len(flat)].copy_(flat)
        start += len(flat)
    if start != len(values):
        raise UnreadableImage("an image does not have the size that its header states.")


def decode_to_device(
    table: ImageTable, form: Form, sizes: Tensor, device: torch.device, num_workers: int, rank: int, world_size: int
) -> DecodedImages:
    """Decode the images of a table to this rank's device.

    Each rank decodes a share and broadcasts it to the others.
    """
    decoded = DecodedImages(torch.empty(3 * int(sizes.prod(1).sum()), dtype=torch.uint8, device=device), sizes)
    bounds = [len(table) * part // world_size for part in range(world_size + 1)]
    ends = [*decoded.offsets.tolist(), len(decoded.values)]
    shares = [decoded.values[ends[first] : ends[last]] for first, last in pairwise(bounds)]
    decode_into(shares[rank], table.paths[bounds[rank] : bounds[rank + 1]], form, num_workers)
    if world_size > 1:
        for part, share in enumerate(shares):
            dist.broadcast(share, src=part)
    return decoded


def decode_to_file(
    table: ImageTable, form: Form, folder: Path, num_workers: int, *, name: str
) -> tuple[DecodedImages, Path]:
    """Decode the images of a table into a memory-mapped file in `folder`.

    Returns the images and the file. A file of the same images (paths, sizes, modification times) in the same form is
    reused; a file of the same paths with other content is replaced. One process builds while others wait. The file is
    written under a temporary name and renamed, so an existing file is complete.
    Raises UsageError when an image cannot be read, the folder is not writable, or the disk is full.
    """
    paths, content = _fingerprints(table, form)
    target = folder / f"{name}-{paths}-{content}.pixels"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / f"{name}-{paths}.lock"):  # the OS releases it if this process dies
            if (decoded := _open(target, len(table))) is None:
                for stale in folder.glob(f"{name}-{paths}-*"):
                    stale.unlink()
                decoded = _build(target, table, form, num_workers)
    except OSError as error:
        raise UsageError(
            f"decoded images cannot be kept in {folder} ({error.strerror or error}): set data.cache=disk "
            "with a data.cache_dir that is writable and has room, data.cache_side to shrink them, or data.cache=none."
        ) from error
    return decoded, target


def _build(target: Path, table: ImageTable, form: Form, num_workers: int) -> DecodedImages:
    sizes = kept_sizes(table, form, num_workers)
    num_values = 3 * int(sizes.prod(1).sum())
    needed = num_values + 16 * len(table)
    partial_file = target.with_suffix(".partial")
    try:
        with partial_file.open("wb") as file:
            # Reserves the space now: writing to a mapped file on a full disk kills the process.
            os.posix_fallocate(file.fileno(), 0, needed)
        values = torch.from_file(str(partial_file), shared=True, size=needed, dtype=torch.uint8)
        decode_into(values[:num_values], table.paths, form, num_workers)
        values[num_values:].copy_(torch.from_numpy(sizes.numpy().reshape(-1).view(np.uint8)))
        partial_file.rename(target)
    finally:
        partial_file.unlink(missing_ok=True)
    return DecodedImages(values[:num_values], sizes)


def _open(file: Path, num_images: int) -> DecodedImages | None:
    """The images in a file; None if it is missing or incomplete."""
    total = file.stat().st_size if file.is_file() else 0
    if total <= 16 * num_images:
        return None
    values = torch.from_file(str(file), shared=True, size=total, dtype=torch.uint8)
    start = total - 16 * num_images
    sizes = torch.from_numpy(values[start:].numpy().copy().view(np.int64).reshape(-1, 2))
    return DecodedImages(values[:start], sizes) if 3 * int(sizes.prod(1).sum()) == start else None


def _fingerprints(table: ImageTable, form: Form) -> tuple[str, str]:
    """Hash of paths and form, and hash of sizes and modification times."""
    # Earlier versions kept images without their EXIF orientation.
    paths, content = hashlib.sha256(repr(form).encode()), hashlib.sha256(b"upright")
    for path in table.paths:
        status = os.stat(split_box(path)[0])
        paths.update(os.fsencode(path.resolve()) + b"\0")
        content.update(f"{status.st_size} {status.st_mtime_ns}\n".encode())
    return paths.hexdigest()[:12], content.hexdigest()[:12]


def free_memory() -> int:
    """Bytes available for files in SHARED_MEMORY; 0 outside Linux."""
    if not SHARED_MEMORY.is_dir():
        return 0
    # The smallest of: free space, available memory, and the container's limit (cgroup v2).
    limits = [shutil.disk_usage(SHARED_MEMORY).free]
    meminfo = Path("/proc/meminfo").read_text().split("\n")
    limits += [1024 * int(line.split()[1]) for line in meminfo if line.startswith("MemAvailable:")]
    group = Path("/sys/fs/cgroup")
    maximum, current = group / "memory.max", group / "memory.current"
    if maximum.is_file() and current.is_file() and (text := maximum.read_text().strip()) != "max":
        limits.append(int(text) - int(current.read_text()))
    return max(0, min(limits))
