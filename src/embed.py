"""Embeddings of a folder's images as a file: `python src/embed.py checkpoint=... images=DIR output=embeddings.npz`."""

from __future__ import annotations

from pathlib import Path

from omegaconf import DictConfig

from proxy_anchor.cli import checks, config
from proxy_anchor.cli import main as entry


def embed(cfg: DictConfig) -> int:
    """Write paths, classes (where sub-folders name them) and unit vectors; returns how many images could be read."""
    import shutil
    import time

    from proxy_anchor.data.images import class_folders, find_images
    from proxy_anchor.errors import UsageError
    from proxy_anchor.inference.checkpoint import load_trained
    from proxy_anchor.inference.embedder import Embedder
    from proxy_anchor.inference.retriever import report_skipped
    from proxy_anchor.reports.tables import write_embeddings

    checks.check_retrieval(cfg, "embed")
    output, root = Path(config.absolute(cfg.output)), Path(config.absolute(cfg.images))
    paths = find_images(root)
    labels = class_folders(paths, root)
    embedder = Embedder(load_trained(cfg.checkpoint), **cfg.embed)
    shards = output.with_name(f".{output.name}.parts")
    start = time.perf_counter()
    done = embedder.embed(paths, shards=shards)
    seconds = time.perf_counter() - start
    report_skipped([(str(paths[row]), reason) for row, reason in done.skipped])
    if not done.rows:
        raise UsageError(f"none of the {len(paths)} images below {root} can be read.")
    names = [paths[row].relative_to(root).as_posix() for row in done.rows]
    write_embeddings(output, names, [labels[row] for row in done.rows], done.embeddings.numpy())
    shutil.rmtree(shards, ignore_errors=True)
    new = len(done.rows) - done.reused
    print(f"{len(names):,} embeddings of D={embedder.embedding_dim} in {output} ({new / seconds:.0f} images/s)")
    return len(names)


if __name__ == "__main__":
    entry.run(embed, "embed")
