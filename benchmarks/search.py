"""Recall@K of a whole test set by every engine, relative to the bare similarity product.

    python benchmarks/search.py                      # SOP's size: 60,502 x 512, K up to 1000
    python benchmarks/search.py --images 5000        # for a CPU

The embeddings are synthetic clusters. All engines must give the same Recall@K to the last digit, or the command
fails. Appends a row per engine, with these numbers, to results/search.jsonl.
"""

from __future__ import annotations

from statistics import median

import torch
from common import interleaved_seconds, make_parser, median_ratio, peak_bytes, report, where_it_ran
from torch import Tensor

from proxy_anchor.errors import UsageError
from proxy_anchor.retrieval.metrics import recall_at_k
from proxy_anchor.retrieval.search import resolve_engine, row_chunks

KS = (1, 10, 100, 1000)


def made_up(images: int, classes: int, dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """(N, D) unit vectors around class centres, and their labels."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(images) % classes
    centres = torch.randn(classes, dim, generator=generator)
    rows = centres[labels] + 2.2 * torch.randn(images, dim, generator=generator)
    return torch.nn.functional.normalize(rows).to(device), labels.to(device)


def bare_product(rows: Tensor) -> None:
    """All similarities, in chunks that are discarded."""
    for chunk in row_chunks(len(rows), len(rows)):
        rows[chunk] @ rows.T


def peer(rows: Tensor, labels: Tensor) -> None:
    """pytorch-metric-learning's calculator, for its only K: Recall@1."""
    from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator

    AccuracyCalculator(include=("precision_at_1",), k=1, device=rows.device).get_accuracy(rows, labels)


def main() -> None:
    """Time, compare, print, record."""
    parser = make_parser(__doc__, repeats=5)
    parser.add_argument("--images", type=int, default=60502)
    parser.add_argument("--classes", type=int, default=11316)
    parser.add_argument("--dim", type=int, default=512)
    fitting = ["faiss_gpu", "torch"] if torch.cuda.is_available() else ["faiss_cpu", "torch"]
    parser.add_argument("--engines", nargs="+", default=fitting, choices=["faiss_gpu", "faiss_cpu", "torch"])
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.images, arguments.classes, arguments.dim, arguments.repeats = 1200, 200, 16, 2
    device = arguments.device
    rows, labels = made_up(arguments.images, min(arguments.classes, arguments.images // 2), arguments.dim, device)
    engines = []
    for name in arguments.engines:
        try:
            engines.append(resolve_engine(name, max(KS), exclude_self=True, device=device))
        except UsageError as error:
            print(f"left out: {name} ({error})")
    found = {engine: recall_at_k(rows, labels, KS, engine=engine) for engine in engines}
    if len({str(values) for values in found.values()}) != 1:
        raise SystemExit(f"the engines disagree: {found}")
    calls = {"bare product": lambda: bare_product(rows)}
    for engine in engines:
        calls[engine] = lambda engine=engine: recall_at_k(rows, labels, KS, engine=engine)  # type: ignore[misc]
    try:
        peer(rows[:100], labels[:100] // 2)
        calls["pytorch-metric-learning, K = 1"] = lambda: peer(rows, labels)
    except Exception as error:  # not installed, or without an engine here
        print(f"left out: pytorch-metric-learning ({error})", flush=True)
    seconds = interleaved_seconds(calls, device, repeats=arguments.repeats, calls=1, warmup=1)
    table = []
    for name, times in seconds.items():
        peak = peak_bytes(calls[name], device)
        table.append(
            {
                "images": arguments.images,
                "dim": arguments.dim,
                "engine": name,
                "seconds": median(times),
                "ratio": median_ratio(times, seconds["bare product"]),
                "extra_mib": None if peak is None else peak / 2**20,
                "recall": " ".join(f"{100 * found[name][k]:.4f}" for k in KS) if name in found else None,
            }
        )
    where = where_it_ran(device, "pytorch-metric-learning")
    report(f"Recall@{max(KS)} and below, exact", table, arguments.output / "search.jsonl", where)


if __name__ == "__main__":
    main()
