"""Plain-text tables of results."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

RESULT_FILE = "result.json"


def format_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows of equal keys as an aligned text table; numbers to the right, one decimal for floats."""
    if not rows:
        return ""
    header = list(dict.fromkeys(key for row in rows for key in row))
    cells = [header] + [[_cell(row.get(key)) for key in header] for row in rows]
    widths = [max(len(line[column]) for line in cells) for column in range(len(header))]
    numeric = [all(isinstance(row.get(key), (int, float, type(None))) for row in rows) for key in header]

    def line(values: Sequence[str]) -> str:
        return "  ".join(
            value.rjust(width) if right else value.ljust(width)
            for value, width, right in zip(values, widths, numeric, strict=True)
        ).rstrip()

    return "\n".join([line(cells[0]), "  ".join("-" * width for width in widths), *map(line, cells[1:])])


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.1f}" if isinstance(value, float) else str(value)


def write_json(file: Path, content: Mapping[str, Any]) -> None:
    """Write JSON aside and rename it, so that a reader never sees half a file."""
    aside = file.with_name(file.name + ".tmp")
    aside.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    aside.replace(file)


def read_result(folder: Path) -> dict[str, Any] | None:
    """The result of a finished run, or None."""
    try:
        return json.loads((folder / RESULT_FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
