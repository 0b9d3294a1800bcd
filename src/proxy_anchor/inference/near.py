"""Nearly equal images, and labels that most neighbours contradict, by embedding."""

from __future__ import annotations

from collections import Counter

from proxy_anchor.data.bad_images import NEAR, Entry, Finding, entries_of
from proxy_anchor.data.table import Splits
from proxy_anchor.inference.embedder import Embedder
from proxy_anchor.models.embedding_net import EmbeddingNet
from proxy_anchor.retrieval.search import search

_NEIGHBOURS, _AGREEING = 10, 7


def published_features() -> EmbeddingNet:
    """EfficientNet-Lite0 with ImageNet weights: its pooled features, of unit length."""
    return EmbeddingNet("tf_efficientnet_lite0", pooling="avg", search_with="features")


def near_findings(splits: Splits, embedder: Embedder, similarity: float) -> list[tuple[Finding, list[Entry]]]:
    """Each finding with the images that it is about, leaks first, then by similarity or number of neighbours.

    "leak" and "near" are pairs of at least that cosine similarity, among the 10 nearest neighbours of each image.
    "label": at least 7 of the 10 are of one other class than the image's own, which has more images.
    """
    entries = entries_of(splits)
    done = embedder.embed([path for path, *_ in entries])
    entries = [entries[row] for row in done.rows]  # unreadable images are findings of `check_images`
    sizes = Counter(name for *_, name in entries)
    k = min(_NEIGHBOURS, len(entries) - 1)
    if k < 1:
        return []
    values, neighbours = (each.tolist() for each in search(done.embeddings, done.embeddings, k, exclude_self=True))
    found: list[tuple[float, Finding, list[Entry]]] = []
    for row, (entry, near) in enumerate(zip(entries, neighbours, strict=True)):
        _, table, name = entry
        for value, other in zip(values[row], near, strict=True):
            if value < similarity:
                break
            if other < row and row in neighbours[other]:
                continue  # the pair is listed already
            its_path, its_table, its_name = entries[other]
            kind = "near" if table == its_table or {table, its_table} == {"query", "gallery"} else "leak"
            detail = f"as {its_path} ({its_table}, class {its_name}), similarity {value:.3f}"
            found.append((value, Finding(kind, *entry, detail), [entry, entries[other]]))
        [(winner, count)] = Counter(entries[other][2] for other in near).most_common(1)
        if count >= _AGREEING and winner != name and sizes[name] > 1:
            detail = f"{count} of {k} neighbours are of class {winner}"
            found.append((count, Finding("label", *entry, detail), [entry, *(entries[other] for other in near)]))
    found.sort(key=lambda each: (list(NEAR).index(each[1].kind), -each[0]))
    return [(finding, images) for _, finding, images in found]
