"""Images decoded once by worker processes and kept: on the GPU, in shared memory or in a file, instead of anew in every epoch.

Every form holds the same bytes, those that `read_rgb` and the crop's first step give; only the place differs.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
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
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms.v2 import functional as F
from tqdm import tqdm

from proxy_anchor.data.augment import CentralCrop
from proxy_anchor.data.images import DecodedImages, open_image, read_rgb
from proxy_anchor.data.table import ImageTable, shorten
from proxy_anchor.errors import UnreadableImage, UsageError, check_int

SHARED_MEMORY = Path("/dev/shm")  # a file system in memory, shared by processes; absent outside Linux
_IMAGES_PER_TASK = 32  # decoded by a worker before it hands them over


@dataclass(frozen=True)
class Shrunk:
    """Training images: as stored, or the shorter side reduced to `side` pixels where it is longer."""

    side: int | None = None

    def __post_init__(self) -> None:
        if self.side is not None:
            check_int("data.cache_side", self.side, 1)

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


# What is kept of an image. Its repr names it in the cache, so that another form is another file.
Form = Shrunk | CentralCrop


class _Reading(Dataset):
    """Item i: what `read` makes of image i, and "" or why it cannot be read."""

    def __init__(self, paths: Sequence[Path], read: Callable[[Path], Any]) -> None:
        self.paths, self.read = paths, read

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, row: int) -> tuple[Any, str]:
        try:
            return self.read(self.paths[row]), ""
        except UnreadableImage as error:
            return None, str(error)


def _read(
    table: ImageTable, read: Callable[[Path], Any], num_workers: int, batch_size: int, what: str
) -> Iterator[list]:
    """Lists of what `read` makes of the images, in order. Raises UnreadableImage that names all unreadable ones."""
    loader = DataLoader(_Reading(table.paths, read), batch_size=batch_size, num_workers=num_workers, collate_fn=list)
    reasons: list[str] = []
    for items in tqdm(loader, what, delay=3, leave=False):
        reasons += [reason for _, reason in items if reason]
        if not reasons:  # with one image missing the others have no place
            yield [value for value, _ in items]
    if reasons:
        several = f"{len(reasons)} images cannot be used: {shorten(reasons)}"
        raise UnreadableImage(reasons[0] if len(reasons) == 1 else several)


def _kept_size(form: Form, path: Path) -> tuple[int, int]:
    with open_image(path) as image:
        return form.size(image.height, image.width)


def _kept_pixels(form: Form, path: Path) -> np.ndarray:
    return np.asarray(form.keep(read_rgb(path))).reshape(-1)


def kept_sizes(table: ImageTable, form: Form, num_workers: int) -> Tensor:
    """(N, 2) int64: height and width of what is kept of each image, from the files' headers where they matter.

    Raises UnreadableImage that names the files which cannot be read.
    """
    if isinstance(form, CentralCrop):
        return torch.tensor([form.size(0, 0)]).expand(len(table), 2)
    num_workers = min(num_workers, len(table) // 1000)  # starting a process takes as long as reading 1000 headers
    parts = _read(table, partial(_kept_size, form), num_workers, 256, "reading image sizes")
    return torch.tensor([size for part in parts for size in part], dtype=torch.int64).view(-1, 2)


def decode_into(values: Tensor, table: ImageTable, form: Form, num_workers: int) -> None:
    """Decode the images of a table, in order, into the flat `values`, which may live on any device.

    Raises UnreadableImage that names the files which cannot be read, or when one does not have the size in its header.
    """
    start = 0
    for part in _read(table, partial(_kept_pixels, form), num_workers, _IMAGES_PER_TASK, "decoding images"):
        flat = torch.from_numpy(np.concatenate(part))
        values[start : start + len(flat)].copy_(flat)
        start += len(flat)
    if start != len(values):
        raise UnreadableImage("an image does not have the size that its header states.")


def decode_to_device(
    table: ImageTable, form: Form, sizes: Tensor, device: torch.device, num_workers: int, rank: int, world_size: int
) -> DecodedImages:
    """The pixels of a table on this process's device; each process decodes a share and all receive all of them."""
    pixels = DecodedImages(torch.empty(3 * int(sizes.prod(1).sum()), dtype=torch.uint8, device=device), sizes)
    bounds = [len(table) * part // world_size for part in range(world_size + 1)]
    ends = [*pixels.offsets.tolist(), len(pixels.values)]
    shares = [pixels.values[ends[first] : ends[last]] for first, last in pairwise(bounds)]
    rows = slice(bounds[rank], bounds[rank + 1])
    mine = ImageTable(table.paths[rows], table.labels[rows], table.classes)
    decode_into(shares[rank], mine, form, num_workers)
    if world_size > 1:
        for part, share in enumerate(shares):
            dist.broadcast(share, src=part)
    return pixels


def decode_to_file(
    table: ImageTable, form: Form, folder: Path, num_workers: int, *, name: str
) -> tuple[DecodedImages, Path]:
    """The pixels of a table in a file of `folder`, mapped into memory, and that file.

    A file that was made of the same images (paths, sizes, modification times) in the same form is used again; one that
    was made of the same paths when they held something else is replaced. Only one process builds at a time, others wait
    for it, and a file that is there is whole: it is written under another name first.
    Raises UsageError when an image cannot be read, the folder may not be written, or the disk has no room.
    """
    paths, content = _fingerprints(table, form)
    target = folder / f"{name}-{paths}-{content}.pixels"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / f"{name}-{paths}.lock"):  # the system releases it also when this process dies
            pixels = _open(target, len(table))
            if pixels is None:
                for stale in folder.glob(f"{name}-{paths}-*"):
                    stale.unlink()
                pixels = _build(target, table, form, num_workers)
    except OSError as error:
        raise UsageError(
            f"decoded images cannot be kept in {folder} ({error.strerror or error}): set data.cache_dir to a folder that may "
            "be written and has room, data.cache_side to shrink them, or data.cache=none."
        ) from error
    return pixels, target


def _build(target: Path, table: ImageTable, form: Form, num_workers: int) -> DecodedImages:
    sizes = kept_sizes(table, form, num_workers)
    num_values = 3 * int(sizes.prod(1).sum())
    needed = num_values + 16 * len(table)
    partial_file = target.with_suffix(".partial")
    try:
        with partial_file.open("wb") as file:
            # Writing to a mapped file on a full disk would kill the process.
            os.posix_fallocate(file.fileno(), 0, needed)
        values = torch.from_file(str(partial_file), shared=True, size=needed, dtype=torch.uint8)
        decode_into(values[:num_values], table, form, num_workers)
        values[num_values:].copy_(torch.from_numpy(sizes.numpy().reshape(-1).view(np.uint8)))
        partial_file.rename(target)
    finally:
        partial_file.unlink(missing_ok=True)
    return DecodedImages(values[:num_values], sizes)


def _open(file: Path, num_images: int) -> DecodedImages | None:
    """The pixels in a whole file; None if there is none."""
    if not file.is_file():
        return None
    total = file.stat().st_size
    if total < 16 * num_images:
        return None
    values = torch.from_file(str(file), shared=True, size=total, dtype=torch.uint8)
    start = total - 16 * num_images
    sizes = torch.from_numpy(values[start:].numpy().copy().view(np.int64).reshape(-1, 2))
    return DecodedImages(values[:start], sizes) if 3 * int(sizes.prod(1).sum()) == start else None


def _fingerprints(table: ImageTable, form: Form) -> tuple[str, str]:
    """Of which files and in which form; and of what those files hold now."""
    paths, content = hashlib.sha256(repr(form).encode()), hashlib.sha256()
    for path in table.paths:
        status = os.stat(path)
        paths.update(os.fsencode(path.resolve()) + b"\0")
        content.update(f"{status.st_size} {status.st_mtime_ns}\n".encode())
    return paths.hexdigest()[:12], content.hexdigest()[:12]


def free_memory() -> int:
    """Bytes of memory that files in SHARED_MEMORY may take without pushing other processes out; 0 outside Linux."""
    if not SHARED_MEMORY.is_dir():
        return 0
    # A container's limit shows in neither of the two where it is the smallest: cgroup v2's own file.
    limits = [shutil.disk_usage(SHARED_MEMORY).free]
    meminfo = Path("/proc/meminfo").read_text().split("\n")
    limits += [1024 * int(line.split()[1]) for line in meminfo if line.startswith("MemAvailable:")]
    group = Path("/sys/fs/cgroup")
    maximum, current = group / "memory.max", group / "memory.current"
    if maximum.is_file() and current.is_file() and (text := maximum.read_text().strip()) != "max":
        limits.append(int(text) - int(current.read_text()))
    return max(0, min(limits))
