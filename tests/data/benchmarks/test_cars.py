"""Cars-196 in both public layouts, which must never be joined; counts; what broken copies say."""

from pathlib import Path

import numpy as np
import pytest
from lookalikes import annotate
from scipy.io import savemat

from proxy_anchor.data.benchmarks import cars
from proxy_anchor.data.benchmarks.cars import load_cars
from proxy_anchor.data.table import ExpectedCounts, ImageTable
from proxy_anchor.errors import UsageError

HALF = Path(__file__).resolve().parents[3].parent / "shared" / "data" / "cars196_half"
# Class ids on both sides of the border between 98 and 99.
JOINT = [1, 98, 99, 196, 98, 2, 150, 150]
TRAIN, TEST = [98, 99, 1, 196], [99, 98, 2]


def touch(folder: Path, names: list[str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).write_bytes(b"x")
        (folder / f"._{name}").write_bytes(b"twin")


def make_joint(root: Path, folder: str = "car_ims", classes: list[int] = JOINT) -> Path:
    names = [f"{number:06d}.jpg" for number in range(1, len(classes) + 1)]
    annotate(root / "cars_annos.mat", "relative_im_path", [f"car_ims/{name}" for name in names], classes, ("test",))
    touch(root / folder, names)
    return root


def make_part(
    root: Path, part: str, classes: list[int], *, annotations: str, labelled: bool = True, folder: str = ""
) -> None:
    names = [f"{number:05d}.jpg" for number in range(1, len(classes) + 1)]
    annotate(root / "devkit" / annotations, "fname", names, classes if labelled else None)
    touch(root / (folder or part), names)


def make_two_folders(root: Path, *, labelled: bool = True, double: bool = False) -> Path:
    for part, classes in (("cars_train", TRAIN), ("cars_test", TEST)):
        name = "cars_train_annos.mat" if part == "cars_train" else "cars_test_annos_withlabels.mat"
        if part == "cars_test" and not labelled:
            name = "cars_test_annos.mat"
        folder = f"{part}/{part}" if double else part
        make_part(root, part, classes, annotations=name, labelled=labelled or part == "cars_train", folder=folder)
    return root


@pytest.fixture
def complete(monkeypatch):
    """Makes the small copies count as the whole benchmark."""

    def expect(train_classes: int, train: int, test_classes: int, query: int) -> None:
        monkeypatch.setattr(cars, "EXPECTED", ExpectedCounts(train_classes, train, test_classes, query))

    return expect


def pairs(table: ImageTable, root: Path) -> list[tuple[str, str]]:
    return [
        (path.relative_to(root).as_posix(), table.classes[label])
        for path, label in zip(table.paths, table.labels.tolist(), strict=True)
    ]


def save_names(file: Path, names: list[str]) -> None:
    savemat(file, {"class_names": np.array([[name] for name in names], dtype=object).reshape(1, -1)})


def test_classes_have_names_where_the_set_has_them(tmp_path, complete):
    complete(2, 3, 2, 4)
    root = make_two_folders(tmp_path)
    names = [f"Car {number}" for number in range(1, 197)]
    save_names(root / "devkit" / "cars_meta.mat", names)
    splits = load_cars(root, allow_partial=True)
    assert set(splits.train.classes) == {"1 Car 1", "2 Car 2", "98 Car 98"}
    assert set(splits.query.classes) == {"99 Car 99", "196 Car 196"}
    save_names(root / "devkit" / "cars_meta.mat", names[:5])  # of another set
    assert set(load_cars(root, allow_partial=True).query.classes) == {"99", "196"}
    (root / "devkit" / "cars_meta.mat").write_bytes(b"damaged")
    assert set(load_cars(root, allow_partial=True).query.classes) == {"99", "196"}


def refused(*arguments, **named) -> str:
    with pytest.raises(UsageError) as caught:
        load_cars(*arguments, **named)
    assert "\n" not in str(caught.value)
    return str(caught.value)


JOINT_PAIRS = (
    [("000001.jpg", "1"), ("000002.jpg", "98"), ("000005.jpg", "98"), ("000006.jpg", "2")],
    [("000003.jpg", "99"), ("000004.jpg", "196"), ("000007.jpg", "150"), ("000008.jpg", "150")],
)


@pytest.mark.parametrize("double", [False, True])
def test_the_two_folder_layout_pools_both_parts_by_class(tmp_path, complete, double):
    complete(3, 4, 2, 3)
    splits = load_cars(make_two_folders(tmp_path, double=double))
    train, test = (f"{part}/{part}" if double else part for part in ("cars_train", "cars_test"))
    # Both parts number from 00001: file 1 is class 98 in one and class 99 in the other.
    assert pairs(splits.train, tmp_path) == [
        (f"{train}/00001.jpg", "98"),
        (f"{train}/00003.jpg", "1"),
        (f"{test}/00002.jpg", "98"),
        (f"{test}/00003.jpg", "2"),
    ]
    assert pairs(splits.query, tmp_path) == [
        (f"{train}/00002.jpg", "99"),
        (f"{train}/00004.jpg", "196"),
        (f"{test}/00001.jpg", "99"),
    ]


def test_layouts_side_by_side_are_not_joined(tmp_path, complete):
    complete(3, 4, 3, 4)
    splits = load_cars(make_two_folders(make_joint(tmp_path)))
    assert pairs(splits.train, tmp_path / "car_ims") == JOINT_PAIRS[0]
    assert pairs(splits.query, tmp_path / "car_ims") == JOINT_PAIRS[1]


def test_a_part_is_refused_with_both_counts_unless_allowed(tmp_path):
    make_part(tmp_path, "cars_train", TRAIN, annotations="cars_train_annos.mat")
    message = refused(tmp_path)
    assert message.startswith(
        "cars is not the whole benchmark: expected 8,054 training images of 98 classes and 8,131 test images of 98 "
        "classes; found 2 training images of 2 classes and 2 test images of 2 classes (cars_test/ was not found)."
    )
    assert "dataset.allow_partial=true" in message
    splits = load_cars(tmp_path, allow_partial=True)
    assert (len(splits.train), len(splits.query)) == (2, 2)
    assert splits.notice.startswith("partial cars, not comparable with the paper: expected 8,054")
    assert "cars_test/ was not found" in splits.notice


def test_test_annotations_without_classes_are_named(tmp_path):
    message = refused(make_two_folders(tmp_path, labelled=False))
    assert message.startswith(f"{tmp_path / 'devkit' / 'cars_test_annos.mat'} holds no classes")
    assert "cars_test_annos_withlabels.mat" in message


@pytest.mark.parametrize("content", [b"", b"<html>", b"MATLAB 5.0 MAT-file" + b"\0" * 300])
def test_a_broken_annotation_file_is_named(tmp_path, content):
    file = make_joint(tmp_path) / "cars_annos.mat"
    file.write_bytes(content)
    assert refused(tmp_path).startswith(f"{file} cannot be read as a Cars-196 annotation file")


def test_the_real_annotations_of_the_half(tmp_path):
    if not HALF.is_dir():
        pytest.skip(f"{HALF} is not here")
    rows = cars._read_annotations(HALF / "devkit" / "cars_train_annos.mat")
    (tmp_path / "cars_train").mkdir()
    for name, _ in rows:
        (tmp_path / "cars_train" / name).write_bytes(b"x")
    (tmp_path / "devkit").symlink_to(HALF / "devkit")
    splits = load_cars(tmp_path, allow_partial=True)
    assert (len(splits.train), len(splits.query)) == (4052, 4092)
    for table, first in ((splits.train, 1), (splits.query, 99)):
        assert [name.partition(" ")[0] for name in table.classes] == [str(label) for label in range(first, first + 98)]
    assert splits.train.classes[0] == "1 AM General Hummer SUV 2000"
    assert "found 4,052 training images of 98 classes and 4,092 test images of 98 classes" in refused(tmp_path)
