"""Nearly equal images and doubtful labels: by given embeddings exactly, and by the command on pictures."""

from __future__ import annotations

import csv
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from commands import compose_entry, one_line
from PIL import Image, ImageDraw

from check import check
from proxy_anchor.data.table import Splits, make_tables
from proxy_anchor.inference.embedder import Embedded
from proxy_anchor.inference.near import near_findings, published_features


def splits_of(train: list[str], query: list[str]) -> Splits:
    """Images named CLASS/NUMBER."""
    tables = [[(Path(name), name.split("/")[0]) for name in names] for names in (train, query)]
    return Splits("made", *(make_tables(rows)[0] for rows in tables))


def found(splits: Splits, vectors: Any, similarity: float = 0.95, left_out: tuple[int, ...] = ()) -> list[tuple]:
    vectors = torch.nn.functional.normalize(torch.tensor(vectors, dtype=torch.float32))

    def embed(paths: list[Path]) -> Embedded:
        assert len(paths) == len(vectors)
        rows = [row for row in range(len(paths)) if row not in left_out]
        return Embedded(rows, vectors[rows], [(row, "damaged") for row in left_out], 0)

    findings = near_findings(splits, SimpleNamespace(embed=embed), similarity)  # type: ignore[arg-type]
    return [(each.kind, str(each.path), each.table, each.detail, [str(path) for path, *_ in p]) for each, p in findings]


def test_pairs_are_listed_once_leaks_first_then_by_similarity() -> None:
    splits = splits_of(["a/0", "a/1", "b/0"], ["c/0", "c/1"])
    angles = torch.tensor([0.0, 10.0, 90.0, 94.0, 0.0]).deg2rad()
    vectors = torch.stack([angles.cos(), angles.sin()], 1).tolist()
    assert found(splits, vectors) == [
        ("leak", "a/0", "train", "as c/1 (query, class c), similarity 1.000", ["a/0", "c/1"]),
        ("leak", "b/0", "train", "as c/0 (query, class c), similarity 0.998", ["b/0", "c/0"]),
        ("leak", "a/1", "train", "as c/1 (query, class c), similarity 0.985", ["a/1", "c/1"]),
        ("near", "a/0", "train", "as a/1 (train, class a), similarity 0.985", ["a/0", "a/1"]),
    ]
    assert [row[1] for row in found(splits, vectors, 0.999)] == ["a/0"]
    assert [row[1] for row in found(splits, vectors, left_out=(0, 2))] == ["a/1"]
    assert found(splits, vectors, left_out=(0, 1, 2, 3)) == []


def test_a_label_that_the_neighbours_contradict() -> None:
    """One image among nine of another class, and images of one class alone in theirs."""
    train = [*(f"a/{number}" for number in range(9)), "b/0", *(f"b/{number}" for number in range(1, 12))]
    vectors = [[1.0, 0.1 * number, 0.0] for number in range(10)] + [[0.0, 0.1 * number, 1.0] for number in range(11)]
    labels = [row for row in found(splits_of(train, []), vectors, 1.1) if row[0] == "label"]
    assert [row[1:4] for row in labels] == [("b/0", "train", "9 of 10 neighbours are of class a")]
    assert len(labels[0][4]) == 11
    train[9] = "alone/0"  # the only image of its class has no neighbour of its own
    assert found(splits_of(train, []), vectors, 1.1) == []


def picture(seed: int) -> Image.Image:
    """Lines, triangles or polygons; every seed another picture."""
    random = np.random.default_rng(seed)
    image = Image.new("RGB", (150, 120), tuple(random.integers(0, 256, 3).tolist()))
    draw = ImageDraw.Draw(image)
    for _ in range(2 + seed):
        corners = [tuple(each) for each in random.integers(0, 150, (2 + seed % 3 * 2, 2)).tolist()]
        colour = tuple(random.integers(0, 256, 3).tolist())
        draw.polygon(corners, colour) if len(corners) > 2 else draw.line(corners, colour, width=1 + seed)
    return image


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number, (part, name) in enumerate([("train", "a"), ("train", "b"), ("test", "c"), ("test", "d")]):
        (tmp_path / "my" / part / name).mkdir(parents=True)
        for image in range(2):
            picture(2 * number + image).save(tmp_path / "my" / part / name / f"{image}.png")
    picture(0).resize((130, 104)).save(tmp_path / "my" / "test" / "c" / "copy.jpg", quality=70)
    return tmp_path


def run_check(folder: Path, *more: str) -> bool:
    arguments = ["dataset=folder", f"dataset.root={folder / 'my'}", f"output={folder / 'findings.csv'}", "near=true"]
    arguments += ["embed.num_workers=0", "embed.device=cpu", "similarity=0.85"]
    return check(compose_entry("check", *arguments, *more))


def test_the_command_finds_a_changed_copy_in_another_split(folder: Path, capsys) -> None:
    assert run_check(folder)  # a note, not a failure
    [row] = csv.DictReader((folder / "findings.csv").read_text().splitlines())
    assert (row["kind"], row["table"], row["class"]) == ("leak", "train", "a")
    assert f"as {folder / 'my' / 'test' / 'c' / 'copy.jpg'} (query, class c), similarity 0.9" in row["detail"]
    assert "leak: 1 (nearly the same image in another split)\nnear: 0 (" in capsys.readouterr().out
    page = (folder / "findings.html").read_text()
    assert page.count("<img") == 2
    assert "<h1>leak: 1 (nearly the same image in another split)</h1>" in page
    assert "query: c<br>copy.jpg" in page
    assert str(folder) not in page


def test_published_features_are_the_pooled_ones() -> None:
    net = published_features().eval()
    images = torch.randint(0, 256, (2, 3, 64, 64), dtype=torch.uint8)
    with torch.no_grad():
        features = net.backbone((images - net.mean) / net.std).mean((2, 3))
        torch.testing.assert_close(net(images), torch.nn.functional.normalize(features))


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("similarity=2", "similarity=2: expected a finite number"),
        ("checkpoint=nothing", "checkpoint=nothing: no such file"),
        ("output=page.html", "output=.*page.html: expected a .csv file"),  # the table would overwrite the page
        ("output=missing/a.csv", "output=.*missing/a.csv: there is no folder"),
    ],
)
def test_wrong_arguments_are_refused_before_images_are_read(folder: Path, capsys, argument: str, message: str) -> None:
    one_line(run_check, folder, argument, match=message)
    assert capsys.readouterr().out == ""
