"""The files that a run leaves behind, written so that no reader ever sees half of one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from proxy_anchor.errors import UsageError

RESULT_FILE = "result.json"


def write_json(file: Path, content: Mapping[str, Any]) -> None:
    """Write JSON aside and rename it, so that a reader never sees half a file."""
    write_text(file, json.dumps(content, indent=2) + "\n")


def write_text(file: Path, text: str) -> None:
    """Write text aside and rename it. File names that are not UTF-8 are written with backslashes."""
    aside = file.with_name(file.name + ".tmp")
    aside.write_text(text, encoding="utf-8", errors="backslashreplace")
    aside.replace(file)


def read_result(folder: Path) -> dict[str, Any] | None:
    """The result of a finished run, or None. Raises UsageError when its file is damaged."""
    try:
        return json.loads((folder / RESULT_FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:  # no JSON, or no text
        raise UsageError(
            f"{folder / RESULT_FILE} is damaged ({error}): remove it, and the run's own command makes it again."
        ) from error


def selecting_recall(result: Mapping[str, Any]) -> float:
    """The smallest K's Recall that selected the epoch of a finished run (held-out classes, folds, or test), in [0, 1]."""
    selected = result["selected"]
    return next(iter((selected.get("validation") or selected["recall"]).values()))
