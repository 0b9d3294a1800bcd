"""Broken files: check finds all, training refuses or skips them by name, evaluation never skips one."""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import TINY_FOLDER, compose_train, one_line
from pictures import encoded, noise
from processes import permissions_count

from proxy_anchor.cli import config
from proxy_anchor.data.bad_images import BAD, check_images, drop_bad_images, naming_bad_images
from proxy_anchor.data.folder import load_folder
from proxy_anchor.errors import UnreadableImage, UsageError
from proxy_anchor.training.module import MetricLearner
from train import train

CLASSES, PER_CLASS = 10, 10


def chunk(name: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))


BOMB = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", 60000, 60000, 8, 2, 0, 0, 0)) + chunk(b"IEND", b"")
PNG = encoded(noise(40, 40), "PNG")


def _write(path: Path, content: Callable[[bytes], bytes]) -> None:
    path.write_bytes(content(path.read_bytes()))


def unlinked(path: Path) -> None:
    path.unlink()
    path.symlink_to("nowhere.jpg")


def fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)  # to open it would wait for ever


def unreadable(path: Path) -> None:
    path.chmod(0)


DAMAGE: dict[str, Callable[[Path], None]] = {
    "empty": lambda path: _write(path, lambda image: b""),
    "truncated": lambda path: _write(path, lambda image: image[: len(image) // 2]),
    "short_by_a_little": lambda path: _write(path, lambda image: image[:-40]),
    "header": lambda path: _write(path, lambda image: image[:20]),
    "text": lambda path: _write(path, lambda image: b"<html>404 not found</html>"),
    "zeros": lambda path: _write(path, lambda image: bytes(len(image))),
    "other_format_cut": lambda path: _write(path, lambda image: PNG[: len(PNG) // 2]),
    "checksum": lambda path: _write(path, lambda image: PNG[:60] + b"\xff\x00\xff" + PNG[63:]),
    "bomb": lambda path: _write(path, lambda image: BOMB),
    "resource_fork": lambda path: _write(path, lambda image: b"\x00\x05\x16\x07\x00\x02\x00\x00Mac OS X        "),
    "dangling_link": unlinked,
    "no_file": fifo,
}
if permissions_count():
    DAMAGE["no_permission"] = unreadable


def make_folder(root: Path, classes: int = CLASSES, per_class: int = PER_CLASS, part: str = "") -> list[Path]:
    paths = []
    for number in range(classes * per_class):
        path = root / part / f"class{number // per_class}" / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encoded(noise(40, 40, number), "JPEG"))
        paths.append(path)
    return paths


@pytest.fixture
def broken(tmp_path: Path) -> tuple[Path, list[Path]]:
    """A folder with its own split, and the training images of it that are broken: one of every kind."""
    train, _ = make_folder(tmp_path / "mine", part="train"), make_folder(tmp_path / "mine", part="test")
    bad = train[3 :: len(train) // len(DAMAGE)][: len(DAMAGE)]
    for path, damage in zip(bad, DAMAGE.values(), strict=True):
        damage(path)
    return tmp_path / "mine", bad


def options(root: Path, *more: str) -> list[str]:
    return [*TINY_FOLDER, f"dataset.root={root}", "trainer.max_epochs=1", "run=x", *more]


def run(root: Path, *more: str) -> tuple[dict, Path]:
    """Train in this process; the result and the run folder."""
    folder = root.parent / "run"
    return train(compose_train(*options(root, *more)), folder), folder


def test_check_finds_two_per_cent_of_every_kind_in_5000_images(tmp_path):
    paths = make_folder(tmp_path / "many", classes=50, per_class=100)
    bad = paths[7::50]
    for number, path in enumerate(bad):
        list(DAMAGE.values())[number % len(DAMAGE)](path)
    findings = check_images(load_folder(tmp_path / "many", verify_files=False))
    assert (len(paths), len(bad)) == (5000, 100)
    assert {each.path for each in findings if each.kind in BAD} == set(bad)


@pytest.fixture
def corrupt(broken):
    """The same without what a look at the folder finds: these are met only when they are read."""
    root, bad = broken
    seen = {path for path, name in zip(bad, DAMAGE, strict=True) if name in ("empty", "dangling_link", "no_file")}
    for path in seen:
        path.unlink()
    return root, [path for path in bad if path not in seen]


def test_a_look_at_the_folder_refuses_what_is_no_file_or_empty(broken):
    one_line(load_folder, broken[0], match=r"^3 of 200 mine images cannot be used: .*\(empty\).*on_bad_image=skip")


@pytest.mark.parametrize("way", [["data.cache=none"], ["data.cache=none", "data.num_workers=2"], ["data.cache=ram"]])
def test_training_refuses_by_default_and_names_them(way, corrupt):
    root, bad = corrupt
    text = one_line(run, root, "trainer.max_epochs=9", *way)  # every image has its turn
    assert text.startswith(f"{len(bad)} training images cannot be used: ")
    assert all(str(path) in text for path in bad[:5])
    assert f"and {len(bad) - 5} more. Restore or remove them (`python src/check.py`" in text
    assert "or set data.on_bad_image=skip to train without them." in text


@pytest.mark.parametrize("way", [["data.cache=none", "data.num_workers=2"], ["data.cache=ram"], ["data.cache=disk"]])
def test_skip_trains_without_them_and_says_so(way, broken, tmp_path, capsys):
    root, bad = broken
    result, folder = run(root, "data.on_bad_image=skip", f"data.cache_dir={tmp_path / 'cache'}", *way)
    lines = (folder / "bad_images.txt").read_text().splitlines()
    assert {line.partition(" (")[0] for line in lines} == set(map(str, bad))
    assert (result["num_skipped_images"], result["num_train_images"]) == (len(bad), 100 - len(bad))
    assert json.loads((folder / "result.json").read_text())["num_skipped_images"] == len(bad)
    said = f"left out, as they cannot be read: {len(bad)} training images: {root}"
    for place in (capsys.readouterr().out, *((folder / name).read_text() for name in ("README.md", "index.html"))):
        assert said in place


def test_skip_on_clean_images_changes_nothing(tmp_path):
    make_folder(tmp_path / "mine", part="train")
    make_folder(tmp_path / "mine", part="test", classes=2)
    splits = load_folder(tmp_path / "mine")
    assert drop_bad_images(splits) is splits


def test_searched_images_are_never_left_out(broken):
    root, _ = broken
    bad = root / "test" / "class1" / "12.jpg"
    bad.write_bytes(b"no image")
    with pytest.raises(UnreadableImage, match=r"^1 searched images cannot be used: ") as caught:
        run(root, "data.on_bad_image=skip")
    assert str(bad) in str(caught.value)
    assert "evaluation leaves none out" in str(caught.value)
    assert not (root.parent / "run").exists()


def test_neither_are_training_classes_that_are_held_out(broken):
    root, bad = broken
    cfg = compose_train(*options(root, "data.on_bad_image=skip", "validation=classes"))
    held_out = set(config.load_splits(cfg, training=False).validation.paths)
    assert held_out & set(bad)
    with pytest.raises(UnreadableImage, match=rf"^{len(held_out & set(bad))} searched images cannot be used: "):
        config.load_splits(cfg)


def test_a_checkpoint_of_such_a_run_is_evaluated_without_its_training_images(broken):
    root, _ = broken
    cfg = compose_train(*options(root, "data.on_bad_image=skip"))
    assert len(config.load_splits(cfg, training=False).query) == 100
    searched = config.load_splits(cfg, training=False)
    searched.query.paths[3].write_bytes(b"")
    with (
        pytest.raises(UnreadableImage, match=r"^1 searched images cannot be used: .*\(empty\)"),
        naming_bad_images(searched),
    ):
        raise UnreadableImage("one of them")


def test_a_repaired_image_is_not_slipped_into_a_run_that_left_it_out(broken):
    root, bad = broken
    _, folder = run(root, "data.on_bad_image=skip")
    (folder / "result.json").unlink()
    bad[0].write_bytes(encoded(noise(40, 40), "JPEG"))
    with pytest.raises(UsageError, match=r"^the train images are not those that this run began with \(then 8\d images"):
        run(root, "data.on_bad_image=skip")


@pytest.mark.parametrize(("workers", "cut", "reason"), [(2, True, "corrupt, "), (0, False, "missing")])
def test_what_goes_bad_while_training_is_one_line_and_the_run_continues_once_it_is_back(
    cut, reason, workers, tmp_path, monkeypatch
):
    paths = make_folder(tmp_path / "mine", part="train")
    make_folder(tmp_path / "mine", part="test", classes=2)
    how = ["data.cache=none", f"data.num_workers={workers}", "trainer.max_epochs=3", "data.on_bad_image=skip"]
    whole = {path: path.read_bytes() for path in paths[40:60]}
    step = MetricLearner.training_step

    def fail_in_epoch_2(learner, *given):
        if learner.current_epoch == 1:
            for path in whole:  # a disk that is gone takes more than one
                path.write_bytes(whole[path][:400]) if cut else path.unlink(missing_ok=True)
        return step(learner, *given)

    monkeypatch.setattr(MetricLearner, "training_step", fail_in_epoch_2)
    text = one_line(run, tmp_path / "mine", *how)
    monkeypatch.undo()
    assert text.startswith(f"20 training images cannot be used: {paths[40]} ({reason}")
    assert "the same command with run=NAME continues" in text
    for path, content in whole.items():
        path.write_bytes(content)
    result, _ = run(tmp_path / "mine", *how)
    assert [row["epoch"] for row in result["history"]] == [0, 1, 2, 3]
