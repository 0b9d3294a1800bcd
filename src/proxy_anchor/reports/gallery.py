"""Queries with their nearest neighbours as a picture; recall by class; choice of queries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont, ImageOps
from torch import Tensor

from proxy_anchor.data.images import read_rgb
from proxy_anchor.data.table import Splits
from proxy_anchor.errors import UsageError
from proxy_anchor.retrieval.rows import normalise
from proxy_anchor.retrieval.search import nearest, resolve_engine, row_chunks, similarity_chunk
from proxy_anchor.utils import write_text

# A green and a red that are distinct for every kind of colour vision.
HIT, MISS = "#009E73", "#CC3311"
_TILE, _FRAME, _TEXT, _GAP = 96, 4, 14, 6
_LETTERS = 17  # that fit below a tile


@dataclass(frozen=True)
class Neighbour:
    """One neighbour of a query.

    Attributes:
        index: row of the gallery, or of the queries where there is no gallery.
        similarity: cosine, in [-1, 1].
        is_hit: whether its class is the query's.
    """

    index: int
    similarity: float
    is_hit: bool


def nearest_images(
    splits: Splits, embeddings: Sequence[Tensor], queries: Sequence[int], k: int
) -> list[list[Neighbour]]:
    """The K nearest images of these rows of splits.query, never the query itself.

    Fewer than K where there are no more. embeddings: see `retrieval_gallery`.
    """
    query, gallery = splits.query, splits.gallery or splits.query
    k = min(k, len(gallery) - (splits.gallery is None))
    rows, others = (normalise(each, "image").float() for each in (embeddings[0][list(queries)], embeddings[-1]))
    listed = min(k + 1, len(gallery))  # one more than K: the query itself is removed by its index
    engine = resolve_engine("auto", listed, device=rows.device)
    similarities, indices = nearest(rows, others, listed, engine, exclude_self=False)
    found = []
    for row, index in enumerate(queries):
        hits = zip(similarities[row].tolist(), indices[row].tolist(), strict=True)
        kept = [(s, i) for s, i in hits if splits.gallery is not None or i != index][:k]
        found.append([Neighbour(i, s, bool(gallery.labels[i] == query.labels[index])) for s, i in kept])
    return found


def retrieval_gallery(
    splits: Splits, embeddings: Sequence[Tensor], queries: Sequence[int], *, k: int = 6
) -> Image.Image:
    """Queries (left column) with their K nearest neighbours, hits framed green and misses red.

    Args:
        splits: images and labels.
        embeddings: [(Q, D)] or [(Q, D), (N, D)], rows in the order of splits.query and splits.gallery.
        queries: rows of splits.query.
        k: neighbours per query.
    """
    query, gallery = splits.query, splits.gallery or splits.query
    found = nearest_images(splits, embeddings, queries, k)
    width = (len(found[0]) + 1) * (_TILE + _GAP) + 2 * _GAP
    row_height = _TILE + _TEXT + _GAP
    page = Image.new("RGB", (width, len(queries) * row_height + _GAP), "white")
    draw = ImageDraw.Draw(page)
    font = ImageFont.load_default(10)
    for row, (index, neighbours) in enumerate(zip(queries, found, strict=True)):
        top = _GAP + row * row_height
        page.paste(_tile(query.paths[index], "black"), (_GAP, top))
        name = query.classes[query.labels[index]].partition("\n")[0][:_LETTERS]
        draw.text((_GAP, top + _TILE), name, "black", font)
        for column, each in enumerate(neighbours, start=1):
            left = 2 * _GAP + column * (_TILE + _GAP)
            page.paste(_tile(gallery.paths[each.index], HIT if each.is_hit else MISS), (left, top))
            # A word in addition to the colour: the picture also reads in grey.
            draw.text((left, top + _TILE), f"{'hit' if each.is_hit else 'miss'}  {each.similarity:.2f}", "black", font)
    return page


def choose_queries(labels: np.ndarray, num_queries: int, seed: int = 0) -> list[int]:
    """Random rows, one of each class before a second of any."""
    order = np.random.default_rng(seed).permutation(len(labels))
    first = np.sort(np.unique(labels[order], return_index=True)[1])
    return np.concatenate([order[first], np.delete(order, first)])[:num_queries].tolist()


def _tile(path: Path, colour: str) -> Image.Image:
    inner = _TILE - 2 * _FRAME
    return ImageOps.expand(ImageOps.pad(read_rgb(path), (inner, inner), color="white"), _FRAME, colour)


def class_recall(splits: Splits, embeddings: Sequence[Tensor], *, k: int = 1) -> dict[str, float]:
    """{class: Recall@K of its queries, in [0, 1]}, in label order.

    embeddings: see `retrieval_gallery`. A query without an image of its class counts as a miss.
    """
    query = splits.query
    found = nearest_images(splits, embeddings, range(len(query)), k)
    hit = np.array([any(each.is_hit for each in row) for row in found])
    return {query.classes[label]: float(hit[query.labels == label].mean()) for label in np.unique(query.labels)}


def write_class_recall(file: Path, splits: Splits, recalls: Mapping[str, Mapping[str, float]]) -> None:
    """CSV of `class_recall` by each model, the first model's worst classes first."""
    from pandas import DataFrame  # takes half a second to import, and train.py does not need it

    table, first = DataFrame(recalls), next(iter(recalls))
    labels, counts = np.unique(splits.query.labels, return_counts=True)
    table.insert(0, "queries", dict(zip(map(splits.query.classes.__getitem__, labels), counts, strict=True)))
    table = table.rename_axis("class").sort_values([first, "class"])
    write_text(file, table.to_csv(float_format="%.4f", lineterminator="\n"))


def worst_queries(splits: Splits, embeddings: Sequence[Tensor]) -> list[int]:
    """All queries, the worst first.

    The order is by margin: similarity of the best image of their class minus that of the best other image.
    """
    query, gallery = splits.query, splits.gallery or splits.query
    units = [normalise(each, "query").float() for each in embeddings]
    own, others = torch.from_numpy(query.labels), torch.from_numpy(gallery.labels)
    margins = []
    for rows in row_chunks(len(query), len(gallery)):
        similarities = similarity_chunk(units[0], units[-1], rows, splits.gallery is None)
        same = own[rows, None] == others
        best = similarities.masked_fill(~same, -torch.inf).amax(1)
        wrong = similarities.masked_fill(same, -torch.inf).amax(1)
        margins.append(torch.nan_to_num(best, neginf=-2) - torch.nan_to_num(wrong, neginf=-2))
    return torch.cat(margins).argsort(stable=True).tolist()


def select_queries(
    splits: Splits, embeddings: Sequence[Tensor], choose: str | Sequence[Path | str] = "random", *, count: int = 20
) -> list[int]:
    """Rows of splits.query.

    Args:
        splits: images and labels.
        embeddings: see `retrieval_gallery`.
        choose: "random" (different classes first), "worst" (see `worst_queries`), or paths of searched images.
        count: how many for "random" and "worst".

    Raises:
        UsageError: for a path that is not a searched image.
    """
    if choose == "random":
        return choose_queries(splits.query.labels, count)
    if choose == "worst":
        return worst_queries(splits, embeddings)[:count]
    paths = [choose] if isinstance(choose, str) else choose
    rows = {path.resolve(): row for row, path in enumerate(splits.query.paths)}
    if missing := [str(path) for path in paths if Path(path).resolve() not in rows]:
        raise UsageError(
            f"choose: expected random, worst, or paths of searched images; not among them: {', '.join(missing)}."
        )
    return [rows[Path(path).resolve()] for path in paths]
