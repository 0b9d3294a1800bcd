"""The table type: one label map for what is compared, an order that does not depend on the process, missing files."""

from itertools import permutations
from pathlib import Path

import numpy as np
import pytest

from proxy_anchor.data import table
from proxy_anchor.data.table import ImageTable, Splits, make_tables, natural_key
from proxy_anchor.errors import UsageError


def rows(*classes: str) -> list[tuple[Path, str]]:
    return [(Path(f"{number}.jpg"), name) for number, name in enumerate(classes)]


@pytest.mark.parametrize("name", ["²", "m²", "2²", "①", "٣", "Ⅷ", "日本", "ß", "😀"])
def test_digits_of_every_script_can_be_sorted(name):
    # '²'.isdigit() holds, but int('²') fails.
    assert sorted(["x", name, "1"], key=natural_key)[0] in ("1", "²", "①")
    assert len(make_tables(rows(name, "1", "x"))[0].classes) == 3


def test_the_label_map_does_not_depend_on_the_order_of_a_set():
    # '1', '01' and '001' are equal as numbers.
    names = ("0001", "001", "01", "1", "2")
    assert {make_tables(rows(*order))[0].classes for order in permutations(names)} == {names}


def test_labels_with_gaps_become_0_to_c():
    [made] = make_tables(rows("700", "3", "20", "3"))
    assert made.classes == ("3", "20", "700")
    assert made.labels.tolist() == [2, 0, 1, 0]
    assert made.labels.dtype == np.int64
    assert made.num_classes == 3
    assert len(made) == 4


def test_query_and_gallery_share_one_map():
    query, gallery = make_tables(rows("b", "d"), rows("a", "b", "c"))
    assert query.classes == gallery.classes == ("a", "b", "c", "d")
    assert query.labels.tolist() == [1, 3]
    assert gallery.labels.tolist() == [0, 1, 2]


@pytest.mark.parametrize("labels", [[-1], [2], [0, 1]])
def test_a_table_refuses_labels_out_of_range_or_of_another_length(labels):
    with pytest.raises(ValueError, match=r"labels"):
        ImageTable((Path("a.jpg"),), np.array(labels), ("x", "y"))


def test_splits_refuse_query_and_gallery_of_two_maps():
    [train], [query], [gallery] = make_tables(rows("t")), make_tables(rows("a")), make_tables(rows("b"))
    with pytest.raises(ValueError, match="one label map"):
        Splits("s", train, query, gallery)


def test_missing_files_are_counted_and_five_of_them_named(tmp_path):
    good = tmp_path / "good.jpg"
    good.write_bytes(b"x")
    empty = tmp_path / "empty.jpg"
    empty.touch()
    folder = tmp_path / "folder.jpg"
    folder.mkdir()
    impossible = Path("nul\0byte.jpg")
    expected = {empty: "empty", folder: "not a file", impossible: "missing", tmp_path / "gone.jpg": "missing"}
    assert table.missing_or_empty([good, *expected]) == expected
    table.require_files([good], "my")
    gone = [tmp_path / f"gone{number}.jpg" for number in range(7)]
    with pytest.raises(UsageError, match=r"^7 of 8 my images cannot be used: .* and 2 more\. Restore") as caught:
        table.require_files([good, *gone], "my")
    assert str(caught.value).count("(missing)") == 5
    assert "\n" not in str(caught.value)
