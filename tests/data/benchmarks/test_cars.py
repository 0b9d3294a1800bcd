"""Cars-196 in both public layouts, which must never be joined; names of classes; what broken copies say."""

import shutil
from pathlib import Path

import lookalikes as look
import numpy as np
import pytest
from commands import SHARED, one_line
from scipy.io import savemat

from proxy_anchor.data.benchmarks.cars import load_cars
from proxy_anchor.data.table import Splits

HALF = SHARED / "data" / "cars196_half"


def classes_of(splits: Splits, root: Path) -> dict[str, str]:
    rows = splits.train.rows + splits.query.rows
    return {path.relative_to(root).as_posix(): name for path, name in rows}


def test_classes_have_names_where_the_set_has_them(tmp_path):
    root = look.make_cars_two_folders(tmp_path)
    names = [[f"Car {number}"] for number in range(1, 197)]
    savemat(root / "devkit" / "cars_meta.mat", {"class_names": np.array(names, dtype=object).T})
    splits = load_cars(root, allow_partial=True)
    assert splits.train.classes == tuple(f"{label} Car {label}" for label in look.CARS_TRAIN)
    assert splits.query.classes == tuple(f"{label} Car {label}" for label in look.CARS_TEST)


def test_the_two_folder_layout_pools_both_parts_by_class(tmp_path):
    # Both parts number from 00001: file 4 is class 2 in one and class 50 in the other.
    labels = look._labels(look.CARS_TRAIN, look.CARS_TEST)
    parts = {"cars_train": labels[0::2], "cars_test": labels[1::2]}
    expected = {
        f"{part}/{number:05d}.jpg": str(label)
        for part, chosen in parts.items()
        for number, label in enumerate(chosen, start=1)
    }
    assert classes_of(load_cars(look.make_cars_two_folders(tmp_path), allow_partial=True), tmp_path) == expected


def test_layouts_side_by_side_are_not_joined(tmp_path):
    splits = load_cars(look.make_cars_two_folders(look.make_cars_joint(tmp_path)), allow_partial=True)
    labels = look._labels(look.CARS_TEST, look.CARS_TRAIN)
    expected = {f"car_ims/{number:06d}.jpg": str(label) for number, label in enumerate(labels, start=1)}
    assert classes_of(splits, tmp_path) == expected


def test_a_part_is_refused_with_both_counts_unless_allowed(tmp_path):
    shutil.rmtree(look.make_cars_two_folders(tmp_path) / "cars_test")
    message = one_line(load_cars, tmp_path)
    assert message.startswith(
        "cars is not the whole benchmark: expected 8,054 train images of 98 classes, 8,131 query images of 98 "
        "classes; found 6 train images of 3 classes, 5 query images of 3 classes."
    )
    assert "dataset.allow_partial=true" in message
    splits = load_cars(tmp_path, allow_partial=True)
    assert (len(splits.train), len(splits.query)) == (6, 5)
    assert splits.notice.startswith("partial cars, not comparable with the paper: expected 8,054")


def test_test_annotations_without_classes_are_named(tmp_path):
    (look.make_cars_two_folders(tmp_path) / "cars_test_annos_withlabels.mat").unlink()
    message = one_line(load_cars, tmp_path)
    assert message.startswith(f"{tmp_path / 'devkit' / 'cars_test_annos.mat'} holds no classes")
    assert "cars_test_annos_withlabels.mat" in message


@pytest.mark.parametrize("content", [b"", b"<html>", b"MATLAB 5.0 MAT-file" + b"\0" * 300])
@pytest.mark.parametrize("name", ["cars_annos.mat", "cars_meta.mat"])
def test_a_broken_file_is_named(tmp_path, name, content):
    file = look.make_cars_joint(tmp_path) / name
    file.write_bytes(content)
    assert one_line(load_cars, tmp_path).startswith(f"{file} cannot be read as a file of Cars-196")


@pytest.mark.skipif(not HALF.is_dir(), reason="the half of Cars-196 is not on this machine")
def test_the_real_annotations_of_the_half(tmp_path):
    (tmp_path / "cars_train").mkdir()
    (tmp_path / "devkit").symlink_to(HALF / "devkit")
    splits = load_cars(tmp_path, allow_partial=True, verify_files=False)
    assert (len(splits.train), len(splits.query)) == (4052, 4092)
    assert [name.partition(" ")[0] for name in splits.query.classes] == [str(label) for label in range(99, 197)]
    assert splits.train.classes[0] == "1 AM General Hummer SUV 2000"
