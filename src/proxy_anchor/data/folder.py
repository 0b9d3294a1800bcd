"""Splits of the user's own images: class folders or a CSV list."""

from __future__ import annotations

import itertools
import os
import random
from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd

from proxy_anchor.data.files import counted_suffixes, find_images, image_suffixes, images_below, is_hidden
from proxy_anchor.data.table import Splits, make_splits, make_tables, natural_key, require_files
from proxy_anchor.errors import UsageError, check_int, check_number, counted, reason_of

_TRAIN_NAMES = ("train", "training")
_TEST_NAMES = ("test", "val", "valid", "validation")
_GROUPS = {"": ""} | dict.fromkeys(_TRAIN_NAMES, "train") | dict.fromkeys(_TEST_NAMES, "query")
_BOX = ("x", "y", "w", "h")
_COLUMNS = ("path", "label", "split", "role", *_BOX)
_HEADER = "path,label[,split][,role][,x,y,w,h]"

_LEAST_TO_DIVIDE = 20  # searched classes: the Recall of less than ten says little about an epoch

Row = tuple[Path, str]
Groups = dict[str, list[Row]]  # some of train, query, gallery, and "" without a split


def load_folder(
    root: Path | str | None,
    *,
    csv_file: Path | str | None = None,
    test_fraction: float | None = None,
    split_seed: int = 0,
    validation_share: float = 0.0,
    verify_files: bool = True,
) -> Splits:
    """Splits of the user's own images.

    Args:
        root: a folder with one sub-folder of images per class, or with `train` and `test` folders of such sub-folders.
            With `csv_file`: the base of relative paths in the list (default: the folder of the list).
        csv_file: a table with the columns path, label and, optionally, split (train or test), role (query or gallery,
            for test images), and x, y, w, h: the box in pixels of the upright image to which it is cropped.
        test_fraction: without a given split, the share of the *classes* that is searched, at least two; at least two
            classes train, and no class is on both sides. None is one half; 1 searches all classes and trains on none.
        split_seed: seed of the choice of classes.
        validation_share: without a given split, the share of the searched classes that is searched for the choice of
            the epoch (`Splits.validation`) instead, where there are at least 20.
        verify_files: False also lists images that are missing or empty, for src/check.py.

    Raises UsageError for a missing folder or list, an empty class, unknown columns or values, missing or empty images,
    or too few classes.
    """
    test_fraction = 0.5 if test_fraction is None else test_fraction
    check_number("dataset.test_fraction", test_fraction, 0, maximum=1, exclusive=True)
    check_int("dataset.split_seed", split_seed, 0)
    check_number("validation.share", validation_share, 0, maximum=1)
    left_out = Counter[str]()
    if csv_file is not None:
        csv_file = Path(csv_file)
        name, groups = csv_file.stem, _groups_of_list(csv_file, csv_file.parent if root is None else Path(root))
    elif root is not None:
        name, groups = Path(root).absolute().name, _groups_of_folder(Path(root), left_out)
    else:
        raise UsageError("dataset=folder needs dataset.root=FOLDER (one sub-folder per class) or dataset.csv=FILE.")
    if unsplit := groups.get(""):
        splits = _split_classes(unsplit, name, test_fraction, split_seed, validation_share)
    else:
        splits = _make_splits(name, groups.get("train", []), groups.get("query", []), groups.get("gallery"))
    if left_out:
        note = (
            f"files that are no images for Pillow, or in no class folder, are left out: {counted_suffixes(left_out)}."
        )
        splits = replace(splits, notice=f"{splits.notice} {note}".strip())
    if verify_files:
        require_files([path for table in splits.tables.values() for path in table.paths], splits.name)
    return splits


def _groups_of_folder(root: Path, left_out: Counter[str]) -> Groups:
    """Images of the class folders, or of those in a train and a test folder; counts other files."""
    if not root.is_dir():
        raise UsageError(f"dataset.root={root} is not a folder: pass the folder that holds one sub-folder per class.")
    folders = {path.name.lower(): path for path in _class_folders(root)}
    train = [folders[name] for name in _TRAIN_NAMES if name in folders]
    test = [folders[name] for name in _TEST_NAMES if name in folders]
    if not (train and test):
        return {"": _rows_of_classes(root, left_out)}
    if len(folders) > 2:
        raise UsageError(
            f"{root} holds {', '.join(folders)}: keep one train and one test folder there and nothing else."
        )
    return {"train": _rows_of_classes(train[0], left_out), "query": _rows_of_classes(test[0], left_out)}


def _class_folders(root: Path) -> list[Path]:
    folders = (path for path in root.iterdir() if path.is_dir() and not is_hidden(path.relative_to(root)))
    return sorted(folders, key=lambda path: natural_key(path.name))


def _rows_of_classes(root: Path, left_out: Counter[str]) -> list[Row]:
    """(path, class) of every image in the class folders of `root`, sub-folders included; counts other files."""
    rows: list[Row] = []
    if not (folders := _class_folders(root)):
        suffixes = " ".join(sorted(image_suffixes()))
        raise UsageError(f"{root} has no class folders: put each class's images ({suffixes}) in its own sub-folder.")
    loose = (path.suffix.lower() for path in root.iterdir() if path.is_file() and not is_hidden(Path(path.name)))
    left_out.update(each for each in loose if each in image_suffixes())
    for folder in folders:
        images, others = images_below(folder)
        if not images:
            found = f" that Pillow reads ({counted_suffixes(others)})" if others else ""
            raise UsageError(f"class folder {folder} holds no image{found}: add images or remove the folder.")
        left_out.update(others)
        rows += [(path, folder.name) for path in sorted(images)]
    return rows


def list_images(place: Path | str) -> tuple[list[Path], list[str | None]]:
    """Images of a folder or a CSV list with their classes; a list's splits are ignored.

    The class of an image in a folder is its first sub-folder; None for all unless every image has one.
    Raises UsageError as `find_images` and `load_folder` do.
    """
    place = Path(place)
    if place.suffix.lower() == ".csv" and place.is_file():
        rows = [row for _, row in _csv_rows(place, place.parent)]
        return [path for path, _ in rows], [label for _, label in rows]
    paths = find_images(place)
    parts = [path.relative_to(place).parts for path in paths]
    return paths, [each[0] for each in parts] if all(len(each) > 1 for each in parts) else [None] * len(paths)


def _csv_rows(file: Path, base: Path) -> list[tuple[str, Row]]:
    """(train, query, gallery or "", (path, class)) of each line; at least one, and no path twice."""
    found: list[tuple[str, Row]] = []
    for line, values in _read_list(file).iterrows():
        where = f"{file}, line {line}"
        if not values["path"] or not values["label"]:
            raise UsageError(f"{where}: path or label is empty; fill it in or remove the line.")
        split, role = values.get("split", "").lower(), values.get("role", "").lower()
        if split not in _GROUPS or role not in ("", "query", "gallery"):
            raise UsageError(
                f"{where}: split {split!r} and role {role!r} are not known together; use train or test, and for test "
                "query or gallery."
            )
        group = "train" if split in _TRAIN_NAMES else role or _GROUPS[split]
        found.append((group, (base / f"{values['path']}{_box(values, where)}", values["label"])))
    if not found:
        raise UsageError(f"{file} lists no images.")
    repeated = [path for path, n in Counter(os.path.abspath(path) for _, (path, _) in found).items() if n > 1]
    if repeated:
        raise UsageError(
            f"{file} lists {len(repeated)} images more than once, the first is {repeated[0]}: keep one line each."
        )
    return found


def _groups_of_list(file: Path, base: Path) -> Groups:
    groups: Groups = defaultdict(list)
    for group, row in _csv_rows(file, base):
        groups[group].append(row)
    total = sum(map(len, groups.values()))
    if groups[""] and len(groups[""]) < total:
        raise UsageError(f"{file}: {len(groups[''])} of {total} lines have no split; fill in all of them or none.")
    return groups


def _box(values: pd.Series, where: str) -> str:
    """The box of a line, as `split_box` reads it; "" without one."""
    given = [values.get(name, "") for name in _BOX]
    if not any(given):
        return ""
    try:
        left, top, *size = map(float, given)
        x, y = round(left), round(top)
        # The far edges are rounded, not the size: a box up to the border of its image stays inside.
        width, height = round(left + size[0]) - x, round(top + size[1]) - y
    except (ValueError, OverflowError):
        x = y = width = height = -1
    if min(x, y) < 0 or min(width, height) < 1:
        raise UsageError(
            f"{where}: the box x,y,w,h is {','.join(given)}; expected pixels, w and h at least 1, or nothing."
        )
    return f"#xywh={x},{y},{width},{height}"


def _read_list(file: Path) -> pd.DataFrame:
    """Stripped cells of a list by column and line number, without empty lines."""
    try:
        # Blank lines are kept until each row has its line number. utf-8-sig: spreadsheets write a byte-order mark.
        plain: Any = {"header": None, "dtype": str, "na_filter": False, "skip_blank_lines": False}
        cells = pd.read_csv(file, encoding="utf-8-sig", skipinitialspace=True, **plain)
    except (pd.errors.EmptyDataError, pd.errors.ParserError) as error:
        raise UsageError(
            f"{file} is not a well-formed CSV file ({reason_of(error)}): look for a quote that is not "
            "closed, or a value with a comma that is not in double quotes."
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"dataset.csv={file} cannot be read ({error}).") from error
    cells = cells.apply(lambda column: column.str.strip())
    cells.index += 1
    cells.columns = [name.lower() for name in cells.iloc[0]]
    if not {"path", "label"} <= {*cells.columns} <= {*_COLUMNS} or not cells.columns.is_unique:
        raise UsageError(
            f"{file}: the first line is {','.join(cells.columns)}; expected {_HEADER}, separated by commas, each once."
        )
    rows = cells.iloc[1:]
    return rows[(rows != "").any(axis=1)]


def _split_classes(
    rows: list[Row], name: str, test_fraction: float, split_seed: int, validation_share: float
) -> Splits:
    """Divide the classes randomly into trained, searched and, with a share, selecting ones."""
    classes = sorted({label for _, label in rows}, key=natural_key)
    if test_fraction == 1:
        return _make_splits(name, [], rows, None, f"no split was given: all {len(classes)} classes are searched.")
    if len(classes) < 4:
        hint = f" If {classes[0]} itself holds the class folders, pass that folder." if len(classes) == 1 else ""
        raise UsageError(
            f"{name} has {counted(len(classes), 'class')}; a class-disjoint split needs at least 4 (2 to train, 2 to "
            f"search).{hint}"
        )
    random.Random(split_seed).shuffle(classes)
    num_test = min(max(2, round(len(classes) * test_fraction)), len(classes) - 2)
    num_selecting = 0
    if validation_share and num_test >= _LEAST_TO_DIVIDE:
        num_selecting = min(max(2, round(num_test * validation_share)), num_test - 2)
    ends = (0, num_selecting, num_test, len(classes))
    parts = [set(classes[start:end]) for start, end in itertools.pairwise(ends)]
    selecting, test, train = ([row for row in rows if row[1] in part] for part in parts)
    selects = f", {num_selecting} others select the epoch (none with validation=test)" if selecting else ""
    notice = (
        f"no split was given: {len(classes) - num_test} classes train{selects} and {num_test - num_selecting} other "
        f"classes are searched (dataset.test_fraction={test_fraction:g}, dataset.split_seed={split_seed})."
    )
    splits = _make_splits(name, train, test, None, notice)
    return replace(splits, validation=make_tables(selecting)[0]) if selecting else splits


def _make_splits(name: str, train: list[Row], query: list[Row], gallery: list[Row] | None, notice: str = "") -> Splits:
    if gallery and not query:
        raise UsageError(f"{name} has gallery images but none with role query: nothing would be searched for.")
    for what, rows in {"train": train, "test": query}.items():
        if not rows and not (what == "train" and notice):
            raise UsageError(f"{name} has no {what} images: give both a train and a test part, or no split at all.")
    splits = make_splits(name, train, query, gallery, notice=notice)
    if splits.shared_classes:
        shared = f"{len(splits.shared_classes)} of {splits.query.num_classes} searched classes are also trained on"
        splits = replace(splits, notice=f"{shared}: Recall@K is not over unseen classes.")
    return splits
