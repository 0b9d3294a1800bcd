"""Warnings and not_finite.json of several processes: said once, counted over all; none waits for a stopped one."""

from __future__ import annotations

import json

import pytest
import torch
from ddp_faults import evaluate_parts, watch_all
from pictures import write_noise_images
from processes import run_processes

from proxy_anchor.data.table import Splits, make_tables
from proxy_anchor.training.callbacks.health import REPLAY_FILE

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("health")


@pytest.fixture(scope="module")
def ranks(folder):
    """What each of two processes tells of every run."""
    rows = write_noise_images(folder, {"a": 5, "b": 5, "c": 4, "x": 6, "y": 6})
    splits = Splits("tiny", make_tables(rows[:14])[0], make_tables(rows[14:])[0])
    return run_processes(watch_all, splits, folder, world_size=2, folder=folder)


def test_what_one_process_sees_is_said_once_for_all(ranks):
    one, other = (rank["standing"] for rank in ranks)
    [text] = one["warnings"]
    assert text.startswith("epoch 1: the backbone has not moved")
    assert other["warnings"] == one["warnings"]
    assert one["printed"].count("warning: ") == 1
    assert "warning: " not in other["printed"]
    assert [rank["fine"]["warnings"] for rank in ranks] == [[], []]


def test_classes_are_seen_when_any_process_saw_them(ranks):
    for rank in ranks:
        [text] = rank["classes"]["warnings"]
        assert text.startswith("1 of 3 classes were never in a batch of training")
        assert text.endswith("(2).")  # the first process saw 0, the second 1


def test_a_number_that_one_process_finds_not_finite_stops_all_after_the_same_step(ranks, folder):
    one, other = (rank["not finite"] for rank in ranks)
    assert one["error"] == other["error"]
    assert one["error"].startswith("the loss is not finite at step 2 (epoch 2)")
    content = json.loads((folder / REPLAY_FILE).read_text())
    assert [len(batch) for batch in content["batches"]] == [6, 6]  # of both: three each
    assert all(len(set(batch)) == 6 for batch in content["batches"])
    assert content["epoch"] == 2


def test_similarity_is_that_of_the_images_of_all_processes(tmp_path):
    near, far = torch.eye(4)[:1].expand(3, 4), torch.eye(4)[1:2].expand(5, 4)
    nothing = torch.empty(0, 4)
    parts = [[near, far], [near, near[:2]], [near, nothing], [near[:1], nothing]]
    for told in run_processes(evaluate_parts, tmp_path, parts, world_size=2, folder=tmp_path):
        assert [len(each) for each in told] == [0, 1, 1, 0]
        assert "mean pairwise similarity 1.0000" in told[1][0]
