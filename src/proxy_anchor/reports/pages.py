"""HTML pages from templates/, each a single file with its pictures inside."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape
from torch import Tensor

from proxy_anchor.data.bad_images import NEAR, Entry, Finding
from proxy_anchor.data.images import ImageInput, make_thumbnail, open_input
from proxy_anchor.data.table import Splits
from proxy_anchor.errors import UsageError
from proxy_anchor.inference.hits import Hit, vote
from proxy_anchor.inference.retriever import Retriever
from proxy_anchor.reports.figures import run_curves
from proxy_anchor.reports.gallery import nearest_images
from proxy_anchor.utils import write_text

PAGE_FILE = "index.html"
_TILE_PX = 112


def render(template: str, **values: Any) -> str:
    """A file of reports/templates with these values; HTML is escaped, a missing name is an error."""
    return _TEMPLATES.get_template(template).render(**values)


def _listed(values: Mapping[str, Any], *left_out: str) -> str:
    """' (alpha 32.0, delta 0.1)'; "" without values."""
    listed = ", ".join(f"{key} {value}" for key, value in values.items() if key not in left_out)
    return f" ({listed})" if listed else ""


_TEMPLATES = Environment(
    loader=PackageLoader("proxy_anchor.reports"),
    autoescape=select_autoescape(["html"]),
    undefined=StrictUndefined,
    trim_blocks=True,
)
_TEMPLATES.filters["base64"] = lambda content: base64.b64encode(content).decode()
_TEMPLATES.filters["listed"] = _listed


def write_run_page(
    folder: Path,
    config: Mapping[str, Any],
    result: Mapping[str, Any],
    data: str,
    splits: Splits,
    embeddings: Sequence[Tensor],
    queries: Sequence[int],
) -> None:
    """Write index.html: results, curves, classes, gallery, environment, config.

    Args:
        folder: the run folder.
        config: of the run, plain types.
        result: contents of result.json.
        data: description of images and classes.
        splits: images and labels.
        embeddings: of the selected epoch, see `retrieval_gallery`.
        queries: rows of splits.query, for the gallery.
    """
    run = config["run"]
    searched = {f"searched ({name})": query.classes for name, (query, _) in splits.evaluated.items()}
    text = render(
        "run.html",
        run=run,
        name=f"{splits.name}, {config['backbone']['name']}, {config['embedding_dim']}-d",
        data=data,
        result={"warnings": [], **result},
        curves=[inline_svg(figure, name) for name, figure in run_curves(result["history"]).items()],
        classes={"trained": splits.train.classes, **searched},
        queries=_rows(splits, {run: embeddings}, queries, 6),
        config=yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True),
    )
    write_text(folder / PAGE_FILE, text)


def inline_svg(figure: Any, name: str) -> str:
    """The figure as an <svg> element for a page; name: different for each figure of a page."""
    stream = io.StringIO()
    # Two figures in one page need different ids for clip paths and letters.
    with matplotlib.rc_context({"svg.hashsalt": name, "svg.fonttype": "none"}):
        figure.savefig(stream, format="svg", metadata={"Date": None})
    text = stream.getvalue()
    return text[text.index("<svg") :]  # without the XML header, which is not HTML


def write_retrieval_page(
    file: Path, splits: Splits, models: Mapping[str, Sequence[Tensor]], queries: Sequence[int], *, k: int = 4
) -> None:
    """A row per query with its K nearest images by each model.

    The page filters by a string in class or path, and by the first neighbour: hit, miss, or different by model.
    models: {name: embeddings}, see `retrieval_gallery`. queries: rows of splits.query.
    """
    rows = _rows(splits, models, queries, k)
    write_text(file, render("retrieval.html", name=splits.name, models=list(models), queries=rows))


def _rows(
    splits: Splits, models: Mapping[str, Sequence[Tensor]], queries: Sequence[int], k: int
) -> list[dict[str, Any]]:
    """Tiles of each query and, by model, of its K nearest images; see `write_retrieval_page`."""
    query, gallery = splits.query, splits.gallery or splits.query
    found = {name: nearest_images(splits, embeddings, queries, k) for name, embeddings in models.items()}
    rows: list[dict[str, Any]] = []
    for number, index in enumerate(queries):
        name, path = query.classes[query.labels[index]], query.paths[index]
        row = {"text": f"{name} {path.name}", "query": _tile(path, "query", "query", name, path.name)}
        tiles: dict[str, list[dict[str, Any]]] = {model: [] for model in found}
        for model, neighbours in found.items():
            for each in neighbours[number]:
                state = "hit" if each.is_hit else "miss"  # a word in addition to the colour
                lines = f"{state} {each.similarity:.3f}", gallery.classes[gallery.labels[each.index]]
                path = gallery.paths[each.index]
                tiles[model].append(_tile(path, state, *lines, path.name))
        first = [each[0]["state"] if each else "miss" for each in tiles.values()]
        rows.append(row | {"found": tiles, "first": " ".join(first)})
    return rows


def _tile(image: ImageInput, state: str, *lines: str | None) -> dict[str, Any]:
    """Picture, frame and caption; without the picture where it cannot be read (any more)."""
    try:
        picture = make_thumbnail(open_input(image), _TILE_PX, _TILE_PX)
    except UsageError:
        picture = b""
    return {"picture": picture, "state": state, "lines": list(lines)}


def write_search_page(
    file: Path, retriever: Retriever, queries: Sequence[Path], results: Sequence[Sequence[Hit]]
) -> None:
    """A row per query with its hits: similarity, class, name; matches framed green."""
    rows = []
    for query, hits in zip(queries, results, strict=True):
        label, share = vote(hits)
        verdict = "" if label is None else f"class by vote: {label} ({100 * share:.0f} %)"
        tiles = [_tile(query, "query", "query", query.name, verdict)]
        for hit in hits:
            state, word = ("hit", "match ") if hit.is_match else ("", "")  # a word in addition to the colour
            picture = retriever.items[hit.id].name  # the name of a hit may be shortened
            tiles.append(_tile(picture, state, f"{word}{hit.similarity:.3f}", hit.label, hit.name))
        rows.append(tiles)
    threshold = retriever.threshold and retriever.threshold.describe()
    write_text(file, render("search.html", threshold=threshold, queries=rows))


def write_findings_page(file: Path, findings: Sequence[tuple[Finding, Sequence[Entry]]], limit: int = 200) -> None:
    """A row per finding of `near_findings` with its images; at most `limit` of each kind."""
    groups = []
    for kind, meaning in NEAR.items():
        rows = []
        chosen = [each for each in findings if each[0].kind == kind]
        for finding, images in chosen[:limit]:
            verdict = finding.detail.rpartition("), ")[2]  # without the other image, which is shown
            tiles = [_tile(path, "", f"{table}: {name}", path.name) for path, table, name in images]
            tiles[0]["lines"].insert(0, verdict)
            rows.append(tiles)
        groups.append((kind, meaning, len(chosen), rows))
    write_text(file, render("findings.html", groups=groups))
