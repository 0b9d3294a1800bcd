from __future__ import annotations

import os
import re
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from by_fractions import each_engine, rows
from commands import one_line

from proxy_anchor.errors import UsageError
from proxy_anchor.retrieval import search as module
from proxy_anchor.retrieval.rows import float32_error, normalise
from proxy_anchor.retrieval.search import resolve_engine, search

pytestmark = pytest.mark.filterwarnings("ignore:nearly all queries are also rows")


def reference(
    queries: torch.Tensor, gallery: torch.Tensor, k: int, exclude_self: bool
) -> tuple[np.ndarray, np.ndarray]:
    """In float64, every row sorted in full."""
    unit = [each.double() / each.double().norm(dim=1, keepdim=True) for each in (queries, gallery)]
    similarities = unit[0] @ unit[1].T
    if exclude_self:
        similarities.fill_diagonal_(-torch.inf)
    values, indices = similarities.sort(descending=True, stable=True)
    return values[:, :k].numpy(), indices[:, :k].numpy()


def pretend_faiss(monkeypatch: pytest.MonkeyPatch, *, gpu: bool) -> None:
    monkeypatch.setattr(module, "has_faiss", lambda: True)
    monkeypatch.setattr(module, "faiss_gpu_works", lambda: gpu)


class TestSearch:
    def test_a_search_that_finds_the_queries_says_so(self) -> None:
        with pytest.warns(UserWarning, match="nearly all queries are also rows of the gallery"):
            search(rows(20), torch.cat([rows(20), rows(5, seed=1)]), 3)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            search(rows(20), rows(20), 3, exclude_self=True)
            search(rows(20), torch.cat([rows(18), rows(5, seed=1)]), 3)
            search(torch.ones(50, 8), torch.ones(60, 8), 1)  # a collapsed network

    @each_engine
    @pytest.mark.parametrize("k", [1, 7, 58])
    @pytest.mark.parametrize("exclude_self", [False, True])
    def test_matches_a_full_sort(self, engine: str, k: int, exclude_self: bool) -> None:
        gallery = rows(59) * 5
        queries = gallery if exclude_self else rows(23, seed=1)
        similarities, indices = search(queries, gallery, k, engine=engine, exclude_self=exclude_self)
        expected_similarities, expected_indices = reference(queries, gallery, k, exclude_self)
        assert similarities.dtype == torch.float32
        assert indices.dtype == torch.int64
        np.testing.assert_array_equal(indices, expected_indices)
        np.testing.assert_allclose(similarities, expected_similarities, atol=float32_error(16))

    @each_engine
    def test_the_row_itself_is_removed_among_more_than_k_duplicates(self, engine: str) -> None:
        x = rows(4).repeat(6, 1)  # six copies of four points; K + 1 = 3 hits need not contain the row itself
        _, indices = search(x, x, 2, engine=engine, exclude_self=True)
        assert indices.shape == (24, 2)
        for i, found in enumerate(indices.tolist()):
            assert i not in found
            assert len(set(found)) == 2
            assert all(j % 4 == i % 4 for j in found)

    @each_engine
    def test_equal_similarities_come_in_index_order(self, engine: str) -> None:
        x = torch.randint(-1, 2, (80, 3), generator=torch.Generator().manual_seed(0)).float()
        similarities, indices = search(x, x, 79, engine=engine, exclude_self=True)
        tied = similarities[:, 1:] == similarities[:, :-1]
        assert tied.sum() > 1000
        assert (similarities.diff(dim=1) <= 0).all()
        assert (indices.diff(dim=1)[tied] > 0).all()
        assert (indices.sort(1).values == torch.tensor([[j for j in range(80) if j != i] for i in range(80)])).all()

    @each_engine
    @pytest.mark.parametrize(
        ("dtype", "scale"), [(torch.float16, 1), (torch.bfloat16, 1), (torch.float32, 1e30), (torch.float64, 1e200)]
    )
    def test_any_float_type_and_scale(self, engine: str, dtype: torch.dtype, scale: float) -> None:
        x = (rows(40).double() * scale).to(dtype)
        unscaled = x.double() / scale
        np.testing.assert_array_equal(search(x, x, 5, engine=engine)[1], reference(unscaled, unscaled, 5, False)[1])

    @each_engine
    def test_autocast_and_reduced_matmul_precision_change_nothing(self, engine: str) -> None:
        x = rows(512, 512)  # smaller products do not use the library that "medium" concerns
        expected = search(x, x, 10, engine=engine, exclude_self=True)
        before = torch.get_float32_matmul_precision()
        try:
            torch.set_float32_matmul_precision("medium")
            with torch.autocast("cpu", dtype=torch.bfloat16):
                got = search(x, x, 10, engine=engine, exclude_self=True)
            assert torch.get_float32_matmul_precision() == "medium"
            assert torch.backends.mkldnn.matmul.fp32_precision == "bf16"
        finally:
            torch.set_float32_matmul_precision(before)
        assert torch.equal(got[0], expected[0])
        assert torch.equal(got[1], expected[1])

    @pytest.mark.gpu
    @each_engine
    def test_cuda_agrees_with_the_cpu(self, engine: str) -> None:
        x = rows(500, 64)
        _, expected = reference(x, x, 10, True)
        similarities, indices = search(x.cuda(), x.cuda(), 10, engine=engine, exclude_self=True)
        assert similarities.device == indices.device == torch.device("cuda", 0)
        np.testing.assert_array_equal(indices.cpu(), expected)


class TestRefusals:
    @pytest.mark.parametrize(("k", "exclude_self", "available"), [(21, False, 20), (20, True, 19)])
    def test_k_above_the_gallery(self, k: int, exclude_self: bool, available: int) -> None:
        x = rows(20)
        search(x, x, k - 1, exclude_self=exclude_self)
        one_line(search, x, x, k, exclude_self=exclude_self, match=rf"K={k} .* {available} images")

    @pytest.mark.parametrize("k", [0, -1, True, 1.0])
    def test_k_that_is_no_count(self, k: object) -> None:
        one_line(search, rows(20), rows(20), k, match="k=")

    @each_engine
    @pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
    def test_bad_rows_are_counted(self, engine: str, value: float) -> None:
        bad = rows(20)
        bad[[3, 3, 7], [0, 1, 15]] = value
        one_line(search, bad, rows(9), 1, engine=engine, match="2 of 20 query embeddings")
        one_line(search, rows(9), bad, 1, engine=engine, match="2 of 20 gallery embeddings")

    def test_shapes_and_types(self) -> None:
        one_line(search, rows(5), rows(5, 8), 1, match="D=16 and the gallery D=8")
        one_line(search, rows(5), rows(6), 1, exclude_self=True, match="5 queries and 6 gallery rows")
        one_line(search, rows(5), rows(0), 1, match=r"gallery: .* shape \(0, 16\)")
        one_line(search, rows(5)[0], rows(5), 1, match=r"queries: .* shape \(16,\)")
        one_line(search, rows(5).long(), rows(5), 1, match=r"queries: .*int64")
        one_line(search, [[1.0]], rows(5), 1, match=r"queries: .* list")
        with pytest.raises(UsageError, match=r"gallery: .*float32 .torch.sparse_coo. of shape \(5, 16\)"):
            search(rows(5), rows(5).to_sparse(), 1)
        one_line(search, rows(5), np.full((5, 16), "a"), 1, match=r"gallery: expected a float array, got <U1")


class TestResolveEngine:
    def test_unknown_name_lists_the_known(self) -> None:
        one_line(resolve_engine, "fiass", 1, match="auto, faiss_gpu, faiss_cpu, torch")

    def test_without_faiss(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "faiss", None)
        assert resolve_engine("auto", 8) == resolve_engine("torch", 8) == "torch"
        one_line(resolve_engine, "faiss_cpu", 8, match="pip install faiss-cpu")
        one_line(resolve_engine, "faiss_gpu", 8, match="pip install faiss-gpu")
        x = rows(30)
        np.testing.assert_array_equal(search(x, x, 4, exclude_self=True)[1], reference(x, x, 4, True)[1])

    def test_with_a_cpu_build(self, monkeypatch: pytest.MonkeyPatch) -> None:
        pretend_faiss(monkeypatch, gpu=False)
        assert resolve_engine("auto", 8) == resolve_engine("auto", 5000, device="cpu") == "faiss_cpu"
        assert resolve_engine("auto", 8, device="cuda") == "torch"  # rather than copy everything to the CPU
        assert resolve_engine("faiss_cpu", 5000, device="cuda") == "faiss_cpu"
        one_line(resolve_engine, "faiss_gpu", 8, match="no working GPU")

    def test_largest_k_on_a_gpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        pretend_faiss(monkeypatch, gpu=True)
        assert resolve_engine("auto", 2048) == resolve_engine("faiss_gpu", 2048) == "faiss_gpu"
        for k, exclude_self in ((2049, False), (2048, True)):
            for name in ("auto", "faiss_gpu"):
                assert resolve_engine(name, k, exclude_self=exclude_self) == "torch"


class TestFaissGpuProbe:
    @pytest.fixture(autouse=True)
    def _forget(self) -> object:
        module._probe_faiss_gpu.cache_clear()
        yield
        module._probe_faiss_gpu.cache_clear()

    def pretend(
        self, monkeypatch: pytest.MonkeyPatch, folder: Path, knn_gpu: str, *, gpus: str = "return 1", cuda: bool = True
    ) -> None:
        """A faiss that both this process and the one that it starts import, with these bodies of functions."""
        (folder / "faiss.py").write_text(
            "import os, time\n"
            "METRIC_INNER_PRODUCT = 0\n"
            "class StandardGpuResources:\n    setTempMemory = lambda self, size: None\n"
            f"def get_num_gpus():\n    {gpus}\n"
            f"def knn_gpu(resources, queries, gallery, k, metric):\n    {knn_gpu}\n"
        )
        monkeypatch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
        monkeypatch.syspath_prepend(folder)
        monkeypatch.delitem(sys.modules, "faiss", raising=False)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)

    right = "import numpy as np; return np.array([[1, 1 - 2.0**-13]]), np.array([[3, 0]])"

    @pytest.mark.parametrize(
        ("bodies", "reason"),
        [
            ({"knn_gpu": "os.abort()"}, "exit code -6"),
            ({"knn_gpu": "raise RuntimeError('no kernel image')"}, "exit code 1: RuntimeError: no kernel image"),
            ({"knn_gpu": right.replace("3, 0", "0, 3")}, "exit code 1: AssertionError"),
            ({"knn_gpu": right.replace("1 - 2.0**-13", "1.0")}, "exit code 1: AssertionError"),
            ({"knn_gpu": "time.sleep(60)"}, "no answer within 1 s"),
            ({"knn_gpu": right, "gpus": "os.abort()"}, "exit code -6"),
            ({"knn_gpu": right, "gpus": "return 0"}, "exit code 1: AssertionError: it sees no GPU"),
        ],
        ids=["aborts", "raises", "wrong", "rounds", "hangs", "aborts_when_counting", "sees_none"],
    )
    def test_a_broken_gpu_build_is_warned_of_once_and_others_search(
        self, bodies: dict[str, str], reason: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        self.pretend(monkeypatch, tmp_path, **bodies)
        if "sleep" in bodies["knn_gpu"]:
            monkeypatch.setattr(module, "_PROBE_SECONDS", 1.0)
        start = time.monotonic()
        with pytest.warns(UserWarning, match=re.escape(f"test search in a subprocess: {reason})")) as caught:
            engines = [resolve_engine("auto", 8, device=device) for device in ("cuda", "cpu")]
        assert engines == ["torch", "faiss_cpu"]
        assert len(caught) == 1
        assert time.monotonic() - start < 30
        one_line(resolve_engine, "faiss_gpu", 8, match="no working GPU")

    def test_a_working_gpu_build_is_used(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        self.pretend(monkeypatch, tmp_path, self.right)
        assert resolve_engine("auto", 8) == "faiss_gpu"

    @pytest.mark.parametrize(("build", "cuda"), [("cpu", True), ("gpu", False)])
    def test_no_gpu_needs_no_search_and_no_warning(
        self, build: str, cuda: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        self.pretend(monkeypatch, tmp_path, "os.abort()", cuda=cuda)
        import faiss

        if build == "cpu":
            monkeypatch.delattr(faiss, "StandardGpuResources")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert not module.faiss_gpu_works()


@pytest.mark.parametrize("dim", [1, 3, 64, 512, 2048])
def test_float32_error_bounds_every_engine(dim: int) -> None:
    x = normalise(torch.cat([rows(40, dim), rows(40, dim).abs(), torch.ones(1, dim)]), "query")
    exact = x @ x.T
    for engine in ("torch", "faiss_cpu") if module.has_faiss() else ("torch",):
        similarities, indices = module.nearest(x.float(), x.float(), 81, engine, exclude_self=False)
        error = (similarities.double() - exact.gather(1, indices)).abs().max()
        assert error <= float32_error(dim)
    columns, in_turn = x.float().numpy().T, np.zeros((81, 81), np.float32)
    for column in columns:  # the order of summation with the largest error
        in_turn += column[:, None] * column
    error = np.abs(in_turn - exact.numpy()).max()
    assert error <= float32_error(dim)
    assert dim < 64 or float32_error(dim) < 1e-7 * dim  # and is no excuse to settle everything
