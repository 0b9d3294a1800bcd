"""A picture of queries with their nearest neighbours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont, ImageOps
from torch import Tensor

from proxy_anchor.data.images import read_rgb
from proxy_anchor.data.table import Splits
from proxy_anchor.retrieval.search import search

# Okabe and Ito's green and a red that is as far from it for every kind of colour vision as their vermilion.
HIT, MISS = "#009E73", "#CC3311"
_TILE, _FRAME, _TEXT, _GAP = 96, 4, 14, 6


@dataclass(frozen=True)
class Neighbour:
    """A row of the gallery (of the queries where there is none), its cosine similarity, and whether its class is the query's."""

    index: int
    similarity: float
    is_hit: bool


def nearest_images(
    splits: Splits, embeddings: Sequence[Tensor], queries: Sequence[int], k: int
) -> list[list[Neighbour]]:
    """The K nearest of each of these rows of splits.query, or fewer where there are no more; never the query itself."""
    query, gallery = splits.query, splits.gallery or splits.query
    k = min(k, len(gallery) - (splits.gallery is None))
    # One extra hit for the query itself, which is then taken out by its index.
    similarities, indices = search(embeddings[0][list(queries)], embeddings[-1], min(k + 1, len(gallery)))
    found = []
    for row, index in enumerate(queries):
        hits = zip(similarities[row].tolist(), indices[row].tolist(), strict=True)
        others = [(s, i) for s, i in hits if splits.gallery is not None or i != index][:k]
        found.append([Neighbour(i, s, bool(gallery.labels[i] == query.labels[index])) for s, i in others])
    return found


def retrieval_gallery(
    splits: Splits,
    embeddings: Sequence[Tensor],
    *,
    num_queries: int = 8,
    k: int = 6,
    seed: int = 0,
    queries: Sequence[int] | None = None,
) -> Image.Image:
    """Queries (left column) with their K nearest neighbours, hits framed green and misses red, similarity below.

    embeddings: [(Q, D)] or [(Q, D), (N, D)], rows in the order of splits.query and splits.gallery.
    queries: rows of splits.query; None: chosen at random, each of another class where there are enough.
    """
    query, gallery = splits.query, splits.gallery or splits.query
    chosen = choose_queries(query.labels, num_queries, seed) if queries is None else list(queries)
    k = min(k, len(gallery) - (splits.gallery is None))
    width = (k + 1) * (_TILE + _GAP) + 2 * _GAP
    row_height = _TILE + _TEXT + _GAP
    page = Image.new("RGB", (width, len(chosen) * row_height + _GAP), "white")
    draw = ImageDraw.Draw(page)
    font = ImageFont.load_default(10)
    for row, neighbours in enumerate(nearest_images(splits, embeddings, chosen, k)):
        index = chosen[row]
        top = _GAP + row * row_height
        page.paste(_tile(query.paths[index], "black"), (_GAP, top))
        draw.text((_GAP, top + _TILE), _fitted(query.classes[query.labels[index]], font), "black", font)
        for column, each in enumerate(neighbours, start=1):
            left = 2 * _GAP + column * (_TILE + _GAP)
            page.paste(_tile(gallery.paths[each.index], HIT if each.is_hit else MISS), (left, top))
            # A sign beside the colour, so that the picture also reads in grey.
            draw.text((left, top + _TILE), f"{'hit' if each.is_hit else 'miss'}  {each.similarity:.2f}", "black", font)
    return page


def choose_queries(labels: np.ndarray, num_queries: int, seed: int) -> list[int]:
    """Rows at random, one of each class before a second of any."""
    order = np.random.default_rng(seed).permutation(len(labels))
    _, first = np.unique(labels[order], return_index=True)
    one_per_class = order[np.sort(first)]
    rest = order[~np.isin(order, one_per_class)]
    return [int(index) for index in np.concatenate([one_per_class, rest])[:num_queries]]


def _fitted(name: str, font: ImageFont.FreeTypeFont | ImageFont.ImageFont) -> str:
    """The name, or as much of its beginning as a tile is wide."""
    name = name.partition("\n")[0][:_TILE]
    if font.getlength(name) <= _TILE:
        return name
    while font.getlength(f"{name}...") > _TILE:
        name = name[:-1]
    return f"{name}..."


def _tile(path: Path, colour: str) -> Image.Image:
    inner = _TILE - 2 * _FRAME
    return ImageOps.expand(ImageOps.pad(read_rgb(path), (inner, inner), color="white"), _FRAME, colour)
