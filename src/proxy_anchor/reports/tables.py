"""Plain-text tables of results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def format_table(rows: Sequence[Mapping[str, Any]], decimals: int = 1) -> str:
    """Rows of equal keys as an aligned text table; numbers to the right, floats with `decimals` places."""
    if not rows:
        return ""
    header = list(dict.fromkeys(key for row in rows for key in row))
    cells = [header] + [[_cell(row.get(key), decimals) for key in header] for row in rows]
    widths = [max(len(line[column]) for line in cells) for column in range(len(header))]
    numeric = [all(isinstance(row.get(key), (int, float, type(None))) for row in rows) for key in header]

    def line(values: Sequence[str]) -> str:
        return "  ".join(
            value.rjust(width) if right else value.ljust(width)
            for value, width, right in zip(values, widths, numeric, strict=True)
        ).rstrip()

    return "\n".join([line(cells[0]), "  ".join("-" * width for width in widths), *map(line, cells[1:])])


def _cell(value: Any, decimals: int) -> str:
    if value is None:
        return "-"
    return f"{value:.{decimals}f}" if isinstance(value, float) else str(value)
