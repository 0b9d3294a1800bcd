"""Proxy-Anchor with its proxies divided over GPUs: memory per process and time per step.

    torchrun --standalone --nproc-per-node=4 benchmarks/sharded.py --classes 1000000 --dim 512
    torchrun --standalone --nproc-per-node=2 benchmarks/sharded.py --quick --device cpu     # seconds, on a CPU

Each process brings batch / W embeddings. A step gathers them, takes the loss and its gradients, and moves the proxies by
AdamW (fused on a GPU), as training does; the network is left out.

    classes_per_rank   of the largest share
    loss_ms            median over rounds of gather + loss + gradients, the slowest process
    step_ms            the same with the optimizer's step
    proxies_mib        of one process
    loss_mib, step_mib the most that a process holds during each, all tensors included; GPU only
    error_ppm          largest difference of the loss and of the embeddings' gradient from the loss in one piece, in
                       millionths of the largest number there; None where one card would not hold it (--compare makes it)

One line is appended to results/sharded.jsonl by the first process, with date, commit, device and versions.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from common import make_parser, report, seconds_per_call, synchronize, where_it_ran

from proxy_anchor.losses.class_block import class_block_loss
from proxy_anchor.losses.sharded import ShardedProxyAnchorLoss
from proxy_anchor.training.distributed import gather_batch


def largest(value: float, device: torch.device) -> float:
    """Over all processes."""
    tensor = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return float(tensor)


def measured(function: Callable[[], object], device: torch.device, repeats: int) -> tuple[float, float | None]:
    """(ms, MiB) of a call: median time and peak memory, each of the process that needs most."""
    function()
    synchronize(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    seconds = [seconds_per_call(function, device, calls=3) for _ in range(repeats)]
    peak = torch.cuda.max_memory_allocated(device) / 2**20 if device.type == "cuda" else None
    return (
        round(1000 * largest(median(seconds), device), 3),
        None if peak is None else round(largest(peak, device), 1),
    )


def error_ppm(loss: ShardedProxyAnchorLoss, rows: torch.Tensor, own_labels: torch.Tensor) -> float:
    """Against the loss in one piece, on this device."""
    embeddings, labels = (each.detach() for each in gather_batch(rows, own_labels))
    proxies = loss.gather_proxies().to(rows.device)
    found, expected = [], []
    for results, function in (
        (found, lambda x: loss(x, labels)),
        (expected, lambda x: class_block_loss(x, proxies, labels, loss.alpha, loss.delta)),
    ):
        x = embeddings.clone().requires_grad_()
        value = function(x)
        results += [value.detach(), torch.autograd.grad(value, x)[0]]
    return 1e6 * max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, expected, strict=True))


def measure(classes: int, batch: int, dim: int, device: torch.device, repeats: int, compare: bool) -> dict[str, Any]:
    """The table's row; every process calls it."""
    world_size = dist.get_world_size()
    torch.manual_seed(0)
    loss = ShardedProxyAnchorLoss(classes, dim, check_labels=False).to(device)
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    rows = torch.randn(batch // world_size, dim, generator=generator).to(device).requires_grad_()
    labels = torch.randint(classes, (batch // world_size,), generator=generator).to(device)
    error = error_ppm(loss, rows, labels) if compare else None
    optimizer = torch.optim.AdamW(loss.parameters(), lr=1e-2, fused=device.type == "cuda")

    def gradients() -> None:
        rows.grad = loss.proxies.grad = None
        loss(*gather_batch(rows, labels)).backward()

    def step() -> None:
        gradients()
        optimizer.step()

    loss_ms, loss_mib = measured(gradients, device, repeats)
    step_ms, step_mib = measured(step, device, repeats)
    return {
        "classes": classes,
        "batch": batch,
        "dim": dim,
        "processes": world_size,
        "classes_per_rank": int(largest(len(loss.classes), device)),
        "loss_ms": loss_ms,
        "step_ms": step_ms,
        "proxies_mib": round(largest(loss.proxies.numel() * 4 / 2**20, device), 1),
        "loss_mib": loss_mib,
        "step_mib": step_mib,
        "error_ppm": None if error is None else round(error, 3),
    }


def main() -> None:
    parser = make_parser(__doc__, repeats=21)
    parser.add_argument("--classes", type=int, nargs="+", default=[1_000_000], help="C, one or more")
    parser.add_argument("--batch", type=int, default=720, help="B of all processes (default 720)")
    parser.add_argument("--dim", type=int, default=512, help="D (default 512)")
    parser.add_argument(
        "--compare", action="store_true", help="with the loss in one piece, which has to fit onto one card"
    )
    options = parser.parse_args()
    if options.quick:
        options.classes, options.batch, options.dim, options.repeats, options.compare = [50, 401], 12, 32, 3, True
    if "WORLD_SIZE" not in os.environ:
        parser.error("start it by torchrun: torchrun --standalone --nproc-per-node=4 benchmarks/sharded.py")
    device = options.device
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    if options.batch % dist.get_world_size():
        parser.error(f"--batch {options.batch} cannot be divided over {dist.get_world_size()} processes")

    rows = [
        measure(classes, options.batch, options.dim, device, options.repeats, options.compare)
        for classes in options.classes
    ]
    if dist.get_rank() == 0:
        report(
            "Proxy-Anchor with divided proxies, forward + backward, float32",
            rows,
            options.output / "sharded.jsonl",
            where_it_ran(device),
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
