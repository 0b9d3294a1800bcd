"""The benchmarks run as commands; what they measure is for a GPU to say."""

from __future__ import annotations

import importlib
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from commands import REPOSITORY, TINY_GLYPHS, run_entry, run_ok

from proxy_anchor.training.callbacks.recall import RecallCallback

SLOW = pytest.mark.slow


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., str]:
    """run("loss.py", "--quick") is what `python benchmarks/loss.py --quick` prints, in an empty folder."""
    return lambda script, *arguments: run_ok(f"../benchmarks/{script}", *arguments, cwd=tmp_path)


def rows_of(folder: Path, name: str) -> list[dict]:
    return [json.loads(line) for line in (folder / "results" / f"{name}.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("file", sorted((REPOSITORY / "benchmarks" / "results").iterdir()), ids=lambda each: each.name)
def test_every_recorded_row_names_a_commit_and_none_is_made_by_hand(file: Path) -> None:
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    if file.stem == "all_backbones":
        rows = [row for row in rows if "summary" in row]  # of all rows before it
    assert rows
    for row in rows:
        assert re.fullmatch("[0-9a-f]{12}", row["commit"]), "measured with uncommitted changes"
        assert "note" not in row


TINY = " ".join([*TINY_GLYPHS])
QUICK = "--quick --device cpu --output results"
SMALL = "--device cpu --network test_resnet --side 32 --batches 4 --output results"
AXES = ["images"] * 4 + ["batch"] * 4 + ["classes"] * 4 + ["proxies"] * 2  # three of both losses, the last of one
COMPILER = pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on a CPU")


@pytest.mark.parametrize(
    ("script", "arguments", "column", "values"),
    [
        ("search", QUICK, "engine", ["bare product", "torch"]),
        ("all_backbones", "--names test_m* --output results", "name", ["test_mambaout", "test_maxvit"]),
        ("throughput", f"{TINY} +output=results", "loading", ["cpu/none"]),
        ("complexity", f"{QUICK} --losses proxy_anchor soft_triple", "axis", AXES),
        pytest.param("fast_start", f"{TINY} +output=results", "compiler_cache", ["empty", "filled"], marks=SLOW),
        pytest.param("ddp", f"--forms one_bucket torch_best {SMALL}", "form", ["one_bucket", "torch_best"], marks=SLOW),
        pytest.param(
            "allocator", f"{QUICK} --backbone test_resnet", "direction", ["evaluating", "training"], marks=SLOW
        ),
        pytest.param("devices", f"--keep gpu --devices 1 2 --output results {TINY}", "kept", ["-", "gpu"], marks=SLOW),
        pytest.param("compiled", f"{QUICK} --jobs 2", "passed", [2, 2], marks=[SLOW, COMPILER]),
    ],
)
def test_a_benchmark_runs_and_records_a_row_for_each_case(run, tmp_path, script, arguments, column, values) -> None:
    run(f"{script}.py", *arguments.split())
    rows = [row for row in rows_of(tmp_path, script) if row.get(column) in values]
    assert [row[column] for row in rows] == values
    assert "commit" in rows_of(tmp_path, script)[-1]
    assert all(not row.get("failed") for row in rows)
    assert not (tmp_path / "runs").exists()


def test_losses_of_the_benchmark_compute_the_same(run, tmp_path: Path) -> None:
    run("loss.py", *QUICK.split())
    rows = rows_of(tmp_path, "loss")
    assert len([row for row in rows if row["loss"] == "ours"]) == 2  # numbers of classes
    assert all(row["error_ppm"] < 20 for row in rows if row["loss"] != "bare product")


RELEASED = {  # modules with the names and arguments of the authors' release
    "losses.py": """
import torch
class Proxy_Anchor(torch.nn.Module):
    def __init__(self, nb_classes, sz_embed, mrg=0.1, alpha=32):
        super().__init__()
        self.proxies = torch.nn.Parameter(torch.randn(nb_classes, sz_embed))
        assert (mrg, alpha) == (0.1, 32)
    def forward(self, X, T):
        return torch.nn.functional.cross_entropy(20 * X @ torch.nn.functional.normalize(self.proxies).T, T)
""",
    "utils.py": """
import torch
def evaluate_cos(model, loader):
    x = model.eval()(next(iter(loader))[0])
    assert loader.dataset.nb_classes() == 8 and torch.allclose(x.norm(dim=1), torch.ones(len(x)))
    return [0.25, 0.5, 0.5, 0.5, 0.5, 1.0]
""",
    "dataset/utils.py": """
from torchvision import transforms
def make_transform(is_train=True, is_inception=False):
    assert not is_inception
    crop = transforms.RandomResizedCrop(32) if is_train else transforms.Resize((32, 32))
    return transforms.Compose([crop, transforms.ToTensor(), transforms.Normalize([0.5] * 3, [0.5] * 3)])
""",
    "dataset/__init__.py": "",
}


@pytest.mark.slow
def test_the_released_code_trains_on_the_same_images(tmp_path: Path) -> None:
    for name, text in RELEASED.items():
        file = tmp_path / "checkout" / "code" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    arguments = (*TINY_GLYPHS, "trainer.max_epochs=2", f"+output={tmp_path / 'results'}")
    # A process of its own: the release's modules have names that others have too.
    done = run_entry("../benchmarks/released_code.py", "checkout", *arguments, cwd=tmp_path, fresh=True)
    assert done.returncode == 0, done.stderr
    released, here = rows_of(tmp_path, "released_code")
    assert (released["code"], here["code"]) == ("released code", "here")
    assert released["network"] == here["network"]
    assert released["level"] == pytest.approx(min(released["best_recall_at_1"], here["best_recall_at_1"]))
    assert all(1 <= row["epochs_to_level"] <= 2 and row["images_per_s"] > 0 for row in (released, here))


def test_the_made_up_set_is_read_as_sop(run, tmp_path: Path) -> None:
    from proxy_anchor.data.benchmarks.sop import load_sop

    run("made_up_sop.py", "set", "--different", "3", "--share", "0.001", "--size", "40", "30")
    splits = load_sop(tmp_path / "set", allow_partial=True)
    assert [(len(each), each.num_classes) for each in (splits.train, splits.query)] == [(60, 11), (61, 11)]


@pytest.fixture
def study(monkeypatch: pytest.MonkeyPatch) -> Any:
    """benchmarks/study.py as a module."""
    monkeypatch.syspath_prepend(str(REPOSITORY / "benchmarks"))
    return importlib.import_module("study")


def test_a_record_of_a_study_holds_no_path_of_the_machine(study, tmp_path: Path, monkeypatch) -> None:
    def train(cfg: Any, folder: Path, callbacks: list[Any]) -> dict[str, Any]:
        embeddings = torch.polar(torch.ones(4), torch.tensor([0, 0.2, 0.5, 0.9]))  # the third finds the second
        recall, labels = RecallCallback(1), torch.tensor([0, 0, 1, 1])
        recall.metrics["test"].update(torch.view_as_real(embeddings), labels, torch.arange(4))
        splits = Mock(searched="test", query=Mock(labels=labels))
        for each in callbacks:
            each.on_train_end(Mock(callbacks=[recall], datamodule=Mock(splits=splits)), Mock(device="cpu"))
        result = {"csv": str(cfg.dataset.csv), "root": str(cfg.dataset.root), "folder": str(folder)}
        return result | {epoch: {"recall": {"1": 0.5}} for epoch in ("untrained", "best", "last")}

    monkeypatch.setattr(study, "train", train)
    (tmp_path / "classes.txt").write_text("0, a\n1, b\n")
    given = ["cub_half", f"dataset.root={tmp_path}", "--only", "fast_seed1", "--output", str(tmp_path / "out")]
    monkeypatch.setattr("sys.argv", ["study.py", *given])
    study.main()
    record = json.loads((tmp_path / "out" / "cub_half" / "fast_seed1.json").read_text())
    assert [record[key] for key in ("csv", "root", "folder")] == ["DIR/images.csv", "DIR", "DIR/fast_seed1"]
    assert record["command"].endswith("dataset.root=DIR dataset.csv=DIR/images.csv")
    assert record["last"]["map_at_r"] == 0.75


def test_a_study_takes_the_settings_that_are_best_on_held_out_classes(study, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(study, "RESULTS", tmp_path)
    with pytest.raises(study.UsageError, match=r"lacks proxy_synthesis_0\.json"):
        study.STUDIES["cars_half_methods"]()
    folder = tmp_path / "cars_half_methods_search"
    folder.mkdir()
    for name, overrides in study.STUDIES["cars_half_methods_search"]().items():
        selected = {"validation": {"1": 0.9 if name == "tcm_1" else 0.5}}  # of equal ones the first
        (folder / f"{name}.json").write_text(json.dumps({"selected": selected, "command": " ".join(overrides)}))
    runs = study.STUDIES["cars_half_methods"]()
    assert len(runs) == 5 * 6
    every_fifth = "trainer.check_val_every_n_epoch=5"
    assert runs["tcm_seed2"][-3:] == ["regulariser.tcm.weight=1.0", every_fifth, "seed=2"]
    assert "regulariser.metrix.weight=0.2" in runs["metrix_seed5"]
    shutil.copy(folder / "tcm_0.json", folder / "tcm_1.json")
    with pytest.raises(study.UsageError, match=r"tcm_1\.json is of other settings"):
        study.STUDIES["cars_half_methods"]()


def test_a_run_that_diverges_has_a_record_and_is_not_chosen(study, tmp_path: Path, monkeypatch) -> None:
    def train(cfg: Any, folder: Path, callbacks: list[Any]) -> dict[str, Any]:
        callbacks[0].value = 0.25
        if cfg.optimizer.lr == 4e-4:
            raise study.NotFinite("the loss is not finite")
        end = {"recall": {"1": 0.5}, "validation": {"1": 0.5 + cfg.optimizer.lr}, "epoch": 3}
        return dict.fromkeys(("untrained", "selected", "best", "last"), end)

    tables = importlib.import_module("tables")
    for module in (study, tables):
        monkeypatch.setattr(module, "RESULTS", tmp_path)
    monkeypatch.setattr(study, "train", train)
    monkeypatch.setattr(tables, "SETS", {"Cars-196": "cars_half"})
    where = [f"dataset.root={tmp_path}", "--output", str(tmp_path)]
    monkeypatch.setattr("sys.argv", ["study.py", "cars_half_losses_search", *where, "--only", "triplet"])
    study.main()
    record = json.loads((tmp_path / "cars_half_losses_search" / "triplet_6.json").read_text())
    assert record["diverged"] == "the loss is not finite"
    assert record["commit"]
    assert "optimizer.lr=4e-4 loss.margin=0.1" in record["command"]
    grid = study.SEARCHED["triplet"]
    assert study.best_settings("cars_half_losses_search", "triplet", grid) == ["optimizer.lr=2e-4", "loss.margin=0.1"]
    [row] = tables.searched("losses")
    assert (row["settings"], row["chosen"]) == (8, "lr=2e-4, loss.margin=0.1")


def test_the_processes_of_a_study_are_spread_over_the_gpus(study, monkeypatch) -> None:
    started = Mock(return_value=Mock(wait=lambda: 0))
    monkeypatch.setattr(study.subprocess, "Popen", started)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    monkeypatch.setattr("sys.argv", ["study.py", "cars_half", "dataset.root=DIR", "--jobs", "3"])
    with pytest.raises(SystemExit, match="0"):
        study.main()
    calls = [(call.args[0][-1], call.kwargs["env"]["CUDA_VISIBLE_DEVICES"]) for call in started.call_args_list]
    assert calls == [("0", "4"), ("1", "7"), ("2", "4")]
