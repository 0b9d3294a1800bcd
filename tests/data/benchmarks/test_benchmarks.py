"""All loaders on look-alikes of every layout: splits, labels, counts, and what broken copies say."""

from collections import Counter

import lookalikes as look
import pytest
from commands import one_line

from proxy_anchor.data.benchmarks import cars, cub, inshop, sop
from proxy_anchor.data.benchmarks.cars import load_cars
from proxy_anchor.data.benchmarks.cub import load_cub
from proxy_anchor.data.benchmarks.inshop import load_inshop
from proxy_anchor.data.benchmarks.sop import load_sop
from proxy_anchor.data.images import read_rgb
from proxy_anchor.data.table import ImageTable

PROTOCOL = {
    cub: {"train": (5864, 100), "query": (5924, 100)},
    cars: {"train": (8054, 98), "query": (8131, 98)},
    sop: {"train": (59551, 11318), "query": (60502, 11316)},
    inshop: {"train": (25882, 3997), "query": (14218, 3985), "gallery": (12612, 3985)},
}
SMALL = {"train": (12, 4), "query": (10, 4)}
SMALL_INSHOP = {"train": (12, 4), "query": (6, 4), "gallery": (5, 4)}

# name: (loader, writer, its arguments, training images per class, test images per class)
CUB = (look.CUB_TRAIN, look.CUB_TEST)
CARS = (look.CARS_TRAIN, look.CARS_TEST)
SOP = (look.SOP_TRAIN, look.SOP_TEST)
LAYOUTS = {
    "cub": (load_cub, look.make_cub, {}, *CUB),
    "cub flat": (load_cub, look.make_cub, {"folder": ""}, *CUB),
    "cub doubled": (load_cub, look.make_cub, {"folder": "CUB_200_2011/CUB_200_2011"}, *CUB),
    "cars joint": (load_cars, look.make_cars_joint, {}, *CARS),
    "cars joint doubled": (load_cars, look.make_cars_joint, {"folder": "car_ims/car_ims"}, *CARS),
    "cars two": (load_cars, look.make_cars_two_folders, {}, *CARS),
    "cars two doubled": (load_cars, look.make_cars_two_folders, {"doubled": True}, *CARS),
    "sop": (load_sop, look.make_sop, {}, *SOP),
    "sop flat": (load_sop, look.make_sop, {"folder": ""}, *SOP),
}
LOADERS = {
    "cub": (cub, load_cub, look.make_cub),
    "cars": (cars, load_cars, look.make_cars_two_folders),
    "sop": (sop, load_sop, look.make_sop),
    "inshop": (inshop, load_inshop, look.make_inshop),
}


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    """The look-alikes count as whole; the protocol's own numbers are tested apart."""
    for module in (cub, cars, sop):
        monkeypatch.setattr(module, "EXPECTED", SMALL)
    monkeypatch.setattr(inshop, "EXPECTED", SMALL_INSHOP)


def per_class(table: ImageTable) -> dict[str, int]:
    return dict(Counter(table.classes[label] for label in table.labels.tolist()))


def as_text(counts: dict[int, int]) -> dict[str, int]:
    return {str(label): count for label, count in counts.items()}


def test_the_protocols_counts(monkeypatch):
    monkeypatch.undo()
    assert {module: module.EXPECTED for module in PROTOCOL} == PROTOCOL


@pytest.mark.parametrize("name", LAYOUTS)
def test_self_search_layouts(name, tmp_path):
    load, make, named, train, test = LAYOUTS[name]
    splits = load(make(tmp_path, **named))
    assert per_class(splits.train) == as_text(train)
    assert per_class(splits.query) == as_text(test)
    assert splits.gallery is None
    assert splits.notice == ""
    assert splits.shared_classes == []
    assert splits.train.classes == tuple(map(str, train))  # natural order, ids with gaps
    assert set(splits.train.labels.tolist()) == {0, 1, 2, 3}
    paths = splits.train.paths + splits.query.paths
    assert len(set(paths)) == 22
    assert not any(path.name.startswith(".") or "__MACOSX" in path.parts for path in paths)
    assert {read_rgb(path).mode for path in paths} == {"RGB"}


def test_cub_joins_its_lists_by_image_id(tmp_path):
    for table in load_cub(look.make_cub(tmp_path)).tables.values():
        for path, label in zip(table.paths, table.labels.tolist(), strict=True):
            assert path.parent.name == f"{int(table.classes[label]):03d}.Bird_{table.classes[label]}"


@pytest.mark.parametrize("lists", ["Eval", "Anno", ""])
@pytest.mark.parametrize("images", ["img", "Img/img", "img_highres", "Img/img_highres", "img/img"])
def test_inshop_layouts(tmp_path, images, lists):
    splits = load_inshop(look.make_inshop(tmp_path, images=images, lists=lists))
    assert {name: per_class(table) for name, table in splits.tables.items()} == look.INSHOP
    assert splits.notice == f"images from {images}/"
    assert splits.query.classes == splits.gallery.classes  # one label map over both
    assert splits.query.classes == ("id_00000001", "id_00000004", "id_00000009", "id_00007982")
    alone = set(splits.query.labels.tolist()) - set(splits.gallery.labels.tolist())
    assert [splits.query.classes[label] for label in alone] == ["id_00000009"]
    assert {read_rgb(path).mode for path in splits.query.paths} == {"RGB"}


@pytest.mark.parametrize(("other", "used"), [("img_highres", "img"), ("Img/img_highres", "Img/img")])
def test_inshop_takes_the_images_of_the_protocol_where_larger_ones_lie_next_to_them(tmp_path, other, used):
    look.make_inshop(tmp_path, images=other)
    assert load_inshop(look.make_inshop(tmp_path, images=used)).notice == f"images from {used}/"


@pytest.mark.parametrize("name", LOADERS)
def test_a_difference_says_expected_and_found(name, tmp_path, monkeypatch):
    module, load, make = LOADERS[name]
    monkeypatch.setattr(module, "EXPECTED", PROTOCOL[module])
    message = one_line(load, make(tmp_path))
    images, classes = PROTOCOL[module]["train"]
    assert f"expected {images:,} train images of {classes:,} classes, " in message
    assert "found 12 train images of 4 classes" in message
    assert "dataset.allow_partial=true" in message
    assert load(tmp_path, allow_partial=True).notice.startswith(f"partial {name}, not comparable with the paper")


@pytest.mark.parametrize("name", LOADERS)
def test_missing_and_empty_images_look_like_a_partial_download(name, tmp_path):
    _, load, make = LOADERS[name]
    whole = load(make(tmp_path))
    gone, empty = whole.train.paths[0], whole.train.paths[3]
    gone.unlink()
    empty.write_bytes(b"")
    assert f"{gone} (missing), {empty} (empty)" in one_line(load, tmp_path)
    partial = load(tmp_path, allow_partial=True)
    assert len(partial.train) == len(whole.train) - 2
    assert "2 listed images are missing or empty" in partial.notice
    assert load(tmp_path, verify_files=False).train.paths == whole.train.paths


@pytest.mark.parametrize("name", LOADERS)
def test_an_empty_folder_says_what_is_wanted(name, tmp_path):
    _, load, _ = LOADERS[name]
    assert f"dataset.root={tmp_path} does not hold" in one_line(load, tmp_path)
    assert f"dataset.root={tmp_path / 'nothing'} is not a folder: pass" in one_line(load, tmp_path / "nothing")


DAMAGED = {  # file, line to replace, new text, place and complaint
    "cub columns": ("cub", "CUB_200_2011/images.txt", "7 a.jpg 3", "expected 2 columns, found 3"),
    "cub label": ("cub", "CUB_200_2011/image_class_labels.txt", "7 x", "'x' is no class id"),
    "cub zero": ("cub", "CUB_200_2011/image_class_labels.txt", "7 0", "'0' is no class id"),
    "sop columns": ("sop", "Stanford_Online_Products/Ebay_train.txt", "1 2 3", "expected 4 columns, found 3"),
    "inshop columns": ("inshop", "Eval/list_eval_partition.txt", "img/a.jpg id_1", "expected 3 columns, found 2"),
    "inshop status": ("inshop", "Eval/list_eval_partition.txt", "img/a.jpg id_1 test", "status 'test' is not known"),
}


@pytest.mark.parametrize("what", DAMAGED)
def test_a_damaged_row_is_named_by_its_line(what, tmp_path):
    name, file, text, complaint = DAMAGED[what]
    _, load, make = LOADERS[name]
    path = make(tmp_path) / file
    lines = path.read_bytes().decode("utf-8-sig").splitlines()
    number = next(index for index, line in enumerate(lines) if index > 6 and line.strip())
    path.write_text("\n".join([*lines[:number], text, *lines[number + 1 :]]))
    message = one_line(load, tmp_path)
    assert message.startswith(f"{path}, line {number + 1}: ")
    assert complaint in message


def test_an_image_of_cub_without_a_class_is_missing_in_the_counts(tmp_path):
    look.make_cub(tmp_path)
    labels = tmp_path / "CUB_200_2011/image_class_labels.txt"
    labels.write_text(labels.read_text(encoding="utf-8-sig").replace("\n61 200", ""))
    assert "found 12 train images of 4 classes, 9 query images" in one_line(load_cub, tmp_path)


def test_a_list_that_is_no_text_is_named(tmp_path):
    path = look.make_sop(tmp_path) / "Stanford_Online_Products/Ebay_test.txt"
    path.write_bytes(b"\xff\xfe\x00a\x00b")
    assert one_line(load_sop, tmp_path).startswith(f"list file {path} cannot be read")
