"""Time and memory of the losses by images, classes, batch and proxies per class.

    python benchmarks/complexity.py                 # all; some: --axes batch classes, --losses proxy_anchor triplet
    python benchmarks/complexity.py --quick         # seconds; shows that it runs

Table 1 of Kim et al. 2020 counts the tuples that a loss could form over all M images. The cost of training depends on
the batch, so there are two axes: `images` (an epoch over M images in batches of fixed size) and `batch` (one step;
equals the paper's count when a single batch holds all M images). Embeddings are random: only loss and miner are
measured, forward and backward. The exponent is the slope of the last three sizes on log-log axes. Writes
complexity.jsonl (a row per point, with date, commit, device and versions) and a figure per axis.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from common import append_rows, make_parser, peak_bytes, seconds_per_call, where_it_ran
from hydra.utils import instantiate
from matplotlib.figure import Figure
from omegaconf import OmegaConf
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from proxy_anchor.reports.figures import COLOURS, save_figure
from proxy_anchor.reports.tables import format_table

CONF = Path(__file__).resolve().parent.parent / "conf" / "loss"
# The losses of Table 1 that this project has, and Multi-Similarity, which is in Fig. 1.
LOSSES = (
    "proxy_anchor",
    "proxy_nca",
    "soft_triple",
    "contrastive",
    "triplet",
    "n_pair",
    "lifted_structure",
    "multi_similarity",
)
PAPER = {
    "proxy_anchor": "O(MC)",
    "proxy_nca": "O(MC)",
    "soft_triple": "O(MCU²)",
    "contrastive": "O(M²)",
    "triplet": "O(M³/B²)",
    "n_pair": "O(M³)",
    "lifted_structure": "O(M³)",
}
# Their exponents on each axis, where defined. B, the number of batches, is M / batch on `images` and 1 on `batch`.
PAPER_EXPONENT = {
    "images": {"proxy_anchor": 1, "proxy_nca": 1, "soft_triple": 1, "contrastive": 2, "triplet": 1, "n_pair": 3}
    | {"lifted_structure": 3},
    "batch": {"proxy_anchor": 1, "proxy_nca": 1, "soft_triple": 1, "contrastive": 2, "triplet": 3, "n_pair": 3}
    | {"lifted_structure": 3},
    "classes": {"proxy_anchor": 1, "proxy_nca": 1, "soft_triple": 1}
    | dict.fromkeys(("contrastive", "triplet", "n_pair", "lifted_structure"), 0),
    "proxies": {"soft_triple": 2},
}
DIM = 512
# Enough classes for the largest batch in pairs (n_pair): with fewer, a larger batch would hold no more pairs.
BASE = {"images": 0, "batch": 120, "classes": 256, "proxies": 10}
SIZES = {
    "images": (960, 1920, 3840, 7680),
    "batch": (60, 120, 240, 480),
    "classes": (100, 400, 1600, 6400),
    "proxies": (2, 4, 8, 16, 32),
}
QUICK = {"images": (16, 32), "batch": (8, 16), "classes": (10, 20), "proxies": (2, 4)}
X_LABEL = {
    "images": "images M of an epoch (batches of fixed size)",
    "batch": "images in a batch",
    "classes": "classes C",
    "proxies": "proxies per class U",
}


def make_loss(name: str, num_classes: int, num_centers: int) -> nn.Module:
    """The loss of conf/loss/NAME.yaml, with the number of centres where it has one."""
    config: Any = OmegaConf.load(CONF / f"{name}.yaml")
    config = config.loss if "loss" in config else config
    if "num_centers" in config:
        config.num_centers = num_centers
    return instantiate(config, num_classes=num_classes, embedding_dim=DIM)


def make_step(name: str, size: dict[str, int], device: torch.device) -> Callable[[], None]:
    """Forward and backward over the batches of an epoch (one batch if `images` is 0), on random unit vectors.

    Raises ValueError for fewer classes than the batch has groups of images.
    """
    torch.manual_seed(0)
    loss = make_loss(name, size["classes"], size["proxies"]).to(device)
    loss.check_labels = False
    batch = size["batch"]
    per_class = 2 if name == "n_pair" else 4
    if batch > per_class * size["classes"]:
        raise ValueError(f"a batch of {batch} images, {per_class} per class, takes more than {size['classes']} classes")
    labels = (torch.arange(batch) // per_class).to(device)
    # Loose clusters, as in training: a miner finds some of the tuples.
    centres = nn.functional.normalize(torch.randn(size["classes"], DIM))[labels.cpu()]
    rows = nn.functional.normalize(centres + 1.2 * nn.functional.normalize(torch.randn(batch, DIM))).to(device)
    rows.requires_grad_()

    def step() -> None:
        for _ in range(max(1, size["images"] // batch)):
            loss(rows, labels).backward()
            rows.grad = None
            loss.zero_grad()

    return step


class _HeldBytes(TorchDispatchMode):
    """Peak memory of a step on a CPU: counts the tensors of all operations while they are alive."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for each in torch.utils._pytree.tree_leaves(out):
            if isinstance(each, Tensor):
                storage = each.untyped_storage()
                if storage._cdata not in self.known:
                    self._hold(storage)
        return out

    def _hold(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        self.known.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)

        def let_go() -> None:
            self.now -= size
            self.known.discard(key)

        weakref.finalize(storage, let_go)


def peak_memory(step: Callable[[], None], device: torch.device) -> int:
    """Peak bytes of a step beyond its inputs."""
    found = peak_bytes(step, device)
    if found is not None:
        return found
    with _HeldBytes() as held:
        step()
    return held.peak


def exponent(sizes: Sequence[float], values: Sequence[float]) -> float:
    """Slope of a line through the last three points on log-log axes."""
    x, y = np.log(sizes[-3:]), np.log(np.maximum(values[-3:], 1e-12))
    return float(np.polyfit(x, y, 1)[0])


def measure(
    axis: str, losses: Sequence[str], sizes: Sequence[int], base: dict[str, int], repeats: int, device: torch.device
) -> list[dict[str, Any]]:
    """A row per loss and size: seconds (median) and peak bytes of a step, or of an epoch on the axis `images`."""
    rows = []
    for name in losses:
        for size in sizes:
            step = make_step(name, {**base, axis: size}, device)
            seconds_per_call(step, device, 1)  # not counted
            seconds = median(seconds_per_call(step, device, 1) for _ in range(repeats))
            rows.append(
                {"axis": axis, "loss": name, "size": size, "seconds": seconds, "peak_bytes": peak_memory(step, device)}
            )
    return rows


def summarise(axis: str, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row per loss: fitted exponents of time and memory and the paper's, and the cost of the largest size."""
    found = []
    for name in dict.fromkeys(row["loss"] for row in rows):
        mine = [row for row in rows if row["loss"] == name]
        sizes = [row["size"] for row in mine]
        paper = PAPER_EXPONENT[axis].get(name)
        found.append(
            {
                "axis": axis,
                "loss": name,
                "paper": PAPER.get(name, "-"),
                "paper's exponent": "-" if paper is None else str(paper),
                "time": f"{exponent(sizes, [row['seconds'] for row in mine]):.2f}",
                "memory": f"{exponent(sizes, [row['peak_bytes'] for row in mine]):.2f}",
                "ms at the largest": f"{1000 * mine[-1]['seconds']:.1f}",
                "MiB at the largest": f"{mine[-1]['peak_bytes'] / 2**20:.1f}",
            }
        )
    return found


def plot(axis: str, rows: Sequence[dict[str, Any]]) -> Figure:
    """Time and memory against the size, log-log, with the fitted exponent and the paper's O() in the legend."""
    figure = Figure(figsize=(10, 4.4), layout="constrained")
    both = figure.subplots(1, 2)
    fits = {row["loss"]: row for row in summarise(axis, rows)}
    for panel, key, label, fit in (
        (both[0], "seconds", "seconds", "time"),
        (both[1], "peak_bytes", "peak memory in bytes", "memory"),
    ):
        for index, (name, fitted) in enumerate(fits.items()):
            mine = [row for row in rows if row["loss"] == name]
            panel.loglog(
                [row["size"] for row in mine],
                [row[key] for row in mine],
                marker="os^Dv<>p"[index % 8],
                color=COLOURS[index % len(COLOURS)],
                linestyle=("-", "--", "-.", ":")[index % 4],
                label=f"{name}: {fitted[fit]}" + (f"; paper {PAPER[name]}" if fit == "time" and name in PAPER else ""),
            )
        panel.set(xlabel=X_LABEL[axis], ylabel=label)
        panel.grid(alpha=0.3, which="both")
        panel.legend(fontsize="x-small", frameon=False, title="fitted exponent", title_fontsize="x-small")
    return figure


def main() -> None:
    """Measure, print the exponents, record every point, draw a figure per axis."""
    parser = make_parser(__doc__, repeats=5)
    parser.add_argument("--axes", nargs="+", choices=list(SIZES), default=list(SIZES))
    parser.add_argument("--losses", nargs="+", default=list(LOSSES), help="files of conf/loss")
    arguments = parser.parse_args()
    for name in arguments.losses:
        if not (CONF / f"{name}.yaml").is_file() or name == "pml":
            known = ", ".join(sorted(file.stem for file in CONF.glob("*.yaml") if file.stem != "pml"))
            parser.error(f"--losses {name}: choose from {known}")
    base = {**BASE, "batch": 8, "classes": 10, "proxies": 2} if arguments.quick else BASE
    where = where_it_ran(arguments.device, "pytorch-metric-learning")
    arguments.output.mkdir(parents=True, exist_ok=True)
    summary = []
    for axis in arguments.axes:
        losses = [name for name in arguments.losses if axis != "proxies" or name == "soft_triple"]
        if not losses:
            continue
        sizes = (QUICK if arguments.quick else SIZES)[axis]
        rows = measure(axis, losses, sizes, base, 1 if arguments.quick else arguments.repeats, arguments.device)
        summary += summarise(axis, rows)
        append_rows(arguments.output / "complexity.jsonl", [{**row, **where} for row in rows])
        save_figure(plot(axis, rows), arguments.output / f"complexity_{axis}")
    print(f"{where['device']}, torch {where['versions']['torch']}, commit {where['commit']}; D = {DIM}\n")
    print(format_table(summary))
    print(f"\nadded to {arguments.output / 'complexity.jsonl'}; figures: complexity_AXIS.svg and .png")


if __name__ == "__main__":
    main()
