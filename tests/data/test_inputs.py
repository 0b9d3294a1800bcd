"""Images handed over one by one: every kind gives the same pixels, every bad one a line that says why."""

from __future__ import annotations

import os
from collections.abc import Callable
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from proxy_anchor.data.augment import CentralCrop
from proxy_anchor.data.files import find_images
from proxy_anchor.data.images import input_key, open_input, prepare_readable
from proxy_anchor.errors import UsageError


def test_every_kind_of_input_is_the_same_picture(write_images: Callable) -> None:
    [(path, _)] = write_images({"a": 1})
    with Image.open(path) as picture:
        pixels = np.asarray(picture.convert("RGB"))
    for given in (path, str(path), path.read_bytes(), pixels, Image.fromarray(pixels), pixels[:, ::-1][:, ::-1]):
        assert np.array_equal(np.asarray(open_input(given)), pixels)
    grey = open_input(pixels[:, :, 0])
    assert grey.mode == "RGB"
    assert np.array_equal(np.asarray(grey)[:, :, 2], pixels[:, :, 0])


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (b"", "empty"),
        (b"GIF89a but no image", "no image of a known format"),
        (np.zeros((4, 4, 3), dtype=np.float32), "expected uint8"),
        (np.zeros((4, 4, 4), dtype=np.uint8), "expected uint8"),
        (np.zeros((0, 4), dtype=np.uint8), "expected uint8"),
        (3, "type int"),
    ],
)
def test_what_is_no_image_is_said_in_one_line(given: object, reason: str) -> None:
    with pytest.raises(UsageError, match=reason) as caught:
        open_input(given)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


def test_a_decompression_bomb_is_refused_by_its_header() -> None:
    stream = BytesIO()
    Image.new("RGB", (30, 50)).save(stream, "PNG")
    with pytest.raises(UsageError, match=r"30 x 50 pixels; at most 1,000"):
        open_input(stream.getvalue()[:-20], max_pixels=1000)  # what follows the header is damaged, and not read


def test_a_folder_is_searched_through_in_natural_order(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    for name in ("10.png", "2.png", "sub/1.JPG", ".hidden.png", "__MACOSX/3.png", "notes.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    os.mkfifo(tmp_path / "pipe.png")  # reading it would wait for ever
    assert [path.relative_to(tmp_path).as_posix() for path in find_images(tmp_path)] == ["2.png", "10.png", "sub/1.JPG"]
    assert capsys.readouterr().out == f"{tmp_path}: no images, and left out: 1 .txt\n"
    with pytest.raises(UsageError, match="no such folder"):
        find_images(tmp_path / "nothing")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "phone.heic").touch()
    with pytest.raises(
        UsageError, match=r"holds no image file \(no images, and left out: 1 \.heic\): there is nothing"
    ):
        find_images(tmp_path / "empty")


def test_key_changes_with_the_file(write_images: Callable) -> None:
    (first, _), (second, _) = write_images({"a": 2})
    before = input_key(first)
    assert before == input_key(str(first)) != input_key(second)
    first.write_bytes(second.read_bytes())
    assert input_key(first) != before
    assert input_key(b"x") == input_key(b"x") != input_key(b"y")
    assert input_key(np.zeros((2, 3), np.uint8)) != input_key(np.zeros((3, 2), np.uint8))
    assert "missing" in input_key("/nowhere/at/all.png")


def test_unreadable_images_keep_their_place_and_reason(write_images: Callable, tmp_path: Path) -> None:
    (good, _), (other, _) = write_images({"a": 2})
    (tmp_path / "bad.jpg").write_text("no image")
    rows, pixels, skipped = prepare_readable(CentralCrop(16, 20), [(4, good), (5, tmp_path / "bad.jpg"), (7, other)])
    assert rows == [4, 7]
    assert pixels.shape == (2, 3, 16, 16)
    assert pixels.dtype == torch.uint8
    assert [row for row, _ in skipped] == [5]
    assert "bad.jpg" in skipped[0][1]
    assert prepare_readable(CentralCrop(16, 20), [(5, tmp_path / "bad.jpg")])[0] == []
