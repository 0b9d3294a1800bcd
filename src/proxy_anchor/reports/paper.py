"""The numbers that Kim et al. 2020 print, and runs beside them: for a terminal, as Markdown, LaTeX and CSV.

A row of ours is all runs on the same images that differ in nothing but the seed. It stands beside the row of the paper with
the same data set, method, dimension, network and image side; where its settings are not those of that row's contract
(conf/experiment), or the row has no contract, it is marked, and the footnote says in what.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
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

MAIN_TABLES = {
    "cub": "tab:eval_cub_cars",
    "cars": "tab:eval_cub_cars",
    "sop": "tab:eval_sop",
    "inshop": "tab:eval_inshop",
}


def paper_results() -> list[Any]:
    """The rows of paper_results.csv as named tuples, in the order of the paper: one number, Recall@k in percent, each.

    table: the label in the paper's source. method: as printed, without its superscript, which is `dimension`. backbone: by
    its name in conf/backbone. crop: image side in pixels (for HORDE the side that the paper compares with). batch_size,
    dataset, k, value. None where the table does not say.
    """
    with files("proxy_anchor.reports").joinpath("paper_results.csv").open(encoding="utf-8") as file:
        frame = pandas.read_csv(file, dtype=dict.fromkeys(("dimension", "crop", "batch_size"), "Int64"))
    frame = frame.astype(object).where(frame.notna(), None)
    return list(frame.itertuples(index=False, name="PaperResult"))


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
    paper: Mapping[int, float]
    ours: Mapping[int, Spread]
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

    @property
    def marks(self) -> dict[str, int]:
        """{mark: number of its footnote}."""
        return {mark: number for number, mark in enumerate(dict.fromkeys(r.mark for r in self.rows if r.mark), 1)}


def paper_tables(runs: Sequence[Run], contracts: Sequence[Contract] = ()) -> list[Table]:
    """The paper's tables that these runs have a place in: every row of the paper, ours beside it.

    The main table of each data set comes first; a data set that the paper does not have gets a table of ours alone.
    """
    tables = []
    for dataset in dict.fromkeys(run.dataset for run in runs):
        groups = by_seed([run for run in runs if run.dataset == dataset])
        main = MAIN_TABLES.get(dataset, dataset)
        placed: set[int] = set()
        made: dict[str, list[Row]] = {main: []}
        for label, printed in _printed(dataset).items():
            rows = []
            for row in printed:
                own = [index for index, group in enumerate(groups) if _is_row(group[0].config, row)]
                rows += [_beside(row, groups[index], contracts, label, dataset) for index in own] or [row]
                placed |= set(own)
            if label == main or any(row.ours for row in rows):
                made[label] = rows
        made[main] += _own_rows([group for index, group in enumerate(groups) if index not in placed])
        tables += [Table(label, dataset, tuple(rows)) for label, rows in made.items()]
    return tables


def _printed(dataset: str) -> dict[str, list[Row]]:
    """{table: the paper's rows of this data set}."""
    recalls: dict[tuple[Any, ...], dict[int, float]] = {}
    for each in paper_results():
        if each.dataset == dataset:
            key = (each.table, each.method, each.dimension, each.backbone, each.crop, each.batch_size)
            recalls.setdefault(key, {})[each.k] = each.value
    tables: dict[str, list[Row]] = {}
    for (table, *looks), recall in recalls.items():
        method, dimension, backbone, crop, batch_size = looks
        tables.setdefault(table, []).append(Row(method, dimension, backbone, crop, batch_size, recall, {}))
    return tables


def _is_row(config: Mapping[str, Any], row: Row) -> bool:
    # Where a table does not say, the paper's text does: BN-Inception, 512 dimensions, 224 pixels.
    return (
        method_name(config) == row.method
        and config["embedding_dim"] == (row.dimension or 512)
        and backbone_name(config) == (row.backbone or "bninception")
        and config["dataset"]["images"]["crop"] == (row.crop or 224)
        and row.batch_size in (None, config["data"]["batch_size"])
    )


def _beside(row: Row, group: Sequence[Run], contracts: Sequence[Contract], label: str, dataset: str) -> Row:
    """The paper's row with ours."""
    config = group[0].config
    found = [each.config for each in contracts if label in each.tables and _is_row(each.config, row)]
    found = [each for each in found if each["dataset"]["name"] == dataset]
    marks = differences(config, found[0]) if found else ["conf/experiment has no contract for this row"]
    ours, last = _recall(group)
    return replace(row, ours=ours, last=last, mark="; ".join([*marks, *_repeated_seeds(group)]))


def _own_rows(groups: Sequence[Sequence[Run]]) -> list[Row]:
    """Rows without one of the paper's; the mark of those that would look alike says in what each differs from most of them."""
    alike: dict[tuple[Any, ...], list[Sequence[Run]]] = {}
    for group in groups:
        config = group[0].config
        images, batch_size = config["dataset"]["images"], config["data"]["batch_size"]
        looks = (method_name(config), config["embedding_dim"], backbone_name(config), images["crop"], batch_size)
        alike.setdefault((looks, group[0].data_name), []).append(group)
    rows = []
    for (looks, data), same in alike.items():
        for group, different in zip(same, told_apart([each[0].config for each in same]), strict=True):
            config = group[0].config
            marks = ["the paper has no such row"] if is_benchmark(config) else []
            if group[0].result["selected"].get("validation") is not None:
                marks.append("the epoch is selected on held-out training classes")
            mark = "; ".join([*marks, *different, *_repeated_seeds(group)])
            ours, last = _recall(group)
            row = Row(*looks, paper={}, ours=ours, last=last, mark=mark)
            if not is_whole_benchmark(config):
                row = replace(row, data=data, run_names=", ".join(run.name for run in group))
            rows.append(row)
    return rows


def _repeated_seeds(group: Sequence[Run]) -> list[str]:
    """A sentence where one seed was run more than once: the deviation is then not one over seeds."""
    counts = Counter(run.config.get("seed") for run in group)
    return [f"seed {seed} was run {count} times" for seed, count in counts.items() if count > 1]


def _recall(group: Sequence[Run]) -> tuple[dict[int, Spread], Spread | None]:
    """Of the selected epoch at every K that all runs have, and of the final epoch at the smallest."""
    first, *others = (run.result["selected"]["recall"] for run in group)
    ks = [int(k) for k in first if all(k in each for each in others)]
    values = {k: Spread.of([run.recall(k) for run in group]) for k in ks}
    last = Spread.of(100 * run.result["last"]["recall"][str(ks[0])] for run in group) if ks else None
    return {k: value for k, value in values.items() if value is not None}, last


# -- forms ---------------------------------------------------------------------------------------------------------


def _cells(table: Table, superscript: str) -> list[dict[str, str]]:
    """Texts by column. What is the same in every row, or nowhere, has no column."""
    rows = []
    for row in table.rows:
        dagger = "†" if row.crop == 256 and row.method in ("Proxy-Anchor", "Contra+HORDE") else ""
        dimension = superscript.format(row.dimension) if row.dimension else ""
        cells = {
            "data": row.data,
            "run": row.run_names,
            "method": f"{dagger}{row.method}{dimension}",
            "net": backbone_abbreviation(row.backbone),
        }
        for column, name in (("side", "crop"), ("batch", "batch_size")):
            if len({getattr(each, name) for each in table.rows}) > 1:
                cells[column] = str(getattr(row, name) or "")
        for k in table.k:
            ours, paper = row.ours.get(k), row.paper.get(k)
            cells[f"paper R@{k}"] = "" if paper is None else f"{paper:.1f}"
            cells[f"ours R@{k}"] = str(ours or "")
            cells[f"diff R@{k}"] = f"{ours.mean - paper:+.1f}" if ours and paper is not None else ""
        cells |= {"last R@1": str(row.last or ""), "n": str(row.runs or "")}
        cells["mark"] = f"[{table.marks[row.mark]}]" if row.mark else ""
        rows.append(cells)
    return [{key: row[key] for key in row if any(each[key] for each in rows)} for row in rows]


def _note(tables: Sequence[Table]) -> str:
    beside_paper = any(row.paper for table in tables for row in table.rows)
    as_paper = ", as in the paper" if beside_paper else ""
    difference = " diff is ours minus the paper's. † 256 pixels." if beside_paper else ""
    return (
        "Recall@K in percent of the test classes, of the selected epoch (by Recall@1 on the test classes unless marked"
        f"{as_paper}); ours is mean ± standard deviation over n seeds. last: the final epoch.{difference}"
    )


def terminal_text(table: Table) -> str:
    """Only the smallest K, and of the paper's rows only those that name Proxy-Anchor or stand beside ours."""
    kept = replace(table, rows=tuple(row for row in table.rows if row.ours or "Anchor" in row.method))
    rows = _cells(kept, "^{}")
    if kept.k:
        rows = [{key: v for key, v in row.items() if "R@" not in key or key.endswith(f"R@{kept.k[0]}")} for row in rows]
    footnotes = [f"[{number}] {mark}" for mark, number in kept.marks.items()]
    return "\n".join([f"{table.label}, {table.dataset}", format_table(rows), *footnotes])


def markdown_text(table: Table) -> str:
    """A heading, the whole table, its marks."""
    footnotes = [f"- [{number}] {mark}\n" for mark, number in table.marks.items()]
    heading = f"## {table.label}, {table.dataset}"
    return f"{heading}\n\n{markdown_table(_cells(table, '<sup>{}</sup>'))}\n\n{''.join(footnotes)}"


def latex_text(table: Table) -> str:
    """A tabular for booktabs; the marks stand behind it as a comment."""
    frame = pandas.DataFrame(_cells(table, "$^{{{}}}$"))
    aligned = "".join("l" if each in ("data", "run", "method", "net") else "r" for each in frame)
    text = frame.map(_escaped).to_latex(index=False, column_format=aligned)
    footnotes = [f"% [{number}] {mark}\n" for mark, number in table.marks.items()]
    return f"% {table.label}, {table.dataset}\n{text}{''.join(footnotes)}"


def _escaped(cell: str) -> str:
    for plain, latex in (("_", r"\_"), ("%", r"\%"), ("&", r"\&"), ("#", r"\#"), ("±", r"$\pm$"), ("†", r"$^\dagger$")):
        cell = cell.replace(plain, latex)
    return cell or "--"


def csv_text(tables: Sequence[Table]) -> str:
    """One line per table, row and K, numbers unrounded."""
    lines = []
    for table in tables:
        for row in table.rows:
            looks = {"data": row.data, "run": row.run_names, "method": row.method, "dimension": row.dimension}
            looks |= {"backbone": row.backbone, "crop": row.crop, "batch_size": row.batch_size}
            for k in sorted({*row.paper, *row.ours}):
                ours, paper = row.ours.get(k), row.paper.get(k)
                line: dict[str, Any] = {"table": table.label, "dataset": table.dataset, **looks, "k": k, "paper": paper}
                line |= {"mean": ours and ours.mean, "deviation": ours and ours.deviation, "n": ours.n if ours else 0}
                difference = ours.mean - paper if ours and paper is not None else None
                lines.append(line | {"difference": difference, "mark": row.mark})
    whole = dict.fromkeys(("dimension", "crop", "batch_size"), "Int64")
    return pandas.DataFrame(lines).astype(whole).to_csv(index=False, lineterminator="\n")


def write_paper_tables(folder: Path, tables: Sequence[Table]) -> str:
    """Write tables.md, tables.tex and tables.csv into `folder`; returns the text for a terminal."""
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / "tables.md", "\n".join([*map(markdown_text, tables), _note(tables), ""]))
    write_text(folder / "tables.tex", "\n".join(map(latex_text, tables)))
    write_text(folder / "tables.csv", csv_text(tables))
    return "\n\n".join([*map(terminal_text, tables), _note(tables)])
