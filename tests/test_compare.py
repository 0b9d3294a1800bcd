"""compare.py as a user runs it, and that its runs start and go on alike."""

from __future__ import annotations

import csv
import json
import re
import shutil
import signal
import weakref

import pytest
import torch
from commands import TINY_GLYPHS, compose_train, composed, run_ok

from compare import check_data, compare
from proxy_anchor.cli import checks
from proxy_anchor.cli import main as entry
from proxy_anchor.data.datamodule import ImageDataModule
from proxy_anchor.errors import UsageError
from proxy_anchor.reports.figures import recall_curves
from proxy_anchor.reports.tables import Spread, comparison_rows, notes, reached
from train import train

TWO_BY_TWO = ["losses=[proxy_anchor,triplet]", "seeds=[1,2]", "run=both", *TINY_GLYPHS]


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """(folder of the user, standard output) of two losses with two seeds."""
    here = tmp_path_factory.mktemp("user")
    return here, run_ok("compare.py", *TWO_BY_TWO, cwd=here)


def result_of(here, loss, seed):
    return json.loads((here / "runs" / "both" / loss / f"seed{seed}" / "result.json").read_text())


def test_every_run_is_where_it_belongs(compared):
    here, output = compared
    assert result_of(here, "triplet", 1)["untrained"] != result_of(here, "triplet", 2)["untrained"]
    assert output.count("4 classes x 4 images, for positives in every batch") == 2
    assert "[4/4] triplet, seed 2" in output


def test_table_and_curves(compared):
    here, output = compared
    folder = here / "runs" / "both"
    [header, _, *rows] = [line for line in (folder / "comparison.md").read_text().splitlines() if line.startswith("|")]
    columns = ("best R@1", "best R@1 - proxy_anchor's", "last R@1", "images/s", "peak GiB", "epochs to", "s to")
    assert all(column in header for column in columns)
    assert [row.split("|")[1].strip() for row in rows] == ["proxy_anchor", "triplet"]
    with (folder / "comparison.csv").open() as file:
        lines = {line["loss"]: line for line in csv.DictReader(file)}
    best = [100 * result_of(here, "triplet", seed)["best"]["recall"]["1"] for seed in (1, 2)]
    assert float(lines["triplet"]["best R@1 mean"]) == pytest.approx(sum(best) / 2)
    assert lines["triplet"]["best R@1 n"] == "2"
    assert f"{sum(best) / 2:.1f} ±" in output
    page = (folder / "index.html").read_text()
    runs = [f"{loss}/seed{seed}/index.html" for loss in ("proxy_anchor", "triplet") for seed in (1, 2)]
    assert sorted(re.findall('<a href="(.*?)"', page)) == runs
    assert page.count("<svg") == 2


def test_the_same_command_keeps_what_is_finished_and_adds(compared, tmp_path):
    here, _ = compared
    shutil.copytree(here, tmp_path / "copy")
    here = tmp_path / "copy"
    folder = here / "runs" / "both"
    (folder / "triplet" / "seed2" / "result.json").unlink()  # as if interrupted
    shutil.rmtree(folder / "proxy_anchor" / "seed2")
    before = (folder / "triplet" / "seed1" / "result.json").stat().st_mtime_ns
    # The data set's absolute place is one of the settings.
    root = f"dataset.root={compared[0] / 'data' / 'glyphs'}"
    output = run_ok("compare.py", *TWO_BY_TWO, root, cwd=here)
    assert output.count("finished: it is not repeated") == 2
    assert output.count("continued after epoch 1 of 1") == 1
    assert (folder / "triplet" / "seed1" / "result.json").stat().st_mtime_ns == before
    assert (folder / "proxy_anchor" / "seed2" / "result.json").is_file()


def test_a_failed_run_is_listed_and_the_others_finish(glyphs, tmp_path, monkeypatch, capsys):
    def train_or_fail(job, place):
        if "triplet" in job.run:
            raise KeyError("miner")
        return train(job, place)

    monkeypatch.setattr("compare.train", train_or_fail)
    arguments = ["losses=[triplet,proxy_anchor]", "run=x", *TINY_GLYPHS, glyphs]
    with composed("compare", *arguments) as cfg, pytest.raises(UsageError) as caught:
        compare(cfg, tmp_path / "x")
    assert str(caught.value).startswith(
        "1 of 2 runs failed (triplet/seed1; see error.txt in their folders, unless another run holds them); the same "
    )
    output = capsys.readouterr().out
    assert "failed: triplet, seed 1: KeyError: 'miner'" in output
    assert re.search(r"^proxy_anchor +1 ", output, re.M)
    trace = (tmp_path / "x/triplet/seed1/error.txt").read_text()
    assert trace.startswith("Traceback")
    assert trace.splitlines()[-1] == "KeyError: 'miner'"
    assert (tmp_path / "x/proxy_anchor/seed1/result.json").is_file()


# In this process: every loss from the same start, in the same order


@pytest.mark.filterwarnings("ignore:Checkpoint directory|The number of training batches|.*treespec, LeafSpec")
def test_losses_start_alike_and_see_the_same_images(glyphs, tmp_path, monkeypatch):
    from proxy_anchor.training.module import MetricLearner

    seen: dict[str, list] = {}

    def record(self, batch, batch_idx, original=MetricLearner.training_step):
        run = seen.setdefault(type(self.loss).__name__ + str(self.loss.num_classes) + current, [])
        if not run:
            run.append({name: value.clone() for name, value in self.net.state_dict().items()})
        run.append((batch[2].clone(), batch[0].clone()))
        return original(self, batch, batch_idx)

    monkeypatch.setattr(MetricLearner, "training_step", record)
    for current in ("proxy_anchor", "margin"):
        cfg = compose_train(*TINY_GLYPHS, f"loss={current}", "data.images_per_class=2", glyphs)
        assert train(cfg, tmp_path / current)["history"][1]["train_loss"] > 0
    (first, *batches), (other, *others) = seen.values()
    assert all(torch.equal(first[name], other[name]) for name in first)
    assert len(batches) == len(others) == 4
    for (indices, images), (same_indices, same_images) in zip(batches, others, strict=True):
        assert torch.equal(indices, same_indices)
        assert torch.equal(images, same_images)


@pytest.mark.filterwarnings("ignore:Checkpoint directory|The number of training batches|.*treespec, LeafSpec")
def test_a_run_leaves_no_memory_to_the_next_and_says_its_label_noise(glyphs, tmp_path, monkeypatch, capsys):
    made = []

    def remember(self, *arguments, original=ImageDataModule.__init__, **named):
        original(self, *arguments, **named)
        made.append(weakref.ref(self))

    monkeypatch.setattr(ImageDataModule, "__init__", remember)
    noisy = ["dataset.label_noise=0.25", glyphs]
    assert train(compose_train(*TINY_GLYPHS, *noisy), tmp_path / "run")["label_noise"] == 0.25
    assert "16 training labels are wrong on purpose (25.0 %)" in capsys.readouterr().out
    entry.forget_last_run()
    [data] = made
    assert data() is None  # and with it the decoded images, which a GPU has to hold
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def jobs_of(folder, *overrides):
    cfg = [f"dataset.root={folder}", "trainer.accelerator=cpu", *overrides]
    jobs = {loss: compose_train(f"loss={loss}", *cfg) for loss in ("proxy_anchor", "triplet")}
    for job in jobs.values():
        checks.check_config(job)
    return jobs


def test_a_few_own_images_are_compared_and_what_one_loss_cannot_use_is_refused_first(write_images, tmp_path):
    write_images(dict.fromkeys("abcd", 3))
    own = jobs_of(tmp_path / "images", "dataset=folder")
    # Of 2 x 3 training images triplet needs 2 x 3 in a batch, proxy_anchor alone would take half of them.
    chosen = {"batch_size": 6, "images_per_class": None}
    assert check_data(own) == {"proxy_anchor": chosen, "triplet": {**chosen, "images_per_class": 3}}
    assert check_data({"proxy_anchor": own["proxy_anchor"]})["proxy_anchor"]["batch_size"] == 3
    own["proxy_anchor"].data.images_per_class = 2  # 12 would be the first common multiple
    assert [each["batch_size"] for each in check_data(own).values()] == [4, 6]
    with pytest.raises(
        UsageError, match=r"loss=triplet: data.batch_size=5 is not a multiple of data.images_per_class=4"
    ):
        check_data(jobs_of(tmp_path / "images", "dataset=folder", "data.batch_size=5"))
    with pytest.raises(UsageError, match=r"loss=proxy_anchor: K=65 is larger than the gallery"):
        check_data(jobs_of(tmp_path / "glyphs", *TINY_GLYPHS, "recall_k=[1,65]"))


# Numbers by hand


def made_up(recalls, train_s=2.0, eval_s=1.0):
    history = [
        {"epoch": epoch, "recall": {"1": value}, "train_seconds": train_s * (epoch > 0), "eval_seconds": eval_s}
        for epoch, value in enumerate(recalls)
    ]
    best = max(history[1:], key=lambda row: row["recall"]["1"])
    return {
        "history": history,
        "untrained": history[0],
        "selected": best,
        "best": best,
        "last": history[-1],
        "searched": "test",
        "train_images_per_second": 100.0,
        "device": "cpu",
    }


def test_times_to_a_level():
    run = made_up([0.9, 0.2, 0.5, 0.4, 0.6])
    assert reached(run, 50, "1") == (2, 6.0)  # the untrained state does not count
    assert reached(run, 60, "1") == (4, 12.0)
    assert reached(run, 61, "1") is None
    rows = comparison_rows({"a": [run, made_up([0.1, 0.7])]}, [60])
    assert rows[0]["epochs to 60"] == Spread(2.5, pytest.approx(2.1213, abs=1e-4), 2, 2)
    assert str(rows[0]["best R@1"]) == "65.0 ± 7.1"
    assert rows[0]["peak GiB"] is None
    del run["history"][3]  # epoch 3 trained all the same
    assert str(comparison_rows({"a": [run, made_up([0.1, 0.3])]}, [60])[0]["s to 60"]) == "11.0 (1 of 2)"


def test_regularisers_and_different_batch_sizes_are_said():
    def run(size: int, **config):
        return made_up([0.1, 0.2]) | {"config": {"data": {"batch_size": size}, **config}}

    assert "Regularisers: tcm. On" in notes({"a": [run(8, regulariser={"tcm": {"weight": 1}})]})
    assert "Batch sizes differ: 8 (a), 12 (b)." in notes({"a": [run(8), run(8)], "b": [run(12)]})
    assert "Batch" not in notes({"a": [run(8)], "old": [made_up([0.1, 0.2])]})


def test_curves_are_means_over_seeds():
    axes = recall_curves({"a": [made_up([0.1, 0.2]), made_up([0.3, 0.4])], "b": [made_up([0.1, 0.9])]}).axes[0]
    assert axes.lines[0].get_ydata() == pytest.approx([20, 30])
    assert [line.get_label() for line in axes.lines] == ["a (n = 2)", "b (n = 1)"]
    assert len(axes.collections) == 1  # a band needs two runs
    axes = recall_curves({"a": [made_up([0.1, 0.2, 0.3])]}, against="seconds").axes[0]
    assert axes.lines[0].get_xdata() == pytest.approx([0, 2, 4])
