"""A gallery folder, opened for search; an index folder is updated from it."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from proxy_anchor.errors import UsageError, counted
from proxy_anchor.inference.checkpoint import load_trained
from proxy_anchor.inference.retriever import INDEX_FILE, Retriever
from proxy_anchor.training.callbacks.health import COLLAPSED, mean_similarity


def open_index(
    checkpoint: str | Path, gallery: str | Path | None, index: str | Path | None, **options: Any
) -> Retriever:
    """A retriever over a gallery folder, or an index updated from it.

    Args:
        checkpoint: see `load_trained`.
        gallery: folder of images; None: the index as it is.
        index: folder of the index; None: nothing is kept.
        options: the arguments of `Retriever`.

    Prints unreadable images and what changed. Raises UsageError as `Retriever.index` and `Retriever.load` do.
    """
    retriever = Retriever(load_trained(checkpoint), **options)
    if index is not None and (gallery is None or Path(index, INDEX_FILE).is_file()):
        retriever.load(index)
        if (wanted := options.get("kind", "exact")) not in ("exact", retriever.kind):
            raise UsageError(f"index={index} is of kind={retriever.kind}: remove it, or leave kind={wanted} out.")
    before = dict(retriever.items)  # with their labels
    if gallery is not None:
        shards = None if index is None else Path(index).with_name(f".{Path(index).name}.parts")
        added, removed = retriever.update(gallery, shards=shards)
        report_skipped(retriever.skipped)
        if index is not None and retriever.items != before:
            retriever.save(index)
            print(f"index {index} saved: {added:,} images added or changed, {removed:,} removed")
        if shards is not None:
            shutil.rmtree(shards, ignore_errors=True)
    print(f"gallery: {counted(len(retriever), 'image')}", flush=True)
    warn_of_collapse(retriever.embeddings[1][:: 1 + len(retriever) // 10_000])  # an index may be large, and on disk
    return retriever


def warn_of_collapse(embeddings: Tensor, source: str = "") -> None:
    """Print a warning where the unit vectors (N, D) are nearly equal; source: what precedes it."""
    if len(embeddings) < 2:
        return
    similarity = mean_similarity(embeddings.sum(0, dtype=torch.float64), len(embeddings))
    if similarity > COLLAPSED:
        print(
            f"warning: {source}the embeddings have collapsed (mean pairwise similarity {similarity:.4f}, of at "
            "most 1): neighbours follow the order of the images.",
            flush=True,
        )


def report_skipped(skipped: Sequence[tuple[str, str]]) -> None:
    """Print the number of unreadable images, and each with its reason."""
    if skipped:
        print(f"left out, as they cannot be read: {counted(len(skipped), 'image')}")
        for name, reason in skipped:
            print(f"  {reason if name in reason else f'{name}: {reason}'}", flush=True)
