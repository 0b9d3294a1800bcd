"""Speed of embedding a folder and of search: `python benchmarks/retrieval.py`.

Embedding: images per second from files to vectors, and the network alone (the same forward on batches that are
already on the device). Search: milliseconds by gallery size, exact and approximate (faiss), on synthetic clustered
vectors, with the share of the exact 10 nearest that approximate search finds. Each row is appended to
results/retrieval.jsonl at once.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import HERE, append_rows, make_photographs, where_it_ran
from torch.nn import functional as F

from proxy_anchor.data.files import find_images
from proxy_anchor.data.images import fit_workers
from proxy_anchor.inference.checkpoint import load_trained
from proxy_anchor.inference.embedder import Embedder
from proxy_anchor.inference.index import VectorIndex
from proxy_anchor.models.embedding_net import EmbeddingNet
from proxy_anchor.reports.tables import format_table
from proxy_anchor.retrieval.search import resolve_engine, search
from proxy_anchor.utils import keep_freed_memory


def seconds(run: Callable[[], Any], repeats: int, device: torch.device) -> float:
    """Median seconds of a call, after a warm-up call."""
    taken = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken.append(time.perf_counter() - start)
    return float(np.median(taken[1:]))


def measure_embedding(embedder: Embedder, paths: list[Path]) -> dict[str, Any]:
    """One row: images/s of the folder and of the network alone."""
    batch_size, device, side = embedder.batch_size, embedder.device, embedder.net.prepare.crop
    pixels = torch.randint(0, 256, (batch_size, 3, side, side), dtype=torch.uint8, device=device)
    steps = 20 if device.type == "cuda" else 2
    ceiling = steps * batch_size / seconds(lambda: [embedder.forward(pixels) for _ in range(steps)], 5, device)
    # Includes the start of the workers, which thousands of images make negligible.
    folder = len(paths) / seconds(lambda: embedder.embed(paths, progress=False), 3, device)
    return {
        "network": embedder.net.config["backbone"],
        "precision": embedder.precision,
        "batch": batch_size,
        "workers": fit_workers(embedder.num_workers, []),
        "images": len(paths),
        "ceiling images/s": ceiling,
        "folder images/s": folder,
        "folder / ceiling %": 100 * folder / ceiling,
    }


def made_up_vectors(number: int, dim: int, seed: int, num_clusters: int) -> torch.Tensor:
    """Unit vectors in clusters of about 50, as embeddings of classes are; similarity within a cluster about 0.5."""
    generator = torch.Generator().manual_seed(seed)
    centres = F.normalize(torch.randn(num_clusters, dim, generator=torch.Generator().manual_seed(0)))
    chosen = torch.randint(num_clusters, (number,), generator=generator)
    vectors = torch.empty(number, dim)
    for start in range(0, number, 100_000):
        part = slice(start, start + 100_000)
        noise = F.normalize(torch.randn(len(chosen[part]), dim, generator=generator))
        vectors[part] = F.normalize(centres[chosen[part]] + noise)
    return vectors


def measure_search(size: int, dim: int, kind: str, engine: str, device: torch.device) -> dict[str, Any]:
    clusters = max(1, size // 50)
    gallery, queries = made_up_vectors(size, dim, 1, clusters), made_up_vectors(100, dim, 2, clusters)
    index = VectorIndex(dim, kind=kind, engine=engine, device=device)
    index.add(np.arange(size), gallery)
    start = time.perf_counter()
    _, found = index.search(queries, 10)
    build = time.perf_counter() - start
    exact = search(queries, gallery, 10)[1].numpy()
    one = seconds(lambda: index.search(queries[:1], 10), 20, device)
    batch = seconds(lambda: index.search(queries, 10), 5, device)
    return {
        "gallery": size,
        "dim": dim,
        "search": f"{kind} ({resolve_engine(engine, 10, device=device, resident=True)})" if kind == "exact" else kind,
        "one query ms": 1000 * one,
        "per query of 100 ms": 1000 * batch / len(queries),
        "recall@10 %": 100 * float(np.mean([np.isin(*pair).mean() for pair in zip(found, exact, strict=True)])),
        "build s": build,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", help="a trained network; default: --backbone with random weights")
    parser.add_argument("--backbone", nargs="*", default=["resnet50", "tf_efficientnet_lite0"], help="timm names")
    parser.add_argument("--folder", help="a folder of images; default: synthetic photographs of 500 x 375")
    parser.add_argument("--images", type=int, default=8000, help="synthetic photographs; 0: no embedding")
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--precision", nargs="*", default=["32"], choices=["32", "bf16"])
    parser.add_argument("--num-workers", type=int)
    parser.add_argument("--sizes", type=int, nargs="*", default=[10_000, 100_000, 1_000_000])
    parser.add_argument(
        "--kinds", nargs="*", default=["exact", "HNSW32", "IVF256,PQ32"], help="exact, or faiss's names"
    )
    parser.add_argument(
        "--engines", nargs="*", default=["auto"], help="of exact search: auto faiss_cpu faiss_gpu torch"
    )
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--output", type=Path, default=HERE / "results", help="folder of the .jsonl record")
    given = parser.parse_args()
    keep_freed_memory()  # as the commands do
    cuda = torch.cuda.is_available() if given.device == "auto" else given.device.startswith("cuda")
    device = torch.device("cuda" if cuda else "cpu")
    where = where_it_ran(device)

    def add(rows: list[dict[str, Any]], row: dict[str, Any], kind: str) -> None:
        append_rows(given.output / "retrieval.jsonl", [{"kind": kind, **row, **where}])
        rows.append(row)

    embedded: list[dict[str, Any]] = []
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as made_up:
        folder = Path(given.folder or made_up)
        if not given.folder and given.images:
            make_photographs(folder, given.images)
        names = [given.checkpoint] if given.checkpoint else given.backbone
        for name, precision in product(names if given.folder or given.images else [], given.precision):
            if given.checkpoint:
                net = load_trained(name)
            else:
                net = EmbeddingNet(name, given.dim, pretrained=False, batch_norm="train").eval()
            options = {"device": given.device, "batch_size": given.batch_size, "num_workers": given.num_workers}
            embedder = Embedder(net, precision=precision, **options)
            add(embedded, measure_embedding(embedder, find_images(folder)), "embedding")
    for size, kind in product(given.sizes, given.kinds):
        for engine in given.engines if kind == "exact" else ["auto"]:
            add(found, measure_search(size, given.dim, kind, engine, device), "search")
    digits = {"one query ms": 3, "per query of 100 ms": 3}
    shown = [{key: f"{row[key]:.{digits[key]}f}" if key in digits else row[key] for key in row} for row in found]
    print(f"{format_table(embedded)}\n\n{format_table(shown)}\n\n{where['device']}, commit {where['commit']}")


if __name__ == "__main__":
    main()
