"""From images to embeddings: prepared as in evaluation, batched, resumable, unreadable ones listed."""

from __future__ import annotations

import zipfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import closing, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from tqdm import tqdm

from proxy_anchor.data.images import ImageInput, InputImages, collate_readable, default_num_workers, input_key
from proxy_anchor.errors import UsageError, check_choice, check_int
from proxy_anchor.inference.checkpoint import TrainedNet
from proxy_anchor.inference.jpeg import CardDecoder, EncodedImages, allow_many_streams
from proxy_anchor.inference.recorded import Recorded, record
from proxy_anchor.utils import Fetch

SHARD_IMAGES = 4096  # embedded between two files of a resumable run
_FEW_IMAGES = 64  # below this, starting worker processes takes longer than decoding
_BATCHES_AHEAD = 2  # decoded on the card before the network takes them
_LONG_S = 0.01  # of waiting for a batch of files
_MANY_BATCHES = 8  # from here on, recording the network's kernels takes less time than it saves

# Places, pixels, thumbnails, skipped; and the same with embeddings.
_Pixels = tuple[list[int], Tensor, list[bytes], list[tuple[int, str]]]
_Batch = tuple[list[int], Fetch, list[bytes], list[tuple[int, str]]]
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


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
        num_workers: decoding processes, or threads that read files for the card; None takes the cores of this process, at
            most 16.
        precision: "32", or "bf16" for the backbone under autocast (similarities move by about 0.01).
        decode: "cpu" reads images as training's evaluation does; "gpu" decodes JPEG files on the card, whose decoder rounds
            otherwise (see docs/search.md), and everything else as before.

    On a card, a long run records the network for whole batches (see `record`) and keeps that with its memory for the next.
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
        decode: str = "cpu",
    ) -> None:
        check_int("batch_size", batch_size, 1)
        if num_workers is not None:
            check_int("num_workers", num_workers, 0)
        check_choice("precision", precision, ["32", "bf16"])
        check_choice("decode", decode, ["cpu", "gpu"])
        if decode == "gpu":
            allow_many_streams()
        self.trained = trained
        self.device = choose_device(device)
        if decode == "gpu" and self.device.type != "cuda":
            raise UsageError(
                f"embed.decode=gpu decodes on a graphics card, and the network runs on {self.device}: use cpu."
            )
        self.batch_size, self.num_workers, self.precision, self.decode = batch_size, num_workers, precision, decode
        # Convolutions over channels-last images are faster on both kinds of processor.
        self.net = trained.net.to(self.device).to(memory_format=torch.channels_last).eval()
        self._recorded: Recorded | None = None

    @property
    def embedding_dim(self) -> int:
        """D."""
        return self.net.config["embedding_dim"]

    @torch.no_grad()
    def forward(self, pixels: Tensor) -> Tensor:
        """uint8 (B, 3, crop, crop) anywhere to unit vectors (B, D) float32 on the device."""
        # A recorded batch takes its whole time however few images are in it.
        if self._recorded is not None and self.batch_size < 2 * len(pixels) <= 2 * self.batch_size:
            return self._recorded(pixels)
        return self.forward_unrecorded(pixels)

    @torch.no_grad()
    def record(self) -> None:
        """Have `forward` replay the network's kernels for whole batches, where there is a card and the network allows it."""
        if self.device.type == "cuda" and self._recorded is None:
            side = self.trained.prepare.crop
            pixels = torch.zeros(self.batch_size, 3, side, side, dtype=torch.uint8, device=self.device)
            pixels = pixels.contiguous(memory_format=torch.channels_last)
            self._recorded = record(self.forward_unrecorded, pixels, keep=self.net)

    @torch.no_grad()
    def forward_unrecorded(self, pixels: Tensor) -> Tensor:
        """As `forward`, kernel by kernel."""
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
        store = _Shards(Path(shards) / self._variant(thumbnail_side), keys) if shards is not None else None
        for row, (embedding, thumbnail) in (store.read() if store else {}).items():
            table[row], small[row], done[row] = embedding, thumbnail, True
        todo = np.flatnonzero(~done).tolist()
        reused, skipped = len(images) - len(todo), []
        bar = tqdm(total=len(images), initial=reused, unit=" images", disable=None if progress else True)
        pending: list[int] = []
        try:
            for chosen, embeddings, thumbnails, unreadable in self._batches(images, todo, thumbnail_side):
                table[chosen], done[chosen] = embeddings, True
                if thumbnail_side:
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
        return Embedded(rows, whole, [small[r] for r in rows], [keys[r] for r in rows], sorted(skipped), reused)

    def _batches(
        self, images: Sequence[ImageInput], todo: Sequence[int], thumbnail_side: int
    ) -> Iterable[tuple[list[int], np.ndarray, list[bytes], list[tuple[int, str]]]]:
        dataset = InputImages([images[row] for row in todo], self.trained.prepare, thumbnail_side=thumbnail_side)
        if len(dataset) >= _MANY_BATCHES * self.batch_size:
            self.record()
        # One batch behind: the GPU works on the next batch while this one's embeddings are checked and stored.
        waiting: _Batch | None = None
        for places, pixels, thumbnails, skipped in self.pixels(dataset):
            found = Fetch(self.forward(pixels) if places else torch.empty(0, self.embedding_dim))
            if waiting is not None:
                yield self._finish(waiting, todo)
            waiting = (places, found, thumbnails, skipped)
        if waiting is not None:
            yield self._finish(waiting, todo)

    def pixels(self, dataset: InputImages) -> Iterator[_Pixels]:
        """What the network is given, batch by batch: see `collate_readable`."""
        workers = default_num_workers() if self.num_workers is None else self.num_workers
        if self.decode == "gpu":
            yield from self._decoded_on_card(dataset, max(1, workers))
            return
        yield from DataLoader(
            dataset,
            batch_size=self.batch_size,
            num_workers=0 if len(dataset) <= _FEW_IMAGES else workers,
            collate_fn=collate_readable,
            pin_memory=self.device.type == "cuda",
        )

    def _decoded_on_card(self, dataset: InputImages, readers: int) -> Iterator[_Pixels]:
        decoder, files = CardDecoder(dataset, self.trained.prepare, self.device), EncodedImages(dataset)
        starts = range(0, len(dataset), self.batch_size)
        batches = (range(start, min(start + self.batch_size, len(dataset))) for start in starts)
        # Threads, as processes take longer to start and to hand files over than reading takes. The card's decoder is an engine
        # beside the one that runs the network: a thread of its own keeps it busy.
        encoded = _ahead(files.read, batches, threads=readers, depth=readers)
        with closing(decoder):
            for rows, take, thumbnails, skipped in _ahead(decoder, encoded, threads=1, depth=_BATCHES_AHEAD):
                yield rows, take(), thumbnails, skipped

    def _finish(
        self, batch: _Batch, todo: Sequence[int]
    ) -> tuple[list[int], np.ndarray, list[bytes], list[tuple[int, str]]]:
        places, embeddings, thumbnails, skipped = batch
        table = embeddings.get().numpy()
        if not np.isfinite(table).all():
            bad = int((~np.isfinite(table)).any(1).sum())
            raise UsageError(
                f"{bad} of {len(table)} embeddings of a batch hold NaN or infinity: the network is broken."
            )
        return [todo[each] for each in places], table, thumbnails, [(todo[each], reason) for each, reason in skipped]

    def _variant(self, thumbnail_side: int) -> str:
        decoder = "-card" if self.decode == "gpu" else ""
        return f"{self.trained.fingerprint}-{self.precision}-{thumbnail_side}{decoder}"


def _ahead(
    function: Callable[[_Item], _Result], items: Iterable[_Item], *, threads: int, depth: int
) -> Iterator[_Result]:
    """The function of each item, in order, computed in threads up to `depth` items ahead of who takes them.

    One more at once whenever the next is long in coming: sixteen threads that read files which are in memory already get less
    done than one, as they pass Python's lock around, and with a slow disk it is the other way round.
    """
    pool = ThreadPoolExecutor(threads)
    waiting: deque[Future[_Result]] = deque()
    ahead = depth if threads == 1 else 1
    try:
        for item in items:
            waiting.append(pool.submit(function, item))
            if len(waiting) > ahead:
                ahead += ahead < depth and not wait([waiting[0]], _LONG_S).done
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)  # who stops early does not wait for what nobody has begun


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
                    embeddings, ends, packed = shard["embeddings"], shard["ends"], shard["thumbnails"].tobytes()
                    starts = [0, *ends[:-1].tolist()]
                    small = [packed[a:b] for a, b in zip(starts, ends.tolist(), strict=True)]
                    found.update(zip(shard["keys"].tolist(), zip(embeddings, small, strict=True), strict=True))
            except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
                file.unlink(missing_ok=True)  # cut short by something else than us: its images are embedded again
        return {row: found[key] for row, key in enumerate(self.keys) if key in found}

    def write(self, rows: Sequence[int], embeddings: np.ndarray, thumbnails: Sequence[bytes]) -> None:
        """One file more, of these rows with their embeddings (n, D) and thumbnails, written aside and renamed."""
        self.folder.mkdir(parents=True, exist_ok=True)
        number = max((int(each.stem) for each in self.folder.glob("[0-9]*.npz")), default=-1) + 1
        file = self.folder / f"{number:06d}.npz"
        aside = file.with_suffix(".tmp")
        with aside.open("wb") as stream:
            np.savez(
                stream,
                keys=np.array([self.keys[row] for row in rows]),
                embeddings=embeddings,
                ends=np.cumsum([len(each) for each in thumbnails], dtype=np.int64),
                thumbnails=np.frombuffer(b"".join(thumbnails), dtype=np.uint8),
            )
        aside.replace(file)
