"""From images to embeddings: prepared as in evaluation, batched, resumable, unreadable ones listed."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from tqdm import tqdm

from proxy_anchor.data.images import ImageInput, InputImages, collate_readable, default_num_workers, input_key
from proxy_anchor.errors import UsageError, check_choice, check_int
from proxy_anchor.inference.checkpoint import TrainedNet

SHARD_IMAGES = 4096  # embedded between two files of a resumable run
_FEW_IMAGES = 64  # below this, starting worker processes takes longer than decoding

# Rows, their embeddings (b, D) and thumbnails; and (row, reason) of what cannot be read.
_Batch = tuple[list[int], np.ndarray, list[bytes], list[tuple[int, str]]]


def choose_device(name: str | torch.device | None = None) -> torch.device:
    """Where the network runs: `name`, or the GPU if there is one. UsageError when it is not there."""
    if name is None or name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UsageError(
            f"device={name} is not available here ({str(error).splitlines()[0]}): use device=cpu."
        ) from error
    return device


@dataclass(frozen=True, eq=False)
class Embedded:
    """What became of N images: those in `rows` (n,) have `embeddings` (n, D) float32 and `thumbnails`, the others a reason.

    skipped: (row, why it could not be read). keys: `input_key` of each kept image. reused: how many came from shards.
    """

    rows: list[int]
    embeddings: Tensor
    thumbnails: list[bytes]
    keys: list[str]
    skipped: list[tuple[int, str]] = field(default_factory=list)
    reused: int = 0


class Embedder:
    """Embeds images with a trained network.

    Args:
        trained: network and preprocessing. device: None takes the GPU if there is one. batch_size: images per step.
        num_workers: decoding processes; None takes the cores of this process, at most 16.
        precision: "32", or "bf16" for the backbone under autocast (similarities move by about 0.01).

    Raises UsageError for a value out of range.
    """

    def __init__(
        self,
        trained: TrainedNet,
        *,
        device: str | torch.device | None = None,
        batch_size: int = 64,
        num_workers: int | None = None,
        precision: str = "32",
    ) -> None:
        check_int("batch_size", batch_size, 1)
        if num_workers is not None:
            check_int("num_workers", num_workers, 0)
        check_choice("precision", precision, ["32", "bf16"])
        self.trained = trained
        self.device = choose_device(device)
        self.batch_size, self.precision = batch_size, precision
        self.num_workers = default_num_workers() if num_workers is None else num_workers
        # Convolutions over channels-last images are faster on both kinds of processor.
        self.net = trained.net.to(self.device).to(memory_format=torch.channels_last).eval()

    @property
    def embedding_dim(self) -> int:
        """D."""
        return self.net.config["embedding_dim"]

    @torch.no_grad()
    def forward(self, pixels: Tensor) -> Tensor:
        """uint8 (B, 3, crop, crop) anywhere to unit vectors (B, D) float32 on the device."""
        on_device = pixels.to(self.device, non_blocking=True).contiguous(memory_format=torch.channels_last)
        autocast = torch.autocast(self.device.type, torch.bfloat16) if self.precision == "bf16" else nullcontext()
        with autocast:
            return self.net(on_device)

    def embed(
        self,
        images: Sequence[ImageInput],
        *,
        shards: Path | str | None = None,
        thumbnail_side: int = 0,
        progress: bool = True,
    ) -> Embedded:
        """Embed what can be read, in order.

        shards: a folder in which finished parts are kept; the same call after an interruption embeds only the rest, and
        so does one with some images more, fewer or changed. thumbnail_side: see `InputImages`.
        progress: a bar on stderr where that is a terminal.
        Raises UsageError when embeddings hold NaN or infinity.
        """
        keys = [input_key(image) for image in images] if shards is not None or thumbnail_side else [""] * len(images)
        table = np.empty((len(images), self.embedding_dim), np.float32)
        small, done = [b""] * len(images), np.zeros(len(images), bool)
        variant = f"{self.trained.fingerprint}-{self.precision}-{thumbnail_side}" if shards is not None else ""
        store = _Shards(Path(shards) / variant, keys) if shards is not None else None
        for row, (embedding, thumbnail) in (store.read() if store else {}).items():
            table[row], small[row], done[row] = embedding, thumbnail, True
        todo = np.flatnonzero(~done).tolist()
        reused, skipped = len(images) - len(todo), []
        bar = tqdm(total=len(images), initial=reused, unit=" images", disable=None if progress else True)
        pending: list[int] = []
        try:
            for chosen, embeddings, thumbnails, unreadable in self._batches(images, todo, thumbnail_side):
                table[chosen], done[chosen] = embeddings, True
                for row, thumbnail in zip(chosen, thumbnails, strict=True):
                    small[row] = thumbnail
                skipped += unreadable
                pending += chosen
                bar.update(len(chosen) + len(unreadable))
                if store and len(pending) >= SHARD_IMAGES:
                    store.write(pending, table[pending], [small[row] for row in pending])
                    pending = []
        finally:  # an interruption loses nothing that was embedded
            bar.close()
            if store and pending:
                store.write(pending, table[pending], [small[row] for row in pending])
        rows = np.flatnonzero(done).tolist()
        whole = torch.from_numpy(table if len(rows) == len(images) else table[rows])
        return Embedded(rows, whole, [small[r] for r in rows], [keys[r] for r in rows], skipped, reused)

    def _batches(self, images: Sequence[ImageInput], todo: Sequence[int], thumbnail_side: int) -> Iterator[_Batch]:
        loader = DataLoader(
            InputImages([images[row] for row in todo], self.trained.prepare, thumbnail_side=thumbnail_side),
            batch_size=self.batch_size,
            num_workers=0 if len(todo) <= _FEW_IMAGES else self.num_workers,
            collate_fn=collate_readable,
            pin_memory=self.device.type == "cuda",
        )
        for places, pixels, thumbnails, skipped in loader:
            found = self.forward(pixels) if places else torch.empty(0, self.embedding_dim)
            if bad := int((~found.isfinite()).any(1).sum()):
                raise UsageError(
                    f"{bad} of {len(found)} embeddings of a batch hold NaN or infinity: the network is broken."
                )
            unreadable = [(todo[each], reason) for each, reason in skipped]
            yield [todo[each] for each in places], found.cpu().numpy(), thumbnails, unreadable


class _Shards:
    """Files of finished embeddings, found again by the images' keys, whatever else is in the folder."""

    def __init__(self, folder: Path, keys: Sequence[str]) -> None:
        self.folder, self.keys = folder, keys

    def read(self) -> dict[int, tuple[np.ndarray, bytes]]:
        """{row: (embedding (D,), thumbnail)} of the images that have been done before."""
        found: dict[str, tuple[np.ndarray, bytes]] = {}
        for file in sorted(self.folder.glob("[0-9]*.npz")):
            try:
                with np.load(file, allow_pickle=False) as shard:
                    packed = shard["thumbnails"].tobytes()
                    small = [packed[start:end] for start, end in shard["thumbnail_bounds"].tolist()]
                    found.update(zip(shard["keys"].tolist(), zip(shard["embeddings"], small, strict=True), strict=True))
            except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
                file.unlink(missing_ok=True)  # cut short by something else than us: its images are embedded again
        return {row: found[key] for row, key in enumerate(self.keys) if key in found}

    def write(self, rows: Sequence[int], embeddings: np.ndarray, thumbnails: Sequence[bytes]) -> None:
        """One file more, of these rows with their embeddings (n, D) and thumbnails, written aside and renamed."""
        self.folder.mkdir(parents=True, exist_ok=True)
        number = max((int(each.stem) for each in self.folder.glob("[0-9]*.npz")), default=-1) + 1
        file = self.folder / f"{number:06d}.npz"
        aside = file.with_suffix(".tmp")
        lengths = np.array([len(each) for each in thumbnails], dtype=np.int64)
        with aside.open("wb") as stream:
            np.savez(
                stream,
                keys=np.array([self.keys[row] for row in rows]),
                embeddings=embeddings,
                thumbnail_bounds=np.stack([lengths.cumsum() - lengths, lengths.cumsum()], axis=1),
                thumbnails=np.frombuffer(b"".join(thumbnails), dtype=np.uint8),
            )
        aside.replace(file)
