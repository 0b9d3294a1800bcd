"""Shared by the benchmark loaders: finding files, and reading list files."""

from __future__ import annotations

from pathlib import Path

from proxy_anchor.data.files import is_hidden
from proxy_anchor.errors import UsageError


def find_below(root: Path, *names: str) -> Path | None:
    """First of `names` in `root` or up to two folders below, or None.

    names: files or folders; "Img/img" is a nested folder. For doubled folders, which some unpackers make
    (cars_train/cars_train), the inner one is returned. Hidden files are ignored.
    Raises UsageError unless `root` is a folder.
    """
    if not root.is_dir():
        raise UsageError(f"dataset.root={root} is not a folder: pass the folder that holds the benchmark.")
    for pattern in ("", "*/", "*/*/"):
        for name in names:
            found = [path for path in sorted(root.glob(pattern + name)) if not is_hidden(path.relative_to(root))]
            if found:
                inner = found[0]
                while (inner / inner.name).is_dir():
                    inner = inner / inner.name
                return inner
    return None


def require_below(root: Path, benchmark: str, *names: str) -> Path:
    """Like `find_below`, but raise UsageError if nothing is found."""
    if (found := find_below(root, *names)) is None:
        raise UsageError(
            f"dataset.root={root} does not hold {benchmark}: {' or '.join(names)} was not found there; "
            "pass the folder that holds it."
        )
    return found


def read_columns(file: Path, num_columns: int, *, skip_lines: int = 0) -> list[tuple[str, list[str]]]:
    """Rows of a whitespace-separated list file, each with its place ("FILE, line 7").

    Blank lines, a byte-order mark and all kinds of line ends are accepted. skip_lines: number of headings, blank lines
    not counted. Raises UsageError for a file that cannot be read, and for a row with another number of columns.
    """
    try:
        lines = file.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"list file {file} cannot be read ({error}): fetch it again.") from error
    rows = [(f"{file}, line {number}", line.split()) for number, line in enumerate(lines, start=1) if line.strip()]
    rows = rows[skip_lines:]
    for place, values in rows:
        if len(values) != num_columns:
            raise UsageError(
                f"{place}: expected {num_columns} columns, found {len(values)}: {' '.join(values)[:80]!r}. "
                "Fetch the list again."
            )
    return rows


def as_int(text: str, place: str) -> int:
    """Parse a class id of a list file, counted from 1."""
    if not (text.isascii() and text.isdecimal() and int(text) > 0):
        raise UsageError(f"{place}: {text!r} is no class id: the file is damaged or another list. Fetch it again.")
    return int(text)
