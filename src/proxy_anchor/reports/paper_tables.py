"""Runs beside the paper's numbers: its tables, for a terminal and as Markdown, LaTeX and CSV.

A row of ours is all runs on the same images that differ in nothing but the seed. It stands beside the row of the paper with the same data set,
method, dimension, network and image side; where its settings are not those of that row's contract (conf/experiment), or the
row has no contract, it is marked, and the footnote says in what.
"""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from proxy_anchor.reports.comparison import Spread
from proxy_anchor.reports.paper import PaperResult, paper_results
from proxy_anchor.reports.runs import (
    Run,
    backbone_abbreviation,
    backbone_name,
    by_seed,
    differences,
    is_benchmark,
    is_whole_benchmark,
    method_name,
    told_apart,
)
from proxy_anchor.reports.tables import format_table
from proxy_anchor.utils import write_text

MAIN_TABLES = {
    "cub": "tab:eval_cub_cars",
    "cars": "tab:eval_cub_cars",
    "sop": "tab:eval_sop",
    "inshop": "tab:eval_inshop",
}
_TABLE_FILE = "tables"


@dataclass(frozen=True)
class Contract:
    """What conf/experiment says about a row. tables: labels in the paper. config: plain types, as a run's."""

    experiment: str
    tables: tuple[str, ...]
    config: Mapping[str, Any]


@dataclass(frozen=True)
class Row:
    """A line of a table. paper, ours: {K: Recall@K in percent}; either may be empty. last: of the final epoch, ours.

    mark: "" or why ours is not what the paper's row is. data, run_names: where the data are none of the paper's, else "".
    """

    method: str
    dimension: int | None
    backbone: str | None
    crop: int | None
    batch_size: int | None
    paper: dict[int, float]
    ours: dict[int, Spread]
    last: Spread | None = None
    mark: str = ""
    data: str = ""
    run_names: str = ""

    @property
    def runs(self) -> int:
        """n, the number of seeds."""
        return next(iter(self.ours.values())).runs if self.ours else 0


@dataclass(frozen=True)
class Table:
    """One table of the paper for one data set, in its order; what the paper has no row for stands at the end."""

    label: str
    dataset: str
    rows: tuple[Row, ...]

    @property
    def k(self) -> list[int]:
        """All K of its rows."""
        return sorted({k for row in self.rows for k in (*row.paper, *row.ours)})


def paper_tables(runs: Sequence[Run], contracts: Sequence[Contract] = ()) -> list[Table]:
    """The paper's tables that these runs have a place in: every row of the paper, ours beside it.

    The main table of each data set comes first; a data set that the paper does not have gets a table of ours alone.
    """
    tables = []
    results = paper_results()
    for dataset in dict.fromkeys(run.dataset for run in runs):
        groups = by_seed([run for run in runs if run.dataset == dataset])
        labels = dict.fromkeys(each.table for each in results if each.dataset == dataset)
        main = MAIN_TABLES.get(dataset, dataset)
        placed: set[int] = set()
        made = []
        for label in labels:
            printed = _printed([each for each in results if each.dataset == dataset and each.table == label])
            rows, found = [], set()
            for row, recall in printed.items():
                own = [index for index, group in enumerate(groups) if _is_row(group[0].config, row)]
                found |= set(own)
                rows += [_row(row, recall, groups[index], contracts, label) for index in own] or [_row(row, recall)]
            placed |= found
            if found or label == main:
                made.append((label, rows))
        extra = _own_rows([group for index, group in enumerate(groups) if index not in placed])
        if main not in labels:
            made.append((main, []))
        made.sort(key=lambda each: each[0] != main)
        tables += [Table(label, dataset, (*rows, *(extra if label == main else ()))) for label, rows in made]
    return tables


def _printed(results: Sequence[PaperResult]) -> dict[PaperResult, dict[int, float]]:
    """The first number of each of the paper's rows, which stands for the row, with all of the row's numbers."""
    rows: dict[tuple[Any, ...], tuple[PaperResult, dict[int, float]]] = {}
    for each in results:
        key = (each.method, each.dimension, each.backbone, each.crop, each.batch_size)
        rows.setdefault(key, (each, {}))[1][each.k] = each.value
    return dict(rows.values())


def _is_row(config: Mapping[str, Any], row: PaperResult) -> bool:
    # Where a table does not say, the paper's text does: BN-Inception, 512 dimensions, 224 pixels.
    return (
        method_name(config) == row.method
        and config["embedding_dim"] == (row.dimension or 512)
        and backbone_name(config) == (row.backbone or "bninception")
        and config["dataset"]["images"]["crop"] == (row.crop or 224)
        and row.batch_size in (None, config["data"]["batch_size"])
    )


def _row(
    row: PaperResult,
    recall: dict[int, float],
    group: Sequence[Run] = (),
    contracts: Sequence[Contract] = (),
    label: str = "",
) -> Row:
    mark = ""
    ours: dict[int, Spread] = {}
    last: Spread | None = None
    if group:
        config = group[0].config
        found = [each for each in contracts if label in each.tables and _is_row(each.config, row)]
        found = [each for each in found if each.config["dataset"]["name"] == row.dataset]
        marks = differences(config, found[0].config) if found else ["conf/experiment has no contract for this row"]
        mark = "; ".join([*marks, *_repeated_seeds(group)])
        ours, last = _recall(group)
    return Row(row.method, row.dimension, row.backbone, row.crop, row.batch_size, recall, ours, last, mark)


def _own_rows(groups: Sequence[Sequence[Run]]) -> list[Row]:
    """Rows without one of the paper's; the mark of those that would look alike says in what each differs from most of them."""
    identities = []
    for group in groups:
        config = group[0].config
        images, batch_size = config["dataset"]["images"], config["data"]["batch_size"]
        looks = (method_name(config), config["embedding_dim"], backbone_name(config), images["crop"], batch_size)
        identities.append((looks, group[0].data_name))
    rows = []
    for looks, data in dict.fromkeys(identities):
        alike = [group for group, other in zip(groups, identities, strict=True) if other == (looks, data)]
        for group, different in zip(alike, told_apart([each[0].config for each in alike]), strict=True):
            config = group[0].config
            marks = ["the paper has no such row"] if is_benchmark(config) else []
            if group[0].result["selected"].get("validation") is not None:
                marks.append("the epoch is selected on held-out training classes")
            names = () if is_whole_benchmark(config) else (data, ", ".join(run.name for run in group))
            mark = "; ".join([*marks, *different, *_repeated_seeds(group)])
            rows.append(Row(*looks, {}, *_recall(group), mark, *names))
    return rows


def _repeated_seeds(group: Sequence[Run]) -> list[str]:
    """A sentence where one seed was run more than once: the deviation is then not one over seeds."""
    counts = Counter(run.config.get("seed") for run in group)
    return [f"seed {seed} was run {count} times" for seed, count in counts.items() if count > 1]


def _recall(group: Sequence[Run]) -> tuple[dict[int, Spread], Spread | None]:
    ks = [
        k for k in group[0].result["selected"]["recall"] if all(k in run.result["selected"]["recall"] for run in group)
    ]
    values = {int(k): Spread.of([run.recall(int(k)) for run in group]) for k in ks}
    smallest = ks[0] if ks else "1"
    last = Spread.of(100 * run.result["last"]["recall"][smallest] for run in group) if ks else None
    return {k: value for k, value in values.items() if value is not None}, last


# -- forms ---------------------------------------------------------------------------------------------------------


def _plain(row: Row) -> str:
    dagger = "†" if row.crop == 256 and row.method in ("Proxy-Anchor", "Contra+HORDE") else ""
    return f"{dagger}{row.method}" + (f"^{row.dimension}" if row.dimension else "")


def _markdown(row: Row) -> str:
    name, _, dimension = _plain(row).partition("^")
    return f"{name}<sup>{dimension}</sup>" if dimension else name


def _latex(row: Row) -> str:
    name, _, dimension = _plain(row).partition("^")
    return f"{name}$^{{{dimension}}}$" if dimension else name


def _cells(table: Table, name: Callable[[Row], str], marks: Mapping[str, int]) -> list[dict[str, str]]:
    """Texts by column. What is the same in every row, or nowhere, has no column."""
    rows = []
    for row in table.rows:
        cells = {
            "data": row.data,
            "run": row.run_names,
            "method": name(row),
            "net": backbone_abbreviation(row.backbone),
        }
        for column, value in (("side", row.crop), ("batch", row.batch_size)):
            if len({getattr(each, {"side": "crop", "batch": "batch_size"}[column]) for each in table.rows}) > 1:
                cells[column] = "" if value is None else str(value)
        for k in table.k:
            ours, paper = row.ours.get(k), row.paper.get(k)
            cells[f"paper R@{k}"] = "" if paper is None else f"{paper:.1f}"
            cells[f"ours R@{k}"] = "" if ours is None else str(ours)
            cells[f"diff R@{k}"] = "" if ours is None or paper is None else f"{ours.mean - paper:+.1f}"
        cells["last R@1"] = "" if row.last is None else str(row.last)
        cells["n"] = str(row.runs or "")
        cells["mark"] = f"[{marks[row.mark]}]" if row.mark else ""
        rows.append(cells)
    return [{key: row[key] for key in row if any(each[key] for each in rows)} for row in rows]


def _marks(table: Table) -> dict[str, int]:
    return {mark: number for number, mark in enumerate(dict.fromkeys(row.mark for row in table.rows if row.mark), 1)}


def _note(tables: Sequence[Table]) -> str:
    beside_paper = any(row.paper for table in tables for row in table.rows)
    as_paper = ", as in the paper" if beside_paper else ""
    difference = " diff is ours minus the paper's. † 256 pixels." if beside_paper else ""
    return (
        "Recall@K in percent of the test classes, of the selected epoch (by Recall@1 on the test classes unless marked"
        f"{as_paper}); ours is mean ± standard deviation over n seeds. last: the final epoch.{difference}"
    )


def terminal_text(table: Table, *, all_k: bool = False) -> str:
    """Only the smallest K unless all_k, and of the paper's rows only those that name Proxy-Anchor or stand beside ours."""
    kept = (
        table
        if all_k
        else Table(table.label, table.dataset, tuple(r for r in table.rows if r.ours or "Anchor" in r.method))
    )
    marks = _marks(kept)
    rows = _cells(kept, _plain, marks)
    if not all_k and kept.k:
        rows = [{key: v for key, v in row.items() if "R@" not in key or key.endswith(f"R@{kept.k[0]}")} for row in rows]
    notes = [f"[{number}] {mark}" for mark, number in marks.items()]
    return "\n".join([f"{table.label}, {table.dataset}", format_table(rows), *notes])


def markdown_text(table: Table) -> str:
    """A heading, the whole table, its marks."""
    marks = _marks(table)
    rows = _cells(table, _markdown, marks)
    lines = [f"## {table.label}, {table.dataset}", "", f"| {' | '.join(rows[0])} |", f"|{' --- |' * len(rows[0])}"]
    lines += [f"| {' | '.join(cell or '-' for cell in row.values())} |" for row in rows]
    lines += ["", *(f"- [{number}] {mark}" for mark, number in marks.items()), ""]
    return "\n".join(lines)


def latex_text(table: Table) -> str:
    """A tabular for booktabs; the marks stand behind it as a comment."""
    marks = _marks(table)
    rows = _cells(table, _latex, marks)
    columns = list(rows[0])
    aligned = "".join("l" if each in ("data", "run", "method", "net") else "r" for each in columns)
    lines = [f"% {table.label}, {table.dataset}", rf"\begin{{tabular}}{{{aligned}}}", r"\toprule"]
    lines += [" & ".join(columns) + r" \\", r"\midrule"]
    lines += [" & ".join(_escaped(cell) or "--" for cell in row.values()) + r" \\" for row in rows]
    lines += [r"\bottomrule", r"\end{tabular}", *(f"% [{number}] {mark}" for mark, number in marks.items()), ""]
    return "\n".join(lines)


def _escaped(cell: str) -> str:
    for plain, latex in (("_", r"\_"), ("%", r"\%"), ("&", r"\&"), ("#", r"\#"), ("±", r"$\pm$"), ("†", r"$^\dagger$")):
        cell = cell.replace(plain, latex)
    return cell


def csv_text(tables: Sequence[Table]) -> str:
    """One line per table, row and K, numbers unrounded."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    head = ["table", "dataset", "data", "run", "method", "dimension", "backbone", "crop", "batch_size", "k"]
    writer.writerow([*head, "paper", "mean", "deviation", "n", "difference", "mark"])
    for table in tables:
        for row in table.rows:
            looks = (row.method, row.dimension, row.backbone, row.crop, row.batch_size)
            identity = [table.label, table.dataset, row.data, row.run_names, *looks]
            for k in sorted({*row.paper, *row.ours}):
                ours, paper = row.ours.get(k), row.paper.get(k)
                numbers = [None, None, 0] if ours is None else [ours.mean, ours.deviation, ours.n]
                difference = None if ours is None or paper is None else ours.mean - paper
                writer.writerow([*identity, k, paper, *numbers, difference, row.mark])
    return stream.getvalue()


def write_paper_tables(folder: Path, tables: Sequence[Table]) -> str:
    """Write tables.md, tables.tex and tables.csv into `folder`; returns the text for a terminal."""
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / f"{_TABLE_FILE}.md", "\n".join([*map(markdown_text, tables), _note(tables), ""]))
    write_text(folder / f"{_TABLE_FILE}.tex", "\n".join(map(latex_text, tables)))
    write_text(folder / f"{_TABLE_FILE}.csv", csv_text(tables))
    return "\n\n".join([*map(terminal_text, tables), _note(tables)])
