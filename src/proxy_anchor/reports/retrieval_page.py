"""Which queries fail, in which classes, and a page to browse them: one HTML file with its pictures inside."""

from __future__ import annotations

import base64
import csv
import io
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont, ImageOps
from torch import Tensor

from proxy_anchor.data.images import make_thumbnail, read_rgb
from proxy_anchor.data.table import Splits
from proxy_anchor.errors import UsageError, check_choice, check_int
from proxy_anchor.reports.gallery import HIT, MISS, choose_queries, nearest_images, retrieval_gallery
from proxy_anchor.retrieval.search import normalise, row_chunks, similarity_chunk
from proxy_anchor.utils import write_text

_THUMBNAIL_PX = 96


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
    first, *_ = recalls.values()
    labels = splits.query.labels
    queries = {
        splits.query.classes[label]: int(count)
        for label, count in zip(*np.unique(labels, return_counts=True), strict=True)
    }
    stream = io.StringIO(newline="")
    table = csv.writer(stream, lineterminator="\n")
    table.writerow(["class", "queries", *recalls])
    for name in sorted(first, key=lambda name: (first[name], name)):
        table.writerow([name, queries[name], *(f"{each[name]:.4f}" for each in recalls.values())])
    write_text(file, stream.getvalue())


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


def worst_of_classes(
    splits: Splits, embeddings: Sequence[Tensor], classes: Sequence[str]
) -> dict[str, list[Image.Image]]:
    """{class: [its worst query, the image that it found first]} as small pictures, for `figures.class_recall_chart`."""
    query, gallery = splits.query, splits.gallery or splits.query
    rows: dict[str, int] = {}
    for row in worst_queries(splits, embeddings):
        rows.setdefault(query.classes[query.labels[row]], row)
    chosen = [rows[name] for name in classes]
    found = nearest_images(splits, embeddings, chosen, 1)
    size = (_THUMBNAIL_PX, _THUMBNAIL_PX)
    return {
        name: [
            ImageOps.pad(read_rgb(path), size, color="white")
            for path in (query.paths[row], *(gallery.paths[each.index] for each in hits))
        ]
        for name, row, hits in zip(classes, chosen, found, strict=True)
    }


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


_STYLE = """
body { font: 14px/1.4 sans-serif; margin: 1.5em; color: #222; background: #fff; }
form { position: sticky; top: 0; background: #fff; padding: 8px 0; border-bottom: 1px solid #ddd; }
label { margin-right: 1.2em; }
section { display: flex; flex-wrap: wrap; gap: 22px; padding: 10px 0; border-top: 1px solid #ddd; }
section[hidden] { display: none; }
.model { display: flex; gap: 8px; }
.model h2 { writing-mode: vertical-rl; font-size: 12px; margin: 0; }
figure { margin: 0; width: 104px; overflow-wrap: anywhere; font-size: 12px; }
figure img { width: 96px; height: 96px; object-fit: contain; border: 4px solid #000; }
figure.hit img { border-color: HIT; }
figure.miss img { border-color: MISS; }
""".replace("HIT", HIT).replace("MISS", MISS)

_SCRIPT = """
const form = document.querySelector("form"), sections = [...document.querySelectorAll("section")];
function apply() {
  const wanted = form.elements.text.value.trim().toLowerCase(), show = form.elements.show.value;
  let count = 0;
  for (const each of sections) {
    const state = each.dataset.first.split(" ");
    const fits = show === "all" || (show === "miss" && state.includes("miss"))
      || (show === "hit" && !state.includes("miss")) || (show === "differ" && new Set(state).size > 1);
    each.hidden = !(fits && each.dataset.text.includes(wanted));
    count += !each.hidden;
  }
  document.querySelector("output").textContent = `${count} of ${sections.length} queries`;
}
form.addEventListener("input", apply);
form.addEventListener("submit", event => event.preventDefault());
apply();
"""


def write_retrieval_page(
    file: Path, splits: Splits, models: Mapping[str, Sequence[Tensor]], queries: Sequence[int], *, k: int = 4
) -> None:
    """A row per query: the query, then its K nearest by each model, similarity below, hits framed green and misses red.

    Filters: a text in class or path; first neighbour a miss, a hit, or not the same with every model.
    """
    query, gallery = splits.query, splits.gallery or splits.query
    found = {name: nearest_images(splits, embeddings, queries, k) for name, embeddings in models.items()}
    sections = []
    for number, index in enumerate(queries):
        name, path = query.classes[query.labels[index]], query.paths[index]
        parts = [_figure(path, "query", ["query", name, path.name])]
        first = []
        for model, rows in found.items():
            row = rows[number]
            first.append("hit" if row and row[0].is_hit else "miss")
            figures = []
            for each in row:
                word = "hit" if each.is_hit else "miss"  # beside the colour, for those who cannot tell it
                other = gallery.paths[each.index]
                lines = [f"{word} {each.similarity:.3f}", gallery.classes[gallery.labels[each.index]], other.name]
                figures.append(_figure(other, word, lines))
            heading = f"<h2>{escape(model)}</h2>" if len(found) > 1 else ""
            parts.append(f'<div class="model">{heading}{"".join(figures)}</div>')
        text = escape(f"{name} {path.name}".lower(), quote=True)
        sections.append(f'<section data-first="{" ".join(first)}" data-text="{text}">{"".join(parts)}</section>')
    differ = '<option value="differ">models differ</option>' if len(found) > 1 else ""
    write_text(
        file,
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>Retrieval</title><style>{_STYLE}</style></head>'
        f"<body><h1>Retrieval: {escape(splits.name)}</h1><form>"
        '<label>show <select name="show"><option value="all">all</option><option value="miss">first is a miss</option>'
        f'<option value="hit">first is a hit</option>{differ}</select></label>'
        '<label>class or file <input name="text" type="search"></label><output></output></form>\n'
        + "\n".join(sections)
        + f"\n<script>{_SCRIPT}</script></body></html>\n",
    )


def _figure(path: Path, state: str, lines: Sequence[str]) -> str:
    source = base64.b64encode(make_thumbnail(read_rgb(path), _THUMBNAIL_PX)).decode()
    text = "<br>".join(map(escape, lines))
    return (
        f'<figure class="{state}"><img alt="{escape(lines[-1], quote=True)}" src="data:image/jpeg;base64,{source}">'
        f"<figcaption>{text}</figcaption></figure>"
    )
