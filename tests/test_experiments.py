"""Every file of conf/experiment: its contract is complete, its numbers are the paper's, its command runs."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import lookalikes as look
import pytest
from commands import REPOSITORY, compose_train, one_line

from proxy_anchor.cli import checks
from proxy_anchor.cli import main as entry
from proxy_anchor.cli.config import load_splits
from proxy_anchor.cli.experiments import experiment_rows, read_experiment, read_experiments
from proxy_anchor.reports.paper import paper_results
from proxy_anchor.reports.runs import differences

FOLDER = Path(entry.CONF) / "experiment"

EXPERIMENTS = {each.name: each for each in read_experiments(FOLDER)}
PAPER = paper_results()

# Recipes that the paper does not have, and their runs on half of the images.
OURS = {"cars_fast": "cars_half_fast", "cars_best": "cars_half_best", "cub_best": "cub_half_best"}


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_command_composes_and_names_its_file(name):
    experiment = EXPERIMENTS[name]
    contract = (FOLDER / f"{name}.yaml").read_text()
    python, script, *overrides = shlex.split(re.search(r"^# command: (.*)", contract, re.M)[1])
    assert (python, script, overrides[0]) == ("python", "src/train.py", f"experiment={name}")
    hydra = compose_train(*overrides, with_hydra=True).hydra
    assert (str(hydra.mode) == "RunMode.MULTIRUN") == (len(experiment.jobs) > 1)  # the command needs no -m
    assert list(hydra.sweeper.params or ()) == [each.partition("=")[0] for each in experiment.jobs[0]]
    checks.check_config(cfg := compose_train(*overrides))
    groups = {group: chosen for group, chosen in hydra.runtime.choices.items() if "/" not in group and chosen}
    checks.check_types(cfg, compose_train(*[f"{each}={groups[each]}" for each in groups if each != "experiment"]))
    for field in ("duration", "memory"):
        assert re.search(f"^# {field}: .*(estimate|measured)", contract, re.M)


@pytest.mark.parametrize("name", sorted(EXPERIMENTS.keys() - OURS))
def test_expected_numbers_are_the_papers_for_this_very_config(name):
    experiment = EXPERIMENTS[name]
    for overrides, expected in experiment.expect.items():
        assert overrides in experiment.jobs
        cfg = compose_train(f"experiment={name}", *overrides)
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
        assert printed == expected
        assert cfg.dataset.name == experiment.dataset
        assert set(printed) <= set(cfg.recall_k)
        assert {224: 256, 256: 292, 324: 361, 448: 512}[cfg.dataset.images.crop] == cfg.dataset.images.resize
        assert (cfg.loss.alpha, cfg.loss.delta) == (32, 0.1)


@pytest.mark.parametrize("name", OURS)
def test_expected_number_of_our_recipe_is_that_of_its_runs(name):
    [expected] = EXPERIMENTS[name].expect.values()
    runs = [json.loads(file.read_text()) for file in (REPOSITORY / "docs/results" / OURS[name]).glob("*.json")]
    assert expected == {1: round(100 * sum(run["best"]["recall"]["1"] for run in runs) / len(runs), 1)}
    assert EXPERIMENTS[name].labels == []
    for run in runs:  # of these settings, on own data or a part
        changed = [each.split()[0] for each in differences(run["config"], compose_train(f"experiment={name}"))]
        assert not [each for each in changed if not re.match("dataset[.](?!images)|recall_k", each)]


def test_every_table_of_proxy_anchor_is_expected_somewhere():
    expected = {
        (label, value)
        for each in EXPERIMENTS.values()
        for label in each.labels
        for recall in each.expect.values()
        for value in recall.values()
    }
    for row in PAPER:
        if row.method == "Proxy-Anchor":
            assert (row.table, row.value) in expected, row


def test_report_lists_them_all():
    rows = {row["experiment"]: tuple(row.values())[1:] for row in experiment_rows(list(EXPERIMENTS.values()))}
    assert list(rows) == sorted(EXPERIMENTS)
    assert rows["cub_512"] == ("tab:eval_cub_cars", "cub", None, 1, "68.4")
    assert rows["cars_alpha_delta"][1:] == ("cars", "loss.alpha, loss.delta", 25, "86.1 (1 of 25 jobs)")
    assert rows["cub_batch_size"][-1] == "65.9 to 69.0"


GOOD = (FOLDER / "cub_batch_size.yaml").read_text()


@pytest.mark.parametrize(
    "text",
    [
        "# @package _global_\nembedding_dim: 512\n",
        GOOD.replace("# paper:", "# papre:"),
        GOOD.replace("R@1 65.9", "about 66"),
        GOOD.replace("override /dataset", "dataset"),
    ],
)
def test_incomplete_contract_is_refused_by_name(text, tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    one_line(read_experiment, file, match=re.escape(f"{file}: expected a contract in comments at the top"))


MAKE = {"cub": look.make_cub, "cars": look.make_cars_joint, "sop": look.make_sop, "inshop": look.make_inshop}


@pytest.mark.parametrize("name", MAKE)
def test_the_config_of_a_data_set_loads_its_images(name, tmp_path):
    cfg = compose_train(f"dataset={name}", f"dataset.root={MAKE[name](tmp_path)}", "dataset.allow_partial=true")
    assert (load_splits(cfg).name, load_splits(cfg).train.num_classes) == (name, 4)


def test_paper_numbers_a_person_knows():
    """The number of rows of each table, and their sum."""
    tables = {table: [row.value for row in PAPER if row.table == table] for table in {row.table for row in PAPER}}
    assert {table: (len(values), round(sum(values), 1)) for table, values in tables.items()} == {
        "tab:eval_cub_cars": (136, 11021.1),
        "tab:eval_sop": (57, 5040.3),
        "tab:eval_inshop": (44, 4046.5),
        "tab:eval_cub_cars_supp": (56, 4944.8),
        "tab:batch_size_fine": (12, 923.3),
        "tab:batch_size_large": (14, 1190.5),
    }
