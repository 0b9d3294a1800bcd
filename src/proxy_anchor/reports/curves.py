"""Recall against epochs and against training time, as in Fig. 1 of Kim et al. 2020."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from proxy_anchor.errors import check_choice

# Okabe and Ito's colours stay apart for every kind of colour vision; the line's form tells them apart in grey.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")
_FORMS = ("-", "--", "-.", ":")
_LABELS = {"epoch": "epoch", "seconds": "training time in seconds (evaluation not counted)"}


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
    size = (9.0, 5 + 0.17 * len(results) / columns) if many else (6.4, 4.2)
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
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
