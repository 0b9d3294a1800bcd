"""Forward and backward of the Proxy-Anchor loss, as ratios to the bare similarity product.

    python benchmarks/loss.py                       # 100, 11,318 (SOP) and 100,000 classes, B 180, D 512
    python benchmarks/loss.py --classes 11318 --device cuda
    python benchmarks/loss.py --quick               # seconds, on a CPU

The bare product is `F.normalize(X) @ F.normalize(P).T` with a given gradient, forward and backward, float32: a lower
bound for a plain implementation of a proxy loss. All lines are measured in the same interleaved rounds.

    ms                median over rounds, per forward and backward
    time_ratio        median over rounds of time / time of the bare product in that round
    graph_ms          the same as a replayed CUDA graph: the time of the GPU when it does not wait for Python, as in a
                      training step whose network keeps it busy; GPU only, for losses that never synchronise
    graph_ratio       of graph_ms, to the bare product's
    memory_mib        peak beyond embeddings, proxies, labels and the given gradient, the two results included; GPU only
    memory_ratio      of that peak, to the bare product's
    error_ppm         largest difference of loss and gradients from the formula in float64, in millionths of the largest
                      number there

One line per table row is appended to results/loss.jsonl, with date, commit, device and versions.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from common import graphed, interleaved_seconds, make_parser, median_ratio, peak_bytes, report, where_it_ran
from torch import Tensor
from torch.nn import functional as F

from proxy_anchor.losses.base import unit_length
from proxy_anchor.losses.proxy_anchor import proxy_anchor_loss
from proxy_anchor.training.compile import compile_loss

try:
    from pytorch_metric_learning.losses import ProxyAnchorLoss as LibraryLoss
except ImportError:
    LibraryLoss = None

ALPHA, DELTA = 32.0, 0.1
BARE = "bare product"
NEVER_WAITS = ("ours", "ours, compiled")  # the released form synchronises for non-zeros, the library for unique labels
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]  # embeddings (B, D), proxies (C, D), labels (B,)


def ours(x: Tensor, proxies: Tensor, labels: Tensor) -> Tensor:
    """The computation of ProxyAnchorLoss."""
    return proxy_anchor_loss(unit_length(x) @ unit_length(proxies).T, labels, ALPHA, DELTA)


def released(x: Tensor, proxies: Tensor, labels: Tensor) -> Tensor:
    """The formulation of the released code: one-hot masks, exp of the whole matrix, masked sums, log(1 + sum)."""
    similarities = F.normalize(x) @ F.normalize(proxies).T
    positive = F.one_hot(labels, len(proxies))
    negative = 1 - positive
    pull, push = torch.exp(-ALPHA * (similarities - DELTA)), torch.exp(ALPHA * (similarities + DELTA))
    num_present = len(torch.nonzero(positive.sum(0) != 0))
    pull_sum = torch.where(positive == 1, pull, torch.zeros_like(pull)).sum(0)
    push_sum = torch.where(negative == 1, push, torch.zeros_like(push)).sum(0)
    return torch.log(1 + pull_sum).sum() / num_present + torch.log(1 + push_sum).sum() / len(proxies)


def make_library_loss(classes: int, dim: int) -> Loss:
    """pytorch-metric-learning's loss, called with our proxies."""
    loss = LibraryLoss(classes, dim, margin=DELTA, alpha=ALPHA)

    def call(x: Tensor, proxies: Tensor, labels: Tensor) -> Tensor:
        loss.proxies = proxies
        return loss(x, labels)

    return call


def make_losses(classes: int, dim: int) -> dict[str, Loss]:
    """All implementations by name."""
    losses: dict[str, Loss] = {"ours": ours, "ours, compiled": compile_loss(ours), "released code's form": released}
    if LibraryLoss is not None:
        losses["pytorch-metric-learning"] = make_library_loss(classes, dim)
    return losses


def value_and_gradients(loss: Loss, x: Tensor, proxies: Tensor, labels: Tensor) -> list[Tensor]:
    """Loss (), gradient (B, D) of the embeddings, gradient (C, D) of the proxies."""
    value = loss(x, proxies, labels)
    return [value.detach(), *torch.autograd.grad(value, [x, proxies])]


def largest_error(found: list[Tensor], exact: list[Tensor]) -> float:
    """max |found - exact| / max |exact|, the largest over value and gradients."""
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, exact, strict=True))


def measure(classes: int, batch: int, dim: int, device: torch.device, repeats: int) -> list[dict[str, Any]]:
    """One row per loss, the bare product first."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(batch, dim, generator=generator).to(device).requires_grad_()
    proxies = torch.nn.Parameter(torch.randn(classes, dim, generator=generator).to(device))
    labels = torch.randint(classes, (batch,), generator=generator).to(device)
    losses = make_losses(classes, dim)

    exact = [each.float() for each in value_and_gradients(ours, x.double(), proxies.double(), labels)]
    errors = {
        name: largest_error(value_and_gradients(loss, x, proxies, labels), exact) for name, loss in losses.items()
    }
    del exact

    gradient = torch.randn(batch, classes, generator=generator).to(device)

    def bare() -> tuple[Tensor, ...]:
        return torch.autograd.grad(F.normalize(x) @ F.normalize(proxies).T, [x, proxies], gradient)

    def step(loss: Loss) -> Callable[[], object]:
        return lambda: torch.autograd.grad(loss(x, proxies, labels), [x, proxies])

    functions: dict[str, Callable[[], object]] = {BARE: bare, **{name: step(loss) for name, loss in losses.items()}}
    peaks = {name: peak_bytes(function, device) for name, function in functions.items()}
    seconds = interleaved_seconds(functions, device, repeats=repeats)
    replayed: dict[str, list[float]] = {}
    if device.type == "cuda":
        graphs = {name: graphed(functions[name], device) for name in (BARE, *NEVER_WAITS)}
        replayed = interleaved_seconds(graphs, device, repeats=repeats)

    rows = []
    for name in functions:
        peak, bare_peak = peaks[name], peaks[BARE]
        rows.append(
            {
                "classes": classes,
                "batch": batch,
                "dim": dim,
                "loss": name,
                "ms": round(1000 * median(seconds[name]), 3),
                "time_ratio": round(median_ratio(seconds[name], seconds[BARE]), 3),
                "graph_ms": round(1000 * median(replayed[name]), 3) if name in replayed else None,
                "graph_ratio": round(median_ratio(replayed[name], replayed[BARE]), 3) if name in replayed else None,
                "memory_mib": None if peak is None else round(peak / 2**20, 1),
                "memory_ratio": None if peak is None or bare_peak is None else round(peak / bare_peak, 3),
                "error_ppm": round(1e6 * errors[name], 3) if name in errors else None,
            }
        )
    return rows


def main() -> None:
    parser = make_parser(__doc__, repeats=21)
    parser.add_argument("--classes", type=int, nargs="+", default=[100, 11_318, 100_000], help="C, one or more")
    parser.add_argument("--batch", type=int, default=180, help="B (default 180)")
    parser.add_argument("--dim", type=int, default=512, help="D (default 512)")
    options = parser.parse_args()
    if options.quick:
        options.classes, options.batch, options.dim, options.repeats = [50, 400], 16, 32, 3

    rows = [
        row
        for classes in options.classes
        for row in measure(classes, options.batch, options.dim, options.device, options.repeats)
    ]
    where = where_it_ran(options.device, "pytorch-metric-learning")
    report("Proxy-Anchor loss, forward + backward, float32", rows, options.output / "loss.jsonl", where)


if __name__ == "__main__":
    main()
