"""What the benchmark loaders share: finding files in public copies' layouts, and reading their list files."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TypeVar

from proxy_anchor.data.images import is_hidden
from proxy_anchor.data.table import missing_or_empty, require_files
from proxy_anchor.errors import UsageError

_Row = TypeVar("_Row", bound=tuple)


def require_folder(root: Path | str, benchmark: str) -> Path:
    """`root` as a path, if it is a folder."""
    root = Path(root)
    if not root.is_dir():
        raise UsageError(f"dataset.root={root} is not a folder: pass the folder that holds {benchmark}.")
    return root


def find_below(root: Path, *names: str) -> Path | None:
    """The first of `names` (a file or folder, "Img/img" for a nested one) in `root` or up to two folders below.

    Doubled folders, which some unpackers make (cars_train/cars_train), are followed inwards; hidden twins are no match.
    """
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
    """`find_below`, or a UsageError that says what was looked for."""
    found = find_below(root, *names)
    if found is None:
        raise UsageError(f"dataset.root={root} does not hold {benchmark}: {' or '.join(names)} was not found there.")
    return found


def read_columns(file: Path, num_columns: int, *, skip_lines: int = 0) -> list[list[str]]:
    """The rows of a white-space separated list file; blank lines, a byte-order mark and any line ends are no matter.

    Raises UsageError for a file that is missing or no text, and for a row with another number of columns, by its line.
    """
    try:
        lines = file.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"list file {file} cannot be read ({error}): fetch it again.") from error
    rows = []
    for number, line in enumerate(lines, start=1):
        values = line.split()
        if number <= skip_lines or not values:
            continue
        if len(values) != num_columns:
            raise UsageError(
                f"{file}, line {number}: expected {num_columns} columns, found {len(values)}: {line[:80]!r}."
            )
        rows.append(values)
    return rows


def as_int(text: str, file: Path) -> int:
    """A class or image id of a list file."""
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"{file}: {text!r} is no number: the file is damaged or another list.") from None


def present_rows(rows: Iterable[_Row], benchmark: str, *, allow_partial: bool) -> tuple[list[_Row], str]:
    """(rows whose first entry, a path, is a file with bytes, a note on those left out).

    Raises UsageError that counts and names missing files, unless allow_partial.
    """
    rows = list(rows)
    if not allow_partial:
        require_files([row[0] for row in rows], benchmark)
        return rows, ""
    bad = {text.rpartition(" (")[0] for text in missing_or_empty([row[0] for row in rows])}
    kept = [row for row in rows if str(row[0]) not in bad]
    return kept, f"{len(bad)} listed images are missing or empty" if bad else ""
