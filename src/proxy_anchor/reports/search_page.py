"""Search results for people: an HTML page that needs no other file."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from html import escape
from pathlib import Path

from proxy_anchor.data.images import ImageInput, make_thumbnail, open_input
from proxy_anchor.inference.retriever import Hit, Retriever, vote
from proxy_anchor.utils import write_text

_STYLE = """
body { font: 14px/1.4 sans-serif; margin: 1.5em; color: #222; background: #fff; }
section { display: flex; flex-wrap: wrap; gap: 10px; padding: 12px 0; border-top: 1px solid #ddd; }
figure { margin: 0; width: 120px; overflow-wrap: anywhere; font-size: 12px; }
figure img { width: 112px; height: 112px; object-fit: contain; border: 4px solid #bbb; background: #f6f6f6; }
figure.query img { border-color: #000; }
figure.match img { border-color: #009E73; }
"""


def write_search_page(
    file: Path,
    retriever: Retriever,
    queries: Sequence[ImageInput],
    names: Sequence[str],
    results: Sequence[Sequence[Hit]],
) -> None:
    """One row per query: the query, then its hits with similarity, class and name; matches framed green."""
    sections = []
    for query, name, hits in zip(queries, names, results, strict=True):
        label, share = vote(hits)
        verdict = "" if label is None else f"class by vote: {label} ({100 * share:.0f} %)"
        figures = [_figure(make_thumbnail(open_input(query), 112), "query", ["query", name, verdict])]
        for hit in hits:
            state = "match" if hit.is_match else ""
            sign = "match " if hit.is_match else ""  # beside the colour, for those who cannot tell it
            lines = [f"{sign}{hit.similarity:.3f}", hit.label or "", hit.name]
            figures.append(_figure(retriever.thumbnail(hit.id), state, lines))
        sections.append(f"<section>{''.join(figures)}</section>")
    note = "" if retriever.threshold is None else f"<p>{escape(retriever.threshold.describe())}</p>"
    write_text(
        file,
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>Search results</title><style>{_STYLE}</style>'
        f"</head><body><h1>Search results</h1>{note}\n" + "\n".join(sections) + "\n</body></html>\n",
    )


def _figure(jpeg: bytes, state: str, lines: Sequence[str]) -> str:
    source = f"data:image/jpeg;base64,{base64.b64encode(jpeg).decode()}" if jpeg else "data:,"
    text = "<br>".join(escape(line) for line in lines if line)
    return f'<figure class="{state}"><img alt="{escape(lines[-1])}" src="{source}"><figcaption>{text}</figcaption></figure>'
