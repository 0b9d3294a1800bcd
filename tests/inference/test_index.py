"""The vector index: exact is the plain search, approximate finds nearly the same, and both keep across files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from proxy_anchor.errors import UsageError
from proxy_anchor.inference import index as module
from proxy_anchor.inference.index import VectorIndex, kind_for
from proxy_anchor.retrieval.search import has_faiss, search

needs_faiss = pytest.mark.skipif(not has_faiss(), reason="faiss is not installed")
KINDS = ["exact", pytest.param("hnsw", marks=needs_faiss), pytest.param("ivf_pq", marks=needs_faiss)]
each_kind = pytest.mark.parametrize("kind", KINDS)


def clustered(count: int, dim: int = 16, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(20, dim, generator=torch.Generator().manual_seed(99))
    return centres[torch.randint(20, (count,), generator=generator)] + torch.randn(count, dim, generator=generator)


def filled(kind: str, vectors: torch.Tensor, first_id: int = 0) -> VectorIndex:
    index = VectorIndex(vectors.shape[1], kind=kind)
    index.add(np.arange(first_id, first_id + len(vectors)), vectors)
    return index


@each_kind
def test_finds_what_the_exact_search_finds(kind: str, capsys) -> None:
    gallery, queries = clustered(2000), clustered(50, seed=1)
    similarities, ids = filled(kind, gallery, first_id=7).search(queries, 10)
    expected, rows = search(queries, gallery, 10)
    hits = [len(set(a) & set(b)) for a, b in zip((ids - 7).tolist(), rows.tolist(), strict=True)]
    assert sum(hits) / 500 > (0.9 if kind != "exact" else 0.999)
    assert torch.allclose(similarities[:, 0], expected[:, 0], atol=1e-6)
    printed = capsys.readouterr().out
    assert ("of the exact 10 nearest neighbours" in printed) == (kind != "exact")


@each_kind
def test_similarities_are_exact_also_where_the_neighbours_are_not(kind: str) -> None:
    gallery, queries = clustered(1500), clustered(20, seed=1)
    similarities, ids = filled(kind, gallery).search(queries, 5)
    unit = [each / each.norm(dim=1, keepdim=True) for each in (queries, gallery)]
    assert torch.allclose(similarities, (unit[0][:, None] * unit[1][ids]).sum(2), atol=1e-6)
    assert (similarities[:, 1:] <= similarities[:, :-1]).all()


@each_kind
def test_removed_vectors_are_not_found_and_added_ones_are(kind: str) -> None:
    gallery = clustered(1200)
    index = filled(kind, gallery)
    index.search(gallery[:1], 1)  # builds it
    index.remove(np.arange(0, 1200, 15))  # 80 of them, fewer than make it build anew
    assert len(index) == 1120
    _, ids = index.search(gallery[::15], 3)
    assert not np.isin(ids, np.arange(0, 1200, 15)).any()
    index.add(np.array([5000]), 2 * gallery[:1])
    similarities, ids = index.search(gallery[:1], 1)
    assert ids.tolist() == [[5000]]
    assert similarities.item() == pytest.approx(1)
    index.remove(np.arange(0, 800))
    left = [id_ for id_ in range(800, 1200) if id_ % 15] + [5000]
    assert index.live()[0].tolist() == left
    assert len(index) == len(left)
    assert index.search(gallery[:1], len(index))[1].shape == (1, len(index))
    assert torch.allclose(index.get(np.array([5000])), gallery[:1] / gallery[:1].norm())


@each_kind
def test_comes_back_from_its_files(kind: str, tmp_path: Path) -> None:
    gallery, queries = clustered(1200), clustered(10, seed=1)
    index = filled(kind, gallery)
    index.search(queries, 5)
    index.remove(np.arange(5))
    index.save(tmp_path)
    again = VectorIndex(16, kind=kind)
    again.load(tmp_path, index.ids)
    assert len(again) == 1195
    before, after = index.search(queries, 5), again.search(queries, 5)
    assert np.array_equal(before[1], after[1])
    assert torch.equal(before[0], after[0])
    again.add(np.array([9999]), queries[:1])
    assert again.search(queries[:1], 1)[1].tolist() == [[9999]]


def test_comes_back_where_faiss_was_taught_tensors(tmp_path: Path) -> None:
    pytest.importorskip("faiss")
    filled("exact", clustered(50)).save(tmp_path)
    # In a process of its own: the import changes faiss for good.
    code = (
        "import sys, numpy as np, faiss.contrib.torch_utils\nfrom pathlib import Path\n"
        "from proxy_anchor.inference.index import VectorIndex\n"
        "index = VectorIndex(16, kind='exact'); index.load(Path(sys.argv[1]), np.arange(50)); print(len(index))\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["50"], done.stderr


def test_size_chooses_the_kind(monkeypatch, capsys) -> None:
    assert [kind_for(n) for n in (1, 1_000_000, 1_000_001, 4_000_001)] == ["exact", "exact", "hnsw", "ivf_pq"]
    if has_faiss():
        monkeypatch.setattr(module, "EXACT_LIMIT", 1000)
        index = filled("auto", clustered(1000))
        index.search(clustered(1), 1)
        assert index.kind == "exact"
        index.add(np.array([1000]), clustered(1))
        index.search(clustered(1), 1)
        assert index.kind == "hnsw"
        assert index.measured_recall is not None
        assert "hnsw over 1,001 vectors" in capsys.readouterr().out
        index.remove(np.arange(10))
        assert index.search(clustered(1), 991)[1].shape == (1, 991)


def test_without_faiss_the_exact_search_works_and_the_rest_is_one_line(monkeypatch, tmp_path: Path) -> None:
    gallery = clustered(50)
    monkeypatch.setattr(module, "has_faiss", lambda: False)
    index = VectorIndex(16, engine="torch")
    index.add(np.arange(50), gallery)
    assert index.search(gallery[3:4], 1)[1].tolist() == [[3]]
    index.save(tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["embeddings.npy"]
    again = VectorIndex(16, engine="torch")
    again.load(tmp_path, index.ids)
    assert again.search(gallery[3:4], 1)[1].tolist() == [[3]]
    with pytest.raises(UsageError, match="needs faiss"):
        VectorIndex(16, kind="hnsw")
    monkeypatch.setattr(module, "EXACT_LIMIT", 10)
    with pytest.raises(UsageError, match="50 vectors: an index beyond exact search needs faiss"):
        index.search(gallery[:1], 1)


def test_damaged_files_are_one_line(tmp_path: Path) -> None:
    index = filled("exact", clustered(50))
    index.save(tmp_path)
    with pytest.raises(UsageError, match="lists 49 images but holds 50"):
        VectorIndex(16).load(tmp_path, index.ids[:49])
    for file in tmp_path.iterdir():
        file.write_bytes(file.read_bytes()[:60])
    with pytest.raises(UsageError, match="is damaged") as caught:
        VectorIndex(16).load(tmp_path, index.ids)
    assert "\n" not in str(caught.value)
    for file in tmp_path.iterdir():
        file.unlink()
    with pytest.raises(UsageError, match="holds no vectors"):
        VectorIndex(16).load(tmp_path, index.ids)


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda index: VectorIndex(4).search(torch.ones(1, 4), 1), "the gallery is empty"),
        (lambda index: index.search(torch.ones(1, 16), 51), "K=51 is larger than the gallery: it has 50 images"),
        (lambda index: index.search(torch.ones(1, 8), 1), "D=8 and the gallery D=16"),
        (lambda index: index.search(torch.full((1, 16), torch.nan), 1), "NaN"),
        (lambda index: index.add(np.array([99]), torch.full((1, 16), torch.inf)), "infinity"),
        (lambda index: VectorIndex(4, kind="tree"), "kind=tree is not known"),
    ],
)
def test_bad_input_is_one_line(call, reason: str) -> None:
    with pytest.raises(UsageError, match=reason) as caught:
        call(filled("exact", clustered(50)))
    assert "\n" not in str(caught.value)
