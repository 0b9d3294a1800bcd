"""The benchmarks run as commands; what they measure is for a GPU to say."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import REPOSITORY, TINY_GLYPHS, run_entry, run_ok


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


def test_loss_prints_a_table_and_records_its_rows(run, tmp_path: Path) -> None:
    arguments = ("--quick", "--device", "cpu", "--output", "results")
    output = run("loss.py", *arguments)
    for name in ("bare product", "ours", "ours, compiled", "released code's form"):
        assert len(re.findall(rf"^ +\d+ .* {name} ", output, re.M)) == 2, name  # two numbers of classes

    rows = rows_of(tmp_path, "loss")
    assert {"classes", "loss", "time_ratio", "memory_ratio", "date", "commit", "device", "versions"} <= set(rows[0])
    for row in rows:
        if row["loss"] == "bare product":
            assert row["time_ratio"] == 1
        else:
            assert row["error_ppm"] < 20, row["loss"]  # the peers compute the same loss
    run("loss.py", *arguments)
    assert len(rows_of(tmp_path, "loss")) == 2 * len(rows)  # added to, not replaced


def test_search_compares_engines_that_agree(run, tmp_path: Path) -> None:
    output = run("search.py", "--quick", "--device", "cpu", "--output", "results")
    assert re.search(r"bare product +\d+\.\d+ +1\.00", output)
    rows = rows_of(tmp_path, "search")
    assert {"bare product", "torch"} <= {row["engine"] for row in rows}


def test_every_backbone_is_dry_run(run, tmp_path: Path) -> None:
    run("all_backbones.py", "--names", "test_m*", "--pooling", "auto", "gem", "--output", "results")
    *rows, last = rows_of(tmp_path, "all_backbones")
    assert [(row["name"], row["asked"], row["outcome"], row["pooling"], row["features"]) for row in rows] == [
        ("test_mambaout", "auto", "works", "own", 256),
        ("test_mambaout", "gem", "works", "gem of NHWC", 256),
        ("test_maxvit", "auto", "works", "avg+max of NCHW", 128),
        ("test_maxvit", "gem", "works", "gem of NCHW", 128),
    ]
    assert last["names"] == 2
    assert {"commit", "versions"} <= set(last)


@pytest.mark.slow
def test_a_start_is_taken_apart_with_an_empty_and_a_filled_cache(run, tmp_path: Path) -> None:
    arguments = (*TINY_GLYPHS, "trainer.accelerator=cpu", "trainer.enable_progress_bar=false")
    run("fast_start.py", *arguments, f"+output={tmp_path / 'results'}")
    assert (tmp_path / "data").is_dir()  # overrides are relative to where the command was given
    assert not (tmp_path / "runs").exists()
    rows = rows_of(tmp_path, "fast_start")
    assert [row["compiler_cache"] for row in rows] == ["empty", "filled"]
    for row in rows:
        parts = [row[name] for name in ("images_s", "first_eval_s", "compile_s", "other_s")]
        assert min(parts) >= 0
        assert sum(parts) == pytest.approx(row["start_s"])
        assert 0 < row["first_eval_s"] < row["start_s"] < row["wall_s"]


def test_throughput_is_a_share_of_the_network_alone(run, tmp_path: Path) -> None:
    arguments = (*TINY_GLYPHS, "trainer.accelerator=cpu", "trainer.enable_progress_bar=false")
    output = run("throughput.py", *arguments, f"+output={tmp_path / 'results'}")
    [row] = rows_of(tmp_path, "throughput")
    assert row["loading"] == "cpu/none"
    assert row["train_share"] == pytest.approx(row["train_per_s"] / row["train_ceiling"])
    assert "train_share" in output


@pytest.mark.slow
def test_forms_of_averaging_take_part_on_cpus(run, tmp_path: Path) -> None:
    sizes = ("--device", "cpu", "--network", "test_resnet", "--side", "32", "--batches", "4")
    output = run("ddp.py", "--forms", "own", "torch_best", *sizes, "--output", "results")
    own, torch = rows_of(tmp_path, "ddp")
    assert own["share"] == 1
    assert torch["share"] == pytest.approx(own["step_ms"] / torch["step_ms"])
    assert own["failed"] == torch["failed"] == ""
    assert "torch_best" in output


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
    model.eval()
    with torch.no_grad():
        x, t = (torch.cat(each) for each in zip(*((model(images), labels) for images, labels in loader)))
    assert loader.dataset.nb_classes() == 8 and torch.allclose(x.norm(dim=1), torch.ones(len(x)))
    near = t[(x @ x.T).topk(33)[1][:, 1:]] == t[:, None]
    return [near[:, :k].any(1).float().mean().item() for k in (1, 2, 4, 8, 16, 32)]
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
    arguments = (*TINY_GLYPHS, "trainer.max_epochs=2", "trainer.accelerator=cpu", f"+output={tmp_path / 'results'}")
    # A process of its own: the release's modules have names that others have too.
    done = run_entry("../benchmarks/released_code.py", "checkout", *arguments, cwd=tmp_path, fresh=True)
    assert done.returncode == 0, done.stderr
    released, here = rows_of(tmp_path, "released_code")
    assert (released["code"], here["code"]) == ("released code", "here")
    assert released["network"] == here["network"]
    assert released["level"] == pytest.approx(min(released["best_recall_at_1"], here["best_recall_at_1"]))
    assert all(1 <= row["epochs_to_level"] <= 2 and row["images_per_s"] > 0 for row in (released, here))


@pytest.mark.slow
def test_allocator_compares_two_processes(run, tmp_path: Path) -> None:
    arguments = ("--quick", "--backbone", "test_resnet", "--output", "results")
    run("allocator.py", *arguments)
    rows = rows_of(tmp_path, "allocator")
    assert [row["direction"] for row in rows] == ["evaluating", "training"]
    assert all(row["speed_up"] > 0 for row in rows)


def test_the_made_up_set_is_read_as_sop(run, tmp_path: Path) -> None:
    from proxy_anchor.data.benchmarks.sop import load_sop

    run("made_up_sop.py", "set", "--different", "3", "--share", "0.001", "--size", "40", "30")
    splits = load_sop(tmp_path / "set", allow_partial=True)
    assert (len(splits.train), splits.train.num_classes, len(splits.query), splits.query.num_classes) == (
        60,
        11,
        61,
        11,
    )


@pytest.mark.slow
def test_devices_are_compared_with_one(run, tmp_path: Path) -> None:
    tiny = [*TINY_GLYPHS, "trainer.accelerator=cpu", "trainer.enable_progress_bar=false", "logger=csv"]
    run("devices.py", "--output", "results", "--keep", "gpu", "--devices", "1", "2", *tiny)
    assert (tmp_path / "data").is_dir()  # overrides are relative to where the command was given
    assert not (tmp_path / "runs").exists()
    rows = rows_of(tmp_path, "devices")
    assert [(row["devices"], row["kept"], row["batch"]) for row in rows] == [
        (1, "-", 16),
        (2, "gpu", 32),
    ]
    assert rows[0]["efficiency"] == 1
    for row in rows[1:]:
        assert row["efficiency"] == pytest.approx(row["train_per_s"] / rows[0]["train_per_s"] / 2)


@pytest.mark.slow
def test_compiled_checks_each_network_in_a_process_of_its_own(run, tmp_path: Path) -> None:
    if shutil.which("g++") is None:
        pytest.skip("torch.compile needs a C++ compiler on a CPU")
    run("compiled.py", "--quick", "--device", "cpu", "--output", "results", "--jobs", "2")
    rows = rows_of(tmp_path, "compiled")
    assert [(row["network"], row["batch_norm"]) for row in rows] == [
        ("test_resnet", "train"),
        ("test_resnet", "frozen_statistics"),
    ]
    assert all(row["passed"] == row["draws"] == 2 and row["refused"] == "" for row in rows)
    assert all(0.5 < row["plain"] < 1 and 0.5 < row["compiled"] < 1 for row in rows)


def test_complexity_measures_every_axis_and_draws_it(run, tmp_path: Path) -> None:
    arguments = ("--quick", "--device", "cpu", "--output", "results", "--losses", "proxy_anchor", "soft_triple")
    assert "O(MCU²)" in run("complexity.py", *arguments)
    rows = rows_of(tmp_path, "complexity")
    assert len(rows) == 2 * 2 * 3 + 2  # three axes for all, proxies for one
    assert all(row["seconds"] > 0 and row["peak_bytes"] > 0 and row["commit"] for row in rows)
    for axis in ("images", "batch", "classes", "proxies"):
        assert (tmp_path / "results" / f"complexity_{axis}.svg").stat().st_size > 1000


def test_a_record_of_a_study_holds_no_path_of_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(REPOSITORY / "benchmarks"))
    import study  # type: ignore[import-not-found]

    epoch = {"recall": {"1": 0.5}}
    monkeypatch.setattr(
        study,
        "train",
        lambda cfg, folder: (
            {"csv": str(cfg.dataset.csv), "root": str(cfg.dataset.root), "folder": str(folder)}
            | dict.fromkeys(("untrained", "best", "last"), epoch)
        ),
    )
    (tmp_path / "classes.txt").write_text("0, a\n1, b\n")
    given = ["cub_half", f"dataset.root={tmp_path}", "--only", "fast_seed1", "--output", str(tmp_path / "out")]
    monkeypatch.setattr("sys.argv", ["study.py", *given])
    study.main()
    record = json.loads((tmp_path / "out" / "cub_half" / "fast_seed1.json").read_text())
    assert [record[key] for key in ("csv", "root", "folder")] == ["DIR/images.csv", "DIR", "DIR/fast_seed1"]
    assert record["command"].endswith("dataset.root=DIR dataset.csv=DIR/images.csv")


def test_a_study_takes_the_settings_that_are_best_on_held_out_classes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(REPOSITORY / "benchmarks"))
    import study

    monkeypatch.setattr(study, "RESULTS", tmp_path)
    with pytest.raises(study.UsageError, match=r"lacks proxy_synthesis_0\.json"):
        study.STUDIES["cars_half_methods"]()
    folder = tmp_path / "cars_half_methods_search"
    folder.mkdir()
    for name in study.STUDIES["cars_half_methods_search"]():
        held_out = {"tcm_5": 0.9, "tcm_6": 0.9}.get(name, 0.5)  # of equal ones the first
        (folder / f"{name}.json").write_text(json.dumps({"selected": {"validation": {"1": held_out}}}))
    (folder / "tcm_0.json").write_text(json.dumps({"diverged": "the loss is nan"}))
    runs = study.STUDIES["cars_half_methods"]()
    assert len(runs) == 5 * 7
    best = ["optimizer.lr=3e-4", "regulariser.tcm.weight=0.3", "regulariser.tcm.negative_margin=0.5"]
    assert runs["tcm_seed2"][-5:] == ["regulariser=tcm", *best, "seed=2"]
