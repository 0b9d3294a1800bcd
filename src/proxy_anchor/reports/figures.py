"""The paper's figures from run folders, one function each, which `save_figure` writes.

Every point is the selected epoch's Recall@K in percent: the mean over the runs that differ in nothing but the seed, with a
bar of one standard deviation where there are several.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from statistics import mean
from typing import Any

import matplotlib
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from proxy_anchor.errors import UsageError, check_choice
from proxy_anchor.reports.runs import (
    Run,
    Spread,
    backbone_abbreviation,
    backbone_name,
    by_seed,
    identity,
    method_name,
    settings,
    told_apart,
)

# Okabe and Ito's colours stay apart for every kind of colour vision; the line's form tells them apart in grey.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")
_FORMS = ("-", "--", "-.", ":")
_LABELS = {"epoch": "epoch", "seconds": "training time in seconds (evaluation not counted)"}
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
    figure, axes = empty_figure()
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
    figure, axes = empty_figure()
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


def class_recall_chart(recall: Mapping[str, float], *, worst: int = 20, k: int = 1) -> Figure:
    """The worst classes by name as bars, beside all classes in order. recall: {class: Recall@k of its queries, in [0, 1]}."""
    ordered = sorted(recall.items(), key=lambda each: (each[1], each[0]))
    names, values = zip(*reversed(ordered[:worst]), strict=True)
    figure, (left, right) = empty_figure(9, 0.6 + 0.24 * max(12, len(names)), columns=2)
    left.barh(range(len(names)), [100 * value for value in values], color=COLOURS[1])
    left.set_yticks(range(len(names)), [_shortened(name) for name in names], fontsize="small")
    left.set(xlabel=f"Recall@{k} (%)", title=f"worst {len(names)} classes", xlim=(0, 100))
    right.plot([100 * value for _, value in ordered], color=COLOURS[0])
    right.set(
        xlabel="class, worst first", ylabel=f"Recall@{k} (%)", title=f"all {len(ordered)} classes", ylim=(-2, 102)
    )
    for axes in (left, right):
        axes.grid(alpha=0.3)
    return figure


def _shortened(name: str) -> str:
    return name if len(name) <= 28 else f"{name[:13]}…{name[-14:]}"


def empty_figure(width: float = 6.4, height: float = 4.2, columns: int = 1) -> tuple[Figure, Any]:
    """A figure of that size in inches with its axes: one, or an array of several."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(1, columns)


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


def recall_curves(
    results: Mapping[str, Sequence[Mapping[str, Any]]], *, against: str = "epoch", k: int = 1, title: str = ""
) -> Figure:
    """A line per name: the mean of Recall@k over its runs, with a band of one standard deviation where there are several.

    results: {name: contents of result.json}. against: "epoch", or "seconds", the mean time of training up to each epoch.
    Epochs that not all runs of a name have are left out.
    """
    check_choice("against", against, _LABELS)
    longest = max(map(len, results), default=0)
    many = len(results) > len(COLOURS) or longest > 60
    columns = 2 if longest <= 60 else 1
    figure, axes = empty_figure(9.0, 5 + 0.17 * len(results) / columns) if many else empty_figure()
    for index, (name, runs) in enumerate(results.items()):
        length = min(len(run["history"]) for run in runs)
        histories = [run["history"][:length] for run in runs]
        recall = 100 * np.array([[row["recall"][str(k)] for row in history] for history in histories])
        if against == "epoch":
            x = np.array([row["epoch"] for row in histories[0]])
        else:
            x = np.array([list(accumulate(row["train_seconds"] for row in history)) for history in histories]).mean(0)
        colour, form = COLOURS[index % len(COLOURS)], _FORMS[(index + index // len(COLOURS)) % len(_FORMS)]
        middle = recall.mean(0)
        axes.plot(x, middle, form, color=colour, linewidth=1.8, label=f"{name} (n = {len(runs)})")
        if len(runs) > 1:
            spread = recall.std(0, ddof=1)
            axes.fill_between(x, middle - spread, middle + spread, color=colour, alpha=0.2, linewidth=0)
    axes.set_xlabel(_LABELS[against])
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylabel(f"Recall@{k} (%)")
    axes.set_title(title)
    axes.grid(alpha=0.3)
    if many:  # they would cover the lines, and beside them long names would leave the lines no width
        figure.legend(loc="outside lower left", ncols=columns, frameon=False, fontsize="x-small")
    else:
        axes.legend(frameon=False, fontsize="small")
    return figure


def save_figure(figure: Figure, file: Path) -> None:
    """Write `file`.svg and `file`.png; the same figure gives the same bytes."""
    with matplotlib.rc_context({"svg.hashsalt": file.name}):
        figure.savefig(file.with_suffix(".svg"), metadata={"Date": None})
    figure.savefig(file.with_suffix(".png"), dpi=120)
