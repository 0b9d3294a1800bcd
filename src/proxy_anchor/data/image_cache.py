"""Images decoded once by worker processes and kept: on the GPU, in shared memory or in a file, instead of anew in every epoch.

Every form holds the same bytes, those that `read_rgb` and the crop's first step give; only the place differs.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms.v2 import functional as F
from tqdm import tqdm

from proxy_anchor.data.augment import CentralCrop
from proxy_anchor.data.images import Pixels, open_image, read_rgb
from proxy_anchor.data.table import ImageTable, shorten
from proxy_anchor.errors import UnreadableImage, UsageError, check_int

SHARED_MEMORY = Path("/dev/shm")  # a file system in memory, shared by processes; absent outside Linux
_IMAGES_PER_TASK = 32  # decoded by a worker before it hands them over


class Form(Protocol):
    """What is kept of an image. Its repr names it in the cache, so that another form is another file."""

    def size(self, height: int, width: int) -> tuple[int, int]:
        """Height and width of what is kept of an image of this size."""
        ...

    def keep(self, image: Image.Image) -> Image.Image:
        """What is kept, RGB."""
        ...


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


class _Headers(Dataset):
    """Item i: the kept size of image i, read from its header, and "" or why it cannot be read."""

    def __init__(self, table: ImageTable, form: Form) -> None:
        self.table, self.form = table, form

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, row: int) -> tuple[tuple[int, int], str]:
        try:
            with open_image(self.table.paths[row]) as image:
                return self.form.size(image.height, image.width), ""
        except UnreadableImage as error:
            return (0, 0), str(error)


class _Decoded(Dataset):
    """Item i: the kept pixels of image i, flat, and "" or why it cannot be read."""

    def __init__(self, table: ImageTable, form: Form) -> None:
        self.table, self.form = table, form

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, row: int) -> tuple[Tensor, str]:
        try:
            image = self.form.keep(read_rgb(self.table.paths[row]))
            return torch.from_numpy(np.array(image).reshape(-1)), ""
        except UnreadableImage as error:
            return torch.empty(0, dtype=torch.uint8), str(error)


def _joined(items: list[tuple[Tensor, str]]) -> tuple[Tensor, list[str]]:
    return torch.cat([flat for flat, _ in items]), [reason for _, reason in items if reason]


def _listed(items: list[tuple[tuple[int, int], str]]) -> tuple[list[tuple[int, int]], list[str]]:
    return [size for size, _ in items], [reason for _, reason in items if reason]


def _refuse(reasons: list[str]) -> None:
    if len(reasons) == 1:
        raise UnreadableImage(reasons[0])
    if reasons:
        raise UnreadableImage(f"{len(reasons)} images cannot be used: {shorten(reasons)}")


def kept_sizes(table: ImageTable, form: Form, num_workers: int) -> Tensor:
    """(N, 2) int64: height and width of what is kept of each image, from the files' headers where they matter.

    Raises UnreadableImage that names the files which cannot be read.
    """
    if isinstance(form, CentralCrop):
        return torch.tensor([form.size(0, 0)]).expand(len(table), 2)
    found: list[tuple[int, int]] = []
    reasons: list[str] = []
    num_workers = min(num_workers, len(table) // 1000)  # starting a process takes as long as reading 1000 headers
    loader = DataLoader(_Headers(table, form), batch_size=256, num_workers=num_workers, collate_fn=_listed)
    for sizes, bad in tqdm(loader, "reading image sizes", delay=3, leave=False):
        found += sizes
        reasons += bad
    _refuse(reasons)
    return torch.tensor(found, dtype=torch.int64).view(-1, 2)


def decode_into(values: Tensor, table: ImageTable, form: Form, sizes: Tensor, num_workers: int) -> None:
    """Decode the images of a table, in order, into the flat `values`, which may live on any device.

    Raises UnreadableImage that names the files which cannot be read, or when one does not have the size in its header.
    """
    loader = DataLoader(_Decoded(table, form), batch_size=_IMAGES_PER_TASK, num_workers=num_workers, collate_fn=_joined)
    start, reasons = 0, []
    for flat, bad in tqdm(loader, "decoding images", delay=3, leave=False):
        reasons += bad
        if not reasons:  # with one image missing the others have no place
            values[start : start + len(flat)].copy_(flat)
            start += len(flat)
    _refuse(reasons)
    if start != 3 * int(sizes.prod(1).sum()):
        raise UnreadableImage("an image does not have the size that its header states.")


def decode_to_device(
    table: ImageTable, form: Form, sizes: Tensor, device: torch.device, num_workers: int, rank: int, world_size: int
) -> Pixels:
    """The pixels of a table on this process's device; each process decodes a share and all receive all of them."""
    pixels = Pixels(torch.empty(3 * int(sizes.prod(1).sum()), dtype=torch.uint8, device=device), sizes)
    bounds = [len(table) * part // world_size for part in range(world_size + 1)]
    ends = [*pixels.offsets.tolist(), len(pixels.values)]
    for part in range(world_size):
        rows = slice(bounds[part], bounds[part + 1])
        share = pixels.values[ends[rows.start] : ends[rows.stop]]
        if part == rank:
            mine = ImageTable(table.paths[rows], table.labels[rows], table.classes)
            decode_into(share, mine, form, sizes[rows], num_workers)
    if world_size > 1:
        for part in range(world_size):
            dist.broadcast(pixels.values[ends[bounds[part]] : ends[bounds[part + 1]]], src=part)
    return pixels


def decode_to_file(table: ImageTable, form: Form, folder: Path, num_workers: int, *, name: str) -> tuple[Pixels, Path]:
    """The pixels of a table in a file of `folder`, mapped into memory, and that file.

    A file that was made of the same images (paths, sizes, modification times) in the same form is used again; one that
    was made of the same paths when they held something else is replaced. Only one process builds at a time, others wait
    for it, and a file that is there is whole: it is written under another name first.
    Raises UsageError when an image cannot be read, the folder may not be written, or the disk has no room.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _not_writable(folder, error) from error
    paths, content = _fingerprints(table, form)
    target = folder / f"{name}-{paths}-{content}.pixels"
    with _lock(folder / f"{name}-{paths}.lock"):
        pixels = _open(target, len(table))
        if pixels is None:
            for stale in folder.glob(f"{name}-{paths}-*"):
                stale.unlink()
            _build(target, table, form, num_workers)
            pixels = _open(target, len(table))
    if pixels is None:
        raise UsageError(f"{target} was removed while it was built: start again, or choose another data.cache_dir.")
    return pixels, target


def _not_writable(folder: Path, error: OSError) -> UsageError:
    return UsageError(
        f"decoded images cannot be kept in {folder} ({error.strerror or error}): set data.cache_dir to a folder that may be "
        "written, or data.cache=none."
    )


def _build(target: Path, table: ImageTable, form: Form, num_workers: int) -> None:
    sizes = kept_sizes(table, form, num_workers)
    num_pixels = 3 * int(sizes.prod(1).sum())
    needed, free = num_pixels + 16 * len(table), shutil.disk_usage(target.parent).free
    if needed > free:
        raise UsageError(
            f"{target.parent} has {free / 1e9:.1f} GB free and the decoded images need {needed / 1e9:.1f} GB: set "
            "data.cache_dir to another disk, data.cache_side to shrink them, or data.cache=none."
        )
    partial = target.with_suffix(".partial")
    try:
        with partial.open("wb") as file:
            os.posix_fallocate(
                file.fileno(), 0, needed
            )  # writing to a mapped file on a full disk would kill the process
        values = torch.from_file(str(partial), shared=True, size=needed, dtype=torch.uint8)
        decode_into(values[:num_pixels], table, form, sizes, num_workers)
        values[num_pixels:].copy_(torch.from_numpy(sizes.numpy().reshape(-1).view(np.uint8)))
        partial.rename(target)
    finally:
        partial.unlink(missing_ok=True)


def _open(file: Path, num_images: int) -> Pixels | None:
    """The pixels in a whole file; None if there is none."""
    if not file.is_file():
        return None
    total = file.stat().st_size
    if total < 16 * num_images:
        return None
    values = torch.from_file(str(file), shared=True, size=total, dtype=torch.uint8)
    start = total - 16 * num_images
    sizes = torch.from_numpy(values[start:].numpy().copy().view(np.int64).reshape(-1, 2))
    return Pixels(values[:start], sizes) if 3 * int(sizes.prod(1).sum()) == start else None


def _fingerprints(table: ImageTable, form: Form) -> tuple[str, str]:
    """Of which files and in which form; and of what those files hold now."""
    paths, content = hashlib.sha256(repr(form).encode()), hashlib.sha256()
    for path in table.paths:
        status = os.stat(path)
        paths.update(os.fsencode(path.resolve()) + b"\0")
        content.update(f"{status.st_size} {status.st_mtime_ns}\n".encode())
    return paths.hexdigest()[:12], content.hexdigest()[:12]


@contextmanager
def _lock(file: Path) -> Iterator[None]:
    """Hold the file's lock; the system releases it also when this process dies."""
    try:
        import fcntl
    except ImportError:  # Windows
        raise UsageError("data.cache=ram and disk need a Unix system: set data.cache=none or gpu.") from None
    try:
        handle = file.open("w")
    except OSError as error:
        raise _not_writable(file.parent, error) from error
    with handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"waiting for another process that decodes the same images ({file}).", flush=True)
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


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
