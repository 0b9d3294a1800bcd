"""Runs of several losses side by side: a table in three forms, and the curves of Fig. 1."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import floor
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from proxy_anchor.errors import UsageError
from proxy_anchor.reports.curves import recall_curves, save_figure
from proxy_anchor.reports.tables import format_table
from proxy_anchor.utils import RESULT_FILE, read_result

Result = dict[str, Any]
TABLE = "comparison"


@dataclass(frozen=True)
class Spread:
    """Mean and standard deviation (None for one value) of n values, out of `runs` that could have had one."""

    mean: float
    deviation: float | None
    n: int
    runs: int

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Spread | None:
        """Over the values that are there; None when none is."""
        everything = list(values)
        known = [value for value in everything if value is not None]
        if not known:
            return None
        return cls(mean(known), stdev(known) if len(known) > 1 else None, len(known), len(everything))

    def __str__(self) -> str:
        digits = 0 if self.mean >= 1000 else 1
        text = f"{self.mean:.{digits}f}"
        if self.deviation is not None:
            text += f" ± {self.deviation:.{digits}f}"
        return text if self.n == self.runs else f"{text} ({self.n} of {self.runs})"


def read_comparison(folder: Path) -> dict[str, list[Result]]:
    """{loss: results by seed} of the finished runs below a folder of compare.py (LOSS/seedN/result.json).

    Raises UsageError when there are none.
    """
    found: dict[str, list[Result]] = {}
    for file in sorted(
        folder.glob(f"*/seed*/{RESULT_FILE}"), key=lambda file: (file.parts[-3], len(file.parts[-2]), file)
    ):
        result = read_result(file.parent)
        if result is not None:
            found.setdefault(file.parts[-3], []).append(result)
    if not found:
        raise UsageError(f"{folder} holds no comparison: expected LOSS/seedN/{RESULT_FILE} below it.")
    return found


def reached(result: Result, level: float, k: str) -> tuple[int, float] | None:
    """(epochs, wall seconds of training and evaluation) until Recall@k was first `level` percent; None if it never was."""
    seconds = 0.0
    for row in result["history"]:
        if row["epoch"] > 0:
            seconds += row["train_seconds"] + row["eval_seconds"]
            if 100 * row["recall"][k] >= level:
                return row["epoch"], seconds
    return None


def default_levels(results: Mapping[str, Sequence[Result]]) -> list[float]:
    """What every run reaches, and 90 and 95 % of the best loss's mean; in percent, rounded down to 0.1."""
    k = _smallest_k(results)
    best = {loss: [100 * run["best"]["recall"][k] for run in runs] for loss, runs in results.items()}
    top = max(map(mean, best.values()))
    levels = [min(min(each) for each in best.values()), 0.9 * top, 0.95 * top]
    return sorted({floor(10 * level + 1e-9) / 10 for level in levels})


def comparison_rows(
    results: Mapping[str, Sequence[Result]], levels: Sequence[float] | None = None
) -> list[dict[str, str | int | Spread | None]]:
    """One row per loss: recalls in percent, epochs and seconds to each level, images/s, peak memory in GiB."""
    k = _smallest_k(results)
    levels = default_levels(results) if levels is None else list(levels)
    rows = []
    for loss, runs in results.items():
        row: dict[str, str | int | Spread | None] = {"loss": loss, "seeds": len(runs)}
        names = ["best", "last"] if runs[0]["selected"].get("validation") is None else ["selected", "best", "last"]
        for name in names:
            for each in runs[0][name]["recall"]:
                row[f"{name} R@{each}"] = Spread.of(100 * run[name]["recall"][each] for run in runs)
        row["best epoch"] = Spread.of(run["best"]["epoch"] for run in runs)
        for level in levels:
            times = [reached(run, level, k) for run in runs]
            row[f"epochs to {level:g}"] = Spread.of(None if time is None else time[0] for time in times)
            row[f"s to {level:g}"] = Spread.of(None if time is None else time[1] for time in times)
        row["images/s"] = Spread.of(run["train_images_per_second"] for run in runs)
        row["peak GiB"] = Spread.of(run.get("peak_memory_gib") for run in runs)
        rows.append(row)
    return rows


def noise_rows(comparisons: Sequence[Mapping[str, Sequence[Result]]]) -> list[dict[str, str]]:
    """A row per loss of several comparisons: best and last Recall at the smallest K, in percent, by share of wrong labels.

    Raises UsageError when they are of different images.
    """
    _require_same_data([run for results in comparisons for runs in results.values() for run in runs])
    found: dict[str, dict[tuple[float, str], list[float]]] = {}
    k = _smallest_k(comparisons[0])
    for results in comparisons:
        for loss, runs in results.items():
            for run in runs:
                for name in ("best", "last"):
                    values = found.setdefault(loss, {}).setdefault((run.get("label_noise", 0.0), name), [])
                    values.append(100 * run[name]["recall"][k])
    columns = sorted({column for values in found.values() for column in values})
    return [
        {"loss": loss}
        | {
            f"{100 * noise:.0f} % noise, {name} R@{k}": f"{Spread.of(values[noise, name])} (n = {len(values[noise, name])})"
            if (noise, name) in values
            else "-"
            for noise, name in columns
        }
        for loss, values in found.items()
    ]


def write_comparison(
    folder: Path, results: Mapping[str, Sequence[Result]], levels: Sequence[float] | None = None
) -> str:
    """Write comparison.md, comparison.csv and the curves into `folder`; returns the table for a terminal.

    results: {loss: results of its runs}, in the order of the rows. levels: Recall at the smallest K in percent; None: see
    `default_levels`. On the terminal only the smallest K. Raises UsageError when the runs are of different images.
    """
    _require_same_data([run for runs in results.values() for run in runs])
    k = _smallest_k(results)
    rows = comparison_rows(results, levels)
    header = list(dict.fromkeys(key for row in rows for key in row))
    text = [{key: None if row.get(key) is None else str(row[key]) for key in header} for row in rows]
    lines = [f"| {' | '.join(header)} |", f"|{' --- |' * len(header)}"]
    lines += [f"| {' | '.join(row[key] or '-' for key in header)} |" for row in text]
    (folder / f"{TABLE}.md").write_text("\n".join([*lines, "", notes(results), ""]), encoding="utf-8")
    _write_csv(folder / f"{TABLE}.csv", header, rows)
    for against in ("epoch", "seconds"):
        save_figure(recall_curves(results, against=against, k=int(k)), folder / f"recall_by_{against}")
    shown = [key for key in header if "R@" not in key or key.endswith(f"R@{k}")]
    table = format_table([{key: row[key] for key in shown} for row in text])
    return f"{table}\n{notes(results)}\nall K: {folder / f'{TABLE}.md'}, .csv; curves: recall_by_epoch and recall_by_seconds"


def notes(results: Mapping[str, Sequence[Result]]) -> str:
    """What the numbers are, in one paragraph."""
    runs = [run for each in results.values() for run in each]
    k = _smallest_k(results)
    starts = {f"{100 * run['untrained']['recall'][k]:.1f}" for run in runs if run.get("untrained")}
    noise = sorted({run.get("label_noise", 0.0) for run in runs})
    return (
        f"Recall@K in percent of the {runs[0]['searched']} classes, mean ± standard deviation over seeds. best: the epoch with "
        f"the highest Recall@{k} there; last: the final one. Untrained Recall@{k}: {', '.join(sorted(starts)) or '-'}. Epochs "
        f"and seconds (training and evaluation) until Recall@{k} first reached a level; in brackets how many runs did. "
        + (f"Wrong training labels: {', '.join(f'{100 * each:.1f} %' for each in noise)}. " if any(noise) else "")
        + f"On {', '.join(sorted({run['device'] for run in runs}))}."
    )


def _require_same_data(runs: Sequence[Result]) -> None:
    """By what the runs say about the searched images, and how many they trained on: wrong labels are no other images."""
    found = {
        (
            tuple(sorted((table, text) for table, text in run["data"].items() if table != "train")),
            run["num_train_images"],
        )
        for run in runs
        if "data" in run  # a run may be older
    }
    if len(found) > 1:
        raise UsageError(
            f"these runs are of {len(found)} different data sets (by the images that they searched and the number that they "
            "trained on), so that no mean over them means anything: give runs of one."
        )


def _smallest_k(results: Mapping[str, Sequence[Result]]) -> str:
    return next(iter(next(iter(results.values()))[0]["best"]["recall"]))


def _write_csv(file: Path, header: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> None:
    """Mean, deviation and number of runs of each spread in columns of their own."""
    lines = []
    for row in rows:
        line: dict[str, Any] = {}
        for key in header:
            value = row.get(key)
            if key in ("loss", "seeds"):
                line[key] = value
            else:
                line[key] = None if value is None else value.mean
                line[f"{key} sd"] = None if value is None else value.deviation
                line[f"{key} n"] = 0 if value is None else value.n
        lines.append(line)
    with file.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.DictWriter(stream, list(lines[0]))
        writer.writeheader()
        writer.writerows(lines)
