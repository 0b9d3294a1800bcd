"""Queries with their nearest neighbours as a picture; which queries fail, in which classes."""

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
from proxy_anchor.errors import UsageError, check_choice, check_int
from proxy_anchor.retrieval.search import normalise, row_chunks, search, similarity_chunk
from proxy_anchor.utils import write_text

# Okabe and Ito's green and a red that is as far from it for every kind of colour vision as their vermilion.
HIT, MISS = "#009E73", "#CC3311"
_TILE, _FRAME, _TEXT, _GAP = 96, 4, 14, 6
_LETTERS = 17  # that a tile is wide


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
        name = query.classes[query.labels[index]].partition("\n")[0][:_LETTERS]
        draw.text((_GAP, top + _TILE), name, "black", font)
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


def _tile(path: Path, colour: str) -> Image.Image:
    inner = _TILE - 2 * _FRAME
    return ImageOps.expand(ImageOps.pad(read_rgb(path), (inner, inner), color="white"), _FRAME, colour)


def class_recall(splits: Splits, embeddings: Sequence[Tensor], *, k: int = 1) -> dict[str, float]:
    """{class: share of its queries with an image of their class among the K nearest}, in label order.

    embeddings: [(Q, D)] or [(Q, D), (N, D)] as `retrieval_gallery` takes them. A query without positive is a miss.
    """
    query = splits.query
    found = nearest_images(splits, embeddings, range(len(query)), k)
    hit = np.array([any(each.is_hit for each in row) for row in found])
    return {query.classes[label]: float(hit[query.labels == label].mean()) for label in np.unique(query.labels)}


def write_class_recall(file: Path, splits: Splits, recalls: Mapping[str, Mapping[str, float]]) -> None:
    """CSV: class, its queries, and its recall by each model (`class_recall` under its name), the first model's worst first."""
    from pandas import DataFrame  # half a second, which a training run does not have to wait

    table, first = DataFrame(recalls), next(iter(recalls))
    labels, counts = np.unique(splits.query.labels, return_counts=True)
    table.insert(0, "queries", dict(zip(map(splits.query.classes.__getitem__, labels), counts, strict=True)))
    table = table.rename_axis("class").sort_values([first, "class"])
    write_text(file, table.to_csv(float_format="%.4f", lineterminator="\n"))


def worst_queries(splits: Splits, embeddings: Sequence[Tensor]) -> list[int]:
    """All queries, those first whose best image of another class is most ahead of the best image of their own."""
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
    splits: Splits,
    embeddings: Sequence[Tensor],
    choose: str = "random",
    *,
    count: int = 20,
    paths: Sequence[Path | str] = (),
    seed: int = 0,
) -> list[int]:
    """Rows of splits.query. choose: "random" (different classes first), "worst" (see `worst_queries`) or "path"."""
    check_choice("choose", choose, ["random", "worst", "path"])
    check_int("count", count, 1)
    if choose == "random":
        return choose_queries(splits.query.labels, count, seed)
    if choose == "worst":
        return worst_queries(splits, embeddings)[:count]
    index = {path.resolve(): row for row, path in enumerate(splits.query.paths)}
    missing = [str(path) for path in paths if Path(path).resolve() not in index]
    if missing or not paths:
        raise UsageError(
            f"choose: expected random, worst, or paths of searched images; not among them: {', '.join(missing) or 'none given'}."
        )
    return [index[Path(path).resolve()] for path in paths]


def side_by_side(
    splits: Splits, models: Mapping[str, Sequence[Tensor]], queries: Sequence[int], *, k: int = 4
) -> Image.Image:
    """`retrieval_gallery` of the same queries for each model, beside each other under its name."""
    pages = [retrieval_gallery(splits, embeddings, k=k, queries=queries) for embeddings in models.values()]
    if len(pages) == 1:
        return pages[0]
    head, gap = 22, 18
    width = sum(page.width for page in pages) + gap * (len(pages) - 1)
    whole = Image.new("RGB", (width, pages[0].height + head), "white")
    draw, left = ImageDraw.Draw(whole), 0
    for name, page in zip(models, pages, strict=True):
        draw.text((left + 8, 5), name, "black", ImageFont.load_default(13))
        whole.paste(page, (left, head))
        left += page.width + gap
    return whole
