"""Results of finished runs next to the numbers of Kim et al. 2020.

A row of ours holds all runs on the same images that differ only in the seed. It is placed next to the paper's row
with the same data set, method, dimension, network and image side. A footnote names every setting in which it differs
from the contract of that row in conf/experiment.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import pandas

from proxy_anchor.reports.runs import (
    Run,
    Spread,
    backbone_abbreviation,
    backbone_name,
    by_seed,
    differences,
    is_benchmark,
    is_whole_benchmark,
    method_name,
    told_apart,
)
from proxy_anchor.reports.tables import format_table, markdown_table
from proxy_anchor.utils import write_text


def paper_results() -> list[Any]:
    """The rows of paper_results.csv as named tuples, in the paper's order.

    Fields: table (label in the paper's source), method, dimension, backbone (name in conf/backbone), crop (image side
    in pixels; for HORDE the side that the paper compares with), batch_size, dataset, k, value (Recall@k in percent).
    None where the table does not say.
    """
    with files("proxy_anchor.reports").joinpath("paper_results.csv").open(encoding="utf-8") as file:
        frame = pandas.read_csv(file, dtype=dict.fromkeys(("dimension", "crop", "batch_size"), "Int64"))
    frame = frame.astype(object).where(frame.notna(), None)
    return list(frame.itertuples(index=False, name="PaperResult"))


# Settings of a row, from conf/experiment: labels of tables in the paper, and a config as a run's, plain types.
Contract = tuple[Sequence[str], Mapping[str, Any]]


@dataclass(frozen=True)
class Row:
    """A line of a table.

    Attributes:
        paper, ours: {K: Recall@K in percent}; either may be empty.
        last: ours at the final epoch.
        mark: text of the footnote, "" for none.
        data, run_names: where the data are not the paper's, else "".
    """

    method: str
    dimension: int | None
    backbone: str | None
    crop: int | None
    batch_size: int | None
    paper: Mapping[int, float] = field(default_factory=dict)
    ours: Mapping[int, Spread] = field(default_factory=dict)
    last: Spread | None = None
    mark: str = ""
    data: str = ""
    run_names: str = ""


@dataclass(frozen=True)
class Table:
    """A table of the paper for one data set; our own rows are last."""

    label: str
    dataset: str
    rows: tuple[Row, ...]


def paper_tables(runs: Sequence[Run], contracts: Sequence[Contract] = ()) -> list[Table]:
    """The paper's tables in which these runs have a row.

    The main table of each data set comes first. A data set that the paper does not have gets a table of ours alone.
    """
    tables = []
    for dataset in dict.fromkeys(run.dataset for run in runs):
        groups = by_seed([run for run in runs if run.dataset == dataset])
        printed = _printed(dataset)
        main = next(iter(printed), dataset)
        placed: set[int] = set()
        made: dict[str, list[Row]] = {main: []}
        for label, paper_rows in printed.items():
            rows = []
            for row in paper_rows:
                own = [index for index, group in enumerate(groups) if _is_row(group[0].config, row)]
                rows += [_with_ours(row, groups[index], contracts, label, dataset) for index in own] or [row]
                placed |= set(own)
            if label == main or any(row.ours for row in rows):
                made[label] = rows
        made[main] += _own_rows([group for index, group in enumerate(groups) if index not in placed])
        tables += [Table(label, dataset, tuple(rows)) for label, rows in made.items()]
    return tables


def _printed(dataset: str) -> dict[str, list[Row]]:
    """{table: the paper's rows of this data set}, the main table first."""
    tables: dict[str, dict[tuple[Any, ...], dict[int, float]]] = {}
    for table, *looks, name, k, value in paper_results():
        if name == dataset:
            tables.setdefault(table, {}).setdefault(tuple(looks), {})[k] = value
    return {
        table: [replace(Row(*looks), paper=recall) for looks, recall in rows.items()] for table, rows in tables.items()
    }


def _looks(config: Mapping[str, Any]) -> tuple[Any, ...]:
    """The first fields of a run's row."""
    crop, batch_size = config["dataset"]["images"]["crop"], config["data"]["batch_size"]
    return method_name(config), config["embedding_dim"], backbone_name(config), crop, batch_size


def _is_row(config: Mapping[str, Any], row: Row) -> bool:
    *looks, batch_size = _looks(config)
    # Defaults are those of the paper's text: BN-Inception, 512 dimensions, 224 pixels.
    printed = [row.method, row.dimension or 512, row.backbone or "bninception", row.crop or 224]
    of_head = "features" not in (config["backbone"].get("search_with") or "")  # of embedding_dim numbers
    return of_head and looks == printed and row.batch_size in (None, batch_size)


def _with_ours(row: Row, group: Sequence[Run], contracts: Sequence[Contract], label: str, dataset: str) -> Row:
    found = [config for labels, config in contracts if label in labels and _is_row(config, row)]
    found = [each for each in found if each["dataset"]["name"] == dataset]
    marks = differences(group[0].config, found[0]) if found else ["conf/experiment has no contract for this row"]
    return _filled(row, group, marks)


def _own_rows(groups: Sequence[Sequence[Run]]) -> list[Row]:
    """Rows that the paper does not have; footnotes tell apart those that look alike."""
    rows = []
    for (*looks, data), group, different in told_apart(groups, lambda run: (*_looks(run.config), run.data_name)):
        config = group[0].config
        marks = ["the paper has no such row"] if is_benchmark(config) else []
        if group[0].result["selected"].get("validation") is not None:
            marks.append("the epoch is selected on held-out classes")
        row = _filled(Row(*looks), group, [*marks, *different])
        if not is_whole_benchmark(config):
            row = replace(row, data=data, run_names=", ".join(run.name for run in group))
        rows.append(row)
    return rows


def _filled(row: Row, group: Sequence[Run], marks: Sequence[str]) -> Row:
    """The row with ours: the selected epoch's recall, and the final epoch's."""
    counts = Counter(run.config.get("seed") for run in group)
    repeated = [f"seed {seed} was run {count} times" for seed, count in counts.items() if count > 1]
    first, *others = (run.result["selected"]["recall"] for run in group)
    ks = [int(k) for k in first if all(k in each for each in others)]
    ours = {k: spread for k in ks if (spread := Spread.of(run.recall(k) for run in group)) is not None}
    last = Spread.of(100 * run.result["last"]["recall"][str(ks[0])] for run in group) if ks else None
    return replace(row, ours=ours, last=last, mark="; ".join([*marks, *repeated]))


def _cells(rows: Sequence[Row]) -> tuple[list[dict[str, str]], list[str]]:
    """Strings by column, without empty columns; and the footnotes."""
    marks = list(dict.fromkeys(row.mark for row in rows if row.mark))
    lines = []
    for row in rows:
        line = {"data": row.data, "run": row.run_names, "method": row.method, "dim": str(row.dimension or "")}
        line["net"] = backbone_abbreviation(row.backbone)
        for column, name in (("side", "crop"), ("batch", "batch_size")):
            if len({getattr(each, name) for each in rows}) > 1:
                line[column] = str(getattr(row, name) or "")
        for k in sorted({k for each in rows for k in (*each.paper, *each.ours)}):
            ours, paper = row.ours.get(k), row.paper.get(k)
            line[f"paper R@{k}"] = "" if paper is None else f"{paper:.1f}"
            line[f"ours R@{k}"] = str(ours or "")
            line[f"diff R@{k}"] = f"{ours.mean - paper:+.1f}" if ours and paper is not None else ""
        line |= {"last R@1": str(row.last or ""), "n": str(row.last.runs) if row.last else ""}
        line["mark"] = f"[{marks.index(row.mark) + 1}]" if row.mark else ""
        lines.append(line)
    shown = [{key: line[key] for key in line if any(each[key] for each in lines)} for line in lines]
    return shown, [f"[{number}] {mark}" for number, mark in enumerate(marks, start=1)]


def _note(tables: Sequence[Table]) -> str:
    with_paper = any(row.paper for table in tables for row in table.rows)
    return (
        "Recall@K in percent of the test classes, of the selected epoch (by Recall@1 on the test classes unless marked"
        f"{', as in the paper' if with_paper else ''}); ours is mean ± standard deviation over n seeds. "
        f"last: the final epoch.{' diff is ours minus the paper.' if with_paper else ''}"
    )


def terminal_text(table: Table) -> str:
    """The table at the smallest K, without the paper's other methods."""
    cells, footnotes = _cells([row for row in table.rows if row.ours or "Anchor" in row.method])
    smallest = next((key for key in cells[0] if "R@" in key), "R@").partition("R@")[2] if cells else ""
    shown = [{key: line[key] for key in line if "R@" not in key or key.endswith(f"R@{smallest}")} for line in cells]
    return "\n".join([f"{table.label}, {table.dataset}", format_table(shown), *footnotes])


def _markdown_text(table: Table) -> str:
    cells, footnotes = _cells(table.rows)
    marks = "".join(f"- {each}\n" for each in footnotes)
    return f"## {table.label}, {table.dataset}\n\n{markdown_table(cells)}\n\n{marks}"


def _latex_text(table: Table) -> str:
    """A tabular for booktabs, with the footnotes as comments."""
    cells, footnotes = _cells(table.rows)
    tabular = pandas.DataFrame(cells).to_latex(index=False, escape=True)
    return "\n".join([f"% {table.label}, {table.dataset}", tabular, *(f"% {each}" for each in footnotes)])


def write_paper_tables(folder: Path, tables: Sequence[Table]) -> str:
    """Write tables.md and tables.tex into `folder`; returns the text for a terminal."""
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / "tables.md", "\n".join([*map(_markdown_text, tables), _note(tables), ""]))
    write_text(folder / "tables.tex", "\n".join([*map(_latex_text, tables), ""]))
    return "\n\n".join([*map(terminal_text, tables), _note(tables)])
