"""Two processes train the model of one: SGD, backbone, head and proxies apart."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ddp_runs import ON_GPU, PARTS, RUNS, part, train, train_all
from pictures import write_noise_images
from processes import run_processes

from proxy_anchor.data.table import Splits, make_tables

FAST = ["plain", "p_x_k", "regularised"]
EQUAL = [pytest.param(name, marks=[pytest.mark.slow] * (name not in FAST)) for name in RUNS]


def make_splits(folder: Path) -> Splits:
    """14 training images, which batches of 6 do not divide, and 33 to search."""
    rows = write_noise_images(folder, {"a": 5, "b": 5, "c": 4, "x": 11, "y": 11, "z": 11})
    return Splits("tiny", make_tables(rows[:14])[0], make_tables(rows[14:])[0])


@pytest.fixture(scope="module", params=[{}, pytest.param(ON_GPU, marks=pytest.mark.gpu(2))], ids=["cpu", "gpu"])
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict, list[dict]]:
    """(one process, [rank 0, rank 1]) of every run that a chosen test needs."""
    folder = tmp_path_factory.mktemp("ddp")
    splits = make_splits(folder)
    names = FAST if not any(each.get_closest_marker("slow") for each in request.session.items) else [*RUNS]
    given = (folder, names, request.param)
    ranks = run_processes(train_all, splits, 2, *given, world_size=2, folder=folder, timeout_s=300)
    return train_all(splits, 1, *given), ranks


@pytest.mark.parametrize("name", EQUAL)
def test_two_processes_train_the_model_of_one(results: tuple[dict, list[dict]], name: str) -> None:
    single, ranks = results[0][name], [rank[name] for rank in results[1]]
    assert single["steps"] == ranks[0]["steps"] == (2 if "accumulated" in name else 4)
    for which in PARTS:
        start, expected = part(single["before"], which), part(single["after"], which)
        if not len(start):
            continue  # a triplet loss has no proxies
        distance = (expected - start).abs().max()
        assert distance > 5e-4, which  # otherwise equality says nothing
        for rank in ranks:
            assert torch.equal(part(rank["before"], which), start)
            torch.testing.assert_close(part(rank["after"], which), expected, rtol=0, atol=1e-5)
    assert ranks[0]["losses"] == ranks[1]["losses"] == pytest.approx(single["losses"], abs=1e-5)


@pytest.mark.parametrize("name", EQUAL)
def test_recall_of_33_images_is_that_of_one_process(results: tuple[dict, list[dict]], name: str) -> None:
    single, ranks = results[0][name], [rank[name] for rank in results[1]]
    assert len({str(each) for each in single["recall"]}) > 1 or single["recall"][0][1] < 1
    assert ranks[0]["recall"] == ranks[1]["recall"] == single["recall"]
    for rank in ranks:
        assert rank["embeddings"][0].shape == (33, 8)
        torch.testing.assert_close(rank["embeddings"][0], single["embeddings"][0], rtol=0, atol=1e-5)


@pytest.mark.gpu(2)  # torch synchronises batch norm on GPUs only
def test_batch_norm_that_trains_counts_over_both_gpus(tmp_path: Path) -> None:
    splits = make_splits(tmp_path)
    run = (tmp_path, {"batch_norm": "train"}, ON_GPU)
    single = train(splits, 1, *run)
    ranks = run_processes(train, splits, 2, *run, world_size=2, folder=tmp_path)
    for which in PARTS:
        assert (part(single["after"], which) - part(single["before"], which)).abs().max() > 5e-4, which
        for rank in ranks:
            torch.testing.assert_close(part(rank["after"], which), part(single["after"], which), rtol=0, atol=1e-9)
