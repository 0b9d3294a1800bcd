"""JPEG files decoded and cropped on the graphics card: for embedding many images once, where processors are too slow.

Only what a decoder cannot misunderstand goes there: whole files of 8-bit grey or YCbCr pixels. Everything else, and
everything that the card refuses, takes the way through Pillow, which also says what is wrong with a file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset
from torchvision.transforms.v2 import functional as F

from proxy_anchor.data.crops import CentralCrop
from proxy_anchor.data.inputs import THUMBNAIL_QUALITY, InputImages, Prepared, collate_readable
from proxy_anchor.data.resample import resample
from proxy_anchor.errors import UsageError

_PIXELS_AT_ONCE = 128_000_000  # decoded between two crops: 0.4 GB, a batch of 64 photographs of 2 megapixels
_PLAIN_FRAMES = {0xC0, 0xC1, 0xC2}  # baseline, extended and progressive with Huffman codes (ITU T.81, table B.1)
_ADOBE = 0xEE  # may say that the three components are RGB, or inverted
_STANDALONE = {0x01, *range(0xD0, 0xD8)}  # markers without a length

Item = Prepared | tuple[int, Tensor, tuple[int, int]]


def plain_size(content: bytes) -> tuple[int, int] | None:
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
    files: Tensor
    ends: list[int]
    sizes: list[tuple[int, int]]
    others: tuple[list[int], Tensor, list[bytes], list[tuple[int, str]]]

    def each_file(self) -> list[Tensor]:
        """The files' bytes, one tensor each."""
        return [self.files[start:end] for start, end in pairwise([0, *self.ends])]


class EncodedImages(Dataset):
    """Item i is (i, bytes, size) of a plain JPEG file, or what `images` has for anything else."""

    def __init__(self, images: InputImages) -> None:
        self.images = images

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, row: int) -> Item:
        image = self.images.images[row]
        content = image if isinstance(image, bytes) else b""
        if isinstance(image, (str, Path)):
            try:
                content = Path(image).read_bytes()
            except (OSError, ValueError):
                return self.images[row]  # which says why
        size = plain_size(content)
        if size is None or size[0] * size[1] > _PIXELS_AT_ONCE:  # Pillow's limits decide about those
            return self.images[row]
        return row, torch.from_numpy(np.frombuffer(content, np.uint8).copy()), size

    @staticmethod
    def collate(items: Sequence[Item]) -> EncodedBatch:
        """Bytes behind one another: one block of memory travels between processes."""
        encoded = [item for item in items if len(item) == 3]
        ends = np.cumsum([len(content) for _, content, _ in encoded], dtype=np.int64).tolist()
        files = torch.cat([content for _, content, _ in encoded]) if encoded else torch.empty(0, dtype=torch.uint8)
        others = collate_readable([item for item in items if len(item) != 3])
        return EncodedBatch([row for row, _, _ in encoded], files, ends, [size for *_, size in encoded], others)


class CardDecoder:
    """Batches of `EncodedImages` to pixels on a device, on a stream of its own.

    Args:
        images: what a file takes that the card cannot decode. prepare: the central crop, as Pillow makes it; values differ
            by at most 1 of 255 from the crop of the same decoded image. (Decoders differ by more: see docs/search.md.)
        device: the card; a CPU for tests.

    Raises UsageError when this build of torchvision cannot decode there.
    """

    def __init__(self, images: InputImages, prepare: CentralCrop, device: torch.device) -> None:
        self.images, self.prepare, self.device = images, prepare, device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        try:
            # Deprecated in torchvision 0.29 for TorchCodec, which 2.11 to 2.14 of torch do not all have a release of.
            from torchvision import io

            self._io = io
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
        rows, thumbnails, skipped, files = list(rows), list(thumbnails), list(skipped), batch.each_file()
        with torch.cuda.stream(self._stream):
            parts = [pixels.to(self.device)] if len(rows) else []
            for part in self._parts(batch):
                crops, small = self._decode([files[i] for i in part], [batch.sizes[i] for i in part])
                if crops is None:  # one of them is damaged: Pillow says which, and how
                    found, crops, small, bad = collate_readable([self.images[batch.rows[i]] for i in part])
                    rows, skipped = rows + found, skipped + bad
                    crops = crops.to(self.device)
                else:
                    rows = rows + [batch.rows[i] for i in part]
                thumbnails = thumbnails + small
                parts += [crops] if len(crops) else []
            joined = torch.cat(parts) if parts else torch.empty(0, 3, 0, 0, dtype=torch.uint8)
        return rows, self._handed_over(joined), thumbnails, skipped

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
        # The card's decoding engine does not wait for its stream, and writes into memory that kernels queued there may
        # still read (pytorch/vision#9606): nothing may be queued when it starts.
        if self._stream is not None:
            self._stream.synchronize()
        try:
            images = self._io.decode_jpeg(files, mode=self._io.ImageReadMode.RGB, device=self.device)
        except RuntimeError:
            return None, []
        if [tuple(image.shape[1:]) for image in images] != sizes:
            return None, []
        # Few calls, each for the whole batch: the thread that runs the network waits for Python while this one has it.
        flat = torch.cat([image.reshape(-1) for image in images])
        windows, targets = central_windows(np.array(sizes), self.prepare)
        table = torch.from_numpy(np.concatenate([windows, targets], axis=1)).to(self.device)
        crops = resample(flat, table[:, :5].contiguous(), self.prepare.crop, table[:, 5:].contiguous())
        return crops, self._thumbnails(images) if self.images.thumbnail_side else [b""] * len(images)

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
