"""Tables of results for a terminal, as Markdown and CSV; the table of compare.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from math import floor, sqrt
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from proxy_anchor.errors import UsageError
from proxy_anchor.reports.runs import Spread, training_seconds
from proxy_anchor.utils import write_text

Result = Mapping[str, Any]


def format_table(rows: Sequence[Mapping[str, Any]], decimals: int = 1, width: int | None = None) -> str:
    """Aligned columns for a terminal; numbers to the right, floats with `decimals` places.

    Columns beyond `width` characters follow in a further table, after the first column.
    """
    # Not pandas, whose import would take as long as the rest of --help.
    if not rows:
        return ""
    header, *_ = lines = _lines(rows, decimals)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    fitting = max(2, sum(end <= (width or end) for end in accumulate(widths, lambda end, each: end + 2 + each)))
    if fitting < len(header):
        parts = header[:fitting], header[:1] + header[fitting:]
        tables = [[{key: row.get(key) for key in part} for row in rows] for part in parts]
        return "\n\n".join(format_table(table, decimals, width) for table in tables)
    lines.insert(1, ["-" * width for width in widths])
    right = [all(isinstance(row.get(key), int | float | None) for row in rows) for key in header]
    return "\n".join(
        "  ".join(
            text.rjust(width) if number else text.ljust(width)
            for text, width, number in zip(line, widths, right, strict=True)
        ).rstrip()
        for line in lines
    )


def markdown_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The same rows in Markdown, floats with one decimal place."""
    header, *cells = _lines(rows, 1)
    lines = [header, ["---"] * len(header), *([text.replace("|", "\\|") or "-" for text in line] for line in cells)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _lines(rows: Sequence[Mapping[str, Any]], decimals: int) -> list[list[str]]:
    header = list(dict.fromkeys(key for row in rows for key in row))

    def cell(value: Any) -> str:
        return f"{value:.{decimals}f}" if isinstance(value, float) else "-" if value is None else str(value)

    return [header, *([cell(row.get(key)) for key in header] for row in rows)]


def reached(result: Result, level: float, k: str) -> tuple[int, float] | None:
    """(epochs, seconds) until Recall@k reaches `level` percent; None if never."""
    evaluating = 0.0
    for row, training in zip(result["history"], training_seconds(result["history"]), strict=True):
        if row["epoch"] > 0:
            evaluating += row["eval_seconds"]
            if 100 * row["recall"][k] >= level:
                return row["epoch"], training + evaluating
    return None


def comparison_rows(
    results: Mapping[str, Sequence[Result]], levels: Sequence[float] | None = None
) -> list[dict[str, Any]]:
    """Rows of losses: recall (%), epochs and seconds to levels, images/s, memory.

    levels: Recall at the smallest K in percent; None: what every run reaches, and 90 and 95 % of the best mean.
    """
    k = _smallest_k(results)
    if levels is None:
        best = [[100 * run["best"]["recall"][k] for run in runs] for runs in results.values()]
        top = max(map(mean, best))
        levels = sorted({floor(10 * each + 1e-9) / 10 for each in (min(map(min, best)), 0.9 * top, 0.95 * top)})

    def numbers(run: Result) -> dict[str, float | None]:
        held_out = run["selected"].get("validation") is not None
        row = {
            f"{name} R@{each}": 100 * value
            for name in (["selected"] if held_out else []) + ["best", "last"]
            for each, value in run[name]["recall"].items()
        }
        row["best epoch"] = run["best"]["epoch"]
        for level in levels:
            row[f"epochs to {level:g}"], row[f"s to {level:g}"] = reached(run, level, k) or (None, None)
        return row | {"images/s": run["train_images_per_second"], "peak GiB": run.get("peak_memory_gib")}

    rows = []
    reference, first = next(iter(results.items()))
    for loss, runs in results.items():
        of_runs = [numbers(run) for run in runs]
        spreads = {key: Spread.of(each.get(key) for each in of_runs) for key in of_runs[0]}
        row: dict[str, Any] = {"loss": loss, "seeds": len(runs)} | spreads
        if len(results) > 1 and len(first) > 1:
            row[f"best R@{k} - {reference}'s"] = paired_difference(runs, first, "best", k)
        rows.append(row)
    return rows


def paired_difference(runs: Sequence[Result], others: Sequence[Result], epoch: str, k: str = "1") -> str | None:
    """Mean difference of Recall@k in points, over the seeds that both have, with its 95 % interval (Student's t).

    epoch: "selected", "best" or "last". None for the same runs, and for fewer than two seeds.
    """
    from scipy.special import stdtrit

    theirs = {run["seed"]: run[epoch]["recall"][k] for run in others if "seed" in run}
    points = [100 * (run[epoch]["recall"][k] - theirs[run["seed"]]) for run in runs if run.get("seed") in theirs]
    if runs is others or len(points) < 2:
        return None
    half = stdtrit(len(points) - 1, 0.975) * stdev(points) / sqrt(len(points))
    return f"{mean(points):+.1f} [{mean(points) - half:+.1f}, {mean(points) + half:+.1f}]"


def write_table(
    folder: Path, name: str, rows: Sequence[Mapping[str, Any]], figures: Mapping[str, Any], note: str = ""
) -> str:
    """Write `name`.md, `name`.csv, the figures by their names, and all with links to the runs on one page.

    Returns a line for a terminal that names the files.
    """
    from pandas import json_normalize

    from proxy_anchor.reports.figures import save_figure
    from proxy_anchor.reports.pages import PAGE_FILE, inline_svg, render

    write_text(folder / f"{name}.md", f"{markdown_table(rows)}\n\n{note}".rstrip() + "\n")
    # Mean, deviation and number of runs are columns of their own.
    flat = [{key: vars(each) if isinstance(each, Spread) else each for key, each in row.items()} for row in rows]
    json_normalize(flat, sep=" ").to_csv(folder / f"{name}.csv", index=False)
    for file, figure in figures.items():
        save_figure(figure, folder / file)
    lines = _lines(rows, 1)
    links = sorted(
        (each.relative_to(folder).as_posix() for each in folder.glob(f"*/**/{PAGE_FILE}")), key=lambda x: (len(x), x)
    )
    pages = {first: link for first, *_ in lines[1:] if (link := f"{first}/{PAGE_FILE}") in links}
    text = render(
        "table.html",
        kind=name,
        name=folder.name,
        lines=lines,
        pages=pages,
        others=[each for each in links if each not in pages.values()],
        note=note,
        figures=[inline_svg(figure, each) for each, figure in figures.items()],
    )
    write_text(folder / PAGE_FILE, text)
    return f"table, {', '.join(figures)}, links to the runs: {folder / PAGE_FILE}; {name}.md, .csv"


def write_comparison(
    folder: Path, results: Mapping[str, Sequence[Result]], levels: Sequence[float] | None = None
) -> str:
    """Write table, curves and page (see `write_table`) into `folder`; returns the table for a terminal.

    Args:
        folder: where the files go.
        results: {loss: results of its runs}, in the order of the rows.
        levels: see `comparison_rows`.

    Raises:
        UsageError: when the runs are of different images.
    """
    from proxy_anchor.reports.figures import recall_curves

    _require_same_data([run for runs in results.values() for run in runs])
    k = _smallest_k(results)
    rows = comparison_rows(results, levels)
    figures = {f"recall_by_{each}": recall_curves(results, against=each, k=int(k)) for each in ("epoch", "seconds")}
    files = write_table(folder, "comparison", rows, figures, notes(results))
    shown = [{key: row[key] for key in row if "R@" not in key or key.endswith(f"R@{k}")} for row in rows]
    return f"{format_table(shown, width=100)}\n{notes(results)}\n{files}"


def notes(results: Mapping[str, Sequence[Result]]) -> str:
    """One paragraph that says what the numbers are."""
    runs = [run for each in results.values() for run in each]
    k = _smallest_k(results)
    starts = sorted({f"{100 * run['untrained']['recall'][k]:.1f}" for run in runs if run.get("untrained")})
    noise = sorted({run.get("label_noise", 0.0) for run in runs})
    sizes = [
        (loss, run["config"]["data"]["batch_size"]) for loss, runs in results.items() for run in runs if "config" in run
    ]
    listed = ", ".join(f"{size} ({loss})" for loss, size in dict.fromkeys(sizes))
    added = sorted({name for run in runs for name in run.get("config", {}).get("regulariser", {})})
    return (
        f"Recall@K in percent of the {runs[0]['searched']} classes, mean ± standard deviation over seeds. best: the "
        f"epoch with the highest Recall@{k}; last: the final one. Untrained Recall@{k}: {', '.join(starts) or '-'}. "
        f"Epochs and seconds (training and evaluation) until Recall@{k} reaches a level; in brackets how many runs do. "
        + (f"Wrong training labels: {', '.join(f'{100 * each:.1f} %' for each in noise)}. " if any(noise) else "")
        + (f"Regularisers: {', '.join(added)}. " if added else "")
        + (f"Batch sizes differ: {listed}. " if len({size for _, size in sizes}) > 1 else "")
        + f"On {', '.join(sorted({run['device'] for run in runs}))}."
    )


def _require_same_data(runs: Sequence[Result]) -> None:
    # Without the training labels, which label noise changes.
    found = {
        (repr(sorted(each for each in run["data"].items() if each[0] != "train")), run["num_train_images"])
        for run in runs
    }
    if len(found) > 1:
        raise UsageError(
            f"these runs are of {len(found)} different data sets (searched images, or number of training images): "
            "compare runs on one data set."
        )


def _smallest_k(results: Mapping[str, Sequence[Result]]) -> str:
    return next(iter(next(iter(results.values()))[0]["best"]["recall"]))
