"""The vector index: exact is the plain search, an index of faiss finds nearly the same, and both keep across files."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import one_line

from proxy_anchor.inference import index as module
from proxy_anchor.inference.index import VectorIndex
from proxy_anchor.retrieval.search import has_faiss, search

needs_faiss = pytest.mark.skipif(not has_faiss(), reason="faiss is not installed")
APPROXIMATE = ["HNSW32", "IVF8,Flat"]
each_kind = pytest.mark.parametrize("kind", ["exact", *(pytest.param(each, marks=needs_faiss) for each in APPROXIMATE)])


def clustered(count: int, dim: int = 16, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(20, dim, generator=torch.Generator().manual_seed(99))
    return centres[torch.randint(20, (count,), generator=generator)] + torch.randn(count, dim, generator=generator)


def filled(kind: str, vectors: torch.Tensor, first_id: int = 0) -> VectorIndex:
    index = VectorIndex(vectors.shape[1], kind=kind)
    index.add(np.arange(first_id, first_id + len(vectors)), vectors)
    return index


@each_kind
def test_finds_what_the_exact_search_finds_with_exact_similarities(kind: str) -> None:
    gallery, queries = clustered(1500), clustered(50, seed=1)
    similarities, ids = filled(kind, gallery, first_id=7).search(queries, 10)
    _, rows = search(queries, gallery, 10)
    hits = [len(set(a) & set(b)) for a, b in zip((ids - 7).tolist(), rows.tolist(), strict=True)]
    assert sum(hits) / 500 > {"exact": 0.999, "HNSW32": 0.9}.get(kind, 0.3)
    unit = [each / each.norm(dim=1, keepdim=True) for each in (queries, gallery)]
    assert torch.allclose(similarities, (unit[0][:, None] * unit[1][ids - 7]).sum(2), atol=1e-6)
    assert (similarities[:, 1:] <= similarities[:, :-1]).all()


@each_kind
def test_removed_vectors_are_not_found_and_added_ones_are(kind: str) -> None:
    gallery = clustered(600)
    index = filled(kind, gallery)
    index.search(gallery[:1], 1)  # builds it
    index.remove(np.arange(0, 600, 15))
    assert len(index) == 560
    _, ids = index.search(gallery[::15], 3)
    assert not np.isin(ids, np.arange(0, 600, 15)).any()
    index.add(np.array([5000]), 2 * gallery[:1])
    similarities, ids = index.search(gallery[:1], 1)
    assert ids.tolist() == [[5000]]
    assert similarities.item() == pytest.approx(1)
    index.remove(np.arange(0, 200))
    left = [id_ for id_ in range(200, 600) if id_ % 15] + [5000]
    assert index.ids.tolist() == left
    # faiss visits one list of eight, and the rest is found all the same
    assert sorted(index.search(gallery[:1], len(index))[1][0].tolist()) == left
    assert torch.allclose(index.get(np.array([5000])), gallery[:1] / gallery[:1].norm())


@each_kind
def test_comes_back_from_its_files(kind: str, tmp_path: Path) -> None:
    gallery, queries = clustered(600), clustered(10, seed=1)
    index = filled(kind, gallery)
    index.remove(np.arange(5))
    index.save(tmp_path)
    again = VectorIndex(16, kind=kind)
    again.load(tmp_path, index.ids)
    assert len(again) == 595
    before, after = index.search(queries, 5), again.search(queries, 5)
    assert np.array_equal(before[1], after[1])
    assert torch.equal(before[0], after[0])
    again.add(np.array([9999]), queries[:1])
    assert again.search(queries[:1], 1)[1].tolist() == [[9999]]


def test_without_faiss_the_exact_search_works_and_the_rest_is_one_line(monkeypatch, tmp_path: Path) -> None:
    gallery = clustered(50)
    monkeypatch.setattr(module, "has_faiss", lambda: False)
    index = VectorIndex(16, engine="torch")
    index.add(np.arange(50), gallery)
    index.save(tmp_path)
    again = VectorIndex(16, engine="torch")
    again.load(tmp_path, index.ids)
    assert again.search(gallery[3:4], 1)[1].tolist() == [[3]]
    one_line(VectorIndex, 16, kind="HNSW32", match="kind=HNSW32: faiss is not installed")


@each_kind
def test_damaged_files_are_one_line(kind: str, tmp_path: Path) -> None:
    index = filled(kind, clustered(600))
    index.save(tmp_path)
    one_line(VectorIndex(16, kind=kind).load, tmp_path, index.ids[:599], match="lists 599 images but holds 600")
    for file in sorted(tmp_path.iterdir(), reverse=True):
        for damage in (lambda file: os.truncate(file, 60), lambda file: os.truncate(file, 0), Path.unlink):
            damage(file)
            one_line(VectorIndex(16, kind=kind).load, tmp_path, index.ids, match=rf"{file.name} is missing or damaged")


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda index: VectorIndex(4).search(torch.ones(1, 4), 1), "the gallery is empty"),
        (lambda index: index.search(torch.ones(1, 16), 51), "K=51 is larger than the gallery: it has 50 images"),
        (lambda index: index.search(torch.ones(1, 8), 1), "D=8 and the gallery D=16"),
        (lambda index: index.search(torch.full((1, 16), torch.nan), 1), "NaN"),
        (lambda index: index.add(np.array([99]), torch.full((1, 16), torch.inf)), "infinity"),
        pytest.param(lambda index: VectorIndex(4, kind="tree"), "kind=tree: .*could not parse", marks=needs_faiss),
        pytest.param(
            lambda index: filled("IVF1024,PQ8", index.vectors).search(torch.ones(1, 16), 1),
            r"kind=IVF1024,PQ8: faiss cannot build it from 50 vectors .*Number of training points \(50\)",
            marks=needs_faiss,
        ),
    ],
)
def test_bad_input_is_one_line(call, reason: str) -> None:
    one_line(call, filled("exact", clustered(50)), match=reason)
