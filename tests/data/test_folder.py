"""The user's own images, as messy as they come: class folders and CSV lists.

The file is long because both are held against the same rules.
"""

import os
import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import one_line
from PIL import Image

from proxy_anchor.data.bad_images import check_images
from proxy_anchor.data.files import images_below
from proxy_anchor.data.folder import list_images, load_folder
from proxy_anchor.data.image_cache import Shrunk, decode_into, kept_sizes
from proxy_anchor.data.images import DecodedImages, ImageDataset, open_input, read_rgb
from proxy_anchor.data.table import ImageTable, Splits, data_fingerprint, split_box
from proxy_anchor.errors import UnreadableImage


def touch(file: Path, content: bytes = b"x") -> Path:
    """A file that is there; loaders do not look inside."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content)
    return file


def make_classes(root: Path, *names: str, images: int = 2) -> Path:
    for name in names:
        for number in range(images):
            touch(root / name / f"{number}.jpg")
    return root


def pairs(table: ImageTable, root: Path) -> set[tuple[str, str]]:
    """(path relative to root, class name) of every image."""
    return {(path.relative_to(root).as_posix(), name) for path, name in table.rows}


def all_pairs(splits: Splits, root: Path) -> set[tuple[str, str]]:
    return set().union(*(pairs(table, root) for table in splits.tables.values()))


refused = partial(one_line, load_folder)


# ---- class folders


def test_classes_are_shared_out_without_overlap(tmp_path):
    root = make_classes(tmp_path / "my images", *"abcdefgh")
    splits = load_folder(root)
    assert splits.name == "my images"
    assert splits.gallery is None
    assert (splits.train.num_classes, splits.query.num_classes) == (4, 4)
    assert set(splits.train.classes) | set(splits.query.classes) == set("abcdefgh")
    assert splits.shared_classes == []
    assert all_pairs(splits, root) == {(f"{name}/{number}.jpg", name) for name in "abcdefgh" for number in (0, 1)}
    assert (len(splits.train), len(splits.query)) == (8, 8)
    assert "4 classes train and 4 other classes are searched" in splits.notice
    assert "dataset.split_seed=0" in splits.notice


def test_the_seed_decides_the_split_and_nothing_else_does(tmp_path):
    root = make_classes(tmp_path, *(f"class {number}" for number in range(12)))
    trained = [load_folder(root, split_seed=seed).train.classes for seed in (0, 0, 1, 2)]
    assert trained[0] == trained[1]
    assert len(set(trained)) == 3
    assert load_folder(root).train.paths == load_folder(root).train.paths


@pytest.mark.parametrize(("fraction", "searched"), [(1e-9, 2), (0.2, 2), (0.25, 2), (0.5, 5), (0.8, 8), (0.999, 8)])
def test_both_sides_keep_two_classes_at_least(tmp_path, fraction, searched):
    root = make_classes(tmp_path, *"abcdefghij", images=1)
    splits = load_folder(root, test_fraction=fraction)
    assert (splits.train.num_classes, splits.query.num_classes) == (10 - searched, searched)


def test_classes_that_select_the_epoch_are_none_of_training_s(tmp_path):
    root = make_classes(tmp_path, *map(str, range(40)), images=1)
    whole, divided = load_folder(root), load_folder(root, validation_share=0.25)
    assert divided.train.paths == whole.train.paths
    assert (divided.validation.num_classes, divided.query.num_classes) == (5, 15)
    assert {*divided.validation.rows, *divided.query.rows} == set(whole.query.rows)
    assert "20 classes train, 5 others select the epoch (none with validation=test) and 15 other" in divided.notice
    assert load_folder(root, validation_share=0.25, test_fraction=0.45).validation is None  # too few to divide
    assert load_folder(root, validation_share=1).query.num_classes == 2
    assert load_folder(root, validation_share=0.01).validation.num_classes == 2
    make_classes(tmp_path / "named" / "train", *"ab")
    make_classes(tmp_path / "named" / "test", *map(str, range(20)))
    assert load_folder(tmp_path / "named", validation_share=0.5).validation is None
    assert refused(root, validation_share=1.5).startswith("validation.share=1.5: expected")


def test_a_fraction_of_one_searches_everything(tmp_path):
    splits = load_folder(make_classes(tmp_path, *"abc", images=2), test_fraction=1)
    assert (len(splits.train), splits.query.num_classes, len(splits.query)) == (0, 3, 6)
    assert "all 3 classes are searched" in splits.notice


@pytest.mark.parametrize("fraction", [0, -0.1, 1.1, float("nan"), "half", True])
def test_a_bad_fraction_is_refused_before_the_folder_is_read(fraction):
    assert refused("/nowhere", test_fraction=fraction).startswith(f"dataset.test_fraction={fraction!r}: expected")


def test_what_systems_leave_behind_is_neither_image_nor_class(tmp_path):
    root = make_classes(tmp_path, *"abcd", images=1)
    for name in (
        "a/Thumbs.db",
        "a/._0.jpg",
        "a/notes.txt",
        "a/.ipynb_checkpoints/0-checkpoint.jpg",  # a copy: it would be a certain hit
        "b/__MACOSX/0.jpg",
        ".git/0.jpg",
        "__MACOSX/e/0.jpg",
        "list.csv",
        "loose.jpg",
    ):
        touch(root / name)
    (root / "a" / "folder.jpg").mkdir()
    splits = load_folder(root)
    assert all_pairs(splits, root) == {(f"{name}/0.jpg", name) for name in "abcd"}
    assert splits.describe().endswith(" or in no class folder, are left out: 1 .jpg, 1 .db, 1 .txt.")


@pytest.mark.parametrize("names", [("train", "test"), ("Training", "VALID"), ("train", "val"), ("train", "validation")])
def test_train_and_test_folders_are_the_split(tmp_path, names):
    train, test = (tmp_path / name for name in names)
    make_classes(train, "2", "10")
    make_classes(test, "x", images=3)
    make_classes(tmp_path / "__MACOSX", "y")
    splits = load_folder(tmp_path, test_fraction=0.1, split_seed=3)
    assert splits.train.classes == ("2", "10")
    assert pairs(splits.query, test) == {(f"x/{number}.jpg", "x") for number in range(3)}
    assert splits.notice == ""


def test_a_class_in_train_and_test_is_said(tmp_path):
    make_classes(tmp_path / "train", "a", "b", "c")
    make_classes(tmp_path / "test", "b", "c", "d", "e")
    splits = load_folder(tmp_path)
    assert splits.shared_classes == ["b", "c"]
    assert splits.notice == "2 of 4 searched classes are also trained on: Recall@K is not over unseen classes."


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (["1.jpg"], r"has no class folders: put each class's images \(.*\.jpeg"),
        (["a/1.jpg"], "has 1 class; .* at least 4 .*If a itself holds the class folders, pass that folder"),
        (["a/1.jpg", "b/1.jpg", "c/1.jpg"], "has 3 classes;"),
        (["a/1.jpg", "b/x.txt"], r"class folder .*b holds no image that Pillow reads \(1 \.txt\): add images"),
        (["train/a/1.jpg", "test/b/x.txt"], "class folder .*b holds no image"),
        (["train/a/1.jpg", "test/b/1.jpg", "val/b/1.jpg"], "val.*: keep one train and one test folder"),
        (["train/a/1.jpg", "test/b/1.jpg", "extra/b/1.jpg"], "extra.*: keep one train and one test folder"),
    ],
)
def test_what_cannot_be_split_is_explained(tmp_path, files, expected):
    for file in files:
        touch(tmp_path / file)
    assert re.search(expected, refused(tmp_path))


def test_missing_root_and_no_root(tmp_path):
    file = touch(tmp_path / "file")
    assert refused(tmp_path / "no").startswith(f"dataset.root={tmp_path / 'no'} is not a folder")
    assert refused(file).startswith(f"dataset.root={file} is not a folder")
    assert "dataset.root=FOLDER" in refused(None)


# ---- CSV


def make_list(folder: Path, text: str | bytes) -> Path:
    file = folder / "list.csv"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return file


SIX = [(f"{name}{number}.jpg", name) for name in ("red", "blue", "10", "9", "a b", "é") for number in (0, 1)]


@pytest.fixture
def images(tmp_path):
    """A folder with the images of SIX."""
    for name, _ in SIX:
        touch(tmp_path / name)
    return tmp_path


PLAIN = "path,label\n" + "".join(f"{path},{label}\n" for path, label in SIX)


def test_a_list_without_split_gets_one(images):
    splits = load_folder(None, csv_file=make_list(images, PLAIN), split_seed=4)
    assert splits.name == "list"
    assert all_pairs(splits, images) == set(SIX)
    assert splits.shared_classes == []
    assert (splits.train.num_classes, splits.query.num_classes) == (3, 3)
    assert "dataset.split_seed=4" in splits.notice


@pytest.mark.parametrize(
    "text",
    [
        "\ufeff" + PLAIN,
        PLAIN.replace("\n", "\r\n"),
        PLAIN.replace("\n", "\r"),
        PLAIN.replace("path,label", " Path , LABEL "),
        PLAIN.replace(",", " ,  "),
        "path,label,split,role\n" + PLAIN.split("\n", 1)[1].replace("\n", ",,\n"),
        PLAIN + ",\n , \n",  # what a spreadsheet makes of empty rows
        "label,path\n" + "".join(f'"{label}","{path}"\n' for path, label in SIX),
        PLAIN.replace("blue0.jpg", "./blue0.jpg"),
    ],
)
def test_lists_may_be_written_in_many_ways(images, text):
    assert all_pairs(load_folder(None, csv_file=make_list(images, text)), images) == set(SIX)


def test_commas_line_separators_and_quotes_in_a_value(images):
    names = ["x, y", 'the "best"', "a\u2028b", "a\x0bb"]
    text = "path,label\n"
    for number, name in enumerate(names):
        touch(images / f"extra,{number}.jpg")
        text += f'"extra,{number}.jpg", "{name.replace(chr(34), 2 * chr(34))}"\n'
    assert {name for _, name in all_pairs(load_folder(None, csv_file=make_list(images, text)), images)} == set(names)


def test_an_unclosed_quote_does_not_swallow_the_rest(images):
    text = PLAIN.replace("blue1.jpg,blue", 'blue1.jpg,"blue')
    assert "not a well-formed CSV" in refused(None, csv_file=make_list(images, text))


def test_paths_start_from_the_root_the_list_or_the_top(images, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    file = make_list(elsewhere, PLAIN)
    assert all_pairs(load_folder(images, csv_file=file), images) == set(SIX)
    assert refused(None, csv_file=file).startswith("12 of 12 list images cannot be used")
    absolute = "path,label\n" + "".join(f"{images / path},{label}\n" for path, label in SIX)
    assert all_pairs(load_folder(elsewhere, csv_file=make_list(elsewhere, absolute)), images) == set(SIX)


SPLIT = "path,label,split\nred0.jpg,red,train\nred1.jpg,red,Train\n90.jpg,9,training\n"
SPLIT += "blue0.jpg,blue,test\nblue1.jpg,blue,VAL\n"


def test_a_given_split_is_kept(images):
    splits = load_folder(None, csv_file=make_list(images, SPLIT))
    assert pairs(splits.train, images) == {("red0.jpg", "red"), ("red1.jpg", "red"), ("90.jpg", "9")}
    assert splits.train.classes == ("9", "red")
    assert pairs(splits.query, images) == {("blue0.jpg", "blue"), ("blue1.jpg", "blue")}
    assert (splits.gallery, splits.notice) == (None, "")


def test_roles_make_query_and_gallery_over_one_map(images):
    text = (
        "role,split,label,path\n,train,red,red0.jpg\nquery,train,red,red1.jpg\nquery,,blue,blue0.jpg\n"
        ",test,9,90.jpg\nGallery,test,blue,blue1.jpg\ngallery,test,10,100.jpg\n"
    )
    splits = load_folder(None, csv_file=make_list(images, text))
    assert pairs(splits.train, images) == {("red0.jpg", "red"), ("red1.jpg", "red")}  # a role means nothing in training
    assert pairs(splits.query, images) == {("blue0.jpg", "blue"), ("90.jpg", "9")}  # 9 has no match: accepted
    assert pairs(splits.gallery, images) == {("blue1.jpg", "blue"), ("100.jpg", "10")}
    assert splits.query.classes == splits.gallery.classes == ("9", "10", "blue")


ROLES = "path,label,split,role\nred0.jpg,red,train,\n"


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "is not a well-formed CSV file (No columns"),
        (b"path,label\n", "lists no images"),
        (b"path,label\nred0.jpg,\xe9t\xe9\n", "cannot be read ('utf-8'"),
        (PLAIN.replace("path,label", "path,labl"), "first line is path,labl; expected path,label[,split][,role]"),
        (PLAIN.replace("path,label", "path,label,wieght"), "first line is path,label,wieght; expected"),
        (PLAIN.replace("path,label", "label,split"), "first line is label,split; expected"),
        (PLAIN.replace("path,label", "path,label,Label"), "first line is path,label,label; expected"),
        (PLAIN.replace(",", ";"), "first line is path;label; expected"),
        (PLAIN.replace("blue0.jpg,blue", "blue0.jpg,"), "line 4: path or label is empty"),
        (PLAIN.replace("blue1.jpg", "blue0.jpg"), "lists 1 images more than once"),
        (PLAIN.replace("blue1.jpg", "."), "(not a file)"),
        (ROLES + "blue0.jpg,blue,tset,", "line 3: split 'tset' and role '' are not known together; use train"),
        (ROLES + "blue0.jpg,blue,test,probe", "line 3: split 'test' and role 'probe' are not known together"),
        (ROLES + "blue0.jpg,blue,train,", "has no test images"),
        (ROLES + "blue0.jpg,blue,test,gallery", "has gallery images but none with role query"),
    ],
)
def test_a_bad_list_is_explained(images, content, expected):
    assert expected in refused(None, csv_file=make_list(images, content))
    assert "cannot be read" in refused(None, csv_file=images)
    assert "No such file" in refused(None, csv_file=images / "no.csv")


def test_a_folder_that_cannot_be_read_is_one_line(tmp_path, monkeypatch):
    def refuse(folder):
        raise PermissionError(13, "Permission denied", str(folder))

    monkeypatch.setattr(os, "scandir", refuse)
    one_line(images_below, tmp_path, match=f"{tmp_path} cannot be read: change its permissions")


# ---- objects in images


def test_boxes_of_a_list_cut_objects_out_of_images(tmp_path):
    """Every way to pixels cuts the same part: reading, both cached forms, the dataset, the network's input."""
    pixels = np.random.default_rng(0).integers(0, 256, (40, 60, 3), dtype=np.uint8)  # upright: 60 wide, 40 high
    exif = Image.Exif()
    exif[0x0112] = 6  # a viewer turns the stored image by 90 degrees clockwise
    Image.fromarray(np.rot90(pixels)).save(tmp_path / "photo.png", exif=exif)
    for number, name in enumerate("bcd"):
        Image.fromarray(pixels).save(tmp_path / f"{name}.png", compress_level=number)  # other bytes
    lines = ["path,label,x,y,w,h", "photo.png,a,10,5,20,30", "photo.png,a,30.4,0,29.6,40", "b.png,b,,,,"]
    lines += ["c.png,c,1.5,0,57.5,40", "d.png,d,1,1,2,2"]  # c: edges at 1.5 and 59
    splits = load_folder(None, csv_file=make_list(tmp_path, "\n".join(lines)), test_fraction=1)
    table = splits.query
    assert [path.name for path in table.paths[:3]] == [
        "photo.png#xywh=10,5,20,30",
        "photo.png#xywh=30,0,30,40",
        "b.png",
    ]
    parts = [pixels[5:35, 10:30], pixels[:, 30:], pixels, pixels[:, 2:59], pixels[1:3, 1:3]]
    images = ImageDataset(table, lambda image, epoch, row: np.asarray(image))
    cached = Shrunk()
    sizes = kept_sizes(table, cached, 0)
    values = torch.empty(3 * int(sizes.prod(1).sum()), dtype=torch.uint8)
    decode_into(values, table.paths, cached, 0)
    decoded = DecodedImages(values, sizes)
    for row, part in enumerate(parts):
        assert np.array_equal(images[row][0], part)
        assert np.array_equal(decoded.array(row), part)
        assert np.array_equal(np.asarray(open_input(str(table.paths[row]))), part)
    assert list_images(tmp_path / "list.csv") == ([*table.paths], ["a", "a", "b", "c", "d"])
    odd = check_images(splits)  # two objects of one file are no duplicates
    assert [(each.kind, each.detail) for each in odd] == [
        ("small", "20 x 30 pixels"),
        ("small", "30 x 40 pixels"),
        ("small", "2 x 2 pixels"),
    ]
    whole = replace(table, paths=tuple(split_box(path)[0] for path in table.paths))
    assert data_fingerprint(splits)["query"] != data_fingerprint(replace(splits, query=whole))["query"]


def test_a_box_outside_its_image_is_named(tmp_path):
    for name in "abcd":
        Image.new("RGB", (60, 40)).save(tmp_path / f"{name}.png")
    lines = ["path,label,x,y,w,h", "a.png,a,41,0,20,40", "b.png,b,0,0,60,40", "c.png,c,,,,", "d.png,d,0,1,60,40"]
    splits = load_folder(None, csv_file=make_list(tmp_path, "\n".join(lines)), test_fraction=1)
    bad = [each for each in check_images(splits) if each.kind == "corrupt"]
    assert [(each.path.name, each.detail) for each in bad] == [
        ("a.png#xywh=41,0,20,40", "box 41,0,20,40 is not inside its 60 x 40 pixels"),
        ("d.png#xywh=0,1,60,40", "box 0,1,60,40 is not inside its 60 x 40 pixels"),
    ]
    with pytest.raises(UnreadableImage, match=r"a.png cannot be read \(box 41,0,20,40 is not inside"):
        read_rgb(splits.query.paths[0])


@pytest.mark.parametrize("box", ["1,2,3,", "a,0,1,1", "-1,0,2,2", "0,0,0,4", "nan,0,1,1", "0,0,inf,1"])
def test_a_box_that_is_none_is_one_line(tmp_path, box):
    touch(tmp_path / "a.jpg")
    boxes = make_list(tmp_path, f"path,label,x,y,w,h\na.jpg,a,{box}\n")
    assert f"line 2: the box x,y,w,h is {box}; expected pixels" in refused(None, csv_file=boxes)
