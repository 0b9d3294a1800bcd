"""JPEG files decoded and cropped on the graphics card: for embedding many images once, where processors are too slow.

Only what a decoder cannot misunderstand goes there: whole files of 8-bit grey or YCbCr pixels. Everything else, and
everything that the card refuses, takes the way through Pillow, which also says what is wrong with a file.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from threading import Lock

import numpy as np
import torch
from torch import Tensor
from torchvision.transforms.v2 import functional as F

from proxy_anchor.data.augment import CentralCrop
from proxy_anchor.data.images import THUMBNAIL_QUALITY, InputImages, Prepared, collate_readable
from proxy_anchor.data.resample import resample
from proxy_anchor.errors import UsageError

_PIXELS_AT_ONCE = 128_000_000  # decoded between two crops: 0.4 GB, a batch of 64 photographs of 2 megapixels
_LOCK = Lock()  # one call at a time on the decoders' stream: see `CardDecoder._keep`
_PILLOW = Lock()  # one picture from bytes at a time: it is opened under changed rules for warnings, which threads share
_PARTS_IN_USE = 1  # that may still be cropped, their memory kept, while the next is decoded
_PLAIN_FRAMES = {0xC0, 0xC1, 0xC2}  # baseline, extended and progressive with Huffman codes (ITU T.81, table B.1)
_ADOBE = 0xEE  # may say that the three components are RGB, or inverted
_STANDALONE = {0x01, *range(0xD0, 0xD8)}  # markers without a length


def plain_size(content: bytes | bytearray) -> tuple[int, int] | None:
    """Height and width of a whole JPEG file of 8-bit grey or YCbCr pixels; None for any other content."""
    if content[:2] != b"\xff\xd8" or b"\xff\xd9" not in content[-64:]:
        return None
    place = 2
    while place + 9 < len(content):
        if content[place] != 0xFF:
            return None
        marker = content[place + 1]
        if marker == 0xFF:  # fill bytes are allowed before a marker
            place += 1
        elif marker in _STANDALONE:
            place += 2
        elif marker in _PLAIN_FRAMES:
            precision, components = content[place + 4], content[place + 9]
            height, width = (int.from_bytes(content[place + i : place + i + 2], "big") for i in (5, 7))
            return (height, width) if precision == 8 and components in (1, 3) and height and width else None
        elif marker == _ADOBE or (0xC3 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC)):
            return None
        else:
            place += 2 + int.from_bytes(content[place + 2 : place + 4], "big")
    return None


@dataclass(frozen=True)
class EncodedBatch:
    """rows of the images in `files` (each a file's bytes, uint8) with their `sizes`; `others` went through Pillow."""

    rows: list[int]
    files: list[Tensor]
    sizes: list[tuple[int, int]]
    others: tuple[list[int], Tensor, list[bytes], list[tuple[int, str]]]


class EncodedImages:
    """The files of `images`: plain JPEG files as they are, anything else as `images` has it.

    For threads: reading leaves Python's lock to others, and what was read is where the decoder needs it.
    """

    def __init__(self, images: InputImages) -> None:
        self.images = images

    def read(self, rows: Sequence[int]) -> EncodedBatch:
        """The batch of these rows."""
        encoded, others = [], []
        for row in rows:
            content = self._content(row)
            size = plain_size(content)
            if size is None or size[0] * size[1] > _PIXELS_AT_ONCE:  # Pillow's limits decide about those
                others.append(_by_pillow(self.images, row))
            else:
                encoded.append((row, torch.frombuffer(content, dtype=torch.uint8), size))
        files, sizes = [content for _, content, _ in encoded], [size for *_, size in encoded]
        return EncodedBatch([row for row, *_ in encoded], files, sizes, collate_readable(others))

    def _content(self, row: int) -> bytearray:
        """A file's bytes; none of what is no file, or cannot be read: then Pillow says why."""
        image = self.images.images[row]
        if isinstance(image, bytes):
            return bytearray(image)
        if not isinstance(image, (str, Path)):
            return bytearray()
        try:
            with open(image, "rb", buffering=0) as file:  # three calls to the system, where Path.read_bytes makes more
                content = bytearray(os.fstat(file.fileno()).st_size)
                del content[file.readinto(content) :]
                return content
        except (OSError, ValueError):
            return bytearray()


def _by_pillow(images: InputImages, row: int) -> Prepared:
    with _PILLOW if isinstance(images.images[row], bytes) else nullcontext():
        return images[row]


class CardDecoder:
    """Batches of `EncodedImages` to pixels on a device, on a stream of its own.

    Args:
        images: what a file takes that the card cannot decode. prepare: the central crop, as Pillow makes it; values differ
            by at most 1 of 255 from the crop of the same decoded image. (Decoders differ by more: see docs/search.md.)
        device: the card; a CPU for tests.

    Whoever has taken the last batch, or gives up before, calls `close`.
    Raises UsageError when this build of torchvision cannot decode there.
    """

    def __init__(self, images: InputImages, prepare: CentralCrop, device: torch.device) -> None:
        self.images, self.prepare, self.device = images, prepare, device
        self._stream = _decoding_stream(device) if device.type == "cuda" else None
        self._in_use: deque[tuple[torch.cuda.Event, Sequence[Tensor]]] = deque()
        try:
            # Deprecated in torchvision 0.29 for TorchCodec, which 2.11 to 2.14 of torch do not all have a release of.
            from torchvision import io

            self._io = io
            with _LOCK, torch.cuda.stream(self._stream):
                if self._stream is not None:
                    self._stream.synchronize()  # for one that was given up
                io.decode_jpeg(io.encode_jpeg(torch.zeros(3, 16, 16, dtype=torch.uint8)), device=device)
        except (RuntimeError, ImportError, AttributeError) as error:
            reason = str(error).splitlines()[0]
            raise UsageError(
                f"embed.decode=gpu: JPEG files cannot be decoded on {device} ({reason}): use cpu."
            ) from error

    def __call__(
        self, batch: EncodedBatch
    ) -> tuple[list[int], Callable[[], Tensor], list[bytes], list[tuple[int, str]]]:
        """Rows, a function that hands over their pixels uint8 (b, 3, crop, crop), thumbnails, and (row, reason) of the others.

        The function is called where the pixels are used: that stream waits for this one.
        """
        rows, pixels, thumbnails, skipped = batch.others
        rows, thumbnails, skipped = list(rows), list(thumbnails), list(skipped)
        with _LOCK, torch.cuda.stream(self._stream):
            parts = [pixels.to(self.device)] if len(rows) else []
            for part in self._parts(batch):
                crops, small = self._decode([batch.files[i] for i in part], [batch.sizes[i] for i in part])
                if crops is None:  # one of them is damaged: Pillow says which, and how
                    found, crops, small, bad = collate_readable([_by_pillow(self.images, batch.rows[i]) for i in part])
                    rows, skipped = rows + found, skipped + bad
                    crops = crops.to(self.device)
                else:
                    rows = rows + [batch.rows[i] for i in part]
                thumbnails = thumbnails + small
                parts += [crops] if len(crops) else []
            if len(parts) > 1:
                joined = torch.cat(parts)
                self._keep([*parts, joined])
            else:
                joined = parts[0] if parts else torch.empty(0, 3, 0, 0, dtype=torch.uint8)
        return rows, self._handed_over(joined), thumbnails, skipped

    def close(self) -> None:
        """Wait for the last crops: another decoder may be given this one's memory."""
        with _LOCK:
            self._free(0)

    def _parts(self, batch: EncodedBatch) -> Iterator[list[int]]:
        """Positions of a batch's files, as many at once as memory is meant to hold decoded."""
        part: list[int] = []
        pixels = 0
        for position, (height, width) in enumerate(batch.sizes):
            if part and pixels + height * width > _PIXELS_AT_ONCE:
                yield part
                part, pixels = [], 0
            part.append(position)
            pixels += height * width
        if part:
            yield part

    def _decode(self, files: list[Tensor], sizes: list[tuple[int, int]]) -> tuple[Tensor | None, list[bytes]]:
        self._free(_PARTS_IN_USE)
        # Sizes are known before anything is decoded: what the crops need is on its way while the engine works.
        windows, targets = central_windows(np.array(sizes), self.prepare)
        table = self._sent(torch.from_numpy(np.concatenate([targets, windows], axis=None)))
        try:
            images = self._io.decode_jpeg(files, mode=self._io.ImageReadMode.RGB, device=self.device)
            is_whole = [tuple(image.shape[1:]) for image in images] == sizes
        except RuntimeError:
            is_whole = False
        if not is_whole:
            if self._stream is not None:
                torch.cuda.synchronize(self.device)  # what was begun ends before its memory is used again
            return None, []
        # Few calls, each for the whole batch: the thread that runs the network waits for Python while this one has it.
        flat = torch.cat([image.reshape(-1) for image in images])
        split = targets.size
        crops = resample(flat, table[split:].view(-1, 5), self.prepare.crop, table[:split].view(-1, 4))
        self._keep([table, flat, crops, *images])  # crops too: a batch that is given up goes before it is written
        return crops, self._thumbnails(images) if self.images.thumbnail_side else [b""] * len(images)

    def _sent(self, table: Tensor) -> Tensor:
        """The table on the device, without waiting for its stream."""
        return table.pin_memory().to(self.device, non_blocking=True) if self._stream is not None else table

    # The card's decoding engine does not wait for its stream, and writes into memory that kernels queued there may still
    # read (pytorch/vision#9606). So no memory goes back before its kernels are done, and the engine need not wait for them.
    def _keep(self, tensors: Sequence[Tensor]) -> None:
        if self._stream is not None:
            self._in_use.append((self._stream.record_event(), tensors))

    def _free(self, still_in_use: int) -> None:
        while self._in_use and (len(self._in_use) > still_in_use or self._in_use[0][0].query()):
            done, tensors = self._in_use.popleft()
            done.synchronize()
            del tensors

    def _thumbnails(self, images: list[Tensor]) -> list[bytes]:
        small = []
        for image in images:
            height, width = image.shape[1:]
            shrink = min(1.0, self.images.thumbnail_side / max(height, width))
            small.append(
                F.resize(image, [max(1, round(height * shrink)), max(1, round(width * shrink))], antialias=True)
            )
        if self._stream is not None:
            self._stream.synchronize()
        return [bytes(each.cpu().numpy()) for each in self._io.encode_jpeg(small, quality=THUMBNAIL_QUALITY)]

    def _handed_over(self, pixels: Tensor) -> Callable[[], Tensor]:
        if self._stream is None:
            return lambda: pixels
        done = self._stream.record_event()

        def take() -> Tensor:
            user = torch.cuda.current_stream(self.device)
            user.wait_event(done)
            if pixels.is_cuda:
                pixels.record_stream(user)  # its memory is not given away before the user has read it
            return pixels

        return take


def allow_many_streams() -> None:
    """Keep the decoder, which uses a dozen streams, from queueing behind the network: streams share a card's eight queues otherwise.

    A process that has used the card before keeps what it had; so does one whose environment says otherwise.
    """
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")


@cache
def _decoding_stream(device: torch.device) -> torch.cuda.Stream:
    """One for every decoder on a card, as memory stays with its stream; ahead of the network, which has work in reserve."""
    return torch.cuda.Stream(device, priority=-1)


def central_windows(sizes: np.ndarray, prepare: CentralCrop) -> tuple[np.ndarray, np.ndarray]:
    """Windows (B, 5) and targets (B, 4) for `resample` that make the central crops of images that lie behind one another.

    sizes: (B, 2) heights and widths.
    """
    heights, widths = sizes.astype(np.int64).T
    lengths = 3 * heights * widths
    starts = lengths.cumsum() - lengths
    # torchvision's rules: the longer side is cut to an integer, the central crop rounded.
    shorter, longer = np.minimum(heights, widths), np.maximum(heights, widths)
    long_side = (prepare.resize * longer / shorter).astype(np.int64)
    tall = heights > widths
    resized_h, resized_w = np.where(tall, long_side, prepare.resize), np.where(tall, prepare.resize, long_side)
    top, left = (np.rint((side - prepare.crop) / 2.0).astype(np.int64) for side in (resized_h, resized_w))
    windows = np.stack([starts, widths, heights, widths, np.zeros_like(starts)], axis=1)
    return windows, np.stack([resized_h, resized_w, top, left], axis=1)
