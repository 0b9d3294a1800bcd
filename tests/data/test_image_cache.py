"""Images decoded once: the same bytes wherever they are kept, one builder at a time, and nothing stale."""

from __future__ import annotations

import multiprocessing
import os
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from proxy_anchor.data import image_cache as module
from proxy_anchor.data.augment import CentralCrop
from proxy_anchor.data.image_cache import Shrunk, decode_to_device, decode_to_file, free_memory, kept_sizes
from proxy_anchor.data.images import DecodedImages, read_rgb
from proxy_anchor.data.table import ImageTable, make_tables
from proxy_anchor.errors import UsageError

CPU = torch.device("cpu")


@pytest.fixture
def table(tmp_path: Path) -> ImageTable:
    """Seven images of different sizes and modes, one of which a viewer turns by 90 degrees."""
    random, rows, exif = np.random.default_rng(0), [], Image.Exif()
    for number, (width, height, mode) in enumerate(
        [(20, 10, "RGB"), (7, 31, "L"), (1, 1, "RGB"), (64, 64, "RGBA"), (30, 20, "P"), (11, 12, "RGB"), (40, 9, "RGB")]
    ):
        file, exif[0x0112] = tmp_path / f"{number}.png", 6 if number == 5 else 1
        image = Image.fromarray(random.integers(0, 256, (height, width, 3), dtype=np.uint8)).convert(mode)
        image.save(file, exif=exif)
        rows.append((file, str(number % 3)))
    return make_tables(rows)[0]


def in_memory(table: ImageTable, form: module.Form, num_workers: int = 0) -> DecodedImages:
    return decode_to_device(table, form, kept_sizes(table, form, num_workers), CPU, num_workers, 0, 1)


def assert_holds(pixels: DecodedImages, table: ImageTable, form: module.Form) -> None:
    assert len(pixels) == len(table)
    for row, path in enumerate(table.paths):
        assert np.array_equal(pixels.array(row), np.asarray(form.keep(read_rgb(path))))


@pytest.mark.parametrize("form", [Shrunk(), Shrunk(12), Shrunk(1), CentralCrop(8, 10)], ids=repr)
@pytest.mark.parametrize("num_workers", [0, 2])
def test_pixels_are_those_of_the_one_reader(table: ImageTable, form: module.Form, num_workers: int) -> None:
    assert_holds(in_memory(table, form, num_workers), table, form)


@pytest.mark.parametrize("rank", [0, 1])
def test_two_processes_decode_a_share_each_and_send_it(
    rank: int, table: ImageTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, sent = in_memory(table, Shrunk()), []
    monkeypatch.setattr(module.dist, "broadcast", lambda share, src: sent.append((src, share)))
    decode_to_device(table, Shrunk(), whole.sizes, CPU, 0, rank, 2)
    assert [src for src, _ in sent] == [0, 1]
    start = sum(len(share) for src, share in sent if src < rank)
    mine = sent[rank][1]
    assert 0 < len(mine) < len(whole.values) == sum(len(share) for _, share in sent)
    assert torch.equal(mine, whole.values[start : start + len(mine)])


def test_shrinking_never_enlarges_and_rounds_as_torchvision_does() -> None:
    assert Shrunk(12).size(10, 20) == (10, 20)
    assert Shrunk(8).size(10, 20) == (8, 16)
    assert Shrunk(8).size(31, 9) == (27, 8)
    for height, width in [(31, 9), (9, 31), (100, 101), (57, 300)]:
        kept = Shrunk(8).keep(Image.new("RGB", (width, height)))
        assert (kept.height, kept.width) == Shrunk(8).size(height, width)
    with pytest.raises(UsageError, match=r"^data\.cache_side=0"):
        Shrunk(0)


@pytest.mark.parametrize("form", [Shrunk(), CentralCrop(8, 10)], ids=repr)
def test_a_file_holds_the_same_and_is_used_again(
    table: ImageTable, form: module.Form, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pixels, file = decode_to_file(table, form, tmp_path / "cache", 0, name="mine")
    assert_holds(pixels, table, form)
    assert [each.suffix for each in sorted((tmp_path / "cache").iterdir())] == [".pixels", ".lock"]
    monkeypatch.setattr(module, "_build", None)  # a second build would fail
    again, same = decode_to_file(table, form, tmp_path / "cache", 0, name="mine")
    assert same == file
    assert_holds(again, table, form)


def test_changed_images_are_decoded_anew_and_the_old_file_goes(table: ImageTable, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    _, old = decode_to_file(table, Shrunk(), cache, 0, name="mine")
    _, other_form = decode_to_file(table, Shrunk(8), cache, 0, name="mine")
    Image.new("RGB", (20, 10), "red").save(table.paths[0])
    os.utime(table.paths[0], ns=(1, 1))
    pixels, new = decode_to_file(table, Shrunk(), cache, 0, name="mine")
    assert new != old
    assert not old.exists()
    assert other_form.exists()
    assert_holds(pixels, table, Shrunk())


@pytest.mark.parametrize("damage", ["cut", "grown", "empty"])
def test_a_file_that_is_not_whole_is_made_again(table: ImageTable, tmp_path: Path, damage: str) -> None:
    _, file = decode_to_file(table, Shrunk(), tmp_path / "cache", 0, name="mine")
    content = file.read_bytes()
    file.write_bytes({"cut": content[:-100], "grown": content + b"x" * 7, "empty": b""}[damage])
    pixels, _ = decode_to_file(table, Shrunk(), tmp_path / "cache", 0, name="mine")
    assert_holds(pixels, table, Shrunk())


def _slow_build(table: ImageTable, folder: Path, marks: Path) -> None:
    build = module._build

    def slow(*arguments) -> DecodedImages:
        (marks / f"{os.getpid()}").touch()
        time.sleep(1)
        return build(*arguments)

    module._build = slow
    pixels, _ = decode_to_file(table, Shrunk(), folder, 0, name="mine")
    assert_holds(pixels, table, Shrunk())


def test_two_processes_build_once(table: ImageTable, tmp_path: Path) -> None:
    marks = tmp_path / "marks"
    marks.mkdir()
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_slow_build, args=(table, tmp_path / "cache", marks)) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0]
    assert len(list(marks.iterdir())) == 1


def _killed_build(table: ImageTable, folder: Path) -> None:
    module.decode_into = lambda *arguments: os.kill(os.getpid(), 9)
    decode_to_file(table, Shrunk(), folder, 0, name="mine")


def test_a_build_that_was_killed_leaves_nothing_that_is_taken_for_whole(table: ImageTable, tmp_path: Path) -> None:
    process = multiprocessing.get_context("fork").Process(target=_killed_build, args=(table, tmp_path / "cache"))
    process.start()
    process.join(60)
    assert process.exitcode == -9
    assert not list((tmp_path / "cache").glob("*.pixels"))
    pixels, _ = decode_to_file(table, Shrunk(), tmp_path / "cache", 0, name="mine")
    assert_holds(pixels, table, Shrunk())
    assert not list((tmp_path / "cache").glob("*.partial"))


@pytest.mark.parametrize("call", [(Path, "mkdir"), (os, "open"), (os, "posix_fallocate")])
def test_a_full_disk_is_one_line_and_leaves_nothing(
    call: tuple, table: ImageTable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object, **named: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(*call, full)
    repair = r"set data\.cache=disk with a data\.cache_dir that .*data\.cache_side .*data\.cache=none"
    with pytest.raises(UsageError, match=rf"{tmp_path} \(No space left on device\): {repair}"):
        decode_to_file(table, Shrunk(), tmp_path, 0, name="mine")
    monkeypatch.undo()
    assert not [*tmp_path.glob("*.pixels"), *tmp_path.glob("*.partial")]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_broken_image_is_named(table: ImageTable, num_workers: int) -> None:
    whole = table.paths[4].read_bytes()
    table.paths[4].write_bytes(b"no image")
    with pytest.raises(UsageError, match=r"image .*4\.png cannot be read"):
        kept_sizes(table, Shrunk(), num_workers)
    # Broken behind the header: met when the pixels are read.
    table.paths[4].write_bytes(whole)
    sizes = kept_sizes(table, Shrunk(), num_workers)
    table.paths[4].write_bytes(whole[: len(whole) - 200])
    with pytest.raises(UsageError, match=r"image .*4\.png cannot be read"):
        decode_to_device(table, Shrunk(), sizes, CPU, num_workers, 0, 1)


def test_free_memory_respects_a_container(monkeypatch: pytest.MonkeyPatch) -> None:
    assert free_memory() > 0
    monkeypatch.setattr(module, "SHARED_MEMORY", Path("/nowhere"))
    assert free_memory() == 0
