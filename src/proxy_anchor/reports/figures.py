"""The paper's figures from run folders, one function each; `curves.save_figure` writes them. See also `curves`.

Every point is the selected epoch's Recall@K in percent: the mean over the runs that differ in nothing but the seed, with a
bar of one standard deviation where there are several.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image

from proxy_anchor.errors import UsageError
from proxy_anchor.reports.comparison import Spread
from proxy_anchor.reports.curves import COLOURS, recall_curves, save_figure
from proxy_anchor.reports.runs import (
    Run,
    backbone_abbreviation,
    backbone_name,
    by_seed,
    identity,
    method_name,
    settings,
    told_apart,
)

DIMENSION, BATCH_SIZE, IMAGE_SIZE = "embedding_dim", "data.batch_size", "dataset.images.crop"
# The side to which an image is resized goes with the crop that is taken of it.
_FOLLOWS = {IMAGE_SIZE: ("dataset.images.resize", "dataset.load.image_size")}
_MARKERS = "os^Dv<>P"


def recall_by_dimension(runs: Sequence[Run], *, k: int = 1) -> Figure:
    """Recall@k against the embedding dimension, on a logarithmic axis (the paper's fig:embedding_dim)."""
    return _recall_by(runs, DIMENSION, "embedding dimension", k=k)


def recall_by_batch_size(runs: Sequence[Run], *, k: int = 1) -> Figure:
    """Recall@k against the images per step (the paper's tab:batch_size_fine and tab:batch_size_large)."""
    return _recall_by(runs, BATCH_SIZE, "batch size", k=k)


def recall_by_image_size(runs: Sequence[Run], *, k: int = 1) -> Figure:
    """Recall@k against the side of the crop in pixels (the paper's tab:eval_cub_cars_supp)."""
    return _recall_by(runs, IMAGE_SIZE, "image side in pixels", k=k)


def _name(run: Run) -> str:
    config = run.config
    return f"{run.data_name}, {method_name(config)}, {backbone_abbreviation(backbone_name(config))}"


def _series(runs: Sequence[Run], key: str, k: int) -> dict[str, dict[float, Spread]]:
    """{name: {value of key: spread}} of runs that are alike in all else, where at least two values were run."""
    found: dict[tuple[str, str], dict[float, list[float]]] = {}
    for run in runs:
        series = found.setdefault((identity(run, key, *_FOLLOWS.get(key, ())), _name(run)), {})
        series.setdefault(settings(run.config)[key], []).append(run.recall(k))
    lines: dict[str, dict[float, Spread]] = {}
    for (_, name), series in found.items():
        spreads = {value: Spread.of(each) for value, each in sorted(series.items())}
        if len(spreads) > 1:
            number = sum(each.partition(" (")[0] == name for each in lines)
            lines[f"{name} ({number + 1})" if number else name] = {v: s for v, s in spreads.items() if s is not None}
    return lines


def _recall_by(runs: Sequence[Run], key: str, label: str, *, k: int) -> Figure:
    series = _series(runs, key, k)
    if not series:
        raise UsageError(f"no two of these runs differ in {key} alone: there is nothing to draw.")
    figure, axes = _empty()
    for index, (name, spreads) in enumerate(series.items()):
        x = list(spreads)
        axes.errorbar(
            x,
            [each.mean for each in spreads.values()],
            [each.deviation or 0.0 for each in spreads.values()],
            color=COLOURS[index % len(COLOURS)],
            marker=_MARKERS[index % len(_MARKERS)],
            capsize=3,
            label=f"{name} (n = {'-'.join(map(str, sorted({each.n for each in spreads.values()})))})",
        )
    ticks = sorted({value for spreads in series.values() for value in spreads})
    if key == DIMENSION:
        axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [f"{value:g}" for value in ticks])
    axes.minorticks_off()
    axes.set(xlabel=label, ylabel=f"Recall@{k} (%)")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize="small")
    return figure


def alpha_delta_map(runs: Sequence[Run], *, k: int = 1) -> Figure:
    """Recall@k as a heat map over Proxy-Anchor's alpha (scale) and delta (margin), the paper's fig:hyper_params.

    Of runs that are alike in all else; where several such families were run, the one with most pairs of values.
    Raises UsageError unless at least two alphas and two deltas were run.
    """
    families: dict[str, dict[tuple[float, float], list[float]]] = {}
    names = {}
    for run in runs:
        if method_name(run.config) == "Proxy-Anchor":
            family, loss = identity(run, "loss.alpha", "loss.delta"), run.config["loss"]
            pair = (float(loss["alpha"]), float(loss["delta"]))
            families.setdefault(family, {}).setdefault(pair, []).append(run.recall(k))
            names[family] = f"{_name(run)}, {run.config['embedding_dim']}-d"
    largest = max(families, key=lambda family: len(families[family]), default="")
    found = families.get(largest, {})
    alphas, deltas = (sorted({key[axis] for key in found}) for axis in (0, 1))
    if len(alphas) < 2 or len(deltas) < 2:
        raise UsageError("a map over alpha and delta needs Proxy-Anchor runs with at least two values of each.")
    grid = np.full((len(deltas), len(alphas)), np.nan)
    for (alpha, delta), values in found.items():
        grid[deltas.index(delta), alphas.index(alpha)] = mean(values)
    figure, axes = _empty()
    image = axes.imshow(
        grid, cmap="cividis", origin="lower", aspect="auto"
    )  # even in lightness, for every kind of colour vision
    middle = (np.nanmin(grid) + np.nanmax(grid)) / 2
    for (row, column), value in np.ndenumerate(grid):
        if not np.isnan(value):
            colour = "white" if value < middle else "black"
            axes.text(column, row, f"{value:.1f}", ha="center", va="center", color=colour)
    axes.set_xticks(range(len(alphas)), [f"{each:g}" for each in alphas])
    axes.set_yticks(range(len(deltas)), [f"{each:g}" for each in deltas])
    axes.set(xlabel="alpha", ylabel="delta", title=names[largest])
    figure.colorbar(image, label=f"Recall@{k} (%)")
    return figure


def class_recall_chart(
    recall: Mapping[str, float],
    *,
    worst: int = 20,
    k: int = 1,
    queries: Mapping[str, Sequence[Image.Image]] | None = None,
) -> Figure:
    """The worst classes by name as bars, beside all classes in order. recall: {class: Recall@k of its queries, in [0, 1]}.

    queries: {class: (its worst query, what that found first)}, shown beside the bars; None: not shown.
    """
    ordered = sorted(recall.items(), key=lambda each: (each[1], each[0]))
    line = 0.24 if queries is None else 0.4
    figure = Figure(figsize=(9, 0.6 + line * max(12, min(worst, len(ordered)))), layout="constrained")
    FigureCanvasAgg(figure)
    left, middle, right = figure.subplots(1, 3, width_ratios=[3, 0.01 if queries is None else 0.75, 3])
    names, values = zip(*reversed(ordered[:worst]), strict=True)
    # Few classes leave room below them: a row keeps its height, and a picture its shape.
    lowest = min(0, len(names) - 12) - 0.6
    left.barh(range(len(names)), [100 * value for value in values], color=COLOURS[1])
    shown = [name if len(name) <= 28 else f"{name[:13]}…{name[-14:]}" for name in names]
    left.set_yticks(range(len(names)), shown, fontsize="small")
    left.set(
        xlabel=f"Recall@{k} (%)", title=f"worst {len(names)} classes", xlim=(0, 100), ylim=(lowest, len(names) - 0.4)
    )
    for row, name in enumerate(names):
        for column, picture in enumerate((queries or {}).get(name, ())):
            place = (column, column + 0.9, row - 0.45, row + 0.45)
            middle.imshow(np.asarray(picture), extent=place, aspect="auto", interpolation="antialiased")
    middle.set(xlim=(0, 2), ylim=left.get_ylim(), title="" if queries is None else "query, found")
    middle.axis("off")
    right.plot([100 * value for _, value in ordered], color=COLOURS[0])
    right.set(
        xlabel="class, worst first", ylabel=f"Recall@{k} (%)", title=f"all {len(ordered)} classes", ylim=(-2, 102)
    )
    for axes in (left, right):
        axes.grid(alpha=0.3)
    return figure


def _empty() -> tuple[Figure, Axes]:
    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots()


def named_groups(runs: Sequence[Run]) -> dict[str, list[Mapping[str, Any]]]:
    """{name: results of the seeds} of runs that differ in nothing else, as `recall_curves` takes them.

    A name that several would share also says in which settings they differ.
    """
    groups: dict[str, list[list[Run]]] = {}
    for group in by_seed(runs):
        groups.setdefault(f"{_name(group[0])}, {group[0].config['embedding_dim']}-d", []).append(group)
    named: dict[str, list[Mapping[str, Any]]] = {}
    for short, alike in groups.items():
        for group, different in zip(alike, told_apart([each[0].config for each in alike]), strict=True):
            more = [f"{len(different) - 3} more"] if len(different) > 3 else []
            name = ", ".join([short, *different[:3], *more])
            number = sum(each.partition(" (")[0] == name for each in named)
            named[f"{name} ({number + 1})" if number else name] = [run.result for run in group]
    return named


def write_figures(folder: Path, runs: Sequence[Run]) -> list[str]:
    """Write every figure that these runs can fill, as .svg and .png; returns their names. Of the smallest K that all have."""
    folder.mkdir(parents=True, exist_ok=True)
    common = set.intersection(*({int(k) for k in row["recall"]} for run in runs for row in run.result["history"]))
    if not common:
        return []
    k = min(common)
    curves = named_groups(runs)
    written = []
    for against in ("epoch", "seconds"):
        save_figure(recall_curves(curves, against=against, k=k), folder / f"recall_by_{against}")
        written.append(f"recall_by_{against}")
    for draw in (recall_by_dimension, recall_by_batch_size, recall_by_image_size, alpha_delta_map):
        try:
            save_figure(draw(runs, k=k), folder / draw.__name__)
        except UsageError:
            continue  # these runs are about something else
        written.append(draw.__name__)
    return written
