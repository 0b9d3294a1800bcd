"""The paper's figures from finished runs.

Every point is the Recall@K of the selected epoch in percent: the mean over the runs that differ only in the seed,
with an error bar of one standard deviation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from proxy_anchor.errors import UsageError
from proxy_anchor.reports.runs import (
    Run,
    backbone_abbreviation,
    backbone_name,
    by_seed,
    identity,
    method_name,
    settings,
    told_apart,
    training_seconds,
)

# Okabe and Ito's colours, distinct for every kind of colour vision; the line style tells them apart in grey.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")
_MARKERS = "os^Dv<>P"
_STYLES = ("-", "--", "-.", ":")
_LABELS = {"epoch": "epoch", "seconds": "training time in seconds (without evaluation)"}

# Figures over one setting: axis label, the setting, and the settings that follow it.
VARIED = {
    "recall_by_dimension": ("embedding dimension", "embedding_dim"),
    "recall_by_batch_size": ("batch size", "data.batch_size"),
    "recall_by_image_size": (
        "image side in pixels",
        "dataset.images.crop",
        "dataset.images.resize",
        "dataset.load.image_size",
    ),
}


def _name(run: Run) -> str:
    return f"{run.data_name}, {method_name(run.config)}, {backbone_abbreviation(backbone_name(run.config))}"


def _title(run: Run) -> str:
    return f"{_name(run)}, {run.config['embedding_dim']}-d"


def recall_by(figure: str, runs: Sequence[Run], *, k: int = 1) -> Figure:
    """Recall@k against one setting: a line per group of otherwise equal runs.

    Args:
        figure: a name in VARIED.
        runs: finished runs.
        k: K of Recall@K.

    Raises:
        UsageError: when no two runs differ in that setting alone.
    """
    from pandas import DataFrame  # takes half a second to import, and train.py does not need it

    label, key, *following = VARIED[figure]
    rows = []
    for run in runs:
        own = settings(run.config)  # without resize=null: whole images are another method than the crops of a size
        alike = identity(run, key, *following), "dataset.images.resize" in own
        rows.append((alike, _name(run), own.get(key), run.recall(k)))
    lines = DataFrame(rows, columns=["alike", "name", "value", "recall"]).groupby(["alike", "name"], sort=False)
    spreads = [(name, line.groupby("value")["recall"].agg(["mean", "std", "count"])) for (_, name), line in lines]
    if not (drawn := [(name, spread) for name, spread in spreads if len(spread) > 1]):
        raise UsageError(f"no two of these runs differ in {key} alone: there is nothing to draw.")
    made, axes = _line_figure(label, f"Recall@{k} (%)", 6.4, 4.2)
    for (name, spread), colour, marker in zip(drawn, cycle(COLOURS), cycle(_MARKERS), strict=False):
        legend = f"{name} (n = {'-'.join(map(str, sorted(set(spread['count']))))})"
        error = spread["std"].fillna(0)
        axes.errorbar(spread.index, spread["mean"], error, color=colour, marker=marker, capsize=3, label=legend)
    ticks = sorted({value for _, spread in drawn for value in spread.index})
    if key == "embedding_dim":
        axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [f"{value:g}" for value in ticks])
    axes.minorticks_off()
    axes.legend(frameon=False, fontsize="small")
    return made


def alpha_delta_map(runs: Sequence[Run], *, k: int = 1) -> Figure:
    """Recall@k as a heat map over Proxy-Anchor's alpha and delta (the paper's fig:hyper_params).

    Shows the group of runs that are equal in all other settings with the most pairs of values.

    Raises:
        UsageError: for fewer than two alphas or two deltas.
    """
    from pandas import DataFrame

    keys = "loss.alpha", "loss.delta"
    rows = [
        (identity(run, *keys), *(float(settings(run.config)[key]) for key in keys), run.recall(k), run)
        for run in runs
        if method_name(run.config) == "Proxy-Anchor"
    ]
    frame = DataFrame(rows, columns=["group", "alpha", "delta", "recall", "run"])
    groups = [group for _, group in frame.groupby("group")]
    largest = max(groups, key=lambda group: len(group[["alpha", "delta"]].drop_duplicates()), default=None)
    if largest is None or min(largest["alpha"].nunique(), largest["delta"].nunique()) < 2:
        raise UsageError("a map over alpha and delta needs Proxy-Anchor runs with at least two values of each.")
    grid = largest.pivot_table(index="delta", columns="alpha", values="recall")  # means over seeds
    figure, axes = empty_figure()
    # cividis is even in lightness for every kind of colour vision.
    image = axes.imshow(grid, cmap="cividis", origin="lower", aspect="auto")
    middle = (np.nanmin(grid) + np.nanmax(grid)) / 2
    for (row, column), value in np.ndenumerate(grid):
        if not np.isnan(value):
            colour = "white" if value < middle else "black"
            axes.text(column, row, f"{value:.1f}", ha="center", va="center", color=colour)
    axes.set_xticks(range(len(grid.columns)), [f"{each:g}" for each in grid.columns])
    axes.set_yticks(range(len(grid.index)), [f"{each:g}" for each in grid.index])
    axes.set(xlabel="alpha", ylabel="delta", title=_title(largest["run"].iloc[0]))
    figure.colorbar(image, label=f"Recall@{k} (%)")
    return figure


def empty_figure(width: float = 6.4, height: float = 4.2) -> tuple[Figure, Any]:
    """A figure of that size in inches, and its axes."""
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots()


def _line_figure(xlabel: str, ylabel: str, width: float, height: float) -> tuple[Figure, Any]:
    figure, axes = empty_figure(width, height)
    axes.set(xlabel=xlabel, ylabel=ylabel)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    return figure, axes


def named_groups(runs: Sequence[Run]) -> dict[str, list[Mapping[str, Any]]]:
    """{name: results} of runs that differ only in the seed, as `recall_curves` takes them.

    Names that would be equal also hold the settings in which the groups differ.
    """
    return {
        ", ".join([name, *different]): [run.result for run in group]
        for name, group, different in told_apart(by_seed(runs), _title)
    }


def write_figures(folder: Path, runs: Sequence[Run]) -> list[str]:
    """Write every possible figure as .svg and .png; returns their names.

    K is the smallest that all runs have.
    """
    folder.mkdir(parents=True, exist_ok=True)
    common = set.intersection(*({int(k) for k in row["recall"]} for run in runs for row in run.result["history"]))
    if not common:
        return []
    k = min(common)
    curves = named_groups(runs)
    figures = {f"recall_by_{each}": recall_curves(curves, against=each, k=k) for each in _LABELS}
    for name in (*VARIED, "alpha_delta_map"):
        try:
            figures[name] = alpha_delta_map(runs, k=k) if name == "alpha_delta_map" else recall_by(name, runs, k=k)
        except UsageError:
            continue  # these runs do not vary that setting
    for name, figure in figures.items():
        save_figure(figure, folder / name)
    return list(figures)


def recall_curves(results: Mapping[str, Sequence[Mapping[str, Any]]], *, against: str = "epoch", k: int = 1) -> Figure:
    """A line per name: mean and standard deviation of Recall@k over its runs.

    Args:
        results: {name: contents of result.json}.
        against: "epoch", or "seconds": the mean training time up to each epoch.
        k: K of Recall@K.

    Epochs that not all runs of a name have are left out.
    """
    figure, axes = _line_figure(_LABELS[against], f"Recall@{k} (%)", 7.0, 4.2 + 0.2 * len(results))
    for index, (name, runs) in enumerate(results.items()):
        length = min(len(run["history"]) for run in runs)
        histories = [run["history"][:length] for run in runs]
        recall = 100 * np.array([[row["recall"][str(k)] for row in history] for history in histories])
        epochs = [[row["epoch"] for row in history] for history in histories]
        x = np.mean(epochs if against == "epoch" else [training_seconds(each) for each in histories], axis=0)
        colour = COLOURS[index % len(COLOURS)]
        style = _STYLES[(index + index // len(COLOURS)) % len(_STYLES)]
        middle = recall.mean(0)
        axes.plot(x, middle, style, color=colour, linewidth=1.8, label=f"{name} (n = {len(runs)})")
        if len(runs) > 1:
            spread = recall.std(0, ddof=1)
            axes.fill_between(x, middle - spread, middle + spread, color=colour, alpha=0.2, linewidth=0)
    # Below the axes: long names would cover the lines.
    figure.legend(loc="outside lower left", frameon=False, fontsize="x-small")
    return figure


def run_curves(history: Sequence[Mapping[str, Any]]) -> dict[str, Figure]:
    """Recall at the smallest K, of each set, and training loss of one run's evaluations against the epoch."""
    k = next(iter(history[-1]["recall"]))

    def shares(key: str) -> dict[int, float]:
        return {row["epoch"]: 100 * row[key][k] for row in history if row.get(key)}

    loss = {row["epoch"]: row["train_loss"] for row in history if row.get("train_loss") is not None}
    made = {}
    for label, lines in {
        f"Recall@{k} (%)": {"searched classes": shares("recall"), "held-out classes": shares("validation")},
        "training loss": {"": loss},
    }.items():
        made[label], axes = _line_figure("epoch", label, 5.0, 3.2)
        known = {name: line for name, line in lines.items() if line}
        for (name, line), colour, style in zip(known.items(), COLOURS, _STYLES, strict=False):
            axes.plot(list(line), list(line.values()), style, color=colour, marker=".", label=name)
        if len(known) > 1:
            axes.legend(frameon=False)
    return made


def recall_by_settings(rows: Sequence[Mapping[str, Any]], settings: Sequence[str], column: str) -> Figure:
    """Parallel coordinates: a line per row through its settings to this Recall in percent, the best one thick.

    Args:
        rows: of a table; one without this Recall is left out.
        settings: columns with strings; numbers have a scale, logarithmic from a ratio of 20 on, others even steps.
        column: the last axis.
    """
    known = sorted((row for row in rows if row.get(column) is not None), key=lambda row: row[column])
    figure, axes = empty_figure(max(5.0, 1.5 * len(settings) + 2), 3.8)
    heights = []
    for place, key in enumerate([*settings, column] if known else []):
        names = [f"{row[key]:.1f}" if key == column else str(row.get(key, "-")) for row in known]
        try:
            values = np.array([float(each) for each in names])
            if values.min() > 0 and values.max() >= 20 * values.min():
                values = np.log(values)
        except ValueError:
            values = np.unique(names, return_inverse=True)[1].astype(float)
        low, span = values.min(), np.ptp(values)
        heights.append((values - low) / span if span else np.full(len(known), 0.5))
        ticks = dict(zip(heights[-1].tolist(), names, strict=True))
        axes.axvline(place, color="#999999", linewidth=1)
        labelled: list[float] = []  # lowest, highest, and all between that do not cover another
        for height in [*sorted(ticks)[:1], *sorted(ticks)[:0:-1]]:
            if all(abs(height - other) > 0.06 for other in labelled):
                labelled.append(height)
                text = axes.annotate(ticks[height], (place, height), (4, 0), textcoords="offset points", va="center")
                text.set_bbox({"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1})
    for number, line in enumerate(zip(*heights, strict=True), start=1):
        best = number == len(known)
        colour = matplotlib.colormaps["cividis_r"](0.2 + 0.8 * line[-1])  # pale to dark
        axes.plot(line, color=colour, linewidth=3 if best else 1.2)
    axes.set_xticks(range(len(settings) + 1), [*settings, f"{column} (%)"])
    axes.set_xlim(-0.1, len(settings) + 0.4)
    axes.set_yticks([])
    axes.spines[:].set_visible(False)
    return figure


def save_figure(figure: Figure, file: Path) -> None:
    """Write `file`.svg and `file`.png; equal figures give equal bytes."""
    with matplotlib.rc_context({"svg.hashsalt": file.name}):
        figure.savefig(file.with_suffix(".svg"), metadata={"Date": None})
    figure.savefig(file.with_suffix(".png"), dpi=120)
