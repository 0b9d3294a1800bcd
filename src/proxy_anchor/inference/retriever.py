"""A trained network as a search engine for images: index, search, keep."""

from __future__ import annotations

import json
import shutil
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from proxy_anchor.data.images import ImageInput, class_folders, find_images, input_key
from proxy_anchor.data.table import shorten
from proxy_anchor.errors import UsageError, check_choice, check_int
from proxy_anchor.inference.checkpoint import TrainedNet, load_trained, written_whole
from proxy_anchor.inference.embedder import Embedder
from proxy_anchor.inference.index import VectorIndex
from proxy_anchor.retrieval.reranking import RERANKINGS, rerank
from proxy_anchor.retrieval.search import check_k
from proxy_anchor.retrieval.threshold import Threshold, calibrate_threshold

INDEX_FORMAT = 2
INDEX_FILE, THUMBNAILS_FILE = "index.json", "thumbnails.bin"
_RERANKED = 100  # nearest neighbours, at least, whose order re-ranking may change


@dataclass(frozen=True)
class Hit:
    """One neighbour. similarity: cosine, in [-1, 1]. is_match: at or above the calibrated threshold, None without one."""

    id: int
    name: str
    label: str | None
    similarity: float
    is_match: bool | None = None


@dataclass(frozen=True, eq=False)
class Item:
    """One image of the gallery. name: its path, or what the caller named it. key: see `input_key`."""

    name: str
    label: str | None
    key: str
    thumbnail: bytes | memoryview


class Retriever:
    """Finds the images of a gallery that are most similar to a query, by cosine similarity of embeddings.

    Images are paths, encoded files' bytes, (H, W, 3) uint8 arrays or Pillow images; they are prepared as in evaluation.

        retriever = Retriever.from_checkpoint("runs/NAME/best.ckpt").index("my_pictures")
        for hit in retriever.search("query.jpg", k=5)[0]:
            print(hit.similarity, hit.label, hit.name)

    Args:
        trained: network and preprocessing, see `load_trained`. kind: see `VectorIndex`. engine: of exact search, see
            `resolve_engine`. thumbnail_side: longest side of the small pictures that are kept with the index, in pixels; 0
            keeps none. embedding: device, batch_size, num_workers, precision; see `Embedder`.

    Attributes:
        skipped: (name, reason) of the images that the latest `index` or `add` could not read.
        threshold: set by `calibrate`, saved with the index.
    """

    def __init__(
        self,
        trained: TrainedNet,
        *,
        kind: str = "exact",
        engine: str = "auto",
        thumbnail_side: int = 96,
        **embedding: Any,
    ) -> None:
        check_int("thumbnail_side", thumbnail_side, 0)
        self.embedder = Embedder(trained, **embedding)
        self.kind, self.engine, self.thumbnail_side = kind, engine, thumbnail_side
        self._clear()

    @classmethod
    def from_checkpoint(cls, checkpoint: str | Path, **options: Any) -> Retriever:
        """From a best.ckpt or last.ckpt of train.py. Options: the arguments of the class."""
        return cls(load_trained(checkpoint), **options)

    @classmethod
    def from_pretrained(cls, folder: str | Path, **options: Any) -> Retriever:
        """From a run folder, or a folder that `export.py format=safetensors` wrote. Options: the arguments of the class."""
        if not Path(folder).is_dir():
            raise UsageError(f"{folder}: no such folder; pass a run folder or a folder written by export.py.")
        return cls(load_trained(folder), **options)

    def _clear(self) -> None:
        self._index = VectorIndex(
            self.embedder.embedding_dim, kind=self.kind, engine=self.engine, device=self.embedder.device
        )
        self._items: dict[int, Item] = {}
        self._ids: dict[str, int] = {}
        self._next_id = 0
        self.skipped: list[tuple[str, str]] = []
        self.threshold: Threshold | None = None

    def __len__(self) -> int:
        return len(self._items)

    @property
    def items(self) -> dict[int, Item]:
        """The gallery's images by id; ids grow and are never used again."""
        return self._items

    @property
    def embeddings(self) -> tuple[np.ndarray, Tensor]:
        """(ids (N,), unit vectors (N, D)) of the gallery."""
        return self._index.ids, self._index.vectors

    def id_of(self, name: str | Path) -> int:
        """The id of an image of the gallery. UsageError when it has none of that name."""
        if str(name) not in self._ids:
            raise UsageError(f"{name} is not in the gallery.")
        return self._ids[str(name)]

    def embed(self, images: ImageInput | Sequence[ImageInput], *, progress: bool = False) -> Tensor:
        """(N, D) float32 unit vectors on the CPU. UsageError names the images that cannot be read."""
        batch = _as_list(images)
        done = self.embedder.embed(batch, progress=progress)
        if done.skipped:
            raise UsageError(f"{len(done.skipped)} of {len(batch)} images: {done.skipped[0][1]}")
        return done.embeddings

    def index(
        self, images: str | Path | Sequence[ImageInput], labels: Sequence[str | None] | None = None, **options: Any
    ) -> Retriever:
        """Make these images the gallery, in place of what there was; returns itself. Arguments: see `add`."""
        self._clear()
        self.add(images, labels, **options)
        return self

    def add(
        self,
        images: str | Path | Sequence[ImageInput],
        labels: Sequence[str | None] | None = None,
        *,
        names: Sequence[str] | None = None,
        shards: str | Path | None = None,
        progress: bool = True,
    ) -> list[int]:
        """Add images to the gallery and return their ids; one of the same name is replaced.

        images: a folder (searched through; where every image is in a sub-folder, those are the labels), or a sequence.
        labels: (N,) classes, None for unknown. names: (N,) how to call images that are no paths; must differ.
        shards: folder of finished parts: the same call after an interruption embeds only the rest (see `Embedder.embed`).
        Images that cannot be read are left out and listed in `skipped`.
        Raises UsageError when none can be read, or lengths differ.
        """
        images, labels = _as_gallery(images, labels)
        for what, values in {"labels": labels, "names": names}.items():
            if values is not None and len(values) != len(images):
                raise UsageError(f"{len(images)} images but {len(values)} {what}: give one for each.")
        called = [self._name(image, row) for row, image in enumerate(images)] if names is None else list(names)
        if len(set(called)) < len(called):
            twice = next(name for name in called if called.count(name) > 1)
            raise UsageError(f"{twice} is there twice: every image of the gallery needs a name of its own.")
        done = self.embedder.embed(images, shards=shards, thumbnail_side=self.thumbnail_side, progress=progress)
        self.skipped = [(called[row], reason) for row, reason in done.skipped]
        if not done.rows:
            raise UsageError(f"none of the {len(images)} images can be read: {shorten([r for _, r in self.skipped])}")
        self.remove([called[row] for row in done.rows if called[row] in self._ids])
        ids = np.arange(self._next_id, self._next_id + len(done.rows))
        self._next_id += len(ids)
        self._index.add(ids, done.embeddings)
        for number, row in enumerate(done.rows):
            label = None if labels is None or labels[row] is None else str(labels[row])
            key = done.keys[number] or input_key(images[row])
            self._items[int(ids[number])] = Item(called[row], label, key, done.thumbnails[number])
            self._ids[called[row]] = int(ids[number])
        return ids.tolist()

    def remove(self, names: str | Path | int | Iterable[str | Path | int]) -> int:
        """Take images out of the gallery, by name or id; returns how many. UsageError for one that is not there."""
        wanted = [names] if isinstance(names, (str, Path, int, np.integer)) else list(names)
        ids = {each if isinstance(each, (int, np.integer)) else self.id_of(each) for each in wanted}
        for each in ids:
            self._require_id(each)
        self._index.remove(np.array(sorted(ids), dtype=np.int64))
        for each in ids:
            del self._ids[self._items.pop(int(each)).name]
        return len(ids)

    def _require_id(self, id_: int) -> None:
        if id_ not in self._items:
            raise UsageError(f"id {id_} is not in the gallery.")

    def update(self, folder: str | Path, *, shards: str | Path | None = None, progress: bool = True) -> tuple[int, int]:
        """Bring the gallery in line with a folder: (added or changed, removed), the latter with those unreadable by now.

        Unreadable ones: see `skipped`. Classes follow the folder too: where every image is in a sub-folder by now, or no longer.
        """
        paths, labels = _as_gallery(folder, None)
        assert labels is not None
        present = {str(path) for path in paths}
        gone = [name for name in self._ids if name not in present]
        new = [
            (path, label)
            for path, label in zip(paths, labels, strict=True)
            if str(path) not in self._ids or self._items[self._ids[str(path)]].key != input_key(path)
        ]
        self.skipped = []
        self.remove(gone)
        if new:
            try:
                self.add([p for p, _ in new], [label for _, label in new], shards=shards, progress=progress)
            except UsageError:
                if not len(self) or len(self.skipped) < len(new):
                    raise  # otherwise: nothing new can be read, and the rest of the gallery is still there
        spoilt = [name for name, _ in self.skipped if name in self._ids]
        self.remove(spoilt)
        gone += spoilt
        for path, label in zip(paths, labels, strict=True):
            if (id_ := self._ids.get(str(path))) is not None:
                self._items[id_] = replace(self._items[id_], label=label)
        return len(new) - len(self.skipped), len(gone)

    def search(
        self, images: ImageInput | Sequence[ImageInput], k: int = 10, *, reranking: str = "none"
    ) -> list[list[Hit]]:
        """The K most similar gallery images of each query, most similar first. One query is a list of one.

        reranking: "none", "query_expansion" or "k_reciprocal", which reorders the 100 nearest (or 5 K, if more).
        Raises UsageError when a query cannot be read, the gallery is empty, or K is larger than it.
        """
        return self.search_embeddings(self.embed(images), k, reranking=reranking)

    def search_embeddings(
        self, embeddings: Tensor | np.ndarray, k: int = 10, *, reranking: str = "none"
    ) -> list[list[Hit]]:
        """As `search`, for (Q, D) vectors of this network, or one (D,)."""
        check_choice("rerank", reranking, RERANKINGS)
        queries = torch.as_tensor(embeddings)
        queries = queries[None] if queries.ndim == 1 else queries
        if reranking == "none":
            similarities, ids = self._index.search(queries, k)
        else:
            check_k(k, max(len(self), 1), exclude_self=False)
            near, ids = self._index.search(queries, min(len(self), max(5 * k, _RERANKED)))
            order = torch.cat(
                [
                    rerank(reranking, query[None].cpu(), k, gallery=self._index.get(row), engine=self.engine)[1]
                    for query, row in zip(queries, ids, strict=True)
                ]
            )
            similarities, ids = near.gather(1, order), np.take_along_axis(ids, order.numpy(), axis=1)
        return [
            [self._hit(id_, similarity) for similarity, id_ in zip(row.tolist(), listed.tolist(), strict=True)]
            for row, listed in zip(similarities, ids, strict=True)
        ]

    def search_item(self, id_: int, k: int = 10) -> list[Hit]:
        """The neighbours of an image of the gallery, without itself. UsageError for an unknown id, or K too large."""
        self._require_id(id_)
        check_k(k, len(self), exclude_self=True)
        # Among exact duplicates the image itself need not come first, and need not be listed at all.
        hits = self.search_embeddings(self._index.get(np.array([id_])), k + 1)[0]
        return [hit for hit in hits if hit.id != id_][:k]

    def _hit(self, id_: int, similarity: float) -> Hit:
        item = self._items[id_]
        match = None if self.threshold is None else similarity >= self.threshold.similarity
        return Hit(id_, item.name, item.label, similarity, match)

    def thumbnail(self, id_: int) -> bytes:
        """The small JPEG picture of a gallery image; b"" when none was kept."""
        return bytes(self._items[id_].thumbnail)

    def calibrate(
        self,
        false_accept_rate: float = 0.001,
        images: str | Path | Sequence[ImageInput] | None = None,
        labels: Sequence[str | None] | None = None,
    ) -> Threshold:
        """Choose from which similarity on a hit is a match, on labelled images or, without any, on the labelled gallery.

        See `calibrate_threshold` for the rate, and for what labels it needs.
        """
        if images is None:
            ids, table = self.embeddings
            labels = [self._items[each].label for each in ids.tolist()]
        else:
            images, labels = _as_gallery(images, labels)
            done = self.embedder.embed(images)
            labels, table = [(labels or [None] * len(images))[row] for row in done.rows], done.embeddings
        known = [row for row, label in enumerate(labels) if label is not None]
        if not known:
            raise UsageError("a threshold needs labelled images: put those of each class in a sub-folder of their own.")
        _, numbers = np.unique([str(labels[row]) for row in known], return_inverse=True)
        self.threshold = calibrate_threshold(table[known], numbers, false_accept_rate=false_accept_rate)
        return self.threshold

    def save(self, folder: str | Path) -> None:
        """Write the index to a folder: index.json, embeddings.npy (and index.faiss), thumbnails.bin.

        Written aside and renamed, so that no reader sees half of one. Raises UsageError when the folder holds something
        else than an index, or the gallery is empty.
        """
        folder = Path(folder).resolve()  # a link stays one, and what it leads to is replaced
        if not len(self):
            raise UsageError("the gallery is empty: there is no index to save.")
        if folder.exists() and not (folder / INDEX_FILE).is_file() and (not folder.is_dir() or any(folder.iterdir())):
            raise UsageError(f"{folder} holds something else than an index: choose another folder.")
        with written_whole(folder) as aside:
            self._write(aside)

    def _write(self, folder: Path) -> None:
        self._index.save(folder)
        ids = self._index.ids.tolist()
        with (folder / THUMBNAILS_FILE).open("wb") as stream:
            for each in ids:
                stream.write(self._items[each].thumbnail)
        rows = [
            [each, item.name, item.label, item.key, len(item.thumbnail)]
            for each, item in ((each, self._items[each]) for each in ids)
        ]
        content = {
            "format": INDEX_FORMAT,
            "model": self.embedder.trained.fingerprint,
            "dim": self._index.dim,
            "kind": self.kind,
            "thumbnail_side": self.thumbnail_side,
            "next_id": self._next_id,
            "threshold": None if self.threshold is None else asdict(self.threshold),
            "columns": ["id", "name", "label", "key", "thumbnail_bytes"],
            "images": rows,
        }
        (folder / INDEX_FILE).write_text(json.dumps(content), encoding="utf-8")

    def load(self, folder: str | Path) -> Retriever:
        """Take over an index that `save` wrote; returns itself.

        Raises UsageError when it is missing, damaged, of another version, or was made by another model.
        """
        folder = Path(folder)
        file = folder / INDEX_FILE
        damaged = UsageError(f"{file} is damaged: build the index again.")
        if not file.is_file():
            raise UsageError(f"{folder} holds no index ({INDEX_FILE} is missing): make one from a gallery first.")
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
            if content["format"] != INDEX_FORMAT:
                raise UsageError(
                    f"{folder} has index format {content['format']}; this version reads {INDEX_FORMAT}: build the index again."
                )
            if content["dim"] != self.embedder.embedding_dim:
                raise UsageError(
                    f"{folder} holds embeddings of D={content['dim']}, and this model's have D={self.embedder.embedding_dim}: "
                    "use the model that made the index, or build it again."
                )
            if content["model"] != self.embedder.trained.fingerprint:
                raise UsageError(
                    f"{folder} was made by another model ({str(content['model'])[:8]}, this one is "
                    f"{self.embedder.trained.fingerprint[:8]}): use that model, or build the index again."
                )
            rows = [(id_, str(name), label, str(key), int(size)) for id_, name, label, key, size in content["images"]]
            ids = np.array([row[0] for row in rows], dtype=np.int64)
            threshold = None if content["threshold"] is None else Threshold(**content["threshold"])
            kind, thumbnail_side, next_id = content["kind"], content["thumbnail_side"], content["next_id"]
            if (np.diff(ids, append=next_id) <= 0).any():
                raise damaged
        except UsageError:
            raise
        except (KeyError, TypeError, ValueError) as error:
            raise damaged from error
        thumbnails, size = folder / THUMBNAILS_FILE, sum(row[-1] for row in rows)
        if size != (thumbnails.stat().st_size if thumbnails.is_file() else 0):
            raise UsageError(f"{thumbnails} is damaged: build the index again.")
        packed = memoryview(np.memmap(thumbnails, mode="r").data) if size else memoryview(b"")
        self.kind, self.thumbnail_side = kind, thumbnail_side
        self._clear()
        self._index.load(folder, ids)
        self.threshold, self._next_id = threshold, next_id
        start = 0
        for id_, name, label, key, size in rows:
            self._items[id_] = Item(name, label, key, packed[start : start + size])
            self._ids[name] = id_
            start += size
        return self

    def _name(self, image: ImageInput, row: int) -> str:
        return str(image) if isinstance(image, (str, Path)) else f"image {self._next_id + row}"


def open_index(
    checkpoint: str | Path, gallery: str | Path | None, index: str | Path | None, **options: Any
) -> Retriever:
    """A retriever over a gallery folder, an index folder, or an index that is brought in line with its gallery.

    gallery None: the index as it is. index None: nothing is kept. Unreadable images and what changed are printed.
    options: the arguments of `Retriever`. Raises UsageError as `Retriever.index` and `Retriever.load` do.
    """
    retriever = Retriever(load_trained(checkpoint), **options)
    if index is None:
        if gallery is None:
            raise UsageError("name a gallery folder, an index folder, or both.")
        retriever.index(gallery)
        report_skipped(retriever.skipped)
    else:
        index = Path(index)
        if gallery is None or (index / INDEX_FILE).is_file():
            retriever.load(index)
        if gallery is not None:
            shards = index.with_name(f".{index.name}.parts")
            added, removed = retriever.update(gallery, shards=shards)
            report_skipped(retriever.skipped)
            if added or removed:
                retriever.save(index)
                print(f"index {index}: {added:,} images added or changed, {removed:,} removed")
            shutil.rmtree(shards, ignore_errors=True)
    print(f"gallery: {len(retriever):,} images", flush=True)
    return retriever


def report_skipped(skipped: Sequence[tuple[str, str]]) -> None:
    """Print how many images could not be read, and each of them with its reason."""
    if skipped:
        print(f"{len(skipped)} images cannot be read and are left out:")
        for name, reason in skipped:
            print(f"  {reason if name in reason else f'{name}: {reason}'}", flush=True)


def vote(hits: Sequence[Hit]) -> tuple[str | None, float]:
    """(class, share of the votes): every labelled hit votes for its class with its similarity, if that is positive.

    Among equals the class of the nearer hit wins. (None, 0.0) when no hit has a label.
    """
    votes: dict[str, float] = defaultdict(float)
    for hit in hits:
        if hit.label is not None:
            votes[hit.label] += max(hit.similarity, 0.0)
    if not votes:
        return None, 0.0
    winner = max(votes, key=lambda name: votes[name])  # the first of equals, and hits come nearest first
    total = sum(votes.values())
    return winner, votes[winner] / total if total else 1 / len(votes)


def _as_list(images: ImageInput | Sequence[ImageInput]) -> Sequence[ImageInput]:
    if isinstance(images, (list, tuple)):
        return images
    return [images]  # type: ignore[list-item]


def _as_gallery(
    images: str | Path | Sequence[ImageInput], labels: Sequence[str | None] | None
) -> tuple[Sequence[ImageInput], Sequence[str | None] | None]:
    if not isinstance(images, (str, Path)):
        if len(images) == 0:
            raise UsageError("the gallery is empty: give at least one image.")
        return images, labels
    paths = find_images(images)
    return paths, class_folders(paths, images) if labels is None else labels
