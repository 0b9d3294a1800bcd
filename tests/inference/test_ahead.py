"""Work that threads do ahead of who takes it."""

import threading
import time

import pytest

from proxy_anchor.inference import embedder as embedder_module
from proxy_anchor.inference.embedder import _ahead


@pytest.mark.parametrize(("threads", "depth"), [(1, 1), (1, 2), (4, 4)])
def test_results_come_in_order(threads, depth):
    def slower_first(item):
        time.sleep(0.002 * (5 - item % 5))
        return item * item

    assert list(_ahead(slower_first, range(20), threads=threads, depth=depth)) == [item**2 for item in range(20)]
    assert list(_ahead(slower_first, [], threads=threads, depth=depth)) == []


@pytest.mark.parametrize(("long", "expected"), [(60.0, 2), (0.0, 5)])
def test_more_at_once_only_for_who_waits_long(monkeypatch, long, expected):
    monkeypatch.setattr(embedder_module, "_LONG_S", long)
    lock, running, most = threading.Lock(), [], []

    def work(item):
        with lock:
            running.append(item)
            most.append(len(running))
        time.sleep(0.01)
        with lock:
            running.remove(item)

    list(_ahead(work, range(30), threads=5, depth=5))
    assert max(most) == expected


def test_an_error_comes_to_who_takes_the_result():
    def fails(item):
        if item == 3:
            raise KeyError("three")
        return item

    results = _ahead(fails, range(9), threads=2, depth=2)
    assert [next(results) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(KeyError, match="three"):
        next(results)


def test_who_stops_early_leaves_no_work_behind():
    begun = []

    def work(item):
        begun.append(item)
        time.sleep(0.01)

    results = _ahead(work, range(1000), threads=2, depth=8)
    next(results)
    results.close()
    there = list(begun)
    time.sleep(0.05)
    assert begun == there
    assert len(begun) < 20
