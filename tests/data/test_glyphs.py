"""The embedded data set: reproducible, class-disjoint, no two classes alike, hard for pixels, safe to interrupt."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from commands import one_line
from PIL import Image, ImageFilter, ImageOps

from proxy_anchor.data import glyphs
from proxy_anchor.data.glyphs import CHARACTERS, FACES, draw_glyph, load_glyphs, upright_mask

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(glyphs.__file__).parents[2])}  # of another process
SMALL = {"train_classes": 3, "test_classes": 2, "images_per_class": 4, "image_size": 32}

ALIKE_ABOVE = 0.985  # the largest similarity in CHARACTERS is 0.973, also of turned characters


def shape_similarities(characters: str) -> np.ndarray:
    """(n, n) cosines of the characters' masks, each brought to one size and blurred; of the face with the largest."""
    largest = np.zeros((len(characters), len(characters)), np.float32)
    for face in FACES:
        masks = [ImageOps.expand(ImageOps.pad(upright_mask(each, face), (22, 22)), 4) for each in characters]
        ink = np.stack([np.asarray(mask.filter(ImageFilter.GaussianBlur(0.7)), np.float32).ravel() for mask in masks])
        ink /= np.linalg.norm(ink, axis=1, keepdims=True)
        np.maximum(largest, ink @ ink.T, out=largest)
    return largest


def pixel_digest(splits) -> str:
    digest = hashlib.sha256()
    for path in (*splits.train.paths, *splits.query.paths):
        digest.update(f"{path.parent.name}/{path.name}".encode() + Image.open(path).tobytes())
    return digest.hexdigest()


def recall_at_1(vectors: np.ndarray, labels: np.ndarray) -> float:
    vectors = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    similarity = vectors @ vectors.T
    np.fill_diagonal(similarity, -np.inf)
    return float((labels[similarity.argmax(1)] == labels).mean())


def test_defaults_are_120_and_120_other_classes(tmp_path, monkeypatch):
    monkeypatch.setattr(glyphs, "_draw_missing", lambda *args, **kwargs: None)
    splits = load_glyphs(tmp_path)
    assert (splits.train.num_classes, splits.query.num_classes) == (120, 120)
    assert len(splits.train) == len(splits.query) == 120 * 24
    assert splits.gallery is None
    assert splits.shared_classes == []


def test_every_character_has_one_class_name_in_ascii():
    names = [glyphs.class_name(character) for character in CHARACTERS]
    assert len(set(names)) == len(set(CHARACTERS)) == len(CHARACTERS)
    assert all(name.isascii() and name.replace("_", "").isalnum() for name in names)


def test_every_face_draws_every_character():
    for face in FACES:
        unknown = upright_mask("\uffff", face).tobytes()  # the box that stands for a character that a font lacks
        assert not [character for character in CHARACTERS if upright_mask(character, face).tobytes() == unknown]


def test_no_two_characters_look_alike():
    similarities = np.triu(shape_similarities(CHARACTERS), 1)
    assert [CHARACTERS[i] + CHARACTERS[j] for i, j in np.argwhere(similarities > ALIKE_ABOVE)] == []
    for group in ("AΑА", "oοо", "BΒВ"):  # one shape in Latin, Greek and Cyrillic
        assert (shape_similarities(group) > ALIKE_ABOVE).all()


def test_pixels_depend_on_the_seed_only_also_when_two_processes_draw_at_once(tmp_path):
    first = pixel_digest(load_glyphs(tmp_path / "a", **SMALL))
    # Two other processes that draw at once, and have drawn other things before.
    code = (
        "from proxy_anchor.data.glyphs import draw_glyph, load_glyphs\n"
        f"draw_glyph('A', 3); load_glyphs({str(tmp_path / 'b')!r}, **{SMALL!r})"  # no __main__ guard is needed
    )
    both = [subprocess.Popen([sys.executable, "-c", code], env=ENVIRONMENT) for _ in range(2)]
    assert [process.wait(timeout=60) for process in both] == [0, 0]
    assert first == pixel_digest(load_glyphs(tmp_path / "b", **SMALL))
    assert first != pixel_digest(load_glyphs(tmp_path / "a", seed=1, **SMALL))
    assert draw_glyph("A", 0).tobytes() == draw_glyph("A", 0).tobytes() != draw_glyph("A", 1).tobytes()


def test_raw_pixels_find_few_neighbours(tmp_path):
    splits = load_glyphs(tmp_path, train_classes=1, test_classes=120, images_per_class=12)
    pixels = np.stack([np.asarray(Image.open(path), np.float32).ravel() for path in splits.query.paths])
    for vectors in (pixels, pixels - pixels.mean(0), pixels - pixels.mean(1, keepdims=True)):
        assert recall_at_1(vectors, splits.query.labels) <= 0.15


def test_damaged_files_are_drawn_again_and_no_others(tmp_path):
    splits = load_glyphs(tmp_path, **SMALL)
    before = pixel_digest(splits)
    missing, empty, kept = splits.train.paths[0], splits.query.paths[1], splits.train.paths[1]
    missing.unlink()
    empty.write_bytes(b"")
    stamp = kept.stat().st_mtime_ns
    assert pixel_digest(load_glyphs(tmp_path, **SMALL)) == before
    assert kept.stat().st_mtime_ns == stamp


def test_killed_run_leaves_no_half_written_image_and_is_continued(tmp_path, monkeypatch):
    whole = pixel_digest(load_glyphs(tmp_path / "whole", **SMALL))
    real, calls = draw_glyph, []

    class HalfWritten:
        def save(self, path, **kwargs):
            Path(path).write_bytes(b"\x89PNG half of it")
            raise KeyboardInterrupt

    def dying(*args, **kwargs):
        calls.append(args)
        return real(*args, **kwargs) if len(calls) < 5 else HalfWritten()

    monkeypatch.setattr(glyphs, "draw_glyph", dying)
    with pytest.raises(KeyboardInterrupt):
        load_glyphs(tmp_path / "killed", **SMALL)
    assert len(list((tmp_path / "killed").rglob("[!.]*.png"))) == 4
    monkeypatch.setattr(glyphs, "draw_glyph", real)
    assert pixel_digest(load_glyphs(tmp_path / "killed", **SMALL)) == whole


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"train_classes": 200, "test_classes": 200}, [str(len(CHARACTERS)), "test_classes=200", "fewer"]),
        ({"image_size": 8}, ["image_size=8", "24"]),
        ({"images_per_class": 1}, ["images_per_class=1", "2"]),
        ({"test_classes": 0}, ["test_classes=0"]),
        ({"train_classes": True}, ["train_classes=True"]),
        ({"seed": -1}, ["seed=-1"]),
    ],
)
def test_bad_arguments_are_named_before_anything_is_written(tmp_path, arguments, words):
    line = one_line(load_glyphs, tmp_path / "data", **arguments)
    assert all(word in line for word in words)
    assert not (tmp_path / "data").exists()
