"""The gallery picture: who is next to whom, and in which colour."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from reports.conftest import on_circle

from proxy_anchor.data.table import Splits, make_tables
from proxy_anchor.reports.gallery import choose_queries, retrieval_gallery

HIT, MISS, BLACK, WHITE = (0x00, 0x9E, 0x73), (0xCC, 0x33, 0x11), (0, 0, 0), (255, 255, 255)
TILE, TEXT, GAP = 96, 14, 6


def shade(number: int) -> tuple[int, int, int]:
    """Every image has a colour of its own, so that the picture tells which one was pasted."""
    return 10 * number + 5, 77, 200


def make_rows(folder: Path, names: str, start: int = 0) -> list[tuple[Path, str]]:
    rows = []
    for number, name in enumerate(names, start):
        file = folder / f"{number}.png"
        Image.new("RGB", (30, 30), shade(number)).save(file)
        rows.append((file, name))
    return rows


def make_splits(folder: Path, query: str, gallery: str = "") -> Splits:
    query_rows = make_rows(folder, query)
    gallery_rows = make_rows(folder, gallery, len(query))
    [train] = make_tables([(folder / "t.png", "t")])
    tables = make_tables(query_rows, *([gallery_rows] if gallery else []))
    return Splits("s", train, *tables)


def read(page: Image.Image, row: int, column: int) -> tuple[tuple[int, ...], int | None]:
    """(frame colour, number of the image) of a tile; the query is column 0."""
    left = GAP if column == 0 else 2 * GAP + column * (TILE + GAP)
    top = GAP + row * (TILE + TEXT + GAP)
    centre = page.getpixel((left + TILE // 2, top + TILE // 2))
    number = None if centre == WHITE else (centre[0] - 5) // 10
    if number is not None:
        assert centre == shade(number)
    return page.getpixel((left, top)), number


def by_query(page: Image.Image, rows: int, k: int) -> dict[int, list[tuple[tuple[int, ...], int | None]]]:
    found = {}
    for row in range(rows):
        frame, query = read(page, row, 0)
        assert frame == BLACK
        found[query] = [read(page, row, column) for column in range(1, k + 1)]
    return found


def test_neighbours_and_their_colours(tmp_path):
    # On a circle: a at 0 and 10 degrees, b at 25 and 100.
    page = retrieval_gallery(make_splits(tmp_path, "aabb"), [on_circle(0, 10, 25, 100)], range(4), k=3)
    assert page.size == (4 * (TILE + GAP) + 2 * GAP, 4 * (TILE + TEXT + GAP) + GAP)
    assert by_query(page, 4, 3) == {
        0: [(HIT, 1), (MISS, 2), (MISS, 3)],
        1: [(HIT, 0), (MISS, 2), (MISS, 3)],
        2: [(MISS, 1), (MISS, 0), (HIT, 3)],
        3: [(HIT, 2), (MISS, 1), (MISS, 0)],
    }


def test_the_query_is_not_its_own_neighbour_among_exact_duplicates(tmp_path):
    page = retrieval_gallery(make_splits(tmp_path, "abcdefgh"), [torch.ones(8, 4)], range(8), k=3)
    found = by_query(page, 8, 3)
    assert sorted(found) == list(range(8))
    for query, neighbours in found.items():
        numbers = [number for _, number in neighbours]
        assert query not in numbers
        assert len(set(numbers)) == 3
        assert all(frame == MISS for frame, _ in neighbours)


def test_a_gallery_of_its_own_is_searched_whole(tmp_path):
    # Row 0 of the gallery (image 2) has the embedding of row 0 of the queries: another image, so a fair neighbour.
    splits = make_splits(tmp_path, "ab", "bab")
    page = retrieval_gallery(splits, [on_circle(0, 90), on_circle(0, 20, 80)], range(2), k=3)
    assert by_query(page, 2, 3) == {
        0: [(MISS, 2), (HIT, 3), (MISS, 4)],
        1: [(HIT, 4), (MISS, 3), (HIT, 2)],
    }


@pytest.mark.parametrize(("query", "gallery", "columns"), [("aab", "", 2), ("aa", "b", 1), ("a", "", 0)])
def test_k_is_bounded_by_what_can_be_found(tmp_path, query, gallery, columns):
    embeddings = [torch.eye(len(query), 4)] + ([torch.eye(len(gallery), 4)] if gallery else [])
    page = retrieval_gallery(make_splits(tmp_path, query, gallery), embeddings, range(len(query)))
    rows = len(query)
    assert page.size == ((columns + 1) * (TILE + GAP) + 2 * GAP, rows * (TILE + TEXT + GAP) + GAP)
    assert all(number is not None for row in by_query(page, rows, columns).values() for _, number in row)


def test_queries_are_of_different_classes_and_follow_the_seed():
    labels = np.repeat(range(3), 5)
    chosen = [choose_queries(labels, 3, seed) for seed in range(4)]
    assert all(sorted(labels[rows]) == [0, 1, 2] for rows in chosen)
    assert chosen[0] == choose_queries(labels, 3)
    assert len(set(map(tuple, chosen))) > 1
    assert sorted(choose_queries(labels, 99)) == list(range(15))
