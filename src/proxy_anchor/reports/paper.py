"""The numbers that the paper prints, Kim et al. 2020: every row of its result tables, to compare runs with."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from importlib.resources import files


@dataclass(frozen=True)
class PaperResult:
    """One number: Recall@k in percent. None where the table does not say.

    table: the label in the paper's source. method: as printed, without its superscript, which is `dimension`.
    backbone: by its name in conf/backbone. crop: image side in pixels (for HORDE the side that the paper compares with).
    """

    table: str
    method: str
    dimension: int | None
    backbone: str | None
    crop: int | None
    batch_size: int | None
    dataset: str
    k: int
    value: float


def paper_results() -> list[PaperResult]:
    """All rows of paper_results.csv, in the order of the paper."""

    def number(text: str) -> int | None:
        return int(text) if text else None

    with files("proxy_anchor.reports").joinpath("paper_results.csv").open(encoding="utf-8") as file:
        return [
            PaperResult(
                table=row["table"],
                method=row["method"],
                dimension=number(row["dimension"]),
                backbone=row["backbone"] or None,
                crop=number(row["crop"]),
                batch_size=number(row["batch_size"]),
                dataset=row["dataset"],
                k=int(row["k"]),
                value=float(row["value"]),
            )
            for row in csv.DictReader(file)
        ]
