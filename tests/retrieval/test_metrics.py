"""Recall@K and the metrics at R: golden values, rules, arguments, and the metric class.

The file is long because one set of small problems, solved by hand, serves all of them.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from by_fractions import ENGINES, coarse_problems, each_engine, on_circle, ranked_hits, rows
from commands import one_line
from hypothesis import given, settings
from processes import run_processes
from torch import Tensor
from torch.utils.data import DistributedSampler

from proxy_anchor.errors import UsageError
from proxy_anchor.retrieval import ranking
from proxy_anchor.retrieval import search as search_module
from proxy_anchor.retrieval.metrics import (
    metrics_at_r,
    metrics_of_ranking,
    num_positives,
    num_queries_without_positive,
    recall_at_k,
)
from proxy_anchor.retrieval.recall_at_k import RecallAtK
from proxy_anchor.retrieval.rows import float32_error
from proxy_anchor.retrieval.search import search

GOLDEN = Path(__file__).parents[1] / "fidelity" / "recall.npz"


def by_sorting_fractions(
    x: np.ndarray, labels: np.ndarray, ks: Sequence[int], g: np.ndarray, g_labels: np.ndarray
) -> dict[int, float]:
    hits = ranked_hits(x, labels, g, g_labels)
    return {k: sum(any(found[:k]) for found in hits) / len(x) for k in ks}


def by_loops(x: np.ndarray, labels: np.ndarray, ks: Sequence[int]) -> dict[int, float]:
    """Self-search Recall@K for any vectors: loops, float64, correctly rounded sums."""
    unit = [[v / math.sqrt(math.fsum(w * w for w in row)) for v in row] for row in x.astype(np.float64).tolist()]
    hits = dict.fromkeys(ks, 0)
    for i, a in enumerate(unit):
        similar = [math.fsum(p * q for p, q in zip(a, b, strict=True)) for b in unit]
        others = [j for j in range(len(unit)) if j != i]
        positives = [j for j in others if labels[j] == labels[i]]
        if positives:
            best = max(similar[j] for j in positives)
            first = min(j for j in positives if similar[j] >= best - 1e-12)
            ahead = [j for j in others if similar[j] > best + 1e-12 or (similar[j] >= best - 1e-12 and j < first)]
            for k in ks:
                hits[k] += len([j for j in ahead if j not in positives]) < k
    return {k: hits[k] / len(x) for k in ks}


@each_engine
@pytest.mark.parametrize("as_type", [np.asarray, torch.from_numpy])
def test_golden_self_search(engine: str, as_type: Callable) -> None:
    golden = np.load(GOLDEN)
    got = recall_at_k(as_type(golden["x"]), as_type(golden["labels"]), golden["self_recall_k"], engine=engine)
    assert got == dict(zip(golden["self_recall_k"].tolist(), golden["self_recall"].tolist(), strict=True))


@each_engine
class TestByHand:
    def test_points_on_a_circle(self, engine: str) -> None:
        # Neighbours, nearest first:  0: 10 25 45   10: 0 25 45   25: 10 45 0   45: 25 10 0
        x, labels = on_circle(0, 10, 25, 45), np.array([7, 3, 7, 3])
        # First positive:             25, rank 2    45, rank 3    0, rank 3    10, rank 2
        assert recall_at_k(x, labels, (1, 2, 3), engine=engine) == {1: 0, 2: 2 / 4, 3: 4 / 4}

    def test_queries_search_only_the_gallery(self, engine: str) -> None:
        gallery, gallery_labels = on_circle(0, 20, 50), np.array([0, 1, 2])
        queries, labels = on_circle(1, 18, 49, 200), np.array([0, 0, 1, 9])
        # Nearest: 0 20 50 (hit at 1), 20 0 50 (hit at 2), 50 20 0 (hit at 2); class 9 is not in the gallery.
        got = recall_at_k(queries, labels, (1, 2, 3), gallery=gallery, gallery_labels=gallery_labels, engine=engine)
        assert got == {1: 1 / 4, 2: 3 / 4, 3: 3 / 4}


class TestEnginesAgree:
    """Every engine gives the number of the plain loops, to the last digit, however near the ties."""

    @each_engine
    @pytest.mark.filterwarnings("ignore:nearly all queries are also rows")
    @settings(max_examples=60, deadline=None, derandomize=True)
    @given(problem=coarse_problems())
    def test_coarse_integers_against_fractions(self, engine: str, problem: tuple[np.ndarray, ...]) -> None:
        x, labels, g, g_labels = problem
        ks = range(1, len(x))
        assert recall_at_k(x.astype("f4"), labels, ks, engine=engine) == by_sorting_fractions(x, labels, ks, x, labels)
        ks = range(1, len(g) + 1)
        got = recall_at_k(x.astype("f4"), labels, ks, gallery=g.astype("f4"), gallery_labels=g_labels, engine=engine)
        assert got == by_sorting_fractions(x, labels, ks, g, g_labels)

    @each_engine
    @pytest.mark.parametrize("dim", [3, 12, 200])
    @pytest.mark.parametrize("chunk", [search_module.CHUNK_ELEMENTS, 1, 77])
    def test_many_exact_ties(self, engine: str, dim: int, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(search_module, "CHUNK_ELEMENTS", chunk)
        random = np.random.default_rng(dim)
        x, labels = random.integers(-1, 2, (150, dim)), random.integers(0, 12, 150)
        expected = by_sorting_fractions(x, labels, (1, 2, 4, 8, 50), x, labels)
        assert 0 < expected[1] < 1
        assert recall_at_k(x.astype("f4"), labels, (1, 2, 4, 8, 50), engine=engine) == expected

    @each_engine
    @pytest.mark.parametrize("noise", [0, 1e-8, 1e-7, 1e-6, 1e-4, 1e-2])
    def test_clusters_of_near_duplicates(self, engine: str, noise: float) -> None:
        random = np.random.default_rng(0)
        centres = random.normal(size=(6, 32))
        x = (centres[random.integers(0, 6, 120)] + noise * random.normal(size=(120, 32))).astype(np.float32)
        labels = random.integers(0, 10, 120)
        assert recall_at_k(x, labels, (1, 2, 4, 8), engine=engine) == by_loops(x, labels, (1, 2, 4, 8))

    @pytest.mark.parametrize("spread", [0, 3e-6])
    @pytest.mark.parametrize("main_class", [0.1, 0.9])
    @pytest.mark.parametrize("seed", range(3))
    def test_an_engine_as_inexact_as_allowed(
        self, seed: int, main_class: float, spread: float, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Similarities off by anything within the float32 bound, and any choice among ties, give the same number."""
        random, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
        plain = search_module.similarity_chunk

        def noisy(queries: Tensor, gallery: Tensor, rows: slice | Tensor, exclude_self: bool) -> Tensor:
            chunk = plain(queries, gallery, rows, exclude_self)
            if chunk.dtype == torch.float32:
                noise = torch.rand(chunk.shape, generator=generator) * 2 - 1
                chunk += noise * (float32_error(queries.shape[1]) - 2e-7)
            return chunk

        def noisy_list(
            queries: Tensor, gallery: Tensor, k: int, engine: str, *, exclude_self: bool
        ) -> tuple[Tensor, Tensor]:
            values, indices = noisy(queries, gallery, slice(0, len(queries)), exclude_self).topk(k)
            return values, indices

        monkeypatch.setattr(ranking, "similarity_chunk", noisy)
        monkeypatch.setattr(ranking, "nearest", noisy_list)
        monkeypatch.setattr(search_module, "has_faiss", lambda: True)
        centres = random.normal(size=(3, 32))
        x = (centres[random.integers(0, 3, 200)] + spread * random.normal(size=(200, 32))).astype(np.float32)
        labels = np.where(random.random(200) < main_class, 0, random.integers(1, 10, 200))
        expected = by_loops(x, labels, (1, 2, 4, 8))
        assert recall_at_k(x, labels, engine="torch") == expected
        assert recall_at_k(x, labels, engine="faiss_cpu") == expected

    @each_engine
    def test_collapsed_network_of_4000(self, engine: str) -> None:
        got = recall_at_k(torch.full((4000, 64), 0.3), torch.arange(4000) % 100, (1, 8), engine=engine)
        assert got[1] == pytest.approx(1 / 100, abs=1e-3)  # chance, not 100 %
        assert got[8] == pytest.approx(8 / 100, abs=3e-3)

    def test_nearly_collapsed_embeddings_cost_few_ordered_sums(self, monkeypatch: pytest.MonkeyPatch) -> None:
        summed, ordered_sum = [], ranking._ordered_sum
        monkeypatch.setattr(ranking, "_ordered_sum", lambda terms: summed.append(len(terms)) or ordered_sum(terms))
        noise = torch.randn(1500, 512, generator=torch.Generator().manual_seed(0))
        recall_at_k(1 + 3e-6 * noise, torch.arange(1500) // 10, engine="torch")
        assert sum(summed) < 1500 * 10  # of 2 million pairs

    @pytest.mark.parametrize("dim", [64, 512])
    def test_negatives_at_the_edge_of_a_tie(self, dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
        """Each query has one negative 1e-12 nearer than its positive: whether they tie is rounding, but one way only.

        The rounding of the 200 differs, so some are hits and some are not.
        """
        random = np.random.default_rng(0)
        basis = np.linalg.qr(random.normal(size=(200, dim, 2)))[0]
        near = random.uniform(0.2, 0.9, (200, 1))
        cosines = np.concatenate([near, near + 1e-12])  # positives come first, and win where the two tie
        turned = np.concatenate([basis, basis])
        gallery = cosines * turned[..., 0] + np.sqrt(1 - cosines**2) * turned[..., 1]
        labels = np.arange(200)
        found = set()
        for chunk in (2**25, 400, 3 * 400, 50 * 400):
            monkeypatch.setattr(search_module, "CHUNK_ELEMENTS", chunk)
            for engine in ENGINES:
                for part in (slice(None), slice(0, None, 3)):
                    arguments = {"gallery": gallery, "gallery_labels": np.r_[labels, labels + 1000], "engine": engine}
                    got = recall_at_k(basis[..., 0][part], labels[part], 1, **arguments)[1]
                    found.add((part.step, got))
        assert len(found) == 2
        assert all(0 < got < 1 for _, got in found)

    def test_no_chunk_is_larger_than_the_bound(self, monkeypatch: pytest.MonkeyPatch) -> None:
        sizes: list[int] = []
        plain = search_module.similarity_chunk

        def spy(*args: object) -> Tensor:
            chunk = plain(*args)  # type: ignore[arg-type]
            sizes.append(chunk.numel() * chunk.element_size())
            return chunk

        monkeypatch.setattr(search_module, "CHUNK_ELEMENTS", 10_000)
        monkeypatch.setattr(ranking, "similarity_chunk", spy)
        recall_at_k(torch.ones(300, 4), torch.arange(300) % 7, engine="torch")
        assert max(sizes) <= 4 * 10_000
        assert sum(sizes) == (4 + 8) * 300 * 300  # one pass in float32, one in float64

    @pytest.mark.skipif("faiss_cpu" not in ENGINES, reason="faiss is not installed")
    def test_faiss_gpu_list_is_cut_at_2048(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """K close to the limit: the spare hits must not push the list past what the GPU can return."""
        asked = []

        def cpu_in_its_place(queries: Tensor, gallery: Tensor, k: int) -> tuple[Tensor, Tensor]:
            asked.append(k)
            return search_module._search_faiss_cpu(queries, gallery, k)

        monkeypatch.setattr(search_module, "faiss_gpu_works", lambda: True)
        monkeypatch.setattr(search_module, "_search_faiss_gpu", cpu_in_its_place)
        x, labels = rows(2300, 4), torch.arange(2300) % 1150
        got = recall_at_k(x, labels, (1, 2047), engine="faiss_gpu")
        assert asked == [2048]
        assert got == recall_at_k(x, labels, (1, 2047), engine="torch")
        assert got[2047] < 1


class TestQueriesInTheGallery:
    """Rows at 0, 10, 25 and 45 degrees: without the row itself the nearest are 10, 0, 10 and 25."""

    x, labels = on_circle(0, 10, 25, 45), np.array([0, 1, 1, 0])
    copies = "nearly all queries are also rows of the gallery"

    def test_copies_are_said_in_one_line(self) -> None:
        with pytest.warns(UserWarning, match=self.copies) as said:
            assert recall_at_k(self.x, self.labels, 1, gallery=self.x, gallery_labels=self.labels) == {1: 1.0}
        assert "\n" not in str(said[0].message)
        with pytest.warns(UserWarning, match=self.copies):  # the same images, embedded in another batch
            recall_at_k(self.x, self.labels, 1, gallery=self.x * 3 + 1e-7, gallery_labels=self.labels)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            recall_at_k(self.x, self.labels, 1)
            recall_at_k(self.x, self.labels, 1, gallery=self.x[:3], gallery_labels=self.labels[:3])  # one is new
            recall_at_k(self.x[:1], self.labels[:1], 1, gallery=self.x, gallery_labels=self.labels)  # one alone

    @each_engine
    def test_a_row_never_finds_itself(self, engine: str) -> None:
        more, more_labels = np.concatenate([self.x, on_circle(50)]), np.append(self.labels, 0)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            arguments = {"gallery": more, "gallery_labels": more_labels, "exclude_self": True}
            # Nearest: 0 -> 10, 25, 45; 10 -> 0, 25; 25 -> 10; 45 -> 50.
            got = recall_at_k(self.x, self.labels, (1, 2, 3), engine=engine, **arguments)
            assert got == {1: 2 / 4, 2: 3 / 4, 3: 4 / 4}
            # R is 2, 1, 1, 2; the precision at R 0, 0, 1, 1/2, and AP@R 0, 0, 1, 1/2.
            assert metrics_at_r(self.x, self.labels, **arguments) == {"map_at_r": 1.5 / 4, "r_precision": 1.5 / 4}
            alone = {"gallery": self.x, "gallery_labels": self.labels, "exclude_self": True}
            expected = recall_at_k(self.x, self.labels, (1, 2, 3), engine=engine)
            assert recall_at_k(self.x, self.labels, (1, 2, 3), engine=engine, **alone) == expected

    @pytest.mark.parametrize("rows", [slice(1, None), slice(None, None, -1)])
    def test_rows_that_do_not_agree(self, rows: slice) -> None:
        arguments = {"gallery": self.x[rows], "gallery_labels": np.array([0, 1, 2, 3])[rows], "exclude_self": True}
        one_line(recall_at_k, self.x, self.labels, 1, **arguments, match="query i must be gallery row i")

    def test_the_metric_pairs_rows_by_dataset_index(self) -> None:
        metric = RecallAtK((1, 2, 3), exclude_self=True)
        angles, labels = torch.tensor(on_circle(0, 10, 25, 45, 50)), torch.tensor([0, 1, 1, 0, 0])
        for order, is_gallery in (([4, 2, 0, 3, 1], True), ([3, 1, 2, 0], False)):
            metric.update(angles[order], labels[order], torch.tensor(order), is_gallery=is_gallery)
        assert metric.compute() == named({1: 2 / 4, 2: 3 / 4, 3: 4 / 4})

    def test_a_query_that_is_not_in_the_gallery(self) -> None:
        metric = RecallAtK(1, exclude_self=True)
        metric.update(self.x[:3], torch.zeros(3, dtype=torch.int64), torch.arange(3))
        metric.update(self.x[:3], torch.zeros(3, dtype=torch.int64), torch.tensor([0, 1, 7]), is_gallery=True)
        one_line(metric.compute, match="3 queries, and 2 gallery rows")


class TestArguments:
    @pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int64])
    def test_any_integer_labels(self, dtype: type) -> None:
        x, labels = on_circle(0, 10, 25, 45), np.array([7, 3, 7, 3]).astype(dtype)
        assert recall_at_k(x, labels, 2) == {2: 1 / 2}
        assert recall_at_k(torch.tensor(x), torch.tensor(labels.astype(np.int64)).int(), 2) == {2: 1 / 2}

    @pytest.mark.parametrize("k", [3, [3], (3, 3), {3}, np.array([3]), np.int64(3), torch.tensor([3]), iter([3])])
    def test_k_in_any_form(self, k: object) -> None:
        got = recall_at_k(on_circle(0, 10, 25, 45), np.array([7, 3, 7, 3]), k)  # type: ignore[arg-type]
        assert got == {3: 1.0}
        assert type(next(iter(got))) is int

    @pytest.mark.parametrize("k", [0, (), (1, 0), 1.5, "12", None])
    def test_k_that_makes_no_sense(self, k: object) -> None:
        one_line(recall_at_k, rows(20), torch.arange(20), k, match="k=")

    def test_k_larger_than_the_gallery(self) -> None:
        one_line(recall_at_k, rows(20), torch.arange(20), 20, match="K=20 is larger than the gallery")

    def test_shapes_that_disagree(self) -> None:
        x, labels = rows(20), torch.arange(20)
        one_line(recall_at_k, x, labels[:19], match="20 query embeddings but 19 labels")
        one_line(recall_at_k, x, labels, gallery=x, match="both, or neither")
        one_line(recall_at_k, x, labels, gallery=rows(20, 8), gallery_labels=labels, match="D=16 and the gallery D=8")
        for wrong in (labels.float(), labels * 1j, labels[:, None], labels > 3, labels.numpy() > 3, labels.tolist()):
            one_line(recall_at_k, x, wrong, match="query labels: expected a one-dimensional")


class TestPositives:
    def test_counts(self) -> None:
        labels = torch.tensor([5, 5, 5, -1, 8, 8])
        assert num_positives(labels).tolist() == [2, 2, 2, 0, 1, 1]
        assert num_positives(labels, np.array([8, 5, 8, 9])).tolist() == [1, 1, 1, 0, 2, 2]
        assert num_queries_without_positive(labels) == 1
        assert num_queries_without_positive(labels, torch.tensor([8])) == 4
        assert num_queries_without_positive(labels, labels) == 0


def named(recall: dict[int, float]) -> dict[str, float]:
    return {f"recall_at_{k}": value for k, value in recall.items()}


class TestRecallAtKClass:
    def feed(self, metric: RecallAtK, x: Tensor, labels: Tensor, order: Sequence[int], batch: int = 7) -> RecallAtK:
        for start in range(0, len(order), batch):
            part = torch.tensor(order[start : start + batch])
            metric.update(x[part], labels[part], part)
        return metric

    def test_any_order_and_batching_gives_the_number_of_one_call(self) -> None:
        random = np.random.default_rng(6)
        x = torch.tensor(random.integers(-1, 2, (60, 3))).float()  # ties: the order of rows matters
        labels = torch.tensor(random.integers(0, 8, 60))
        expected = recall_at_k(x, labels)
        for batch in (1, 13, 60):
            order = random.permutation(60).tolist()
            assert self.feed(RecallAtK(), x, labels, [*order, *order[:5]], batch).compute() == named(expected)

    @each_engine
    def test_golden_query_and_gallery(self, engine: str) -> None:
        golden = np.load(GOLDEN)
        part = {name: torch.tensor(golden[name]) for name in ("query", "query_labels", "gallery", "gallery_labels")}
        metric = RecallAtK(golden["query_gallery_recall_k"], engine=engine, num_images=122 + 112)
        for start in range(0, 130, 10):
            for name, size in (("query", 122), ("gallery", 112)):
                index = torch.arange(start, start + 10) % size  # wraps: both are padded with their own first rows
                rows_, labels = part[name][index], part[f"{name}_labels"][index]
                metric.update(rows_, labels, index, is_gallery=name == "gallery")
        assert list(metric.compute().values()) == golden["query_gallery_recall"].tolist()

    def test_leading_dimensions_are_embeddings_of_their_own(self) -> None:
        metric, labels = RecallAtK(1, dims=[2]), torch.tensor([0, 0, 1, 1])
        metric.update(torch.tensor([[1, 0, 100], [1, 0.1, -100], [10, 10, 100], [0, 5, -100]]), labels)
        assert metric.compute() == {"recall_at_1": 0, "recall_at_1_dim2": 3 / 4}  # by cosine: lengths differ
        metric.update(torch.tensor([[0.0, 7, -100], [10, 1, 100]]), torch.tensor([1, 0]), is_gallery=True)
        assert metric.compute() == {"recall_at_1": 2 / 4, "recall_at_1_dim2": 3 / 4}

    def test_without_indices_every_row_counts_in_order_of_arrival(self) -> None:
        metric = RecallAtK(1)
        for label in (4, 4, 9, 4):
            metric.update(torch.ones(1, 3), torch.tensor([label]))
        # All tied: row 0 sees row 1, the others see row 0, of class 4.
        assert metric.compute() == {"recall_at_1": 3 / 4}

    def test_a_partial_pass_is_refused(self) -> None:
        x, labels = rows(33), torch.arange(33) % 4
        metric = self.feed(RecallAtK(1, num_images=33), x, labels, [*range(32), 3])
        one_line(metric.compute, match="32 distinct images were seen, expected 33")
        assert self.feed(metric, x, labels, [32]).compute() == named(recall_at_k(x, labels, 1))

    def test_forward_adds_a_batch(self) -> None:
        x, labels = rows(40, 8), torch.arange(40) % 7
        metric = RecallAtK((1, 30), num_images=40)
        assert metric(x[:20], labels[:20]) is None  # the batch has no 30 neighbours
        metric.update(x[20:], labels[20:])
        assert metric.compute() == named(recall_at_k(x, labels, (1, 30)))

    def test_refusals(self) -> None:
        one_line(RecallAtK, engine="fiass", match="engine=fiass")
        with pytest.raises(UsageError, match="3 embeddings, 3 labels and 2 indices"):
            RecallAtK().update(rows(3), torch.arange(3), torch.arange(2))
        one_line(RecallAtK().update, rows(3), torch.arange(3), torch.ones(3), match="indices: expected")


def of_two_processes(x: Tensor, labels: Tensor) -> dict[str, object]:
    """What one of them gets of padded shares, and where it errs."""
    dist.init_process_group("gloo")
    rank, found = dist.get_rank(), {}
    metric = RecallAtK(num_images=33)
    mine = torch.tensor([*DistributedSampler(range(33), 2, rank, shuffle=False)])
    assert len(mine) == 17
    for part in mine.split(5):
        metric.update(x[part], labels[part], part)
    found["shares"] = metric.compute()
    found["gathered"] = len(metric.gathered_embeddings()[0])
    assert sum(map(len, metric.embeddings)) == 17  # each process has its own rows again
    for of_all in (0, 1):
        metric.reset()
        if rank == of_all:
            metric.update(x, labels, torch.arange(33))
        assert metric.compute() == found["shares"]
        assert sum(map(len, metric.embeddings)) == 33 * (rank == of_all)
    metric.sync_on_compute = metric._to_sync = False  # this process alone
    assert rank == 0 or metric.compute() == found["shares"]
    for collective in (RecallAtK().compute, RecallAtK().gathered_embeddings):
        one_line(collective, match="no embeddings were added")
    one_line(RecallAtK().update, x, labels, match="dataset indices")
    return found


def test_33_images_on_two_processes_equal_one(tmp_path: Path) -> None:
    random = np.random.default_rng(7)
    x, labels = random.integers(-1, 2, (33, 3)), random.integers(0, 8, 33)
    whole = named(by_sorting_fractions(x, labels, (1, 2, 4, 8), x, labels))
    given = torch.tensor(x).float(), torch.tensor(labels)
    for found in run_processes(of_two_processes, *given, world_size=2, folder=tmp_path):
        assert found == {"shares": whole, "gathered": 33}


# ---- neighbour lists that were ranked elsewhere


def test_metrics_of_a_ranking_are_fractions_a_person_can_check():
    """Classes a a a b, each ranked by hand; b has no positive and counts as a miss."""
    ranking = torch.tensor([[1, 3, 2], [3, 0, 2], [3, 1, 0], [0, 1, 2]])
    values = metrics_of_ranking(ranking, torch.tensor([0, 0, 0, 1]), [1, 2])
    assert values["recall_at_1"] == 1 / 4
    assert values["recall_at_2"] == 3 / 4
    # R = 2: (1 + 0) / 2, (0 + 1/2) / 2, (0 + 1/2) / 2, nothing
    assert values["map_at_r"] == pytest.approx((1 / 2 + 1 / 4 + 1 / 4) / 4)
    assert values["r_precision"] == pytest.approx((1 / 2 + 1 / 2 + 1 / 2) / 4)


@pytest.mark.parametrize("with_gallery", [False, True])
def test_metrics_of_the_search_s_own_ranking_are_the_metrics(with_gallery):
    embeddings, labels = torch.randn(60, 8), torch.arange(60) % 7
    gallery = {"gallery": embeddings[20:], "gallery_labels": labels[20:]} if with_gallery else {}
    queries, wanted = (embeddings[:20], labels[:20]) if with_gallery else (embeddings, labels)
    _, ranking = search(queries, gallery.get("gallery", queries), 15, exclude_self=not with_gallery)
    found = metrics_of_ranking(ranking, wanted, [1, 4], gallery_labels=gallery.get("gallery_labels"))
    expected = named(recall_at_k(queries, wanted, [1, 4], **gallery)) | metrics_at_r(queries, wanted, **gallery)
    assert found == pytest.approx(expected)


def test_a_ranking_that_is_too_short_or_wrong_is_refused():
    labels = torch.tensor([0, 0, 0, 1])
    one_line(metrics_of_ranking, torch.zeros(4, 1, dtype=torch.int64), labels, 1, match="at least 2 neighbours")
    none = torch.full((4, 3), -1)  # as an approximate index says that it found none
    one_line(metrics_of_ranking, none, labels, 1, match="outside the gallery")
