"""A run to look at: index.html in its folder, one file that opens without a server."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

import yaml

from proxy_anchor.reports.curves import recall_curves
from proxy_anchor.utils import write_text

PAGE_FILE = "index.html"

_STYLE = """
body { font: 15px/1.5 sans-serif; margin: 2em auto; max-width: 60em; padding: 0 1em; color: #222; background: #fff; }
table { border-collapse: collapse; }
td, th { padding: 3px 12px; border-bottom: 1px solid #ddd; text-align: right; }
td:first-child, th:first-child { text-align: left; }
svg, img { max-width: 100%; height: auto; }
pre { background: #f6f6f6; padding: 1em; overflow-x: auto; }
"""


def write_run_page(folder: Path, config: Mapping[str, Any], result: Mapping[str, Any], data: str) -> None:
    """Write index.html: results, curves, the gallery.png that lies in `folder`, environment, config.

    config: the run's, plain types. result: as result.json holds it. data: the lines that describe the images.
    """
    k = int(next(iter(result["last"]["recall"])))
    name = f"{config['dataset']['name']}, {config['backbone']['name']}, {config['embedding_dim']}-d"
    curves = "".join(
        _inline_svg(recall_curves({name: [dict(result)]}, against=against, k=k), against)
        for against in ("epoch", "seconds")
    )
    gallery = folder / "gallery.png"
    picture = ""
    if gallery.is_file():
        source = base64.b64encode(gallery.read_bytes()).decode()
        picture = (
            "<h2>Gallery</h2><p>A query in each row (black), its nearest images: hits framed green, misses red.</p>"
            f'<img alt="queries with their nearest images" src="data:image/png;base64,{source}">'
        )
    warnings = "".join(f"<p><strong>Warning:</strong> {escape(text)}</p>" for text in result.get("warnings", []))
    environment = {"device": result["device"], **result["versions"]}
    write_text(
        folder / PAGE_FILE,
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(name)}</title><style>{_STYLE}</style>'
        f"</head><body><h1>{escape(name)}</h1><p>{escape(data)}</p>"
        f"<h2>Results</h2>{_results(result)}<p>Recall@K in percent of {escape(result['searched'])} classes; epoch selected by "
        f"{escape(result['selected_by'])}.</p>{warnings}"
        f"<h2>Curves</h2>{curves}{picture}"
        f"<h2>Environment</h2>{_table([['', 'version'], *map(list, environment.items())])}"
        f"<h2>Config</h2><pre>{escape(yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True))}</pre></body></html>\n",
    )


def _results(result: Mapping[str, Any]) -> str:
    ks = list(result["last"]["recall"])
    rows = [["", "epoch", *(f"Recall@{k}" for k in ks)]]
    for name in ("untrained", "selected", "best", "last"):
        if row := result.get(name):
            rows.append([name, row["epoch"], *(f"{100 * row['recall'][k]:.1f}" for k in ks)])
    return _table(rows)


def _table(rows: list[list[Any]]) -> str:
    head, *body = ([escape(str(cell)) for cell in row] for row in rows)
    lines = ["<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in body]
    return f"<table><tr>{''.join(f'<th>{cell}</th>' for cell in head)}</tr>{''.join(lines)}</table>"


def _inline_svg(figure: Any, name: str) -> str:
    import matplotlib

    stream = io.StringIO()
    # Two figures in one page must not share the names of their clip paths and letters.
    with matplotlib.rc_context({"svg.hashsalt": name, "svg.fonttype": "none"}):
        figure.savefig(stream, format="svg", metadata={"Date": None})
    text = stream.getvalue()
    return text[text.index("<svg") :]  # without the XML header, which HTML does not know
