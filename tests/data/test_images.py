"""From files to pixels: every mode becomes RGB, every bad file is named, the crops are torchvision's."""

import os
import re
import resource
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from commands import one_line
from pictures import encoded, noise
from PIL import Image
from torch.utils.data import DataLoader

from proxy_anchor.cli import messages
from proxy_anchor.data import images
from proxy_anchor.data.augment import CentralCrop
from proxy_anchor.data.files import find_images, images_below
from proxy_anchor.data.table import make_tables
from proxy_anchor.errors import UsageError

GREY, RED, WHITE = (120, 120, 120), (200, 10, 10), (255, 255, 255)


def pixel(image: Image.Image, at: tuple[int, int] = (0, 0)) -> tuple[int, ...]:
    assert image.mode == "RGB"
    return image.getpixel(at)


# ---- modes


def solid(mode: str, colour) -> Image.Image:
    return Image.new(mode, (4, 3), colour)


@pytest.mark.parametrize(
    ("image", "expected"),
    [
        (solid("L", 120), GREY),
        (solid("1", 0), (0, 0, 0)),
        (solid("RGB", RED), RED),
        (solid("CMYK", (0, 255, 255, 0)), (255, 0, 0)),
        (solid("YCbCr", (120, 128, 128)), GREY),
        (solid("LA", (0, 0)), WHITE),
        (solid("LA", (0, 51)), (204, 204, 204)),  # 51/255 = one fifth of black over white
        (solid("RGBA", (*RED, 0)), WHITE),
        (solid("RGBA", (0, 0, 0, 51)), (204, 204, 204)),
        (solid("PA", (0, 0)), WHITE),
        (solid("I", 120), GREY),
        (solid("I", -5), (0, 0, 0)),
        (solid("F", 120.0), GREY),
        (solid("F", 0.5), (127, 127, 127)),  # floats up to 1 are shares of white
        (solid("I;16", 120 * 257), GREY),
    ],
    ids=lambda value: value.mode if isinstance(value, Image.Image) else str(value),
)
def test_every_mode_becomes_rgb(image, expected):
    assert pixel(images.to_rgb(image)) == expected
    assert images.to_rgb(image).size == (4, 3)


@pytest.mark.parametrize("dtype", [np.uint16, np.int32, np.float32])
def test_high_bit_depths_are_scaled_not_clipped(dtype):
    image = Image.fromarray(np.array([[0, 32768, 65535]], dtype=dtype))
    assert image.mode in ("I;16", "I", "F")
    assert [pixel(images.to_rgb(image), (x, 0))[0] for x in range(3)] == [0, 127, 255]


def test_white_is_that_of_the_whole_picture_and_of_16_bits_in_a_pgm(tmp_path):
    (tmp_path / "dark.pgm").write_bytes(b"P5 2 1 65535\n" + np.array([300, 120 * 257], dtype=">u2").tobytes())
    assert pixel(images.read_rgb(tmp_path / "dark.pgm"), (1, 0)) == GREY
    Image.fromarray(np.array([[300, 60_000]], dtype=np.int32)).save(tmp_path / "part.tif")
    assert pixel(images.read_rgb(tmp_path / "part.tif#xywh=0,0,1,1")) == (1, 1, 1)


def test_a_palette_keeps_its_colours_and_its_transparency_shows_white(tmp_path):
    image = Image.new("P", (2, 1))
    image.putpalette([*RED, 0, 0, 255])
    image.putpixel((1, 0), 1)
    assert [pixel(images.to_rgb(image), (x, 0)) for x in (0, 1)] == [RED, (0, 0, 255)]
    for suffix, transparency in (("png", 1), ("gif", 1), ("png", bytes([255, 0]))):
        file = tmp_path / f"image.{suffix}"
        image.save(file, transparency=transparency)
        assert [pixel(images.read_rgb(file), (x, 0)) for x in (0, 1)] == [RED, WHITE]


# EXIF orientation -> where a viewer finds the pixel of the stored image's rows "AB", "CD", "EF".
UPRIGHT = {
    1: ["AB", "CD", "EF"],
    2: ["BA", "DC", "FE"],
    3: ["FE", "DC", "BA"],
    4: ["EF", "CD", "AB"],
    5: ["ACE", "BDF"],
    6: ["ECA", "FDB"],
    7: ["FDB", "ECA"],
    8: ["BDF", "ACE"],
}


@pytest.mark.parametrize("orientation", UPRIGHT)
@pytest.mark.parametrize("form", ["png", "tiff", "webp"])
def test_an_exif_orientation_is_applied_once(orientation, form, tmp_path):
    stored = np.array([[[ord(letter) * 3] * 3 for letter in row] for row in UPRIGHT[1]], np.uint8)
    file, exif = tmp_path / f"turned.{form}", Image.Exif()
    exif[0x0112] = orientation
    Image.fromarray(stored).save(file, exif=exif, lossless=True)
    for image in (images.read_rgb(file), images.open_input(images.read_rgb(file)), images.open_input(Image.open(file))):
        letters = ["".join(chr(value // 3) for value in row) for row in np.asarray(image)[:, :, 0].tolist()]
        assert letters == UPRIGHT[orientation]
    with images.open_image(file) as image:
        assert images.upright_size(image) == (len(letters), len(letters[0]))


def test_damaged_exif_data_leave_an_image_as_it_is_stored(tmp_path):
    noise(12, 5).save(tmp_path / "x.jpg", exif=b"Exif\0\0II*\0\xff\xff\xff\xff")
    assert images.read_rgb(tmp_path / "x.jpg").size == (12, 5)


# ---- bad files


NOISE = noise(64, 64)
NOT_FINITE = Image.fromarray(np.full((3, 3), np.nan, np.float32))
BAD = {  # content, and what its error must say; further kinds: test_bad_images.py
    "empty": (b"", "no image of a known format"),
    "text": (b"<html>404 not found</html>\n" * 9, "no image of a known format"),
    "truncated jpeg": (encoded(NOISE, "JPEG")[:-900], "truncated"),
    "truncated gif": (encoded(NOISE, "GIF")[:-900], "truncated"),
    "not finite": (encoded(NOT_FINITE, "TIFF"), "not finite"),
    "missing": (None, "is missing"),
}


def bad_file(kind: str, folder: Path) -> Path:
    file, content = folder / "bad image.jpg", BAD[kind][0]
    if content is not None:
        file.write_bytes(content)
    return file


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_file_is_named_in_one_line(kind, tmp_path):
    file = bad_file(kind, tmp_path)
    with pytest.raises(UsageError, match=f"^image {file} .*{BAD[kind][1]}.*remove it") as caught:
        images.read_rgb(file)
    assert messages.one_line(caught.value) == str(caught.value)


def test_images_are_known_by_name(tmp_path):
    good = ["a.jpg", "A.JPEG", "b.PNG", "c.d.webp", "ü ö.tif", "x.bmp", "x.gif", "x.ppm", "x.tiff"]
    good += ["y.jfif", "y.jpe", "y.jp2", "y.tga", "y.pgm", "y.mpo"]
    hidden = ["._a.jpg", ".hidden.png", ".jpg", ".DS_Store"]
    others = ["a.txt", "a", "a.jpg.part", "b.PART", "a.mat", "jpg", "x.pdf", "x.eps", "x.mpg", "x.wmf", "x.h5"]
    for name in good + hidden + others:
        (tmp_path / name).touch()
    found, counts = images_below(tmp_path)
    assert sorted(path.name for path in found) == sorted(good)
    others = {".part": 2, "without suffix": 2} | dict.fromkeys(
        [".txt", ".mat", ".pdf", ".eps", ".mpg", ".wmf", ".h5"], 1
    )
    assert counts == others


def test_links_to_folders_are_followed_and_circles_end(tmp_path):
    for name in ("a/1.png", "b/2.png", "else/3.png"):
        (tmp_path / "all" / name).parent.mkdir(parents=True)
        (tmp_path / "all" / name).touch()
    (tmp_path / "all" / "else").rename(tmp_path / "else")
    for link, target in {"c": tmp_path / "else", "a/b": "../b", "b/a": "../a", "up": ".", "a/up": ".."}.items():
        (tmp_path / "all" / link).symlink_to(target)
    (tmp_path / "all" / "loop").symlink_to("loop")
    names = [path.relative_to(tmp_path / "all").as_posix() for path in images_below(tmp_path / "all", by_class=True)[0]]
    assert names == ["a/1.png", "a/b/2.png", "b/2.png", "b/a/1.png", "c/3.png"]
    assert len(images_below(tmp_path / "all" / "a")[0]) == 2  # the folder above holds the link


def test_folders_that_link_to_each_other_are_entered_once_below_each_class(tmp_path, monkeypatch):
    names, entered = "abcdefgh", []
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "1.png").touch()
        for other in names.replace(name, ""):
            (tmp_path / name / f"to_{other}").symlink_to(tmp_path / other)
    monkeypatch.setattr(os, "scandir", lambda folder, scandir=os.scandir: entered.append(folder) or scandir(folder))
    found, _ = images_below(tmp_path / "a")
    assert len(entered) == 8
    assert sorted(path.resolve().parent.name for path in found) == [*names]
    entered.clear()
    assert len(find_images(tmp_path)) == 8 * 8  # each class as it is alone
    assert len(entered) == 1 + 8 * 8


# ---- the data set


@pytest.mark.parametrize(("num_workers", "kind"), [(0, "missing"), (1, "truncated jpeg")])
def test_a_bad_image_met_by_a_worker_is_one_line(tmp_path, write_images, num_workers, kind):
    bad = bad_file(kind, tmp_path)
    [table] = make_tables([*write_images({"a": 6}), (bad, "a")])
    direct = one_line(images.read_rgb, bad)
    with pytest.raises(UsageError) as caught:
        list(DataLoader(images.ImageDataset(table, CentralCrop(8, 8)), batch_size=4, num_workers=num_workers))
    assert messages.one_line(caught.value) == direct


# ---- worker processes


@pytest.mark.parametrize(
    ("given", "free", "limit", "fitting", "said"),
    [
        (0, 0, 0, 0, ""),
        (2, 10 * 1000, 1024, 2, ""),
        (2, 10 * 1000 - 1, 1024, 1, "num_workers=2: .* each of 2 loaders take 0 MB of .*0 MB are free"),
        (2, 5 * 1000, 1024, 0, "num_workers=2: .*--shm-size=8g"),
        (2, 10**9, 32, 0, "num_workers=2: .* take [0-9]+ open files .the limit is 32; `ulimit -n 4096`"),
        (None, 10 * 1000, 1024, 2, ""),
        (None, 6 * 1000, 1024, 1, "num_workers=2: .*0 MB are free"),
        (None, 10**9, 32, 0, "num_workers=2: .*the limit is 32"),
    ],
)
def test_workers_have_room_for_all_loaders_before_they_start(given, free, limit, fitting, said, monkeypatch, capsys):
    """Two loaders with batches of 1000 bytes; a number that is given is refused, the default of 2 lowered."""
    monkeypatch.setattr(images, "available_cpus", lambda: 2)
    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=free))
    monkeypatch.setattr(resource, "getrlimit", lambda which: (limit, limit))
    refused = said and given is not None
    with pytest.raises(UsageError, match=f"{said}.*: set num_workers={fitting}") if refused else nullcontext():
        assert images.fit_workers(given, [(1000, 100), (1000, 100)], "num_workers") == fitting
    printed = capsys.readouterr().out
    assert bool(printed) == bool(said and given is None)
    assert not printed or re.match(f"{said}.*: lowered to {fitting}\\.$", printed)


def test_fewer_batches_than_workers_prepare_need_less_room_and_ranks_share_it(monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=2000))
    assert images.fit_workers(16, [(1000, 2)]) == 16
    one_line(images.fit_workers, 16, [(1000, 3)], match="take 0 MB")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    one_line(images.fit_workers, 16, [(1000, 2)], match="take 0 MB")


# ---- images that are handed over one by one


def test_every_kind_of_input_is_the_same_picture(write_images: Callable) -> None:
    [(path, _)] = write_images({"a": 1})
    with Image.open(path) as picture:
        pixels = np.asarray(picture.convert("RGB"))
    for given in (path, str(path), path.read_bytes(), pixels, Image.fromarray(pixels), pixels[:, ::-1][:, ::-1]):
        assert np.array_equal(np.asarray(images.open_input(given)), pixels)
    grey = images.open_input(pixels[:, :, 0])
    assert grey.mode == "RGB"
    assert np.array_equal(np.asarray(grey)[:, :, 2], pixels[:, :, 0])


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (b"", "no image of a known format"),
        (b"GIF89a but no image", "no image of a known format"),
        (np.zeros((4, 4, 3), dtype=np.float32), "expected uint8"),
        (np.zeros((4, 4, 4), dtype=np.uint8), "expected uint8"),
        (np.zeros((0, 4), dtype=np.uint8), "expected uint8"),
        (3, "type int"),
    ],
)
def test_what_is_no_image_is_said_in_one_line(given: object, reason: str) -> None:
    one_line(images.open_input, given, match=reason)


def test_a_decompression_bomb_is_refused_by_its_header() -> None:
    damaged = encoded(Image.new("RGB", (30, 50)), "PNG")[:-20]  # after the header, and not read
    one_line(images.open_input, damaged, max_pixels=1000, match=r"30 x 50 pixels; at most 1,000")


def test_a_folder_is_searched_through_in_natural_order(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    for name in ("10.png", "2.png", "sub/1.JPG", ".hidden.png", "__MACOSX/3.png", "notes.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    os.mkfifo(tmp_path / "pipe.png")  # reading it would wait for ever
    assert [path.relative_to(tmp_path).as_posix() for path in find_images(tmp_path)] == ["2.png", "10.png", "sub/1.JPG"]
    assert capsys.readouterr().out == f"{tmp_path}: 1 .txt left out\n"
    one_line(find_images, tmp_path / "nothing", match="no such folder")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "phone.heic").touch()
    one_line(find_images, tmp_path / "empty", match=r"holds no image file \(1 \.heic left out\): there is nothing")


def test_key_changes_with_the_file(write_images: Callable) -> None:
    (first, _), (second, _) = write_images({"a": 2})
    before = images.input_key(first)
    assert before == images.input_key(str(first)) != images.input_key(second)
    first.write_bytes(second.read_bytes())
    assert images.input_key(first) != before
    assert images.input_key(b"x") == images.input_key(b"x") != images.input_key(b"y")
    assert images.input_key(np.zeros((2, 3), np.uint8)) != images.input_key(np.zeros((3, 2), np.uint8))
    assert "missing" in images.input_key("/nowhere/at/all.png")


def test_unreadable_images_keep_their_place_and_reason(write_images: Callable, tmp_path: Path) -> None:
    (good, _), (other, _) = write_images({"a": 2})
    (tmp_path / "bad.jpg").write_text("no image")
    rows, pixels, skipped = images.prepare_readable(
        CentralCrop(16, 20), [(4, good), (5, tmp_path / "bad.jpg"), (7, other)]
    )
    assert rows == [4, 7]
    assert pixels.shape == (2, 3, 16, 16)
    assert pixels.dtype == torch.uint8
    assert [row for row, _ in skipped] == [5]
    assert "bad.jpg" in skipped[0][1]
    assert images.prepare_readable(CentralCrop(16, 20), [(5, tmp_path / "bad.jpg")])[0] == []
