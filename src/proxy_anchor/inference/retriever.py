"""A trained network as a search engine for images: index, search, save."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from proxy_anchor.data.files import is_hidden
from proxy_anchor.data.folder import list_images
from proxy_anchor.data.images import ImageInput, input_key
from proxy_anchor.data.table import shorten
from proxy_anchor.errors import UsageError
from proxy_anchor.inference.checkpoint import load_trained, written_whole
from proxy_anchor.inference.embedder import Embedder
from proxy_anchor.inference.hits import Hit
from proxy_anchor.inference.index import FAISS_FILE, VECTORS_FILE, VectorIndex
from proxy_anchor.models.embedding_net import EmbeddingNet
from proxy_anchor.retrieval.reranking import rerank
from proxy_anchor.retrieval.rows import check_k
from proxy_anchor.retrieval.threshold import Threshold, calibrate_threshold

INDEX_FORMAT = 3
INDEX_FILE = "index.json"
INDEX_FILES = {INDEX_FILE, VECTORS_FILE, FAISS_FILE}
_RERANKED = 100  # nearest neighbours, at least, that re-ranking reorders


class Item(NamedTuple):
    """One image of the gallery; key: see `input_key`."""

    name: str
    label: str | None
    key: str


class Retriever:
    """Finds the gallery images most similar to a query, by cosine similarity.

    Images are paths, encoded files' bytes, (H, W, 3) uint8 arrays or Pillow images, prepared as in evaluation::

        retriever = Retriever.from_pretrained("runs/NAME").index("my_pictures")
        for hit in retriever.search("query.jpg", k=5)[0]:
            print(hit.similarity, hit.label, hit.name)

    Args:
        net: any network; see `Embedder`.
        kind: see `VectorIndex`.
        engine: of exact search, see `resolve_engine`.
        embedding: device, batch_size, num_workers, precision, dim; see `Embedder`.

    Attributes:
        items: {id: image of the gallery}; ids increase and are never reused.
        skipped: (name, reason) of the images that the latest `index`, `add` or `update` could not read.
        threshold: set by `calibrate`, saved with the index.
    """

    def __init__(self, net: EmbeddingNet, *, kind: str = "exact", engine: str = "auto", **embedding: Any) -> None:
        self.embedder = Embedder(net, **embedding)
        self.kind, self.engine = kind, engine
        self._clear()

    @classmethod
    def from_pretrained(cls, path: str | Path, **options: Any) -> Retriever:
        """From a checkpoint, a run folder, a folder of `EmbeddingNet.save_pretrained`, or user/name on the hub.

        options: the arguments of the class.
        """
        return cls(load_trained(path), **options)

    def _clear(self) -> None:
        self._index = VectorIndex(
            self.embedder.embedding_dim, kind=self.kind, engine=self.engine, device=self.embedder.device
        )
        self.items: dict[int, Item] = {}
        self._ids: dict[str, int] = {}
        self._next_id = 0
        self.skipped: list[tuple[str, str]] = []
        self.threshold: Threshold | None = None

    def __len__(self) -> int:
        return len(self.items)

    @property
    def embeddings(self) -> tuple[np.ndarray, Tensor]:
        """(ids (N,), unit vectors (N, D)) of the gallery."""
        return self._index.ids, self._index.vectors

    def id_of(self, name: str | Path) -> int:
        """The id of the gallery image of that name; UsageError when there is none."""
        if str(name) not in self._ids:
            raise UsageError(f"{name} is not in the gallery.")
        return self._ids[str(name)]

    def embed(self, images: ImageInput | Sequence[ImageInput], *, progress: bool = False) -> Tensor:
        """(N, D) float32 unit vectors on the CPU; UsageError for an unreadable image."""
        batch: Sequence[Any] = images if isinstance(images, (list, tuple)) else [images]
        done = self.embedder.embed(batch, progress=progress)
        if done.skipped:
            raise UsageError(f"{len(done.skipped)} of {len(batch)} images: {done.skipped[0][1]}")
        return done.embeddings

    def index(
        self, images: str | Path | Sequence[ImageInput], labels: Sequence[str | None] | None = None, **options: Any
    ) -> Retriever:
        """Replace the gallery by these images; returns itself. Arguments: see `add`."""
        self._clear()
        self.add(images, labels, **options)
        return self

    def add(
        self,
        images: str | Path | Sequence[ImageInput],
        labels: Sequence[str | None] | None = None,
        *,
        shards: str | Path | None = None,
        progress: bool = True,
    ) -> list[int]:
        """Add images to the gallery; one of the same name is replaced. Names are paths, or "image ID".

        Args:
            images: a folder, whose sub-folders are the labels where every image is in one; a CSV list, see
                `load_folder`; or a sequence.
            labels: (N,) classes, None for unknown.
            shards: folder for finished parts of an interrupted call, see `Embedder.embed`.
            progress: see `Embedder.embed`.

        Returns:
            Their ids. Unreadable images are left out and listed in `skipped`.

        Raises:
            UsageError: when none can be read, lengths differ, or two names are equal.
        """
        if isinstance(images, (str, Path)):
            images, classes = list_images(images)
            labels = classes if labels is None else labels
        if len(images) == 0:
            raise UsageError("the gallery is empty: give at least one image.")
        if labels is not None and len(labels) != len(images):
            raise UsageError(f"{len(images)} images but {len(labels)} labels: give one for each.")
        first = self._next_id
        names = [str(x) if isinstance(x, (str, Path)) else f"image {first + row}" for row, x in enumerate(images)]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise UsageError(f"{twice} is there twice: every image of the gallery needs a name of its own.")
        keys = [input_key(image) for image in images]
        done = self.embedder.embed(images, shards=shards, progress=progress)
        self.skipped = [(names[row], reason) for row, reason in done.skipped]
        if not done.rows:
            raise UsageError(f"none of the {len(images)} images can be read: {shorten([r for _, r in self.skipped])}")
        self.remove([names[row] for row in done.rows if names[row] in self._ids])
        ids = first + np.array(done.rows)  # an unreadable image has its number too
        self._next_id += len(images)
        self._index.add(ids, done.embeddings)
        for id_, row in zip(ids.tolist(), done.rows, strict=True):
            label = None if labels is None or labels[row] is None else str(labels[row])
            self.items[id_] = Item(names[row], label, keys[row])
            self._ids[names[row]] = id_
        return ids.tolist()

    def remove(self, names: str | Path | Iterable[str | Path]) -> int:
        """Remove images by name; returns how many. UsageError for an unknown name."""
        wanted = {self.id_of(name) for name in ([names] if isinstance(names, (str, Path)) else names)}
        self._index.remove(np.array(sorted(wanted), dtype=np.int64))
        for id_ in wanted:
            del self._ids[self.items.pop(id_).name]
        return len(wanted)

    def update(self, folder: str | Path, *, shards: str | Path | None = None, progress: bool = True) -> tuple[int, int]:
        """Bring the gallery in line with a folder, classes included.

        Returns:
            Number of added or changed images, and of removed ones, which include those that became unreadable.
        """
        paths, labels = list_images(folder)
        classes = dict(zip(map(str, paths), labels or (), strict=True))
        gone = [name for name in self._ids if name not in classes]
        self.remove(gone)
        new = [name for name in classes if name not in self._ids or self.items[self._ids[name]].key != input_key(name)]
        self.skipped = []
        if new:
            try:
                self.add(new, shards=shards, progress=progress)
            except UsageError:
                if not len(self) or len(self.skipped) < len(new):
                    raise  # otherwise all new images are unreadable, and the rest of the gallery remains
        spoilt = [name for name, _ in self.skipped if name in self._ids]
        self.remove(spoilt)
        self.items = {id_: item._replace(label=classes[item.name]) for id_, item in self.items.items()}
        return len(new) - len(self.skipped), len(gone) + len(spoilt)

    def search(
        self, images: ImageInput | Sequence[ImageInput], k: int = 10, *, reranking: str = "none"
    ) -> list[list[Hit]]:
        """The K most similar gallery images of each query, most similar first.

        Args:
            images: one query, or a list or tuple of queries.
            k: neighbours per query.
            reranking: "none", "query_expansion" or "k_reciprocal", which reorders the 100 nearest (or 5 K, if more).

        Raises:
            UsageError: when a query is unreadable, the gallery is empty, or K is larger than it.
        """
        return self.search_embeddings(self.embed(images), k, reranking=reranking)

    def search_embeddings(
        self, embeddings: Tensor | np.ndarray, k: int = 10, *, reranking: str = "none"
    ) -> list[list[Hit]]:
        """As `search`, for (Q, D) vectors of this network."""
        queries = torch.as_tensor(embeddings)
        if reranking == "none":
            similarities, ids = self._index.search(queries, k)
        else:
            check_k(k, max(len(self), 1), exclude_self=False)
            near, ids = self._index.search(queries, min(len(self), max(5 * k, _RERANKED)))
            pairs = zip(queries.cpu(), map(self._index.get, ids), strict=True)
            reranked = [rerank(reranking, one[None], k, gallery=rows, engine=self.engine)[1] for one, rows in pairs]
            order = torch.cat(reranked)
            similarities, ids = near.gather(1, order), np.take_along_axis(ids, order.numpy(), axis=1)
        return [
            [self._hit(id_, similarity) for similarity, id_ in zip(row.tolist(), listed.tolist(), strict=True)]
            for row, listed in zip(similarities, ids, strict=True)
        ]

    def search_item(self, id_: int, k: int = 10) -> list[Hit]:
        """The neighbours of a gallery image, without itself."""
        if id_ not in self.items:
            raise UsageError(f"id {id_} is not in the gallery.")
        check_k(k, len(self), exclude_self=True)
        # Among exact duplicates the image itself need not come first, nor be found at all.
        hits = self.search_embeddings(self._index.get(np.array([id_])), k + 1)[0]
        return [hit for hit in hits if hit.id != id_][:k]

    def _hit(self, id_: int, similarity: float) -> Hit:
        item = self.items[id_]
        match = None if self.threshold is None else similarity >= self.threshold.similarity
        return Hit(id_, item.name, item.label, similarity, match)

    def calibrate(self, false_accept_rate: float = 0.001) -> Threshold:
        """Choose the similarity of a match on the gallery's labelled images.

        See `calibrate_threshold` for the rate, and for the labels it needs.
        """
        ids, vectors = self.embeddings
        labels = [self.items[each].label for each in ids.tolist()]
        if not (known := [row for row, label in enumerate(labels) if label is not None]):
            raise UsageError("a threshold needs labelled images: put those of each class in a sub-folder of their own.")
        _, numbers = np.unique([str(labels[row]) for row in known], return_inverse=True)
        self.threshold = calibrate_threshold(vectors[known], numbers, false_accept_rate=false_accept_rate)
        return self.threshold

    def save(self, folder: str | Path) -> None:
        """Write index.json and embeddings.npy (and index.faiss), under a temporary name first.

        Raises:
            UsageError: when the folder holds something else than an index.
        """
        folder = Path(folder).resolve()  # a link stays, and its target is replaced
        names = {each.name for each in folder.glob("*") if not is_hidden(Path(each.name))}
        if folder.is_file() or (names and (INDEX_FILE not in names or names - INDEX_FILES)):
            raise UsageError(f"{folder} holds something else than an index: choose another folder.")
        content = {
            "format": INDEX_FORMAT,
            "model": self.embedder.fingerprint,
            "kind": self.kind,
            "next_id": self._next_id,
            "threshold": None if self.threshold is None else asdict(self.threshold),
            "columns": ["id", "name", "label", "key"],
            "images": [[id_, *self.items[id_]] for id_ in self._index.ids.tolist()],
        }
        with written_whole(folder) as aside:
            self._index.save(aside)
            (aside / INDEX_FILE).write_text(json.dumps(content), encoding="utf-8")

    def load(self, folder: str | Path) -> Retriever:
        """Replace the gallery by an index that `save` wrote; returns itself.

        Raises:
            UsageError: when it is missing, damaged, of another version, or made by another model.
        """
        folder = Path(folder)
        file = folder / INDEX_FILE
        if not file.is_file():
            raise UsageError(f"{folder} holds no index ({INDEX_FILE} is missing): make one from a gallery first.")
        own = self.embedder.fingerprint
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
            if (version := content["format"]) == INDEX_FORMAT:  # others hold other keys and columns
                model, kind, next_id = str(content["model"]), content["kind"], content["next_id"]
                items = {id_: Item(str(name), label, str(key)) for id_, name, label, key in content["images"]}
                ids = np.array(list(items), dtype=np.int64)
                threshold = None if content["threshold"] is None else Threshold(**content["threshold"])
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise UsageError(f"{file} is damaged: build the index again.") from error
        if version != INDEX_FORMAT:
            raise UsageError(
                f"{folder} was written by another version of this project (index format {version}; this one reads "
                f"{INDEX_FORMAT}): remove it and embed the gallery again."
            )
        if model != own:
            raise UsageError(
                f"{folder} was made by another model ({model[-8:]}, this one is {own[-8:]}): use that model, or build "
                "the index again."
            )
        self.kind = kind
        self._clear()
        self._index.load(folder, ids)
        self.items, self._ids = items, {item.name: id_ for id_, item in items.items()}
        self.threshold, self._next_id = threshold, next_id
        return self
