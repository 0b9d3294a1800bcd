"""From images to embeddings: prepared as in evaluation, in batches, resumable."""

from __future__ import annotations

import copy
import uuid
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader
from tqdm import tqdm

from proxy_anchor.data.images import ImageInput, fit_workers, input_key, prepare_readable
from proxy_anchor.errors import UsageError, check_choice, check_int, check_number
from proxy_anchor.models.embedding_net import EmbeddingNet

SHARD_IMAGES = 4096  # per file of a resumable run
_FEW_IMAGES = 64  # starting worker processes takes longer than decoding so few

_Batch = tuple[list[int], np.ndarray, list[tuple[int, str]]]  # rows, their embeddings (b, D), skipped (row, reason)


def choose_device(name: str | torch.device | None = None) -> torch.device:
    """The named device; for None or "auto" the GPU if there is one.

    Raises:
        UsageError: when the device is not available.
    """
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
    """Embeddings of the readable images among N.

    Attributes:
        rows: (n,) rows of the readable images.
        embeddings: (n, D) float32 unit vectors on the CPU.
        skipped: (row, reason) of each unreadable image.
        reused: how many embeddings come from shards.
    """

    rows: list[int]
    embeddings: Tensor
    skipped: list[tuple[int, str]]
    reused: int


class Embedder:
    """Embeds images with a trained network.

    Args:
        net: is copied, so that its training may go on; its `prepare` makes images pixels. Of `torch.compile(net)` the
            network inside, not compiled.
        device: None takes the GPU if there is one.
        batch_size: images per step.
        num_workers: decoding processes; None takes this process's cores, at most 16.
        precision: "32", or "bf16": the backbone under autocast (similarities change by about 0.01).
        dim: keep the first numbers of each embedding alone, normalised again, for a network trained with
            regulariser=nested; None keeps all.

    Raises:
        UsageError: for another module, or a value out of range.
    """

    def __init__(
        self,
        net: EmbeddingNet,
        *,
        device: str | torch.device | None = None,
        batch_size: int = 64,
        num_workers: int | None = None,
        precision: str = "32",
        dim: int | None = None,
    ) -> None:
        net = getattr(net, "_orig_mod", net)  # of `torch.compile(net)`
        if not isinstance(net, EmbeddingNet):
            raise UsageError(
                f"net is of type {type(net).__name__}: expected an EmbeddingNet; make one with EmbeddingNet(BACKBONE, "
                "DIM) and load your weights into it, or read one with Retriever.from_pretrained(PATH)."
            )
        self.embedding_dim: int = net.embedding_dim if dim is None else dim
        check_int("batch_size", batch_size, 1)
        check_int("dim", self.embedding_dim, 1)
        check_number("dim", self.embedding_dim, 1, maximum=net.embedding_dim)
        check_int("num_workers", num_workers, 0, optional=True)
        check_choice("precision", precision, ["32", "bf16"])
        self.device = choose_device(device)
        self.batch_size, self.num_workers, self.precision = batch_size, num_workers, precision
        # Convolutions are faster on channels-last images, on CPUs and GPUs.
        self.net = copy.deepcopy(net).to(self.device).to(memory_format=torch.channels_last).eval()

    @cached_property
    def fingerprint(self) -> str:
        """See `SharedNet.fingerprint`; with the number of dimensions, where it is not the network's."""
        whole = self.embedding_dim == self.net.embedding_dim
        return self.net.fingerprint() + ("" if whole else f"-dim{self.embedding_dim}")

    @torch.no_grad()
    def forward(self, pixels: Tensor) -> Tensor:
        """uint8 (B, 3, crop, crop) to float32 unit vectors (B, D)."""
        on_device = pixels.to(self.device, non_blocking=True).contiguous(memory_format=torch.channels_last)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.precision == "bf16"):
            embeddings = self.net(on_device).float()  # of a network in bfloat16
        whole = embeddings.shape[1] == self.embedding_dim
        return embeddings if whole else F.normalize(embeddings[:, : self.embedding_dim])

    def embed(
        self, images: Sequence[ImageInput], *, shards: Path | str | None = None, progress: bool = True
    ) -> Embedded:
        """Embed the readable images, in order.

        Args:
            images: see `open_input`.
            shards: folder for finished parts. A later call with mostly the same images embeds only the rest.
            progress: whether to show a bar on stderr where that is a terminal.

        Raises:
            UsageError: when embeddings hold NaN or infinity.
        """
        table = np.empty((len(images), self.embedding_dim), np.float32)
        done = np.zeros(len(images), bool)
        folder = None if shards is None else Path(shards) / f"{self.fingerprint}-{self.precision}"
        if folder is not None:
            keys = [input_key(image) for image in images]
            found = _read_shards(folder)
            for row, key in enumerate(keys):
                if key in found:
                    table[row], done[row] = found[key], True
        todo = np.flatnonzero(~done).tolist()
        reused, skipped = len(images) - len(todo), []
        bar = tqdm(total=len(images), initial=reused, unit=" images", disable=None if progress else True)
        pending: list[int] = []
        try:
            for chosen, embeddings, unreadable in self._batches(images, todo):
                table[chosen], done[chosen] = embeddings, True
                skipped += unreadable
                pending += chosen
                bar.update(len(chosen) + len(unreadable))
                if folder is not None and len(pending) >= SHARD_IMAGES:
                    _write_shard(folder, [keys[row] for row in pending], table[pending])
                    pending = []
        finally:  # an interruption keeps what is embedded
            bar.close()
            if folder is not None and pending:
                _write_shard(folder, [keys[row] for row in pending], table[pending])
        rows = np.flatnonzero(done).tolist()
        whole = torch.from_numpy(table if len(rows) == len(images) else table[rows])
        return Embedded(rows, whole, skipped, reused)

    def _batches(self, images: Sequence[ImageInput], todo: Sequence[int]) -> Iterator[_Batch]:
        batches = [(self.batch_size * 3 * self.net.prepare.crop**2, -(-len(todo) // self.batch_size))]
        few = len(todo) <= _FEW_IMAGES
        num_workers = 0 if few else fit_workers(self.num_workers, batches, "embed.num_workers")
        loader: DataLoader = DataLoader(
            [(row, images[row]) for row in todo],  # type: ignore[arg-type]  # any sequence is a Dataset
            batch_size=self.batch_size,
            num_workers=num_workers,
            collate_fn=partial(prepare_readable, self.net.prepare),
            pin_memory=self.device.type == "cuda",
        )
        for rows, pixels, skipped in loader:
            found = self.forward(pixels) if rows else torch.empty(0, self.embedding_dim)
            if bad := int((~found.isfinite()).any(1).sum()):
                raise UsageError(
                    f"{bad} of {len(found)} embeddings of a batch hold NaN or infinity: the network is broken."
                )
            yield rows, found.cpu().numpy(), skipped


def _read_shards(folder: Path) -> dict[str, np.ndarray]:
    """{key of an image: its embedding (D,)} of the images that are finished."""
    found: dict[str, np.ndarray] = {}
    for file in folder.glob("*.npz"):
        try:
            with np.load(file, allow_pickle=False) as shard:
                found.update(zip(shard["keys"].tolist(), shard["embeddings"], strict=True))
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
            file.unlink(missing_ok=True)  # damaged: its images are embedded again
    return found


def _write_shard(folder: Path, keys: list[str], embeddings: np.ndarray) -> None:
    """Write embeddings (n, D) with their keys (n,) to a further file."""
    folder.mkdir(parents=True, exist_ok=True)
    np.savez(folder / f"{uuid.uuid4().hex}.npz", keys=keys, embeddings=embeddings)  # half a file is dropped on reading
