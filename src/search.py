"""Find the images of a gallery that are most similar to a query."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from proxy_anchor.cli import checks, config
from proxy_anchor.cli import main as entry


def search(cfg: DictConfig) -> list[dict[str, Any]]:
    """Print the neighbours, write them as JSON and HTML, return the list."""
    from proxy_anchor.data.files import find_images
    from proxy_anchor.errors import UsageError
    from proxy_anchor.inference.gallery import open_index, report_skipped
    from proxy_anchor.inference.hits import vote
    from proxy_anchor.reports.pages import write_search_page
    from proxy_anchor.reports.tables import format_table
    from proxy_anchor.training.checkpoint import checkpoint_of
    from proxy_anchor.utils import write_json

    checks.check_use(cfg, "search")
    query = Path(cfg.query)
    queries = find_images(query) if query.is_dir() else [query]
    retriever = open_index(cfg.checkpoint, cfg.gallery, cfg.index, kind=cfg.kind, **cfg.embed)
    if cfg.false_accept_rate is not None:
        retriever.calibrate(cfg.false_accept_rate)
        if cfg.index is not None:
            retriever.save(cfg.index)
    if retriever.threshold is not None:
        print(retriever.threshold.describe())

    done = retriever.embedder.embed(queries)
    if not done.rows:
        raise UsageError(f"none of the {len(queries)} queries can be read: {done.skipped[0][1]}")
    report_skipped([(str(queries[row]), reason) for row, reason in done.skipped])
    queries = [queries[row] for row in done.rows]
    found = retriever.search_embeddings(done.embeddings, cfg.k, reranking=cfg.rerank)
    names = [item.name for item in retriever.items.values()]
    root = os.path.dirname(os.path.commonprefix(names))  # noqa: RUF071  (any names)
    shown = [[replace(hit, name=hit.name.removeprefix(root and f"{root}{os.sep}")) for hit in hits] for hits in found]
    rows, listed = [], []
    for path, hits, short in zip(queries, found, shown, strict=True):
        label, share = vote(hits)
        listed.append({"query": str(path), "class": label, "share": share, "hits": [vars(hit) for hit in hits]})
        for rank, hit in enumerate(short, start=1):
            row = {"query": path.name, "rank": rank, "similarity": f"{hit.similarity:.3f}", "class": hit.label}
            rows.append(row | ({} if hit.is_match is None else {"match": hit.is_match}) | {"image": hit.name})
    print(format_table(rows))
    run = checkpoint_of(cfg.checkpoint).parent
    default = run if (run / "config.yaml").is_file() else Path()
    output = Path(config.absolute(cfg.output or str(default / "search")))
    write_json(output.with_name(f"{output.name}.json"), {"checkpoint": cfg.checkpoint, "queries": listed})
    write_search_page(output.with_name(f"{output.name}.html"), retriever, queries, shown)
    print(f"written: {output}.json and {output}.html")
    return listed


if __name__ == "__main__":
    entry.run(search, "search")
