"""The main job as a user runs it: train, evaluate, sweep, and every way to get it wrong."""

from __future__ import annotations

import csv
import json
import re
import shutil

import pytest
import pytorch_lightning
import torch
from commands import TINY_FOLDER, TINY_GLYPHS, compose_entry, compose_train, run_ok
from omegaconf import OmegaConf
from PIL import Image
from processes import run_python

from evaluate import evaluate
from proxy_anchor.cli import config as settings
from proxy_anchor.cli.command import entries
from proxy_anchor.errors import FolderTaken
from proxy_anchor.reports import run as reports
from train import cross_validate, train


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A real run on a part of the embedded data set, 5 epochs; (folder, standard output)."""
    here = tmp_path_factory.mktemp("user")
    classes = ["dataset.load.train_classes=24", "dataset.load.test_classes=12"]
    small = [*classes, "data.batch_size=24", "data.num_workers=0", "trainer.max_epochs=4"]
    output = run_ok("train.py", "run=first", *small, cwd=here)
    return here / "runs" / "first", output


def test_training_on_glyphs_learns(trained):
    folder, output = trained
    result = json.loads((folder / "result.json").read_text())
    assert result["last"]["recall"]["1"] >= result["untrained"]["recall"]["1"] + 0.20
    assert result["best"]["recall"]["1"] >= result["last"]["recall"]["1"]
    peaks = [result[f"peak_memory_{each}gib"] for each in ("training_", "evaluation_", "")]
    assert 0.05 < max(peaks[:2]) <= peaks[2]
    assert [row["epoch"] for row in result["history"]] == list(range(5))
    assert result["seed"] == 1 == result["config"]["seed"]
    assert result["config"]["dataset"]["root"].startswith("/")
    assert result["command"].startswith("train.py ")
    assert result["commit"] == reports.commit() != "unknown"
    assert "before training: Recall@1" in output
    assert "epoch 4/4:" in output
    assert str(folder) in output


def test_a_run_folder_holds_pictures_curves_and_the_log(trained):
    folder, _ = trained
    with Image.open(folder / "gallery.png") as picture:
        assert min(picture.size) > 300
    with (folder / "metrics.csv").open() as file:
        recalls = [float(row["test/recall_at_1"]) for row in csv.DictReader(file) if row["test/recall_at_1"]]
    history = json.loads((folder / "result.json").read_text())["history"]
    assert recalls == pytest.approx([row["recall"]["1"] for row in history], abs=1e-6)
    assert list((folder / "tensorboard").glob("events.*"))


@pytest.mark.parametrize(("which", "file"), [("best", ""), ("last", "/last.ckpt")])
def test_evaluate_reproduces_training_to_the_last_digit(trained, tmp_path, which, file):
    folder, _ = trained
    run_ok("evaluate.py", f"checkpoint={folder}{file}", "output=numbers.json", cwd=tmp_path)
    recorded = json.loads((folder / "result.json").read_text())[which]["recall"]
    numbers = json.loads((tmp_path / "numbers.json").read_text())
    assert numbers["checkpoint"] == str(folder / f"{which}.ckpt")
    assert {k: numbers[f"recall_at_{k}"] for k in recorded} == recorded
    assert 0 < numbers["map_at_r"] <= numbers["r_precision"] < numbers["recall_at_1"]
    assert [path.name for path in tmp_path.iterdir()] == ["numbers.json"]


def test_evaluate_warns_of_collapsed_embeddings(trained, tmp_path):
    folder, _ = trained
    assert "collapsed" not in run_ok("evaluate.py", f"checkpoint={folder}", cwd=tmp_path)
    content = torch.load(folder / "best.ckpt", weights_only=True)
    content["state_dict"]["net.head.weight"].zero_()
    shutil.copytree(folder, tmp_path / "collapsed")
    torch.save(content, tmp_path / "collapsed" / "best.ckpt")
    pictures = folder.parent.parent / "data" / "glyphs"
    query = next(pictures.rglob("*.png"))
    for script, arguments, source in (
        ("evaluate.py", ["checkpoint=collapsed"], ""),
        ("search.py", ["checkpoint=collapsed", f"gallery={query.parent}", f"query={query}"], ""),
        ("report.py", ["map=collapsed", "method=pca"], "collapsed: "),
    ):
        printed = run_ok(script, *arguments, cwd=tmp_path)
        said = f"warning: {source}the embeddings have collapsed (mean pairwise similarity 1.0000, of at most 1)"
        assert printed.count(said) == 1, script


def test_evaluate_on_another_data_set(trained, tmp_path):
    folder, _ = trained
    [mine] = (folder.parent.parent / "data" / "glyphs").glob("*/test")
    output = run_ok("evaluate.py", f"checkpoint={folder}", "dataset=folder", f"dataset.root={mine}", cwd=tmp_path)
    assert re.search(r"data: test, \d+ query images of 12 classes\n", output)  # all: none of them trains
    assert "Recall@1" in output


def test_own_images_have_classes_that_select_the_epoch(write_images, tmp_path, capsys):
    write_images({f"class {number}": 2 for number in range(40)})
    folder = [*TINY_FOLDER, f"dataset.root={tmp_path}/images"]
    parts = {}
    for choice in ("auto", "test", "classes"):
        splits = settings.load_splits(compose_train(*folder, f"validation={choice}"))
        parts[choice] = [table.num_classes for table in splits.tables.values()]
    assert parts == {"auto": [20, 10, 10], "test": [20, 20], "classes": [16, 20, 4]}  # trained, searched, selecting
    result = train(compose_train(*folder, "trainer.max_epochs=3"), tmp_path / "run")
    printed = capsys.readouterr().out
    assert "epoch selected by Recall@1 on held-out classes" in printed
    assert "the Recall that selects the epoch has not improved in 10 evaluations" in printed
    held_out = [row["validation"]["1"] for row in result["history"][1:]]
    assert result["selected"]["epoch"] == 1 + held_out.index(max(held_out))
    content = torch.load(tmp_path / "run" / "best.ckpt", weights_only=True)
    assert content["epoch"] + 1 == result["selected"]["epoch"]


def test_folds_choose_the_batch_for_their_own_images_and_report_the_mean(write_images, tmp_path, capsys):
    write_images(dict(zip("abcdefgh", (1, 2, 3, 4, 5, 6, 7, 8), strict=True)))
    folds = ["validation=folds", "validation.num_folds=2", f"dataset.root={tmp_path}/images", "data.batch_size=null"]
    cfg = compose_train(*TINY_FOLDER, "dataset.test_fraction=0.5", "trainer.max_epochs=1", "recall_k=1", *folds)
    result = cross_validate(cfg, tmp_path / "x")
    assert result == json.loads((tmp_path / "x/result.json").read_text())
    chosen = {each["num_train_images"]: each["config"]["data"] for each in result["folds"]}
    assert len(chosen) == 2
    assert all(data["batch_size"] == images // 2 for images, data in chosen.items())
    assert cfg.data.batch_size is None
    each = [json.loads((tmp_path / f"x/fold{number}/result.json").read_text()) for number in range(2)]
    assert [fold["searched"] for fold in each] == ["validation", "validation"]
    mean = sum(fold["last"]["recall"]["1"] for fold in each) / 2
    assert result["last"]["recall"]["1"] == pytest.approx(mean)
    assert f"last epoch 1: @1 {100 * mean:.1f}" in capsys.readouterr().out
    page = (tmp_path / "x" / "index.html").read_text()
    for number, fold in enumerate(each):
        recall = 100 * fold["last"]["recall"]["1"]
        assert f'<a href="fold{number}/index.html">fold{number}</a></td><td>{recall:.1f}</td>' in page
    assert page.count("<svg") == 1
    assert f"selected epoch 1: @1 {100 * mean:.1f}" in page


def test_what_is_allowed_trains_and_is_said(tmp_path):
    allowed = ["trainer.gradient_clip_val=null", "run=7", "~trainer.log_every_n_steps", "optimizer.weight_decay=0"]
    colors = ["dataset.images.brightness=0.4", "dataset.images.hue=0.1", "dataset.images.grayscale=0.2"]
    any_of_timm = ["backbone=test_vit", "backbone.pretrained=false", "backbone.drop_path=0.2"]
    output = run_ok("train.py", *TINY_GLYPHS, *allowed, *colors, *any_of_timm, cwd=tmp_path)
    assert "network: test_vit, pooling its own, 16-d" in output
    assert "; colours brightness 0.4, hue 0.1, grayscale 0.2; drop path 0.2, no dropout\n" in output
    card = (tmp_path / "runs/7/README.md").read_text()
    assert "their colours varied (brightness 0.4, hue 0.1, grayscale 0.2)" in card
    assert "drop path 0.2" in card


def test_help_shows_the_config_and_does_not_import_torch(tmp_path):
    shown = run_ok("train.py", "--help", cwd=tmp_path)
    assert shown.startswith("Train an embedding network with its proxies.\n")
    assert "proxy_lr_mult: 100" in shown
    for name in entries():
        assert f"src/{name}.py" in run_ok(f"{name}.py", "--help", cwd=tmp_path)
    heavy = "import sys; sys.argv = ['train.py']; import train; print(sorted({'torch', 'timm'} & set(sys.modules)))"
    assert run_python(heavy).strip() == "[]"


def test_the_running_mean_is_what_is_evaluated_and_saved(glyphs, tmp_path, monkeypatch):
    from proxy_anchor.training.module import MetricLearner

    weights: list[dict[str, torch.Tensor]] = []

    def record(self, *given, original=MetricLearner.optimizer_step):
        original(self, *given)
        weights.append({name: value.detach().clone() for name, value in self.state_dict().items()})

    monkeypatch.setattr(MetricLearner, "optimizer_step", record)
    mean = ["callbacks=ema", "callbacks.ema.multi_avg_fn.decay=0.5", "trainer.max_epochs=2", "run=mean"]
    mean.append("dataset.images.eval_crop=36")  # and larger images are searched than trained on
    result = train(compose_train(*TINY_GLYPHS, *mean, glyphs), tmp_path / "runs" / "mean")
    means = dict(weights[0])
    for step in weights[1:]:
        for name, value in step.items():
            means[name] = means[name] + (value - means[name]) / 2 if value.is_floating_point() else means[name]
    saved = torch.load(tmp_path / "runs" / "mean" / "last.ckpt", weights_only=True)
    assert len(weights) == 8
    for name, value in means.items():
        if value.is_floating_point():
            torch.testing.assert_close(saved["state_dict"][name], value, rtol=1e-4, atol=1e-6)
            assert torch.equal(saved["current_model_state"][name], weights[-1][name])
    run_ok("evaluate.py", "checkpoint=runs/mean/last.ckpt", "output=again.json", cwd=tmp_path)
    again = json.loads((tmp_path / "again.json").read_text())
    assert {k: again[f"recall_at_{k}"] for k in map(str, (1, 2, 4, 8))} == result["last"]["recall"]


def test_training_and_evaluation_agree_on_what_is_compiled(glyphs, tmp_path, monkeypatch):
    counts = []

    def record(net, *, num_evaluated, with_features=False):
        counts.append(num_evaluated)
        return net.forward

    monkeypatch.setattr("proxy_anchor.training.module.CompiledNet", record)
    monkeypatch.setattr("proxy_anchor.training.module.compile_loss", lambda loss: loss)
    arguments = [*TINY_GLYPHS, glyphs, "compile=true", "trainer.max_epochs=4"]
    cfg = compose_train(*arguments, "trainer.check_val_every_n_epoch=2")
    result = train(cfg, tmp_path / "run")
    evaluate(compose_entry("evaluate", f"checkpoint={tmp_path}/run/last.ckpt"))
    assert counts == [2 * result["num_eval_images"]] * 2
    assert (
        settings.compilation(OmegaConf.create({"trainer": cfg.trainer}), 1)["compile"] is False
    )  # an older checkpoint


def test_a_few_own_images_train_without_flags_and_a_run_that_trained_nothing_takes_others(
    write_images, tmp_path, monkeypatch, capsys
):
    write_images(dict.fromkeys("abcd", 3))
    root = f"dataset.root={tmp_path}/images"
    tiny = [each for each in TINY_FOLDER if not each.startswith("data.batch_size")]
    own = [*tiny, root, "loss=triplet", "trainer.max_epochs=2", "optimizer.lr=1e-3"]
    folder = tmp_path / "x"

    def killed(*given, **named):
        raise RuntimeError("killed")

    with monkeypatch.context() as patched:
        patched.setattr(pytorch_lightning.Trainer, "fit", killed)
        with pytest.raises(RuntimeError, match="killed"):
            train(compose_train(*own, "optimizer.lr=1e-4"), folder)
    assert OmegaConf.load(folder / "config.yaml").optimizer.lr == 1e-4
    capsys.readouterr()
    train(compose_train(*own), folder)
    printed = capsys.readouterr().out
    assert "chosen for 6 training images: data.images_per_class=3, data.batch_size=6, recall_k=[1, 2, 4]" in printed
    made = OmegaConf.load(folder / "config.yaml")
    assert (made.data.batch_size, made.data.images_per_class) == (6, 3)
    assert made.optimizer.lr == 1e-3
    assert f"  run folder: {folder} (open its index.html)\n  search with it: python src/search.py" in printed
    assert "last.ckpt holds" not in printed
    evaluated = run_ok("evaluate.py", f"checkpoint={folder}", cwd=tmp_path)
    assert "@4 " in evaluated
    assert "@8 " not in evaluated
    (folder / "result.json").unlink()
    monkeypatch.setattr(reports, "_LARGE", 1)
    seconds = train(compose_train(*own), folder)["startup_seconds"]  # continued after its last epoch
    assert (seconds["first_evaluation"], seconds["compilation"]) == (0, 0)
    assert seconds["images"] < seconds["total"]
    assert "  last.ckpt holds the optimizer's state and is needed only to continue" in capsys.readouterr().out
    # The same command knows its run by what was chosen, which data of another machine need not choose again.
    monkeypatch.setattr(settings, "fit_to_images", None)
    assert train(compose_train(*own), folder)["selected"]["recall"].keys() == {"1", "2", "4"}
    for other in ("data.batch_size=4", "recall_k=[1]", "data.images_per_class=2", "optimizer.lr=1"):
        with pytest.raises(FolderTaken, match=other.partition("=")[0]):
            train(compose_train(*own, other), folder)
