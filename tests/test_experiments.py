"""Every file of conf/experiment: its contract is complete, its numbers are the paper's, its command runs."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import lookalikes as look
import pytest
from commands import REPOSITORY, SHARED, compose_train, run_ok

import report
from proxy_anchor.cli import main as entry
from proxy_anchor.cli.experiments import experiment_rows, read_experiment, read_experiments
from proxy_anchor.errors import UsageError
from proxy_anchor.reports.paper import paper_results
from train import train

FOLDER = Path(entry.CONF) / "experiment"

# One epoch of a tiny network from scratch, in seconds on a CPU.
ONE_EPOCH = [
    "backbone=test_resnet",
    "backbone.pretrained=false",
    "speed=reference",
    "batch_norm=train",
    "data.batch_size=4",
    "data.num_workers=0",
    "recall_k=[1,2]",
    "trainer.max_epochs=1",
    "optimizer.warmup_epochs=0",
    "trainer.enable_progress_bar=false",
]
EXPERIMENTS = {each.name: each for each in read_experiments(FOLDER)}
PAPER = paper_results()
TEX = SHARED / "paper" / "proxy_anchor_cvpr2020.tex"

# Written out: what there is, and the number of jobs of each sweep.
SINGLE = {f"{dataset}_{row}" for dataset in ("cub", "cars", "sop", "inshop") for row in ("512", "512_crop256")}
SINGLE |= {"cub_64", "cars_64", "sop_64", "inshop_128"}
OURS = {"cars_fast"}  # recipes that the paper does not have
SWEEPS = {
    "cub_networks": 4,
    "cars_networks": 4,
    "cub_image_size": 4,
    "cars_image_size": 4,
    "cub_batch_size": 6,
    "cars_batch_size": 6,
    "sop_batch_size": 7,
    "inshop_batch_size": 7,
    "cars_dimension": 6,
    "cars_alpha_delta": 25,
}


def test_all_rows_are_there_with_their_numbers_of_jobs():
    assert {name: len(each.jobs) for name, each in EXPERIMENTS.items()} == dict.fromkeys(SINGLE | OURS, 1) | SWEEPS


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_command_composes_and_names_its_file(name):
    experiment = EXPERIMENTS[name]
    python, script, *overrides = shlex.split(experiment.command)
    assert (python, script, overrides[0]) == ("python", "src/train.py", f"experiment={name}")
    hydra = compose_train(*overrides, with_hydra=True).hydra
    assert (str(hydra.mode) == "RunMode.MULTIRUN") == (name in SWEEPS)  # the command needs no -m
    assert tuple(hydra.sweeper.params or ()) == experiment.varied
    assert "estimate" in experiment.duration or "measured" in experiment.duration
    assert "estimate" in experiment.memory or "measured" in experiment.memory


@pytest.mark.parametrize("name", sorted(set(EXPERIMENTS) - OURS))
def test_expected_numbers_are_the_papers_for_this_very_config(name):
    experiment = EXPERIMENTS[name]
    for expected in experiment.expect:
        assert expected.overrides in experiment.jobs
        cfg = compose_train(f"experiment={name}", *expected.overrides)
        setting = {
            "method": "Proxy-Anchor",
            "dataset": cfg.dataset.name,
            "backbone": cfg.backbone.name.partition(".")[0],
            "dimension": cfg.embedding_dim,
            "crop": cfg.dataset.images.crop,
            "batch_size": cfg.data.batch_size,
        }
        printed = {
            row.k: row.value
            for row in PAPER
            if row.table in experiment.labels
            and all(getattr(row, key) in (None, value) for key, value in setting.items())
        }
        assert printed == expected.recall
        assert cfg.dataset.name == experiment.dataset
        assert set(printed) <= set(cfg.recall_k)
        assert {224: 256, 256: 292, 324: 361, 448: 512}[cfg.dataset.images.crop] == cfg.dataset.images.resize
        assert (cfg.loss.alpha, cfg.loss.delta) == (32, 0.1)


def test_expected_number_of_our_recipe_is_that_of_its_run():
    [expected] = EXPERIMENTS["cars_fast"].expect
    folder = REPOSITORY / "docs/results/cars_half_fast"
    runs = [json.loads((folder / f"epochs40_seed{seed}.json").read_text()) for seed in (1, 2, 3, 4)]
    assert expected.recall == {1: round(25 * sum(run["best"]["recall"]["1"] for run in runs), 1)}
    seconds = [sum(epoch["train_seconds"] + epoch["eval_seconds"] for epoch in run["history"][1:]) for run in runs]
    assert EXPERIMENTS["cars_fast"].duration.startswith(f"{sum(seconds) / 4:.1f} s")
    assert EXPERIMENTS["cars_fast"].labels == []


def test_every_table_of_proxy_anchor_is_expected_somewhere():
    expected = {(label, value) for each in EXPERIMENTS.values() for label in each.labels for value in _values(each)}
    for row in PAPER:
        if row.method == "Proxy-Anchor":
            assert (row.table, row.value) in expected, row


def _values(experiment):
    return {value for each in experiment.expect for value in each.recall.values()}


@pytest.mark.parametrize(
    ("name", "grid"),
    {
        "cars_dimension": {"embedding_dim": [32, 64, 128, 256, 512, 1024]},
        "cars_alpha_delta": {"loss.alpha": [4, 8, 16, 32, 64], "loss.delta": [0, 0.1, 0.2, 0.3, 0.4]},
    }.items(),
)
def test_grids_of_the_figures(name, grid):
    found: dict[str, set[float]] = {}
    for job in EXPERIMENTS[name].jobs:
        for override in job:
            key, value = override.split("=")
            found.setdefault(key, set()).add(float(value))
    assert found == {key: set(values) for key, values in grid.items()}


def test_report_lists_them_all():
    output = report.experiments()
    lines = {line.split()[0]: line for line in output.splitlines() if line.split()}
    assert set(EXPERIMENTS) <= set(lines)
    assert lines["cub_512"].split() == ["cub_512", "tab:eval_cub_cars", "cub", "-", "1", "68.4"]
    assert "loss.alpha, loss.delta" in lines["cars_alpha_delta"]
    assert lines["cars_alpha_delta"].endswith("25  86.1 (1 of 25 jobs)")
    assert lines["cub_batch_size"].endswith("6  65.9 to 69.0")
    assert [row["experiment"] for row in experiment_rows(list(EXPERIMENTS.values()))] == sorted(EXPERIMENTS)


GOOD = (FOLDER / "cub_batch_size.yaml").read_text()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("embedding_dim: 512\n", "has no contract"),
        ("# @package _global_\nembedding_dim: 512\n", "has no contract"),
        ("# a title\n" + GOOD, "has no contract"),
        (re.sub(r"# command.*\n", "", GOOD), "the contract lacks command; add '# command: ...' at the top"),
        (re.sub(r"# (duration|memory).*\n", "", GOOD), "the contract lacks duration, memory"),
        (GOOD.replace("# paper:", "# papre:"), "'# papre: tab:batch_size_fine' is not a new field"),
        (GOOD.replace("R@1 65.9", "R@1 66"), "expected '[key=value ...] R@1 68.4, R@2 79.2, ...'"),
        (GOOD.replace("R@1 65.9", "about 66"), "expected '[key=value ...] R@1 68.4, R@2 79.2, ...'"),
        (GOOD.replace("override /dataset", "dataset"), "expected defaults that hold 'override /dataset: NAME'"),
    ],
)
def test_incomplete_contract_is_refused_by_name(text, message, tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    with pytest.raises(UsageError, match=re.escape(message)) as caught:
        read_experiment(file)
    assert str(file) in str(caught.value)


def test_folder_without_experiments_is_refused(tmp_path):
    with pytest.raises(UsageError, match="holds no experiments"):
        read_experiments(tmp_path)


MAKE = {"cub": look.make_cub, "cars": look.make_cars_joint, "sop": look.make_sop, "inshop": look.make_inshop}


@pytest.fixture(scope="module")
def roots(tmp_path_factory):
    return {name: make(tmp_path_factory.mktemp(name)) for name, make in MAKE.items()}


@pytest.mark.filterwarnings(r"ignore:Checkpoint directory|The number of training batches|.*treespec, LeafSpec")
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_trains_on_made_up_images(name, roots, tmp_path):
    """The first job of each, shrunk: its own data set's layout, loss and schedule; a tiny network on tiny images."""
    experiment = EXPERIMENTS[name]
    cfg = compose_train(
        f"experiment={name}",
        *experiment.jobs[0],
        f"dataset.root={roots[experiment.dataset]}",
        "dataset.allow_partial=true",
        "dataset.images.crop=32",
        "dataset.images.resize=36",
        *ONE_EPOCH,
        "logger=csv",
        "trainer.accelerator=cpu",
        "compile=false",
    )
    result = train(cfg, tmp_path)
    assert [row["epoch"] for row in result["history"]] == [0, 1]
    assert result["history"][1]["train_loss"] > 0
    assert json.loads((tmp_path / "result.json").read_text())["last"] == result["last"]


def test_sweep_runs_as_its_contract_says(roots, tmp_path):
    """One of them through the command line, without -m, so that Hydra itself reads the file's sweeper."""
    output = run_ok(
        "train.py",
        "experiment=cub_image_size",
        "run=x",
        f"dataset.root={roots['cub']}",
        "dataset.allow_partial=true",
        *ONE_EPOCH,
        cwd=tmp_path,
    )
    assert "{crop:448,resize:512}" in output
    assert sorted(path.parent.name for path in (tmp_path / "runs" / "x").glob("*/result.json")) == ["0", "1", "2", "3"]


# The data file against the paper's source.

NETWORKS = {"G": "googlenet", "GoogleNet": "googlenet", "BN": "bninception", "Inception-BN": "bninception"}
NETWORKS |= {"R50": "resnet50", "ResNet-50": "resnet50", "ResNet-101": "resnet101"}


def _tex_rows(label):
    """The rows of a table as lists of cells in plain text: dagger and superscript stay as † and ^512."""
    text = TEX.read_text(encoding="utf-8")
    end = text.index(f"\\label{{{label}}}")
    table = text[text.rindex("\\begin{table", 0, end) : text.rindex("\\end{tabularx}", 0, end)]
    table = table.replace("\\ccol", "").replace("\\hline", "").replace("$^{\\dagger}$", "†")
    table = re.sub(r"~?\s*\\cite\{[^}]*\}", "", table)
    table = re.sub(r"\$\^\{(\d+)\}\$", r"^\1", table)
    table = re.sub(r"\\multicolumn\{\d+\}\{[^}]*\}|\\textbf|\\underline|\\cline\{[^}]*\}", "", table)
    for row in table.split("\\\\"):
        yield [re.sub(r"[{}\s]+", " ", cell).strip() for cell in row.split("&")]


def _numbers(cells):
    return [float(cell) for cell in cells if re.fullmatch(r"\d+\.\d", cell)]


def _tex_results():
    """{(table, method, dimension, backbone, crop, batch size, data set, k): value} for whatever the tables print."""
    found = {}
    for table, datasets, ks in (
        ("tab:eval_cub_cars", ("cub", "cars"), (1, 2, 4, 8)),
        ("tab:eval_sop", ("sop",), (1, 10, 100, 1000)),
        ("tab:eval_inshop", ("inshop",), (1, 10, 20, 40)),
    ):
        columns = [(dataset, k) for dataset in datasets for k in ks]
        for row in _tex_rows(table):
            if not (match := re.fullmatch(r".*?(† ?)?([A-Z][A-Za-z+ -]*?) ?\^(\d+)", row[0])):
                continue
            ours = match[2] == "Proxy-Anchor"
            network = NETWORKS.get(row[1], row[1]) if len(datasets) == 2 else ("bninception" if ours else None)
            crop = 256 if match[1] else (224 if ours else None)
            for (dataset, k), cell in zip(columns, row[-len(columns) :], strict=True):
                if cell != "-":
                    found[table, match[2], int(match[3]), network, crop, None, dataset, k] = float(cell)
    network, crop = None, 224
    for row in _tex_rows("tab:eval_cub_cars_supp"):
        if len(numbers := _numbers(row)) == 8:
            network = next((NETWORKS[key] for key in sorted(NETWORKS, key=len, reverse=True) if key in row[0]), network)
            crop = int(match[0]) if (match := re.search(r"\d{3}(?= \\times)", row[1])) else crop
            columns = [(dataset, k) for dataset in ("cub", "cars") for k in (1, 2, 4, 8)]
            for (dataset, k), value in zip(columns, numbers, strict=True):
                found["tab:eval_cub_cars_supp", "Proxy-Anchor", 512, network, crop, None, dataset, k] = value
    for table, datasets in (("tab:batch_size_fine", ("cub", "cars")), ("tab:batch_size_large", ("sop", "inshop"))):
        for row in _tex_rows(table):
            if re.fullmatch(r"\d+", row[0]):
                for dataset, value in zip(datasets, _numbers(row), strict=True):
                    found[table, "Proxy-Anchor", None, None, None, int(row[0]), dataset, 1] = value
    return found


@pytest.mark.skipif(not TEX.is_file(), reason="the paper's source is not on this machine")
def test_paper_numbers_are_those_of_its_source():
    ours = {
        (row.table, row.method, row.dimension, row.backbone, row.crop, row.batch_size, row.dataset, row.k): row.value
        for row in PAPER
    }
    assert ours == _tex_results()
    assert len(ours) == len(PAPER)


def test_paper_numbers_a_person_knows():
    """The four of the abstract-level comparison, and counts: rows x columns of each table less its dashes."""
    main = {
        row.dataset: row.value
        for row in PAPER
        if (row.method, row.dimension, row.crop, row.k) == ("Proxy-Anchor", 512, 224, 1) and "supp" not in row.table
    }
    assert main == {"cub": 68.4, "cars": 86.1, "sop": 79.1, "inshop": 91.5}
    counts = {table: sum(row.table == table for row in PAPER) for table in dict.fromkeys(row.table for row in PAPER)}
    assert counts == {
        "tab:eval_cub_cars": 17 * 8,
        "tab:eval_sop": 16 * 4 - 3 - 4,
        "tab:eval_inshop": 11 * 4,
        "tab:eval_cub_cars_supp": 7 * 8,
        "tab:batch_size_fine": 6 * 2,
        "tab:batch_size_large": 7 * 2,
    }
